"""One pass over the batches of all tasks and of memory against one pass per batch."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, mse_loss

from _learning import Agreement, Preferences, TinyResNet, assert_same, complete_state
from spcl.aggregation.factors import FactoredGradients
from spcl.engine.joining import JoiningRule, Trial, WithoutDropout, consists_of_known_layers
from spcl.engine.joint import ClassifierStack, HeadGradients
from spcl.engine.layers import normalise_batches
from spcl.engine.model import BufferSnapshot, Samples, SharedModel
from spcl.errors import TaskError
from spcl.learner import Learner
from spcl.memory import Reservoir
from spcl.methods import Method, make_method
from spcl.models import BACKBONES, MLP, InputSpec
from spcl.models.transformer import TransformerBlock
from spcl.tasks import Task, TaskSource

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


class Attention(nn.Module):
    """PyTorch's own attention of tokens with themselves, some of them padding, and an encoder layer with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1, 2).transpose(1, 2)
        padding = torch.tensor([False, False, False, True]).expand(len(x), -1)
        attended, weights = self.attention(x, x, x, key_padding_mask=padding)
        causal = nn.Transformer.generate_square_subsequent_mask(4).to(x.dtype)
        encoded = self.layer(attended + weights.mean(dim=2, keepdim=True), src_mask=causal, is_causal=True)
        return encoded[:, :3].flatten(1)


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
    Attention,
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


# -- what one pass leaves to a pass per batch


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet18", "vit", "text", "ngrams", "conv1d"])
def test_a_trial_confirms_what_is_known_of_the_networks_here(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 13, 3) if name == "conv1d" else torch.randn(16, 3, 20, 20)
    x = torch.randint(1, 9, (16, 8)) if name in ("text", "ngrams") else x
    width = {"width": 8} if name == "resnet18" else {}
    backbone = BACKBONES.make(name, InputSpec.of(x), **width).double()
    x = x.double() if x.is_floating_point() else x
    model = SharedModel(backbone, "task", nn.Linear, 0, None)
    snapshot = BufferSnapshot(model).take()
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


class CrossAttention(nn.Module):
    """Attention of a learned query to the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1, 2).transpose(1, 2)
        return self.attention(x.mean(dim=1, keepdim=True), x, x)[0][:, 0]


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
    CrossAttention: "is not of a sequence with itself",
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


def test_attention_with_dropout_shares_a_pass() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    learner = Learner(nn.Sequential(nn.Flatten(1, 2), layer, nn.Flatten()), make_method("soro"))
    for name in "ab":
        learner.add_task(name, classes=2)
    x = torch.randn(4, 2, 2, 8)
    learner.step({name: (x, torch.arange(4) % 2) for name in "ab"})
    assert learner.fallback_reason is None


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


# -- sums of gradients: one pass, and no row per task


def batches_of_all() -> dict[str, tuple[Tensor, Tensor]]:
    return {str(task): (torch.randn(4, 6), torch.randint(3, (4,))) for task in range(TASKS)}


def passes_of(method: str, memory: bool, measured: bool) -> tuple[Learner, list[str]]:
    """Return a learner after two steps and the passes through its backbone in the second, replay included."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    learner = Learner(
        backbone,
        make_method(method),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        memory=Reservoir(20) if memory else None,
        measure_stability=measured,
    )
    for task in range(TASKS):
        learner.add_task(str(task), classes=3)
    learner.step(batches_of_all())
    passes: list[str] = []

    def note(module: nn.Module, inputs: object, features: Tensor) -> None:
        passes.append("forward")
        features.register_hook(lambda gradient: passes.append("backward"))

    backbone.register_forward_hook(note)
    learner.step(batches_of_all())
    assert learner._engine.fallback_reason is None
    return learner, passes


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("method", ["er", "der++", "dwa", "rlw"])
def test_sums_take_one_pass_and_no_row_per_task(method: str, memory: bool) -> None:
    learner, passes = passes_of(method, memory, measured=False)
    plan = learner._engine.gradients.plan
    assert passes == ["forward", "backward"]
    assert len(plan.names) == TASKS + memory
    assert plan.rows == (2 if memory and learner.method.reduction == "mean" else 1)  # tasks, and memory beside them


@pytest.mark.parametrize("method", ["er", "rlw"])
def test_measured_sums_keep_a_row_per_gradient(method: str) -> None:
    learner, passes = passes_of(method, memory=True, measured=True)
    assert passes == ["forward", "backward"]
    assert learner._engine.gradients.plan.rows == TASKS + 1


# -- classifiers that are computed together

TASKS = 9


def classifiers() -> list[Samples]:
    """Return batches of plain classifiers."""
    tasks = [Task(str(place), 4, cross_entropy, nn.Linear(5, 4), 0) for place in range(TASKS)]
    return [Samples(TaskSource(task.name, task), torch.randn(6, 2), torch.randint(4, (6,))) for task in tasks]


