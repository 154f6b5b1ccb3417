"""The captured path computes what the eager engine computes: on any device without graphs, on a GPU with them."""

import gc
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from _learning import capture_without_graphs
from spcl.engine.graphs import CudaGraphEngine
from spcl.engine.graphs.classifiers import JointGradient
from spcl.learner import Learner
from spcl.memory import BalancedCoreset, Reservoir
from spcl.methods import make_method
from spcl.models import MLP, Backbone, Normalise, ResNet18

CPU = torch.device("cpu")
GPU = torch.device("cuda")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and this machine has none")
METHODS = ["er", "soro", "soro+dbt", "pcgrad", "dwa", "graddrop", "a-gem", "der++", "gmed", "mdmtr"]


def small_backbone() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 10)]
    return Backbone(Normalise([0.5] * 3, [0.25] * 3), _Features(*layers))


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return Backbone(Normalise([0.5] * 3, [0.25] * 3), MLP(3 * 8 * 8, hidden=(16, 10)))


class _Features(nn.Sequential):
    feature_dim = 10


def moments(
    steps: int, device: torch.device
) -> Iterator[tuple[list[tuple[str, int]], dict[str, tuple[Tensor, Tensor]], list[str]]]:
    """Three tasks that start and end at different times; the last batch of each is smaller."""
    generator = torch.Generator().manual_seed(1)
    tasks = {"a": (0, 5, 3), "b": (2, 8, 2), "c": (4, steps - 1, 4)}
    for step in range(steps):
        batches = {}
        for name, (first, last, classes) in tasks.items():
            if first <= step <= last:
                size = 5 if step == last else 8
                x = torch.randint(0, 256, (size, 3, 8, 8), generator=generator, dtype=torch.uint8)
                batches[name] = (x.to(device), torch.randint(0, classes, (size,), generator=generator))
        started = [(name, classes) for name, (first, _, classes) in tasks.items() if first == step]
        yield started, batches, [name for name, (_, last, _) in tasks.items() if last == step]


def train(learner: Learner, steps: int = 12, device: torch.device = CPU) -> list[dict[str, float]]:
    torch.manual_seed(4)  # some methods draw from the global generator
    losses = []
    for started, batches, ended in moments(steps, device):
        for name, classes in started:
            learner.add_task(name, classes=classes)
        losses.append(learner.step(batches).losses)
        for name in ended:
            learner.finish_task(name)
    return losses


def make(method: str, scenario: str, backbone: nn.Module, reservoir: bool = False, **options: object) -> Learner:
    torch.manual_seed(2)
    dtype = torch.float32 if method == "gmed" else None
    memory = (Reservoir if reservoir else BalancedCoreset)(20, seed=3, dtype=dtype)
    return Learner(
        backbone,
        make_method(method),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        memory=memory,
        scenario=scenario,  # type: ignore[arg-type]
        memory_batch=8,
        **options,  # type: ignore[arg-type]
    )


def state(learner: Learner) -> dict[str, Tensor]:
    tensors = dict(learner.model.backbone.state_dict())
    for task in learner.tasks.values():
        assert task.head is not None
        tensors |= {f"{task.name}.{name}": value for name, value in task.head.state_dict().items()}
    return {name: value.detach().cpu() for name, value in tensors.items()}


