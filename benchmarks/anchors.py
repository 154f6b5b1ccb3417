"""What training offline on everything at once reaches on the real sources, and what needs no training: the anchors.

Plain PyTorch with the backbones of this package: shuffled batches of all sources that are not held out, Adam, one head.
Every number is a mean over seeds and, after ±, their standard deviation. A data set that is not here is left out
(`spcl data get wisdm beijing-air clinc150`).

    python benchmarks/anchors.py [--data-dir FOLDER] [--seeds 3] [--threads 1] [--sets wisdm beijing-air clinc150]
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, l1_loss

from spcl.data import SourceData, SourceSamples, load_beijing_air, load_clinc150, load_wisdm
from spcl.errors import MissingDataError
from spcl.models import BACKBONES, InputSpec, Standardise

BATCH = 64
Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Samples:
    """Inputs and targets of several sources, and the source of every sample."""

    x: Tensor
    y: Tensor
    source: Tensor


def joined(sources: Sequence[SourceSamples], split: str) -> Samples:
    """Join the samples of sources; the classes of sources with tasks of their own are numbered through."""
    offsets, classes = [], 0
    for source in sources:
        offsets.append(classes if source.task is None else 0)
        classes += source.classes or 0
    parts = [(getattr(source, f"{split}_x"), getattr(source, f"{split}_y")) for source in sources]
    return Samples(
        torch.cat([x for x, _ in parts]),
        torch.cat([y + offset for (_, y), offset in zip(parts, offsets, strict=True)]),
        torch.cat([torch.full((len(y),), number) for number, (_, y) in enumerate(parts)]),
    )


def trained(
    samples: Samples,
    backbone: str | dict[str, Any],
    outputs: int,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    seed: int,
    epochs: Sequence[int],
    batch: int = BATCH,
    learning_rate: float = 1e-3,
) -> list[Model]:
    """Train on shuffled samples, and return the model after each of these numbers of epochs."""
    torch.manual_seed(seed)
    network = BACKBONES.make(backbone, InputSpec.of(samples.x))
    for module in network.modules():
        if isinstance(module, Standardise):
            module.fit(samples.x)
    model = nn.Sequential(network, nn.Linear(network.feature_dim, outputs))
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    states = []
    for epoch in range(1, max(epochs) + 1):
        for chosen in torch.randperm(len(samples.y)).split(batch):
            optimizer.zero_grad()
            loss(model(samples.x[chosen]), samples.y[chosen]).backward()
            optimizer.step()
        if epoch in epochs:
            states.append({name: value.clone() for name, value in model.state_dict().items()})
    return [partial(_predict, model, state) for state in states]


@torch.no_grad()
def _predict(model: nn.Module, state: Mapping[str, Tensor], x: Tensor) -> Tensor:
    model.load_state_dict(state)
    return torch.cat([model(part) for part in x.split(4096)])


def accuracy(model: Model, samples: Samples) -> float:
    """Return the mean accuracy of the sources, in per cent."""
    right = (model(samples.x).argmax(dim=1) == samples.y).double()
    return 100 * float(np.mean([right[samples.source == source].mean() for source in samples.source.unique()]))


# -- the anchors: (what, numbers by seed)

Anchors = dict[str, list[float]]


def wisdm(seeds: int, load: Callable[[int], SourceData]) -> Anchors:
    """Accuracy on later windows of known persons and on persons never seen; every seed holds out other persons."""
    found: Anchors = {"offline MLP, 20 epochs: known persons, %": [], "… persons never seen, %": []}
    for seed in range(seeds):
        data = load(seed)
        known, unseen = ([source for source in data.sources if source.unseen == held] for held in (False, True))
        backbone = {"name": "mlp", "standardise": True}
        (model,) = trained(joined(known, "train"), backbone, data.classes, cross_entropy, seed=seed, epochs=[20])
        for numbers, sources in zip(found.values(), (known, unseen), strict=True):
            numbers.append(accuracy(model, joined(sources, "test")))
    return found


def beijing_air(data: SourceData, seeds: int) -> Anchors:
    """Mean absolute errors in µg/m³: the last value, that of a day before, the median of a station, and an MLP."""
    train, test = (joined(data.sources, split) for split in ("train", "test"))
    scale = data.sources[0].scale
    medians = torch.stack([source.train_y.median() for source in data.sources])
    errors = {
        "persistence": test.x[:, -1, :1] / scale - test.y,
        "the value a day before": test.x[:, -19, :1] / scale - test.y,
        "median of the station": medians[test.source][:, None] - test.y,
    }
    found: Anchors = {f"{name}, µg/m³": [scale * float(error.abs().mean())] for name, error in errors.items()}
    by_persistence = _by_source(errors["persistence"], test)
    names = "offline MLP, 5 epochs, µg/m³", "… largest ratio to persistence at a station"
    found |= {name: [] for name in names}
    for seed in range(seeds):
        backbone = {"name": "mlp", "standardise": True}
        (model,) = trained(train, backbone, 1, l1_loss, seed=seed, epochs=[5], batch=256, learning_rate=3e-4)
        error = model(test.x) - test.y
        found[names[0]].append(scale * float(error.abs().mean()))
        found[names[1]].append(float((_by_source(error, test) / by_persistence).max()))
    return found


def _by_source(error: Tensor, samples: Samples) -> Tensor:
    return torch.stack([error[samples.source == source].abs().mean() for source in samples.source.unique()])


def clinc150(data: SourceData, seeds: int) -> Anchors:
    """Accuracy over all 150 intents at once."""
    train, test = (joined(data.sources, split) for split in ("train", "test"))
    epochs = [1, 3, 5]
    found: Anchors = {f"offline, hashed words and pairs, after {epoch} passes, %": [] for epoch in epochs}
    for seed in range(seeds):
        models = trained(train, "ngrams", data.classes, cross_entropy, seed=seed, epochs=epochs, learning_rate=3e-3)
        for numbers, model in zip(found.values(), models, strict=True):
            numbers.append(accuracy(model, test))
    return found


def main() -> None:
    """Measure and print the anchors of the data sets that are here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sets", nargs="+", default=["wisdm", "beijing-air", "clinc150"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console, folder = Console(), options.data_dir
    measured: dict[str, Callable[[], Anchors]] = {
        "wisdm": lambda: wisdm(options.seeds, lambda seed: load_wisdm(seed=seed, data_dir=folder)),
        "beijing-air": lambda: beijing_air(load_beijing_air(data_dir=folder), options.seeds),
        "clinc150": lambda: clinc150(load_clinc150(data_dir=folder), options.seeds),
    }
    for name in options.sets:
        try:
            found = measured[name]()
        except MissingDataError as error:
            console.print(f"{name} is left out: {error}")
            continue
        table = Table("", "mean ± deviation", title=name, box=None)
        for what, numbers in found.items():
            spread = f" ± {np.std(numbers):.2f}" if len(numbers) > 1 else ""
            table.add_row(what, f"{np.mean(numbers):.2f}{spread}")
        console.print(table)


if __name__ == "__main__":
    main()