def test_stacked_classifiers_give_the_losses_and_gradients_of_each() -> None:
    samples = classifiers()
    features = torch.randn(6 * TASKS, 5, requires_grad=True)
    replayed = [deepcopy(group.task.head) for group in samples]
    for group in samples:  # gradients of replayed samples; the stack adds its own
        group.task.head.weight.grad = torch.ones(4, 5)
    stack = ClassifierStack(samples, features.device, (HeadGradients(), HeadGradients()))
    losses = stack.forward(features)
    gradient = stack.backward([1.0] * TASKS)
    stack.assign_grads()
    for place, (group, head) in enumerate(zip(samples, replayed, strict=True)):
        own = slice(6 * place, 6 * place + 6)
        expected = cross_entropy(head(features[own]), group.y)
        expected.backward()
        torch.testing.assert_close(losses[place], expected.detach())
        torch.testing.assert_close(gradient[own], features.grad[own])
        torch.testing.assert_close(group.task.head.weight.grad, head.weight.grad + 1)
        torch.testing.assert_close(group.task.head.bias.grad, head.bias.grad)


def test_losses_in_half_precision_are_as_large_as_they_are() -> None:
    tasks = [Task(str(place), 2, cross_entropy, nn.Linear(1, 2).half(), 0) for place in range(TASKS)]
    count = 2048
    samples = [
        Samples(TaskSource(task.name, task), torch.ones(count, 1), torch.zeros(count, dtype=torch.long))
        for task in tasks
    ]
    with torch.no_grad():
        for task in tasks:
            task.head.weight.copy_(torch.tensor([[0.0], [100.0]]))
            task.head.bias.zero_()
    losses = ClassifierStack(samples, torch.device("cpu"), (HeadGradients(), HeadGradients())).forward(
        torch.ones(count * TASKS, 1, dtype=torch.half)
    )
    assert losses.tolist() == [100.0] * TASKS  # their sums over samples are more than the type can hold


@pytest.mark.parametrize(("tasks", "threads"), [(2, 1), (5, 1), (7, 2)])
def test_few_stacked_classifiers_are_the_same_to_the_last_bit(tasks: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        heads = [nn.Linear(64, 12) for _ in range(tasks)]
        made = [Task(str(place), 12, cross_entropy, deepcopy(head), 0) for place, head in enumerate(heads)]
        samples = [
            Samples(TaskSource(task.name, task), torch.randn(128, 2), torch.randint(12, (128,))) for task in made
        ]
        features = torch.randn(128 * tasks, 64, requires_grad=True)
        stack = ClassifierStack(samples, features.device, (HeadGradients(), HeadGradients()))
        losses, gradient = stack.forward(features), stack.backward([1.0] * tasks)
        stack.assign_grads()
        outputs = [head(part) for head, part in zip(heads, features.split(128), strict=True)]
        expected = torch.stack([cross_entropy(each, group.y) for each, group in zip(outputs, samples, strict=True)])
        expected.sum().backward()
        assert torch.equal(losses, expected.detach())
        assert torch.equal(gradient, features.grad)
        for head, task in zip(heads, made, strict=True):
            assert torch.equal(task.head.weight.grad, head.weight.grad)
            assert torch.equal(task.head.bias.grad, head.bias.grad)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", [3, TASKS])
def test_kept_gradients_are_those_of_the_heads_in_every_step(count: int) -> None:
    everyone, kept = classifiers(), (HeadGradients(), HeadGradients())
    for samples in (everyone[:count], everyone[:count], everyone[-2:], everyone[:count]):
        features = torch.randn(6 * len(samples), 5)
        for group in samples:
            group.task.head.zero_grad()
        stack = ClassifierStack(samples, features.device, kept)
        stack.forward(features)
        stack.backward([1.0] * len(samples))
        stack.assign_grads()
        for group, part in zip(samples, features.split(6), strict=True):
            head = deepcopy(group.task.head)
            head.zero_grad()
            cross_entropy(head(part), group.y).backward()
            torch.testing.assert_close(group.task.head.weight.grad, head.weight.grad)
            torch.testing.assert_close(group.task.head.bias.grad, head.bias.grad)


def frozen(head: nn.Linear) -> None:
    head.bias.requires_grad_(False)


def hooked(head: nn.Linear) -> None:
    head.weight.register_hook(torch.zeros_like)


def watched(head: nn.Linear) -> None:
    head.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("change", [frozen, hooked, watched, partial(nn.utils.parametrizations.weight_norm)])
def test_classifiers_that_differ_are_not_stacked(change: object) -> None:
    samples = classifiers()
    assert ClassifierStack.supports(samples)
    change(samples[-1].task.head)  # type: ignore[operator]
    assert not ClassifierStack.supports(samples)
