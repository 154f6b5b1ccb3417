"""One pass over the batches of all tasks and of memory against one pass per batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import mse_loss

from _learning import Agreement, Preferences, TinyResNet, assert_same, complete_state
from spcl.aggregation.factors import FactoredGradients, factored_products
from spcl.engine.joining import JoiningRule
from spcl.engine.known_layers import consists_of_known_layers
from spcl.engine.model import SharedModel
from spcl.engine.segmented_batch_norm import normalise_batches
from spcl.engine.snapshot import BufferSnapshot
from spcl.engine.trial import Trial, WithoutDropout
from spcl.errors import TaskError
from spcl.learner import Learner
from spcl.memory import Reservoir
from spcl.methods import Method, make_method
from spcl.models import BACKBONES, MLP, InputSpec
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


class Checkpointed(nn.Linear):
    """A layer whose forward pass is repeated in the backward pass."""

    def __init__(self) -> None:
        super().__init__(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x.flatten(1), use_reentrant=False)


NETWORKS: list[Callable[[], nn.Module]] = [
    mlp,
    cnn,
    batch_norm_cnn,
    shared_activations,
    partly_frozen,
    Transformer,
    Tied,
    Checkpointed,
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


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("method", ["soro", "er"])
def test_float32_differs_by_rounding_only(network: Callable[[], nn.Module], method: str) -> None:
    learners = two_learners(network, partial(make_method, method), dtype=torch.float32)
    for learner in learners:
        for name in "abc":
            learner.add_task(name, classes=2)
        learner.step(
            {
                name: (images(size, 1, torch.float32), torch.arange(size) % 2)
                for name, size in zip("abc", (4, 4, 7), strict=True)
            }
        )
    assert_equal_models(*learners, tolerance=1e-5)


def test_many_small_sources_share_stacked_heads_and_keep_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(32, 2000), nn.ReLU(), nn.Linear(2000, 6))

    learners = two_learners(network, partial(make_method, "soro"), memory=True)
    names = [f"source {index}" for index in range(24)]
    for learner in learners:
        for name in names:
            learner.add_task(name, classes=3)
    factored: list[int] = []
    sums = FactoredGradients.weighted_sum
    monkeypatch.setattr(FactoredGradients, "weighted_sum", lambda *args: (factored.append(1), sums(*args))[1])
    for step in range(2):
        pairs = {name: (images(2, 100 * step + index), torch.arange(2)) for index, name in enumerate(names)}
        one, other = (learner.step(pairs) for learner in learners)
        assert one.weights == pytest.approx(other.weights, rel=1e-6)
        torch.testing.assert_close(one.before.gramian, other.before.gramian)
    assert len(factored) >= 4  # a weight and its bias, in two steps
    assert_equal_models(*learners)


@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=9), equal=st.booleans(), seed=st.integers(0, 99))
def test_factored_gradients_are_the_matrices_they_stand_for(lengths: list[int], equal: bool, seed: int) -> None:
    lengths = [lengths[0]] * len(lengths) if equal else lengths
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(sum(lengths), width, generator=generator, dtype=torch.float64) for width in (3, 5))
    factored = FactoredGradients(left, right, lengths)
    ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    dense = torch.stack([left[end - n : end].T @ right[end - n : end] for end, n in zip(ends, lengths, strict=True)])
    weights = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    torch.testing.assert_close(factored_products([factored])[0], dense.flatten(1) @ dense.flatten(1).T)
    torch.testing.assert_close(factored.dense(), dense)
    torch.testing.assert_close(factored.weighted_sum(weights), (weights.view(-1, 1, 1) * dense).sum(dim=0))
    bias, sums = FactoredGradients(left, None, lengths), torch.stack([part.sum(dim=0) for part in left.split(lengths)])
    torch.testing.assert_close(bias.dense(), sums)
    torch.testing.assert_close(bias.weighted_sum(weights), weights @ sums)
    other = FactoredGradients(right, left, lengths)
    whole = torch.cat([dense.flatten(1), sums, other.dense().flatten(1)], dim=1)
    for order in ([factored, bias, other], [bias, other, factored]):
        products, scale = factored_products(order)
        torch.testing.assert_close(products, whole @ whole.T)
        norms = (left.square().sum(dim=1), right.square().sum(dim=1))
        torch.testing.assert_close(scale, (2 * norms[0] * norms[1] + norms[0]).sum())


# -- what one pass leaves to a pass per batch


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet18", "vit", "text"])
def test_a_trial_confirms_what_is_known_of_the_networks_here(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randint(1, 9, (16, 8)) if name == "text" else torch.randn(16, 3, 20, 20)
    backbone = BACKBONES.make(name, InputSpec.of(x)).double()
    x = x.double() if x.is_floating_point() else x
    model = SharedModel(backbone, "task", nn.Linear, 0, None)
    snapshot = BufferSnapshot(model)
    snapshot.refresh()
    snapshot.copy()
    rule = JoiningRule(model, list(backbone.parameters()), snapshot)
    assert consists_of_known_layers(backbone)
    trial = Trial(backbone, list(backbone.parameters()), rule.names, rule.counters, snapshot)
    assert trial.run([x[:8], x[8:]]) == ("segments", None)


def test_layers_that_somebody_changed_are_not_known() -> None:
    assert consists_of_known_layers(mlp())
    hooked, replaced = mlp(), mlp()
    hooked[1].register_forward_hook(lambda module, args, output: output - output.mean(dim=0))
    replaced[1].forward = lambda x: x - x.mean(dim=0)
    unknown = nn.Sequential(nn.Linear(2, 2), nn.Softmax(dim=0))
    for network in (hooked, replaced, unknown, nn.Sequential(nn.Flatten(0)), weight_norm()):
        assert not consists_of_known_layers(network)


def test_a_layer_that_changes_later_is_noticed() -> None:
    one, each = two_learners(mlp, partial(make_method, "soro"))
    x, y = images(8, 0), torch.arange(8) % 3
    for learner in (one, each):
        for name in "ab":
            learner.add_task(name, classes=3)
        learner.step(dict.fromkeys("ab", (x, y)))
        learner.model.backbone[1].register_forward_hook(
            lambda module, args, output, layer=learner.model.backbone[3]: output * layer.weight.sum()
        )
        for _ in range(2):
            learner.step(dict.fromkeys("ab", (x, y)))
    assert "is used by sum" in (one._engine.fallback_reason or "")
    assert_equal_models(one, each)


class CentredOverTheBatch(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x.flatten(1))
        return x - x.mean(dim=0)


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1)) + torch.rand(len(x), self.out_features)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight


class MeanToken(nn.Module):
    """A parameter whose first dimension is 1, but is no dimension of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 6)
        self.token = nn.Parameter(torch.randn(1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1)) * self.token.mean(dim=0)


