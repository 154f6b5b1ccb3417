"""Sources of different kinds: classification, regression and multi-label, each with its own head and loss.

    python examples/regression_and_multilabel.py

Every task but a classifier brings a head on the backbone's features and a loss of its outputs and targets. Targets have
the shape of the outputs: (N, 1) for one number per sample, (N, L) of zeros and ones for L labels.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

import spcl

TARGETS = {
    "quadrant": lambda x: (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long(),
    "radius": lambda x: x.norm(dim=1, keepdim=True),
    "tags": lambda x: torch.stack([x[:, 0] > x[:, 1], x.sum(dim=1) > 0, x.abs().amax(dim=1) > 1], dim=1).float(),
}


def source(task: str, batches: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(batches):
        x = torch.randn(32, 2, generator=generator)
        yield x, TARGETS[task](x)


torch.manual_seed(0)
backbone = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
learner = spcl.Learner(backbone, spcl.SORO(), memory=spcl.BalancedCoreset(200))
learner.add_task("quadrant", classes=4)
learner.add_task("radius", head=nn.Linear(64, 1), loss=mse_loss)
learner.add_task("tags", head=nn.Linear(64, 3), loss=binary_cross_entropy_with_logits)
with spcl.LiveStream({name: source(name, 400, seed) for seed, name in enumerate(TARGETS)}) as stream:
    learner.fit(stream)

x = torch.randn(2000, 2)
scores = {name: learner.evaluate([(x, targets(x))], task=name) for name, targets in TARGETS.items()}
print(f"quadrant: {scores['quadrant']:.3f} accuracy")
print(f"radius: {scores['radius']:.3f} squared error")
print(f"tags: {scores['tags']:.3f} cross-entropy; probabilities of the first sample's:", end=" ")
print(learner.module("tags")(x[:1]).sigmoid().detach().numpy().round(3))
