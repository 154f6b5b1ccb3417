"""One pass as a CUDA graph: the same gradients as a pass per batch."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from spcl.engine.graphs import CudaGraphEngine
from spcl.learner import Learner
from spcl.memory import BalancedCoreset
from spcl.methods import make_method
from spcl.models import MLP, ResNet18, SmallCNN
from spcl.transforms import Crop

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and this machine has none")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])

NETWORKS: dict[str, Callable[[], nn.Module]] = {"mlp": lambda: MLP(3 * 18 * 18), "cnn": lambda: SmallCNN(3, 18)}
SPANS = {"a": (0, 9), "b": (1, 22), "c": (2, 22)}


def make(
    network: Callable[[], nn.Module], method: str, scenario: str, device: str, graphs: bool, **settings: bool
) -> Learner:
    torch.manual_seed(0)
    backbone = network().to(device)
    if device == "cuda":
        backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    memory = BalancedCoreset(60, device=device)
    optimizer = partial(torch.optim.SGD, lr=0.01)
    learner = Learner(backbone, make_method(method, **settings), optimizer=optimizer, memory=memory, scenario=scenario)
    if graphs and device == "cpu":
        learner._use_engine(CudaGraphEngine(learner.model, learner.method))
    if not graphs and device == "cuda":
        learner._engine._one_pass.find = lambda batches: None
    return learner


def train(learner: Learner, device: str, steps: int = 18) -> list[dict[str, float]]:
    generator, losses = torch.Generator().manual_seed(1), []
    for step in range(steps):
        for task, (begin, end) in SPANS.items():
            if step == begin:
                learner.add_task(task, classes=3)
            if step == end:
                learner.finish_task(task)
        active = [task for task, (begin, end) in SPANS.items() if begin <= step < end]
        batches = {
            task: (torch.randn(6, 3, 18, 18, generator=generator).to(device), torch.arange(6) % 3) for task in active
        }
        losses.append(learner.step(batches).losses)
    return losses


@devices
@pytest.mark.parametrize("scenario", ["task", "class"])
@pytest.mark.parametrize("method", ["soro", "soro+dbt", "er", "mgda", "dwa", "der++"])
@pytest.mark.parametrize("network", NETWORKS)
def test_one_graph_trains_as_a_pass_per_batch(network: str, method: str, scenario: str, device: str) -> None:
    one, each = (make(NETWORKS[network], method, scenario, device, graphs) for graphs in (True, False))
    with torch.backends.cudnn.flags(allow_tf32=False):
        mine, theirs = train(one, device), train(each, device)
    passes = one._engine._one_pass._passes
    assert one._engine.fallback_reason is None
    assert passes
    assert device == "cpu" or any(each.graph.replay is not None for each in passes.values())
    for step, (left, right) in enumerate(zip(mine, theirs, strict=True)):
        assert left == pytest.approx(right, rel=2e-3, abs=2e-4), step
    for left, right in zip(one.model.backbone.parameters(), each.model.backbone.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=2e-2, atol=2e-4)


@devices
@pytest.mark.parametrize("scenario", ["task", "class"])
@pytest.mark.parametrize("method", ["soro", "soro+dbt", "er", "dwa"])
def test_heads_are_weighed_in_one_graph(method: str, scenario: str, device: str) -> None:
    one, each = (make(NETWORKS["mlp"], method, scenario, device, graphs, weigh_heads=True) for graphs in (True, False))
    mine, theirs = train(one, device, 14), train(each, device, 14)
    assert one._engine._one_pass._passes
    for step, (left, right) in enumerate(zip(mine, theirs, strict=True)):
        assert left == pytest.approx(right, rel=2e-3, abs=2e-4), step
    for name, task in one.tasks.items():
        torch.testing.assert_close(task.head.weight, each.tasks[name].head.weight, rtol=2e-3, atol=2e-4)
    many = {"many": (torch.randn(6, 3, 18, 18).to(device), torch.arange(6) % 3)}  # more classes than there was room for
    for learner in (one, each):
        learner.add_task("many", classes=200)
    assert one.step(many).losses == pytest.approx(each.step(many).losses, rel=2e-3)


@devices
def test_weighed_heads_of_another_kind_get_columns_of_their_own(device: str) -> None:
    one, each = (make(NETWORKS["mlp"], "soro", "task", device, graphs, weigh_heads=True) for graphs in (True, False))
    generator, y = torch.Generator().manual_seed(3), torch.arange(6) % 3
    head = nn.Linear(64, 1)
    for learner in (one, each):
        learner.add_task("classes", classes=3)
    for step in range(6):
        x, speeds = torch.randn(6, 3, 18, 18, generator=generator).to(device), torch.randn(6, 1, generator=generator)
        batches = {"classes": (x, y)} | ({"speed": (x, speeds)} if step > 2 else {})
        for learner in (one, each):
            if step == 3:
                learner.add_task("speed", head=deepcopy(head).to(device), loss=functional.mse_loss)
        assert one.step(batches).losses == pytest.approx(each.step(batches).losses, rel=1e-3)
    assert not one._engine._heads_are_plain
    torch.testing.assert_close(one.tasks["speed"].head.weight, each.tasks["speed"].head.weight, rtol=1e-3, atol=1e-4)


@needs_gpu
def test_losses_heads_and_statistics_of_batch_norm_are_those_of_a_pass_per_batch() -> None:
    """Gradients may differ where rounding decides on which side of zero ReLU finds a number."""
    one, each = (make(ResNet18, "soro", "task", "cuda", graphs) for graphs in (True, False))
    with torch.backends.cudnn.flags(allow_tf32=False):
        mine, theirs = train(one, "cuda", 9), train(each, "cuda", 9)
    assert one._engine._one_pass._passes
    for left, right in zip(mine[:4], theirs[:4], strict=True):
        assert left == pytest.approx(right, rel=1e-2)
    for left, right in zip(one.model.backbone.buffers(), each.model.backbone.buffers(), strict=True):
        torch.testing.assert_close(left, right, rtol=5e-2, atol=5e-2)


@needs_gpu
def test_augmented_inputs_of_tasks_stay_when_memory_is_augmented() -> None:
    learner = make(NETWORKS["cnn"], "soro", "task", "cuda", True)
    x = torch.randn(8, 3, 18, 18).cuda()
    engine = learner._engine
    for _ in range(8):
        engine._augmentation.begin()
        (first,) = engine._augment(Crop(1), [x])
        kept = first.clone()
        engine._augment(Crop(1), [x])
        assert torch.equal(first, kept)


# -- resuming


@devices
def test_a_resumed_run_joins_batches_in_the_same_steps(tmp_path: Path, device: str) -> None:
    whole, half = (make(NETWORKS["mlp"], "soro", "task", device, True) for _ in range(2))
    train(whole, device, 8)
    train(half, device, 8)
    half.save(tmp_path / "c")
    resumed = Learner.load(tmp_path / "c", backbone=NETWORKS["mlp"]().to(device))
    if device == "cpu":
        resumed._use_engine(CudaGraphEngine(resumed.model, resumed.method))
        resumed._engine.history.load_state_dict(half._engine.history.state_dict())
    assert resumed._engine.history.state_dict() == whole._engine.history.state_dict() != {}
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        x, y = torch.randn(2, 6, 3, 18, 18, generator=generator).to(device), torch.arange(6) % 3
        losses = [each.step({"a": (x[0], y), "b": (x[1], y)}).losses for each in (whole, resumed)]
        assert losses[0] == losses[1]


@devices
def test_other_heads_take_a_graph_per_batch_and_it_is_said_why(device: str) -> None:
    learner = make(NETWORKS["mlp"], "soro", "task", device, True)
    learner.add_task("classes", classes=3)
    learner.add_task("speed", head=nn.Linear(64, 1).to(device), loss=functional.mse_loss)
    x = torch.randn(6, 3, 18, 18).to(device)
    for _ in range(8):
        learner.step({"classes": (x, torch.arange(6) % 3), "speed": (x, torch.randn(6, 1))})
    assert not learner._engine._one_pass._passes
    assert "plain classifiers" in (learner._engine.fallback_reason or "")
