"""Stored logits in CUDA graphs: the same losses, gradients and logits as of the eager engine, in one pass for all."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, smooth_l1_loss

from spcl.engine.graphs import CudaGraphEngine
from spcl.engine.graphs.classifiers import JointClassifier, StaticSamples
from spcl.engine.model import Samples
from spcl.learner import Learner
from spcl.learner.checks import classifier_task
from spcl.memory import BalancedCoreset, Reservoir
from spcl.methods import ER, REPLAY_LOSSES, Method, Output, make_method
from spcl.methods.replay import ReplayLoss, StoredLogits, TaskLoss
from spcl.tasks import TaskSource

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and this machine has none")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
scenarios = pytest.mark.parametrize("scenario", ["task", "class"])

METHODS: dict[str, dict[str, Any]] = {
    "er": {"replay_loss": "logits", "logit_weight": 0.7},
    "der++": {"logit_weight": 0.3},
    "spcl": {},
    "soro": {"replay_loss": "logits"},
    "dwa": {"replay_loss": "logits"},
}
CASES = [(name, memory, {}, {}) for name in METHODS for memory in (BalancedCoreset, Reservoir)]
CASES += [(name, BalancedCoreset, {"weigh_heads": True}, {}) for name in METHODS]
CASES += [(name, Reservoir, {}, {"measure_stability": True}) for name in ("er", "der++")]  # a row for every gradient
CASES += [(name, memory, {"finished_weight": 0.2}, {}) for name in METHODS for memory in (BalancedCoreset, Reservoir)]
CLASSES = {"a": 3, "b": 2, "c": 4, "d": 200}  # the last are more than there was room for
SPANS = {"a": (0, 5), "b": (1, 18), "c": (2, 14), "d": (14, 18)}
STEPS = 18


def make(
    method: Method, scenario: str, device: str, graphs: bool, memory: type = BalancedCoreset, **options: Any
) -> Learner:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh()).to(device)
    if "autocast" not in options:
        backbone.double()
    sgd = partial(torch.optim.SGD, lr=0.1)
    learner = Learner(
        backbone, method, optimizer=sgd, memory=memory(20), scenario=scenario, memory_batch=5, capture=graphs, **options
    )
    if graphs and device == "cpu":
        learner._use_engine(CudaGraphEngine(learner.model, learner.method))
    return learner


def batch(task: str, step: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + ord(task))
    x = torch.randn(6, 5, dtype=torch.float64, generator=generator)
    return x.to(device), torch.randint(CLASSES[task], (6,), generator=generator)


def train(learner: Learner, device: str) -> list[dict[str, float]]:
    """Train while tasks start and end; at step 8 some of the stored logits get lost, at step 12 all of a task."""
    losses = []
    for step in range(STEPS):
        for task, (begin, end) in SPANS.items():
            if step == begin:
                learner.add_task(task, classes=CLASSES[task])
            if step == end:
                learner.finish_task(task)
        assert learner.memory is not None
        fields = learner.memory.buffers["a"].fields if "a" in learner.memory.buffers else {}
        if step == 8:
            fields["logits"][::2] = torch.nan
        if step == 12:
            del fields["logits"]
        active = [task for task, (begin, end) in SPANS.items() if begin <= step < end]
        batches = {task: batch(task, step, device) for task in active}
        losses.append(learner.step({task: (x.to(learner.model.dtype), y) for task, (x, y) in batches.items()}).losses)
    return losses


def assert_same(mine: Learner, theirs: Learner) -> None:
    pairs = zip(mine.model.modules(), theirs.model.modules(), strict=True)
    for left, right in pairs:
        torch.testing.assert_close(left.state_dict(), right.state_dict(), rtol=1e-7, atol=1e-9)
    assert mine.memory is not None
    assert theirs.memory is not None
    for name, buffer in mine.memory.buffers.items():
        found, expected = (
            {field: each.take(field) for field in each.fields} for each in (buffer, theirs.memory.buffers[name])
        )
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9, equal_nan=True)


@devices
@scenarios
@pytest.mark.parametrize(("name", "memory", "changed", "options"), CASES)
def test_one_graph_trains_towards_stored_logits_as_the_eager_engine(
    name: str, memory: type, changed: dict[str, Any], options: dict[str, Any], scenario: str, device: str
) -> None:
    method = partial(make_method, name, **METHODS[name], **changed)
    graphs, eager = (make(method(), scenario, device, on, memory, **options) for on in (True, False))
    for step, (mine, theirs) in enumerate(zip(train(graphs, device), train(eager, device), strict=True)):
        assert mine == pytest.approx(theirs, rel=1e-7), step
    assert_same(graphs, eager)
    engine = graphs._engine
    assert isinstance(engine, CudaGraphEngine)
    assert engine.fallback_reason is None
    passes = [each for each in engine._one_pass._passes.values() if each.samples._stored is not None]
    assert passes
    assert device == "cpu" or any(each.graph.replay is not None for each in passes)


@devices
@scenarios
def test_a_pass_per_batch_computes_the_same(scenario: str, device: str) -> None:
    for name in ("der++", "spcl"):
        graphs, eager = (make(make_method(name), scenario, device, on, Reservoir) for on in (True, False))
        assert isinstance(graphs._engine, CudaGraphEngine)
        graphs._engine._one_pass.find = lambda batches: None  # type: ignore[method-assign]
        for mine, theirs in zip(train(graphs, device), train(eager, device), strict=True):
            assert mine == pytest.approx(theirs, rel=1e-7)
        assert_same(graphs, eager)


@devices
@scenarios
def test_mixed_precision_stores_and_replays_logits_in_full(scenario: str, device: str) -> None:
    method, options = partial(make_method, "der++"), {"autocast": torch.bfloat16}
    graphs, eager = (make(method(), scenario, device, on, Reservoir, **options) for on in (True, False))
    for mine, theirs in zip(train(graphs, device), train(eager, device), strict=True):
        assert mine == pytest.approx(theirs, rel=0.05)
    assert graphs.memory is not None
    assert graphs.memory.buffers["d"].take("logits").dtype == torch.float32


class SmoothDistance(StoredLogits):
    """A loss that no coefficients describe."""

    def loss(self, outputs: Sequence[Output], draw: int, task_loss: TaskLoss) -> Tensor:
        near = [
            smooth_l1_loss(output.value[:, : output.stored.shape[1]], output.stored.nan_to_num())
            for output in outputs
            if output.stored is not None
        ]
        return torch.stack([task_loss(output) for output in outputs] + near).sum()


class SmoothER(ER):
    """A method with that loss."""

    name = "smooth-er"
    replay_losses: ClassVar[dict[str, type[ReplayLoss]]] = {**REPLAY_LOSSES, "logits": SmoothDistance}


@devices
@scenarios
def test_a_loss_of_another_kind_runs_eagerly_with_the_reason(scenario: str, device: str) -> None:
    graphs, eager = (make(SmoothER(replay_loss="logits"), scenario, device, on) for on in (True, False))
    for mine, theirs in zip(train(graphs, device), train(eager, device), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-7)
    assert_same(graphs, eager)
    assert "not all sources have plain classifiers" in (graphs._engine.fallback_reason or "")


groups = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.booleans()), min_size=1, max_size=6)


@given(groups, st.booleans(), st.booleans(), st.integers(0, 2**16))
@settings(max_examples=30, deadline=None)
def test_losses_of_static_samples_are_those_of_every_sample_alone(
    drawn: list[tuple[int, int, bool]], joint: bool, has_offsets: bool, seed: int
) -> None:
    """Each group has a size, a task, and if replayed stored logits: all of the task's, or of the first classes so far.

    Class-incrementally there may be offsets, which belong to new samples.
    """
    generator = torch.Generator().manual_seed(seed)
    random = partial(torch.randn, generator=generator, dtype=torch.float64)
    sizes, tasks, offset = [2, 3, 1, 4], [], 0
    for number, classes in enumerate(sizes):
        tasks.append(classifier_task(str(number), classes, offset))
        tasks[-1].head, offset = nn.Linear(3, classes, dtype=torch.float64), offset + classes
    offsets = random(offset) if joint and has_offsets else None
    classifier = JointClassifier(3, joint, lambda: offsets, torch.empty(0, dtype=torch.float64))
    classifier.include(tasks)
    samples = []
    for size, number, has_stored in drawn:
        task, stored = tasks[number], None
        if has_stored:
            stored = random(size, task.offset + sizes[number] if joint else sizes[number])
            stored[random(stored.shape) > 0.5] = torch.nan
        y = torch.randint(sizes[number], (size,), generator=generator)
        samples.append(Samples(TaskSource(task.name, task), random(size, 3), y, stored, replayed=has_stored))
    static = StaticSamples(classifier, random(1, 3), [sum(len(group.y) for group in samples)], [(0.3, 0.6)], False)
    static.fill([group.x for group in samples], samples)
    expected = []
    for group in samples:
        own = slice(0, offset) if joint else slice(group.task.offset, group.task.offset + sizes[int(group.task.name)])
        for row, label in enumerate(group.y):
            logits = classifier.logits(group.x[row])[own]
            compared = logits if group.replayed or offsets is None else logits + offsets
            loss = 0.3 * cross_entropy(compared, label + (group.task.offset if joint else 0))
            if group.stored is not None and not group.stored[row].isnan().all():
                known = ~group.stored[row].isnan()
                loss = loss + 0.6 * (logits[: len(known)][known] - group.stored[row][known]).square().mean()
            expected.append(loss)
    found = static.losses(classifier.logits(static.x))
    torch.testing.assert_close(found * len(found), torch.stack(expected))
