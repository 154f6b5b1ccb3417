"""From settings to what a run needs: the data, the stream of moments, the learner."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from spcl.data import ImageData, from_arrays, from_folder, load_data
from spcl.data.presets import PRESETS
from spcl.data.protocol import Configuration, draw_protocol, fit, in_paradigm, load_protocol
from spcl.data.splits import hold_out
from spcl.errors import DataError, SpclError
from spcl.memory import BalancedCoreset, Memory, Reservoir
from spcl.models import MLP, Backbone, Normalise, ResNet18, SmallCNN
from spcl.streams import ParallelStream

if TYPE_CHECKING:
    from spcl.runs.settings import RunSettings

__all__ = [
    "DATA_SETTINGS",
    "LAYOUT_SETTINGS",
    "Problem",
    "lay_out",
    "load_benchmark",
    "load_samples",
    "make_backbone",
    "make_memory",
    "make_problem",
    "pick_device",
]

SAMPLE_FOR_NORMALISATION = 10_000

DATA_SETTINGS = ("benchmark", "data_dir", "validation")
"""The settings that decide what :func:`load_samples` gives."""

LAYOUT_SETTINGS = (
    *("protocol", "protocol_seed", "config", "tasks", "batch_size"),
    *("fit", "paradigm", "overlap", "gap"),
)
"""The settings that decide whether :func:`lay_out` can lay out these samples in time."""


@dataclass(frozen=True)
class Problem:
    """The data of a run, laid out in time.

    Attributes:
        data: training and test samples.
        configuration: label set and timeline.
        stream: the moments.
        tests: the samples each task is evaluated on, with local labels.
    """

    data: ImageData
    configuration: Configuration
    stream: ParallelStream
    tests: dict[str, tuple[Tensor, Tensor]]


def load_benchmark(benchmark: str, data_dir: str | None) -> ImageData:
    """A known benchmark by name, or your own data by path: a folder of pictures, or an .npz file with x and y."""
    path = Path(benchmark).expanduser()
    if benchmark in PRESETS or not (path.suffix == ".npz" or path.is_dir()):
        return load_data(benchmark, data_dir)
    if path.is_dir():
        return from_folder(path)
    arrays = _named_arrays(path)
    return from_arrays(arrays["x"], arrays["y"], arrays.get("test_x"), arrays.get("test_y"), name=path.stem)


def _named_arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file:
            loaded = np.load(file)
            names = ["one array without a name"] if isinstance(loaded, np.ndarray) else list(loaded)
            arrays = {name: loaded[name] for name in ("x", "y", "test_x", "test_y") if name in names}
    except Exception as error:  # numpy's readers raise many kinds on damaged files
        raise DataError(f"cannot read {path}: {error}") from error
    if not {"x", "y"} <= arrays.keys():
        raise DataError(
            f"{path} must hold arrays x and y (and perhaps test_x and test_y), found {', '.join(names) or 'nothing'}; "
            "write it with np.savez(path, x=…, y=…)"
        )
    return arrays


def make_problem(settings: "RunSettings", device: torch.device) -> Problem:
    """Data, protocol and stream as the settings say, the data on the device."""
    return lay_out(settings, load_samples(settings), device)


def load_samples(settings: "RunSettings") -> ImageData:
    """The data that the settings name, split once more where they hold some of it out."""
    data = load_benchmark(settings.benchmark, settings.data_dir)
    return hold_out(data, settings.validation) if settings.validation else data


def lay_out(settings: "RunSettings", data: ImageData, device: torch.device) -> Problem:
    """Protocol and stream of this data as the settings say."""
    configuration = _configuration(settings, data)
    stream = ParallelStream(
        data.train_x.to(device),
        data.train_y,
        configuration.label_set,
        configuration.timeline,
        settings.batch_size,
        settings.seed,
    )
    return Problem(data, configuration, stream, _tests(data, stream, device))


def _configuration(settings: "RunSettings", data: ImageData) -> Configuration:
    if settings.protocol is None:
        protocol = draw_protocol(
            data.classes,
            settings.tasks,
            data.train_y,
            settings.batch_size,
            settings.protocol_seed,
            overlap=settings.overlap,
            gap=settings.gap,
            benchmark=data.name,
        )
    else:
        protocol = load_protocol(Path(settings.protocol).expanduser())
        if protocol.classes != data.classes:
            raise DataError(
                f"the protocol {settings.protocol} has {protocol.classes} classes, but {data.name} has {data.classes}"
            )
    configuration = protocol.configuration(settings.config)
    if settings.fit:
        configuration = fit(configuration, data.train_y, settings.batch_size)
    return in_paradigm(configuration, settings.paradigm)


def _tests(data: ImageData, stream: ParallelStream, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    tests = {}
    for name, classes in zip(stream.names, stream.label_set, strict=True):
        local = torch.full((data.classes,), -1)
        local[list(classes)] = torch.arange(len(classes))
        labels = local[data.test_y]
        members = labels >= 0
        if not members.any():
            raise DataError(f"{name}: its classes {list(classes)} have no test sample, so it cannot be evaluated")
        tests[name] = (data.test_x[members].to(device), labels[members])
    return tests


def make_backbone(settings: "RunSettings", data: ImageData, device: torch.device) -> nn.Module:
    """The shared network on its device, with bytes normalised by the statistics of (a part of) the training data."""
    backbone = _network(settings, data).to(device)
    if device.type == "cuda":
        backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if data.train_x.dtype != torch.uint8:
        return backbone
    sample = data.train_x[:: max(1, len(data.train_x) // SAMPLE_FOR_NORMALISATION)].to(device)
    std, mean = torch.std_mean(sample.float() / 255, dim=[0, 2, 3])
    return Backbone(Normalise(mean.tolist(), std.clamp(min=1e-3).tolist()).to(device), backbone)


def _network(settings: "RunSettings", data: ImageData) -> nn.Module:
    if settings.backbone == "mlp":
        return MLP(int(np.prod(data.shape)))
    if len(data.shape) != 3:
        raise SpclError(
            f"backbone {settings.backbone!r} needs images, but {data.name} has samples of {data.shape}; use mlp"
        )
    channels, height, width = data.shape
    if settings.backbone == "cnn":
        return SmallCNN(channels, (height, width))
    return ResNet18(channels, settings.batch_norm_momentum)


def make_memory(settings: "RunSettings", edited: bool, device: torch.device) -> Memory | None:
    """The rehearsal memory; one whose samples a method edits keeps them as floats."""
    if not settings.memory_budget:
        return None
    policy = BalancedCoreset if settings.memory == "balanced" else Reservoir
    dtype = torch.float32 if edited else None
    return policy(settings.memory_budget, seed=settings.seed, device=device, dtype=dtype)


def pick_device(name: str) -> torch.device:
    """The device of this name; ``auto`` takes a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # there are devices that have tensors, but no numbers in them
    except (RuntimeError, AssertionError, ImportError) as error:
        raise SpclError(f"cannot use device {name!r}: {str(error).splitlines()[0]}; try --device cpu") from error
    return device