def weight_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(32, 6)))


def cumulative_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 6), nn.BatchNorm1d(6, momentum=None))


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(dim=0)


class OutOfSight(nn.Linear):
    """A parameter that a function in C++ or of the user's own takes."""

    def __init__(self) -> None:
        super().__init__(32, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return Scale.apply(super().forward(x.flatten(1)), self.scale)


FALLBACKS: dict[Callable[[], nn.Module], str] = {
    partial(CentredOverTheBatch, 32, 6): "depend on the other samples",
    partial(Noisy, 32, 6): "random numbers",
    Product: "the parameter 'weight' is used by matmul",
    MeanToken: "depend on the other samples",
    weight_norm: "is used by _weight_norm",
    cumulative_batch_norm: "momentum=None",
    OutOfSight: "the parameter 'scale' is used where",
}


@pytest.mark.parametrize(("network", "reason"), FALLBACKS.items(), ids=FALLBACKS.values())
@pytest.mark.parametrize("method", ["soro", "er"])
def test_what_one_pass_cannot_do_is_left_to_a_pass_per_batch(
    network: Callable[[], nn.Module], reason: str, method: str
) -> None:
    learners = two_learners(network, partial(make_method, method))
    for learner in learners:
        for name in "abc":
            learner.add_task(name, classes=2)
        for step in range(2):
            torch.manual_seed(step)
            learner.step({name: (images(3, step), torch.arange(3) % 2) for name in "abc"})
    assert reason in (learners[0]._engine.fallback_reason or "")
    assert_equal_models(*learners)


def test_a_compiled_backbone_and_mixed_precision_take_a_pass_per_batch() -> None:
    torch.compiler.reset()
    reasons = {
        "compiled": Learner(torch.compile(mlp(), backend="eager"), make_method("er"), optimizer=SGD),
        "mixed precision": Learner(mlp(), make_method("er"), optimizer=SGD, autocast=torch.bfloat16),
    }
    for reason, learner in reasons.items():
        for name in "ab":
            learner.add_task(name, classes=2)
        learner.step({name: (images(3, 1, torch.float32), torch.arange(3) % 2) for name in "ab"})
        assert reason in learner._engine.fallback_reason


def test_hooks_of_parameters_are_called() -> None:
    learner = Learner(mlp(), make_method("soro"), optimizer=SGD)
    for name in "ab":
        learner.add_task(name, classes=2)
    pairs = {name: (images(3, 1, torch.float32), torch.arange(3) % 2) for name in "ab"}
    learner.step(pairs)
    assert learner._engine.fallback_reason is None
    seen: list[Tensor] = []
    learner.model.backbone[1].weight.register_hook(seen.append)
    learner.step(pairs)
    assert "hooks" in learner._engine.fallback_reason
    assert len(seen) == 2


def test_a_pass_over_all_batches_that_runs_out_of_memory_is_not_tried_again() -> None:
    class Small(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 10:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(x.flatten(1))

    learners = two_learners(partial(Small, 32, 6), partial(make_method, "soro"))
    for learner in learners:
        for name in "ab":
            learner.add_task(name, classes=2)
        for step in range(2):
            report = learner.step({name: (images(6, step), torch.arange(6) % 2) for name in "ab"})
            assert not report.skipped
    assert "out of memory" in learners[0]._engine.fallback_reason
    assert_equal_models(*learners)
    before = complete_state(learners[0])
    with pytest.raises(torch.OutOfMemoryError):
        learners[0].step({name: (images(11, 0), torch.arange(11) % 2) for name in "ab"})
    assert_same(complete_state(learners[0]), before)


# -- faults


def test_rows_that_hold_no_gradient_yet_are_no_fault() -> None:
    learner = Learner(mlp(), make_method("gmed"), optimizer=SGD, memory=Reservoir(6))
    for name in "abc":
        learner.add_task(name, classes=2)
    passes: list[int] = []
    learner.model.backbone.register_forward_pre_hook(lambda *_: passes.append(1))
    for step in range(3):
        pairs = {name: (images(3, step, torch.float32), torch.arange(3) % 2) for name in "abc"}
        learner._engine.gradients.buffer.fill_(torch.nan)
        passes.clear()
        learner.step(pairs)
    assert len(passes) == 4  # of the tasks, two that look ahead, and of memory


@pytest.mark.parametrize("network", [batch_norm_cnn, partial(TinyResNet, dropout=0.3)])
@pytest.mark.parametrize("method", ["soro", "er", "der++"])
@pytest.mark.parametrize("bad", ["inputs", "head"])
def test_a_bad_task_leaves_no_trace(network: Callable[[], nn.Module], method: str, bad: str) -> None:
    states = []
    for extra in (True, False):
        torch.manual_seed(0)
        memory = Reservoir(6) if bad == "inputs" else None
        learner = Learner(network(), make_method(method), optimizer=SGD, memory=memory)
        for name in "abc":
            learner.add_task(name, classes=2)
        pairs = {name: (images(3, 5, torch.float32), torch.arange(3) % 2) for name in "abc"}
        learner.step(pairs)
        if bad == "inputs":
            pairs["b"] = (pairs["b"][0] * torch.nan, pairs["b"][1])
        else:
            learner.tasks["b"].head.weight.data[0] = torch.inf
        report = learner.step(pairs if extra else {name: pairs[name] for name in "ac"})
        assert list(report.skipped) == (["b"] if extra else [])
        assert learner._engine.fallback_reason is None
        state = complete_state(learner)
        states.append({key: state[key] for key in ("backbone", "random", "optimizer", "memory")})
    assert_same(*states)


def test_an_error_names_its_task_and_changes_nothing() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layer = nn.Embedding(10, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.embedding(x).mean(dim=1))

    learner = Learner(Tokens(), make_method("soro"), optimizer=SGD)
    for name in "abc":
        learner.add_task(name, classes=2)
    pairs = {name: (torch.arange(12).view(3, 4) % 10, torch.arange(3) % 2) for name in "abc"}
    learner.step(pairs)
    assert learner._engine.fallback_reason is None
    before = complete_state(learner)
    with pytest.raises(TaskError, match="task 'b': the model raised an error on 3 samples"):
        learner.step(pairs | {"b": (pairs["b"][0] + 5, pairs["b"][1])})
    assert_same(complete_state(learner), before)


def test_dropout_draws_for_every_sample() -> None:
    torch.manual_seed(0)
    seen: list[Tensor] = []

    class Recorded(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(super().forward(x).detach())
            return x

    learner = Learner(nn.Sequential(nn.Flatten(), nn.Linear(32, 50), Recorded(0.5)), make_method("soro"), optimizer=SGD)
    for name in "ab":
        learner.add_task(name, classes=2)
    x = images(1, 0, torch.float32).expand(3, -1, -1, -1)
    learner.step({name: (x, torch.arange(3) % 2) for name in "ab"})
    masks = seen[-1] != 0
    assert masks.shape == (6, 50)
    assert len({tuple(row) for row in masks.tolist()}) == 6
    with WithoutDropout():
        assert torch.equal(functional.dropout(x, 0.5), x)


def test_batch_norm_keeps_the_statistics_of_batches_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 3, 2, generator=generator, dtype=torch.float64) * 3 + 1
    layer = nn.BatchNorm1d(3).double()
    expected = torch.cat([layer(part) for part in x.split([2, 4, 3])])
    running = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    torch.testing.assert_close(normalise_batches(x, running, (2, 4, 3), 0.1, layer.eps), expected)
    torch.testing.assert_close(running, (layer.running_mean, layer.running_var))


class CountedMLP(MLP):
    """Counts its passes."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_networks_of_every_type_share_a_pass(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    network = CountedMLP(6).to(dtype)
    learner = Learner(network, make_method("soro"))
    batches = {task: (torch.randn(4, 6, dtype=dtype), torch.arange(4) % 2) for task in "ab"}
    for task in batches:
        learner.add_task(task, classes=2)
    learner.step(batches)
    before = network.passes
    learner.step(batches)
    assert network.passes == before + 1
