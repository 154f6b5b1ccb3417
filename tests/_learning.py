"""What the tests of the learner share: a small residual network, batches, and all there is to compare of a learner."""

import copy
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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
    elementwise = True

    def combine(self, rows: Tensor) -> Tensor:
        return rows.sum(dim=0).where(rows.sign().sum(dim=0).abs() == len(rows), 0)


def images(count: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, 2, 4, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)


def batch(count: int, classes: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return images(count, seed, dtype), torch.arange(count) % classes


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
