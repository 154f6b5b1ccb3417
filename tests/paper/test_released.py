"""Preset ``released`` and the settings that it combines, against references."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from _by_hand import (
    RATE,
    Batches,
    ByHand,
    assert_equals_by_hand,
    er_by_hand,
    present,
    soro_by_hand,
    trained_learner,
)
from method_runs import weigh
from spcl.aggregation import solve_soro
from spcl.engine.graphs import CudaGraphEngine
from spcl.errors import SpclError
from spcl.learner import Learner
from spcl.memory import EpochCoreset
from spcl.methods import ER, METHODS, SORO, SORODBT, Method, make_method
from spcl.models import BACKBONES, MLP, InputSpec, ResNet18
from spcl.runs import resolve_settings
from spcl.runs.build import load_benchmark, make_backbone
from spcl.runs.settings import load_settings_file


class ByHandWithHeads(ByHand):
    """Columns of G are the gradients of backbone and heads; heads that a loss does not reach have zeros."""

    def step(self, given: Batches, combine: Callable[[Tensor, bool], Tensor], alpha: float = 0.0) -> None:
        weights = [*self.backbone.parameters(), *self.heads.parameters()]
        losses = self.losses(given)
        rows = torch.stack([self.gradient(loss, weights) for loss in losses])
        shared = list(self.backbone.parameters())
        penalty = self.orthogonality_gradient(shared)
        rows[:, : len(penalty)] += alpha * penalty
        update = combine(rows, len(losses) > len(given))
        with torch.no_grad():
            for weight, change in zip(weights, update.split([each.numel() for each in weights]), strict=True):
                weight -= RATE * change.view_as(weight)

    def gradient(self, loss: Tensor, weights: list[nn.Parameter]) -> Tensor:
        parts = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
        return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("engine", ["eager", "captured"])
@pytest.mark.parametrize("scenario", ["task", "class"])
@pytest.mark.parametrize(
    ("method", "combine", "alpha"),
    [
        (ER(weigh_heads=True), er_by_hand, 0.0),
        (SORO(weigh_heads=True), soro_by_hand, 0.0),
        (SORODBT(weigh_heads=True, alpha=0.01), soro_by_hand, 0.01),
    ],
    ids=["er", "soro", "soro+dbt"],
)
def test_heads_are_weighed_with_the_backbone(
    method: Method, combine: Callable[[Tensor, bool], Tensor], alpha: float, scenario: str, engine: str
) -> None:
    learner = trained_learner(method, scenario)
    if engine == "captured":
        learner._use_engine(CudaGraphEngine(learner.model, learner.method))
    for seed in (3, 4):
        reference = ByHandWithHeads(learner)
        given = present(learner, seed)
        reference.step(given, combine, alpha)
        learner.step(given)
        assert_equals_by_hand(learner, reference)


def test_heads_of_another_type_cannot_be_weighed_with_the_backbone() -> None:
    learner = Learner(nn.Linear(4, 8), SORO(weigh_heads=True))
    learner.add_task("a", head=nn.Linear(8, 1).double(), loss=lambda x, y: (x.float() - y).square().mean())
    learner.model.tasks["a"].head = Cast(learner.model.tasks["a"].head)
    with pytest.raises(SpclError, match=r"heads are torch\.float64 on cpu, the backbone is torch\.float32"):
        learner.step({"a": (torch.randn(3, 4), torch.randn(3, 1))})


class Cast(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, features: Tensor) -> Tensor:
        return self.head(features.double())


def test_memory_in_epochs_draws_every_sample_once_before_any_twice() -> None:
    memory = EpochCoreset(10, seed=1)
    for task, first in (("a", 0), ("b", 100)):
        memory.start(task, 2)
        memory.observe(task, torch.arange(first, first + 40), torch.arange(40) % 2)
    memory.finish("a")
    epochs = [[drawn(memory, 4) for _ in range(3)] for _ in range(2)]
    for epoch in epochs:
        assert [len(draw) for draw in epoch] == [4, 4, 2]
        assert len({sample for draw in epoch for sample in draw}) == 10
    assert epochs[0] != epochs[1]
    memory.draw(4)
    memory.finish("b")  # a new epoch, over the samples of both
    assert len({sample for _ in range(3) for sample in drawn(memory, 4)}) == 10


def drawn(memory: EpochCoreset, count: int) -> list[int]:
    return [sample for batch in memory.draw(count) for sample in batch.x.tolist()]


def test_an_epoch_goes_on_after_a_checkpoint_and_after_an_undone_draw() -> None:
    memory, restored = EpochCoreset(10, seed=1), EpochCoreset(10, seed=2)
    memory.start("a", 2)
    memory.observe("a", torch.arange(40), torch.arange(40) % 2)
    memory.finish("a")
    memory.draw(4)
    restored.load_state_dict(memory.state_dict())
    before = memory.draw_state()
    first = [drawn(memory, 4) for _ in range(4)]
    assert [drawn(restored, 4) for _ in range(4)] == first
    memory.restore_draws(before)
    assert [drawn(memory, 4) for _ in range(4)] == first


def test_the_published_network() -> None:
    torch.manual_seed(0)
    options = {"name": "resnet18", "norm_eps": 1e-3, "stem_init": "glorot", "residual_relu": True}
    network = BACKBONES.make(options, InputSpec((3, 32, 32), torch.uint8), batch_norm_momentum=0.01)
    norms = [layer for layer in network.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert len(norms) == 20
    assert {(norm.eps, norm.momentum) for norm in norms} == {(1e-3, 0.01)}
    stem = network.stem[0].weight
    assert stem.abs().max() <= (6 / (27 + 576)) ** 0.5 < 1.01 * stem.abs().max()
    assert sum(isinstance(layer, nn.ReLU) for layer in network.modules()) == 1 + 2 * 8
    block, x = network.stages[1].eval(), torch.randn(2, 64, 4, 4)
    assert (block(x.relu()) >= x.relu()).all()
    plain = ResNet18().stages[1].eval()
    plain.load_state_dict(block.state_dict())
    assert (plain(x.relu()) < x.relu()).any()


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_glorot_initialises_every_layer(name: str) -> None:
    network = BACKBONES.make({"name": name, "init": "glorot"}, InputSpec((3, 32, 32), torch.uint8))
    for layer in network.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            taps = layer.weight[0, 0].numel() if layer.weight.ndim == 4 else 1
            bound = (6 / (taps * sum(layer.weight.shape[:2]))) ** 0.5
            assert 0.9 * bound < layer.weight.abs().max() <= bound
            assert not layer.bias.any()


def test_heads_can_be_initialised_by_glorot() -> None:
    head = make_method("er", head_init="glorot").make_head(500, 100)
    assert 0.09 < head.weight.abs().max() <= 0.1
    assert not head.bias.any()


def test_images_can_stay_in_0_to_1() -> None:
    settings = resolve_settings({"benchmark": "ps-glyphs", "normalise": False})
    normalise = make_backbone(settings, load_benchmark("ps-glyphs"), torch.device("cpu"))[0]
    x = torch.tensor([[[[0, 51, 255]]]], dtype=torch.uint8)
    np.testing.assert_allclose(normalise(x).numpy().ravel(), [0.0, 0.2, 1.0])


def test_the_preset_combines_them_and_each_can_be_set_otherwise() -> None:
    settings = resolve_settings({"benchmark": "ps-cifar100", "preset": "released", "method": "soro"})
    assert settings.normalise is False
    assert settings.optimizer == {"name": "adam", "eps": 1e-7}
    assert settings.memory == "epochs"
    assert settings.batch_norm_momentum == 0.01
    assert settings.backbone["residual_relu"] is True
    method = settings.method
    assert method["weigh_heads"]
    assert method["head_init"] == "glorot"
    assert (method["sigma"], method["lambda_"], method["cutoff"]) == (500.0, 10.0, 1e-7)
    changes = {"memory": "balanced", "backbone": {"norm_eps": 1e-5}, "method": {"name": "er", "weigh_heads": False}}
    other = resolve_settings({"benchmark": "ps-cifar100", "preset": "released"}, changes)
    assert other.memory == "balanced"
    assert (other.backbone["norm_eps"], other.backbone["residual_relu"]) == (1e-5, True)
    assert (other.method["weigh_heads"], other.method["head_init"]) == (False, "glorot")
    assert resolve_settings(settings.model_dump()) == settings


def test_methods_that_are_compared_with_soro_have_its_cutoff() -> None:
    gradients = torch.tensor([[1.0, 1.0], [0.0, 1e-4]], dtype=torch.float64)  # σ_min is 7e-5, or 1.4 where that is zero
    for name in ("soro", "soro+dbt", "procrustes", "soro-kappa", "normsum", "scaledsum"):
        settings = resolve_settings({"benchmark": "ps-cifar100", "preset": "released", "method": name}).method
        assert settings["cutoff"] == 1e-7, name
        if name.endswith("sum"):
            changes = {"scale": "min"} if name == "normsum" else {}
            methods = [make_method(name, cutoff=cutoff, **changes) for cutoff in (settings["cutoff"], 2.0**-52)]
            norms = [weigh(method, gradients).norm() for method in methods]
            assert norms[0] > 1e3 * norms[1], name


def test_recorded_settings_are_read_as_they_were(tmp_path: Path) -> None:
    settings = resolve_settings({"benchmark": "ps-cifar100", "preset": "released", "method": "soro"})
    path = tmp_path / "settings.json"
    path.write_text(settings.model_dump_json())
    assert '"eps":1e-7' in path.read_text()
    assert resolve_settings(load_settings_file(path)) == settings


def test_paper_and_default_take_over_none_of_them() -> None:
    for preset in ("paper", "default"):
        settings = resolve_settings({"benchmark": "ps-cifar100", "preset": preset, "method": "soro"})
        assert (settings.normalise, settings.optimizer, settings.memory) == (True, "adam", "balanced")
        assert settings.backbone == "resnet18"
        assert settings.method == {"name": "soro", **SORO().settings.model_dump()}


def test_eigenvalues_below_the_cutoff_count_as_zero() -> None:
    gradients = np.array([[1.0, 1.0], [0.0, 1e-4]])
    gramian = torch.from_numpy(gradients.T @ gradients)
    near = SORO(cutoff=1e-7).settings
    assert torch.linalg.matrix_rank(solve_soro(gramian, near).adjusted, rtol=1e-3) == 1
    assert torch.linalg.matrix_rank(solve_soro(gramian, SORO().settings).adjusted, rtol=1e-3) == 2


# -- CUDA graphs

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and this machine has none")
DIFFERENT_STEPS = ("er", "graddrop", "soro", "soro+dbt", "gmed", "mdmtr", "spcl")
"""Methods whose steps each run other graphs; on a GPU a test takes seconds."""


@pytest.mark.parametrize("scenario", ["task", "class"])
@pytest.mark.parametrize(
    ("method", "device"),
    [
        *((name, "cpu") for name in METHODS),
        *(pytest.param(name, "cuda", marks=needs_gpu) for name in METHODS if name in DIFFERENT_STEPS),
    ],
)
def test_graphs_with_weighed_heads_equal_eager_steps(method: str, scenario: str, device: str) -> None:
    """Both begin every step with the same weights and memory, since rounding errors grow from step to step."""
    captured, eager = (learner_with_weighed_heads(method, scenario, device, on) for on in (True, False))
    generator, errors = torch.Generator().manual_seed(1), list[float]()
    # rounding on a GPU puts one ReLU or a few on the other side of zero: up to some percent in a step, less in most
    of_losses, typical, largest = (1e-5, 1e-5, 1e-5) if device == "cpu" else (0.01, 0.01, 0.1)
    for step in range(30):
        batches = {
            task: (torch.randn(16, 3, 16, 16, generator=generator), torch.arange(16) % CLASSES[task])
            for task, (begin, end) in SPANS.items()
            if begin <= step < end
        }
        (losses, update), (expected_losses, expected) = (stepped(each, step, batches) for each in (captured, eager))
        assert losses == pytest.approx(expected_losses, rel=of_losses), step
        errors.append(float((update - expected).norm() / expected.norm()))
        take_over(captured, eager)
    assert np.median(errors) < typical, errors
    assert max(errors) < largest, errors
    engine = captured._engine
    assert isinstance(engine, CudaGraphEngine)
    graphs = engine._one_pass if captured.method.has_plain_memory_loss() else engine._backbone
    assert graphs._passes
    assert engine._capture.unsupported is None


CLASSES = {"a": 5, "b": 4, "c": 3}
SPANS = {"a": (0, 13), "b": (4, 30), "c": (18, 30)}


def learner_with_weighed_heads(method: str, scenario: str, device: str, capture: bool) -> Learner:
    torch.manual_seed(0)
    on_gpu = device == "cuda"
    backbone = ResNet18(3, 0.01, norm_eps=1e-3, residual_relu=True, stem_init="glorot") if on_gpu else MLP(3 * 16 * 16)
    learner = Learner(
        backbone.to(device),
        make_method(method, weigh_heads=True, head_init="glorot"),
        optimizer=lambda weights: torch.optim.Adam(weights, lr=1e-4, eps=1e-7, fused=on_gpu, capturable=on_gpu),
        memory=EpochCoreset(60, device=device),
        memory_batch=16,
        scenario=scenario,
        capture=capture,
        measure_stability=True,
    )
    if capture and not on_gpu:
        learner._use_engine(CudaGraphEngine(learner.model, learner.method))
    return learner


def take_over(learner: Learner, other: Learner) -> None:
    """Copy weights, running averages and memory of the other learner."""
    for mine, theirs in zip(learner.model.modules(), other.model.modules(), strict=True):
        mine.load_state_dict(theirs.state_dict())
    assert learner.memory is not None
    assert other.memory is not None
    learner.memory.load_state_dict(other.memory.state_dict())


def stepped(learner: Learner, step: int, batches: Batches) -> tuple[dict[str, float], Tensor]:
    """Make a step, before which tasks may start and end; return the losses and the update that the optimiser got."""
    for task, (begin, end) in SPANS.items():
        if step == begin:
            learner.add_task(task, classes=CLASSES[task])
        if step == end:
            learner.finish_task(task)
    torch.manual_seed(step)  # graddrop draws
    with torch.backends.cudnn.flags(allow_tf32=False):
        losses = learner.step(batches).losses
    parameters = [*learner.model.backbone.parameters()]
    if learner.method.name != "graddrop":  # it draws by column, and graphs have the heads' columns at other places
        parameters += learner.model.head_parameters()
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
    return losses, torch.cat([gradient.flatten() for gradient in gradients])
