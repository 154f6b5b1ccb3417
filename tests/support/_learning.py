"""What the tests of the learner share: a small residual network, batches, and all there is to compare of a learner."""

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from spcl.engine.graphs import CudaGraphEngine
from spcl.learner import Learner
from spcl.methods import Gradients, Method, Weights


class TinyResNet(nn.Module):
    """A residual network with batch-norm, a strided shortcut and, if asked for, dropout; 4×4 images of 2 channels."""

    def __init__(self, width: int = 4, dropout: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.stem = nn.Sequential(nn.Conv2d(2, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
            self.residual = nn.Sequential(
                nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(2 * width),
                nn.ReLU(),
                nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
                nn.BatchNorm2d(2 * width),
            )
            self.shortcut = nn.Sequential(
                nn.Conv2d(width, 2 * width, 1, stride=2, bias=False), nn.BatchNorm2d(2 * width)
            )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.dropout((self.residual(x) + self.shortcut(x)).relu().mean(dim=(2, 3)))


class Preferences(Method):
    """A weighted sum with weights known beforehand, drawn from a generator of its own; they do not add up to one."""

    name = "preferences"
    reduction = "sum"

    def __init__(self, **settings: float) -> None:
        super().__init__(**settings)
        self.generator = np.random.default_rng(0)

    def weigh(self, columns: Gradients) -> Weights:
        return Weights(torch.from_numpy(1 + self.generator.random(len(columns.names))))

    def state_dict(self) -> dict[str, object]:
        return {"generator": self.generator.bit_generator.state}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.generator.bit_generator.state = state["generator"]


class Agreement(Method):
    """Not a weighting: the sum where all gradients agree in sign, else nothing."""

    name = "agreement"

    def combine(self, rows: Tensor) -> Tensor:
        return rows.sum(dim=0).where(rows.sign().sum(dim=0).abs() == len(rows), 0)


@dataclass
class PlainMoment:
    """What any object must have to be a moment."""

    batches: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)


def images(count: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, 2, 4, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)


def batch(count: int, classes: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return images(count, seed, dtype), torch.arange(count) % classes


EVENTS = 10


def head(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.Dropout(0.2), nn.Linear(4, 1))


def heads() -> dict[str, tuple[nn.Module, Any]]:
    return {"speed": (head(1), mse_loss)}


def live_one_event(learner: Learner, event: int) -> None:
    """Tasks come and go: a classifier without data yet, a regression made before it, a bad batch, a finished task."""
    if event == 0:
        learner.add_task("a", classes=3)
        if learner.method.name != "mdmtr":  # which is for classifiers only
            learner.add_task("speed", head=head(), loss=mse_loss)
    if event == 3:
        learner.add_task("b", classes=2)
    if event == 6:
        learner.finish_task("a")
    speed = images(5, event), torch.full((5, 1), torch.nan if event in (4, 8, 9) else 0.5)
    batches = {"speed": speed} if "speed" in learner.tasks else {}
    batches |= {"a": batch(6, 3, event)} if event < 6 and (event or not batches) else {}
    batches |= {"b": batch(4, 2, event)} if event >= 5 else {}
    learner.step(batches)


def complete_state(learner: Learner) -> dict[str, Any]:
    """Everything a call may change: what is saved, and the modes of all modules."""
    modes = [part.training for module in learner.model.modules() for part in module.modules()]
    return copy.deepcopy(learner._state() | {"modes": modes})


def assert_same(found: Any, expected: Any, place: str = "state") -> None:
    """Equality to the last bit."""
    if isinstance(expected, Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), place
        assert found.detach().cpu().numpy().tobytes() == expected.detach().cpu().numpy().tobytes(), place
    elif isinstance(expected, dict):
        assert list(found) == list(expected), place
        for key in expected:
            assert_same(found[key], expected[key], f"{place}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), place
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{place}[{index}]")
    elif isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(found), place
    else:
        assert found == expected, place


def capture_without_graphs(learner: Learner) -> None:
    """Send the work through the static tensors of the captured path, on a device that has no graphs."""
    learner._use_engine(CudaGraphEngine(learner.model, learner.method))