def assert_same(one: Learner, other: Learner, tolerance: float) -> None:
    mine, theirs = state(one), state(other)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(
            value, theirs[name], rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("scenario", ["task", "class"])
@pytest.mark.parametrize("method", METHODS)
def test_the_same_work_without_graphs(method: str, scenario: str) -> None:
    eager = make(method, scenario, small_backbone())
    replayed = make(method, scenario, small_backbone())
    capture_without_graphs(replayed)
    losses = [train(learner) for learner in (eager, replayed)]
    assert len(losses[0]) == len(losses[1]) == 12
    for mine, theirs in zip(*losses, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    assert_same(eager, replayed, 1e-4)


@pytest.mark.parametrize("scenario", ["task", "class"])
@pytest.mark.parametrize("device", [CPU, pytest.param(GPU, marks=needs_gpu)], ids=["cpu", "gpu"])
@pytest.mark.parametrize("backbone", ["with batch-norm", "without"])
def test_steady_steps_of_a_small_network_are_one_graph(backbone: str, scenario: str, device: torch.device) -> None:
    networks = (
        [small_backbone() for _ in range(2)] if backbone == "with batch-norm" else [perceptron() for _ in range(2)]
    )
    learners = [make("soro", scenario, network.to(device), capture=False) for network in networks]
    capture_without_graphs(learners[1])
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (30, 2, 8, 3, 8, 8), generator=generator, dtype=torch.uint8).to(device)
    labels = torch.randint(0, 3, (30, 2, 8), generator=generator)
    for learner in learners:
        for name in ("a", "b"):
            learner.add_task(name, classes=3)
        for x, y in zip(images, labels, strict=True):
            learner.step({"a": (x[0], y[0]), "b": (x[1], y[1])})
    engine = learners[1]._engine
    assert isinstance(engine, CudaGraphEngine)
    assert engine._one_pass._passes
    assert engine._capture.unsupported is None
    assert_same(*learners, 1e-3)


@pytest.mark.parametrize("device", [CPU, pytest.param(GPU, marks=needs_gpu)], ids=["cpu", "gpu"])
def test_a_steady_step_notices_that_heads_have_moved(device: torch.device) -> None:
    learners = [make("soro", "class", perceptron().to(device), capture=False) for _ in range(2)]
    capture_without_graphs(learners[1])
    x, y = torch.randint(0, 256, (2, 8, 3, 8, 8), dtype=torch.uint8).to(device), torch.arange(8) % 3
    for learner in learners:
        for name in ("a", "b"):
            learner.add_task(name, classes=3)
        for step in range(24):
            if step == 20:
                learner.add_task("many", classes=200)  # more than there was room for, and no batch yet
            learner.step({"a": (x[0], y), "b": (x[1], y)})
    assert_same(*learners, 1e-3)


def test_a_step_without_room_for_the_heads_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, replayed = (make("soro", "class", small_backbone()) for _ in range(2))
    capture_without_graphs(replayed)
    x, y = torch.randint(0, 256, (8, 3, 8, 8), dtype=torch.uint8), torch.arange(8) % 3
    for learner in (eager, replayed):
        learner.add_task("a", classes=3)
        learner.step({"a": (x, y)})
        learner.add_task("many", classes=200)
    with monkeypatch.context() as patched:
        patched.setattr(JointGradient, "__init__", _no_room)
        with pytest.raises(torch.OutOfMemoryError):
            replayed.step({"many": (x, y)})
    for learner in (eager, replayed):
        learner.step({"a": (x, y), "many": (x, y)})
    assert_same(eager, replayed, 1e-4)


def _no_room(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_logits_reach_a_reservoir() -> None:
    eager, replayed = (make("der++", "class", small_backbone(), reservoir=True) for _ in range(2))
    capture_without_graphs(replayed)
    for learner in (eager, replayed):
        train(learner)
    mine, theirs = ({r.source: r.logits for r in learner.memory.draw(20)} for learner in (eager, replayed))  # type: ignore[union-attr]
    assert mine.keys() == theirs.keys()
    for task, logits in mine.items():
        torch.testing.assert_close(logits, theirs[task], rtol=1e-4, atol=1e-4, equal_nan=True)


def test_more_classes_than_the_first_capacity() -> None:
    learners = [make("soro", "class", small_backbone()) for _ in range(2)]
    capture_without_graphs(learners[1])
    x = torch.randint(0, 256, (8, 3, 8, 8), dtype=torch.uint8)
    for learner in learners:
        for number, classes in enumerate((100, 60, 120)):
            learner.add_task(f"task-{number}", classes=classes)
            for _ in range(3):
                learner.step({f"task-{number}": (x, torch.arange(8) + classes - 8)})
    assert_same(*learners, 1e-4)


@needs_gpu
@pytest.mark.parametrize("scenario", ["task", "class"])
@pytest.mark.parametrize("method", METHODS)
def test_graphs_match_the_eager_engine_on_a_gpu(method: str, scenario: str) -> None:
    learners = [make(method, scenario, small_backbone().to(GPU), capture=capture) for capture in (False, True)]
    for learner in learners:
        train(learner, device=GPU)
    assert_same(*learners, 2e-3)


@needs_gpu
def test_resnet_in_bfloat16_on_a_gpu() -> None:
    losses = []
    for capture in (False, True):
        torch.manual_seed(0)
        backbone = Backbone(Normalise([0.5] * 3, [0.25] * 3), ResNet18()).to(GPU, memory_format=torch.channels_last)
        learner = make("soro+dbt", "class", backbone, capture=capture, autocast=torch.bfloat16)
        losses.append(train(learner, device=GPU))
        assert not capture or learner._engine._capture.unsupported is None
    for mine, theirs in zip(*(record[:3] for record in losses), strict=True):  # bfloat16 drifts apart soon after
        assert mine == pytest.approx(theirs, rel=0.05)


@needs_gpu
def test_a_backbone_that_cannot_be_captured_is_run_eagerly_with_the_reason() -> None:
    class Peeking(nn.Module):
        feature_dim = 3 * 64

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            x = x.float().flatten(1) * self.scale
            return x / (1.0 + float(x.abs().max()))  # waits for the GPU, which a graph cannot

    learner, stream = make("soro", "task", Peeking().to(GPU)), torch.cuda.current_stream()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(learner, device=GPU)
    assert any("no CUDA graph can be captured" in str(warning.message) for warning in caught)
    assert torch.cuda.current_stream() == stream
    assert all(torch.isfinite(value).all() for value in state(learner).values())


@needs_gpu
def test_a_backbone_that_replaces_its_buffers_is_run_eagerly_with_the_reason() -> None:
    class Replacing(nn.Module):
        feature_dim = 3 * 64

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.register_buffer("mean", torch.zeros(3 * 64))

        def forward(self, x: Tensor) -> Tensor:
            x = x.float().flatten(1) / 255.0
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=0)
            return (x - self.mean) * self.scale

    eager, captured = (make("soro", "task", Replacing().to(GPU), capture=capture) for capture in (False, True))
    train(eager, device=GPU)
    with pytest.warns(RuntimeWarning, match="one by one: the backbone replaces its buffer 'mean'"):
        train(captured, device=GPU)
    assert_same(eager, captured, 2e-3)


@needs_gpu
def test_a_backbone_without_buffers_is_captured_without_a_warning() -> None:
    learners = [
        make("soro", "task", nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU()).to(GPU), capture=capture)
        for capture in (False, True)
    ]
    learners[1].model.backbone.load_state_dict(learners[0].model.backbone.state_dict())
    generator = torch.Generator().manual_seed(1)
    for learner in learners:
        learner.add_task("a", classes=3)
        learner.add_task("b", classes=3)
    for _ in range(30):
        x, y = torch.randn(2, 8, 12, generator=generator).to(GPU), torch.randint(0, 3, (2, 8), generator=generator)
        for learner in learners:
            learner.step({"a": (x[0], y[0]), "b": (x[1], y[1])})
    assert_same(*learners, 1e-3)


