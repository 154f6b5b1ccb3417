"""One pass over the batches of all tasks and of memory against one pass per batch."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from _learning import Agreement, Preferences, TinyResNet
from spcl.learner import Learner
from spcl.memory import Reservoir
from spcl.methods import Method, make_method
from spcl.models.transformer import TransformerBlock

SGD = partial(torch.optim.SGD, lr=0.05)
CHANNELS, SIDE = 2, 4


# -- networks: images of 2 channels, 4×4


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 10), nn.Tanh(), nn.Linear(10, 6, bias=False))


def cnn() -> nn.Module:
    convolutions = nn.Conv2d(2, 6, 3, padding="valid"), nn.ReLU(), nn.Conv2d(6, 6, (1, 2), stride=(1, 2), groups=2)
    return nn.Sequential(*convolutions, nn.GroupNorm(2, 6), nn.Flatten(), nn.Linear(12, 5))


def batch_norm_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6)
    )


def shared_activations() -> nn.Module:
    return TinyResNet(seed=1)


def partly_frozen() -> nn.Module:
    backbone = batch_norm_cnn()
    backbone[0].requires_grad_(False)
    backbone[4].weight.requires_grad_(False)
    return backbone


class Transformer(nn.Module):
    """Patches of a column each, a class token, positions, a scale per channel, and a block."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 6, 8))
        self.scale = nn.Parameter(torch.ones(8))
        self.block = TransformerBlock(8, 2)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x.flatten(1, 2).transpose(1, 2))
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions[:, : x.shape[1] + 1]
        return self.norm(self.block(x * self.scale))[:, 0]


class Tied(nn.Module):
    """The same weight in two layers, and a parameter without influence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.second.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.flatten(1)).tanh())


NETWORKS: list[Callable[[], nn.Module]] = [
    mlp,
    cnn,
    batch_norm_cnn,
    shared_activations,
    partly_frozen,
    Transformer,
    Tied,
]
METHODS: list[Callable[[], Method]] = [
    *(partial(make_method, name) for name in ("soro", "er", "der++", "rlw", "dwa", "pcgrad", "graddrop", "gmed")),
    partial(make_method, "soro", alpha=0.01),
    partial(make_method, "er", alpha=0.01, decoupled=True),
    Preferences,
    Agreement,
]


def images(count: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, CHANNELS, SIDE, SIDE, generator=generator, dtype=torch.float64).to(dtype)


def two_learners(
    network: Callable[[], nn.Module],
    method: Callable[[], Method],
    memory: bool = False,
    dtype: torch.dtype = torch.float64,
    **options: object,
) -> tuple[Learner, Learner]:
    """Return the same learner twice; the second one takes a pass per batch."""
    learners = []
    for _ in range(2):
        torch.manual_seed(0)
        kept = Reservoir(6) if memory else None
        learners.append(Learner(network().to(dtype), method(), memory=kept, **{"optimizer": SGD, **options}))
    learners[1]._engine.one_pass = None
    return learners[0], learners[1]


def assert_equal_models(one: Learner, other: Learner, tolerance: float = 1e-8) -> None:
    for found, expected in zip(one.model.modules(), other.model.modules(), strict=True):
        torch.testing.assert_close(
            dict(found.state_dict()), dict(expected.state_dict()), rtol=tolerance, atol=tolerance
        )


@settings(max_examples=60, deadline=None)
@given(
    network=st.sampled_from(NETWORKS),
    method=st.sampled_from(METHODS),
    sizes=st.lists(st.integers(2, 5), min_size=1, max_size=5),
    scenario=st.sampled_from(["task", "class"]),
    memory=st.booleans(),
    regression=st.booleans(),
    measured=st.booleans(),
)
def test_one_pass_gives_what_a_pass_per_batch_gives(
    network: Callable[[], nn.Module],
    method: Callable[[], Method],
    sizes: list[int],
    scenario: str,
    memory: bool,
    regression: bool,
    measured: bool,
) -> None:
    learners = two_learners(network, method, memory, scenario=scenario, measure_stability=measured)
    for learner in learners:
        for index, _ in enumerate(sizes):
            learner.add_task(f"task {index}", classes=2 + index % 2)
        if regression and learner.method.name != "gmed":
            features = learner.model.backbone(images(2, 0)).shape[1]
            torch.manual_seed(1)
            learner.add_task("speed", head=nn.Linear(features, 1).double(), loss=mse_loss)
    for step in range(3):
        pairs = {
            f"task {index}": (images(size, 10 * step + index), torch.arange(size) % 2)
            for index, size in enumerate(sizes)
        }
        if "speed" in learners[0].tasks:
            pairs["speed"] = (images(3, 10 * step + 7), torch.ones(3, 1, dtype=torch.float64))
        torch.manual_seed(step)
        one = learners[0].step(pairs)
        torch.manual_seed(step)
        other = learners[1].step(pairs)
        assert list(one.losses) == list(other.losses)
        assert one.losses == pytest.approx(other.losses, rel=1e-9)
        assert one.weights == pytest.approx(other.weights, rel=1e-6, abs=1e-9)
        assert (one.before is None) == (other.before is None)
    assert learners[0]._engine.fallback_reason is None
    assert_equal_models(*learners)