def test_a_part_set_to_evaluation_later_is_noticed() -> None:
    eager, replayed = (make("soro", "task", small_backbone()) for _ in range(2))
    capture_without_graphs(replayed)
    for learner in (eager, replayed):
        train(learner)
        batch_norm = next(part for part in learner.model.backbone.modules() if isinstance(part, nn.BatchNorm2d))
        before = batch_norm.running_mean.clone()
        batch_norm.eval()
        learner.add_task("d", classes=2)
        x = torch.randint(0, 256, (8, 3, 8, 8), generator=torch.Generator().manual_seed(5), dtype=torch.uint8)
        learner.step({"d": (x, torch.arange(8) % 2)})
        assert torch.equal(batch_norm.running_mean, before)
    engine = replayed._engine
    assert isinstance(engine, CudaGraphEngine)
    assert len({key[-1] for key in engine._classifiers._graphs}) == 2  # one graph for either mode
    assert_same(eager, replayed, 1e-4)


# -- memory


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("method", METHODS)
def test_a_learner_that_nobody_holds_is_gone_at_once(method: str, captured: bool) -> None:
    learner = make(method, "class", small_backbone())
    if captured:
        capture_without_graphs(learner)
    train(learner)
    parts = [weakref.ref(part) for part in (learner, learner.model.backbone, learner.memory)]
    with without_garbage_collection():
        del learner
        assert [part() for part in parts] == [None] * 3


@needs_gpu
@pytest.mark.parametrize("method", ["soro+dbt", "der++", "mdmtr"])
def test_one_learner_after_another_takes_no_more_gpu_memory(method: str) -> None:
    taken = []
    with without_garbage_collection():
        for _ in range(4):
            train(make(method, "class", small_backbone().to(GPU)), steps=30, device=GPU)
            taken.append(torch.cuda.memory_allocated())
    assert taken[1:] == [taken[1]] * 3  # the first leaves what libraries keep for good
