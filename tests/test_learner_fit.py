"""Training on a stream equals the loop by hand, and continues exactly from its checkpoints."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ExponentialLR

from _learning import TinyResNet, assert_same, batch, complete_state, images
from spcl.checkpoint import read_checkpoint
from spcl.errors import SpclError, TaskError
from spcl.learner import Learner, StepReport
from spcl.memory import Reservoir
from spcl.methods import SORO
from spcl.streams import LiveStream, ParallelStream, Timeline


class PowerCutError(Exception):
    pass


def parallel() -> ParallelStream:
    labels = torch.arange(36) % 6
    return ParallelStream(
        images(36, 0), labels, ((0, 1), (2, 3), (4, 5)), Timeline(((0, 2), (1, 3), (4, 6))), 4, seed=0
    )


def new_learner(**options: Any) -> Learner:
    torch.manual_seed(0)
    return Learner(TinyResNet(dropout=0.2), SORO(), memory=Reservoir(9), **options)


def cut_after(step: int) -> Any:
    def on_step(report: StepReport) -> None:
        if report.step == step:
            raise PowerCutError

    return on_step


@pytest.mark.parametrize("scenario", ["task", "class"])
def test_fit_equals_the_loop_by_hand(scenario: str) -> None:
    by_hand = new_learner(scenario=scenario)
    stream = parallel()
    for moment in stream:
        for name in moment.started:
            by_hand.add_task(name, classes=stream.classes[name])
        by_hand.step(moment.batches)
        for name in moment.ended:
            by_hand.finish_task(name)
    learner = new_learner(scenario=scenario)
    learner.fit(parallel())
    assert learner.steps == len(parallel())
    assert learner.active_tasks == []
    assert_same(complete_state(learner), complete_state(by_hand))


@pytest.mark.parametrize("cut", range(7))
def test_training_continues_exactly_from_the_last_checkpoint(cut: int, tmp_path: Path) -> None:
    whole = new_learner()
    whole.fit(parallel())
    path = tmp_path / "checkpoint"
    with pytest.raises(PowerCutError):
        new_learner().fit(parallel(), checkpoint=path, every=0, on_step=cut_after(cut))
    torch.manual_seed(99)
    stream = parallel()
    if path.exists():
        learner = Learner.load(path, backbone=TinyResNet(dropout=0.2, seed=1), stream=stream)
    else:
        assert cut == 0
        learner = new_learner()
    assert learner.steps == cut
    learner.fit(stream, checkpoint=path, every=0)
    assert_same(complete_state(learner), complete_state(whole))
    stream = parallel()
    finished = Learner.load(path, backbone=TinyResNet(dropout=0.2, seed=2), stream=stream)
    finished.fit(stream)
    assert_same(complete_state(finished), complete_state(whole))


def test_schedules_are_saved_along(tmp_path: Path) -> None:
    def fit(learner: Learner, stream: ParallelStream, schedule: ExponentialLR, cut: int = -1) -> None:
        def on_step(report: StepReport) -> None:
            cut_after(cut)(report)
            schedule.step()

        learner.fit(stream, checkpoint=tmp_path / "c", every=0, on_step=on_step, schedule=schedule)

    whole = new_learner()
    fit(whole, parallel(), ExponentialLR(whole.optimizer, 0.5))
    broken = new_learner()
    with pytest.raises(PowerCutError):
        fit(broken, parallel(), ExponentialLR(broken.optimizer, 0.5), cut=4)
    stream = parallel()
    learner = Learner.load(tmp_path / "c", backbone=TinyResNet(dropout=0.2), stream=stream)
    schedule = ExponentialLR(learner.optimizer, 0.5)
    schedule.load_state_dict(read_checkpoint(tmp_path / "c")["sources"]["schedule"])
    fit(learner, stream, schedule)
    assert_same(complete_state(learner), complete_state(whole))


def test_checkpoints_are_saved_every_so_often_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    now = 0.0
    monkeypatch.setattr("spcl.learner.fitting.time.monotonic", lambda: now)
    learner = new_learner()
    monkeypatch.setattr(learner, "save", lambda path, **sources: saved.append(learner.steps))

    def tick(report: StepReport) -> None:
        nonlocal now
        now += 1.0

    learner.fit(parallel(), checkpoint=tmp_path / "c", every=3, on_step=tick)
    assert saved == [3, 6, 7]
    saved.clear()
    new_learner().fit(parallel())
    assert saved == []


def test_live_sources_are_fitted_and_may_join_with_any_head() -> None:
    def source(task: str, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        for seed in range(count):
            yield (images(4, seed), torch.zeros(4, 1)) if task == "speed" else batch(4, 2, seed)

    learner = new_learner()
    learner.add_task("known", classes=2)
    started: list[str] = []

    def on_start(name: str) -> None:
        started.append(name)
        learner.add_task(name, head=nn.Linear(8, 1), loss=mse_loss)

    with LiveStream({"known": source("known", 6), "speed": source("speed", 3)}, patience=10.0) as stream:
        learner.fit(stream, on_start=on_start)
    assert started == ["speed"]
    assert stream.delivered == {"known": 6, "speed": 3}
    assert learner.active_tasks == []


@dataclass
class Event:
    """What any object must have to be a moment."""

    batches: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)


def test_any_iterable_of_moments_is_a_stream(tmp_path: Path) -> None:
    learner = new_learner()
    learner.add_task("a", classes=3)
    learner.fit([Event({"a": batch(4, 3, 0)}, ["a"]), Event(ended=["a"])], checkpoint=tmp_path / "c")
    assert learner.steps == 1
    assert learner.active_tasks == []
    assert read_checkpoint(tmp_path / "c")["sources"] == {}


@pytest.mark.parametrize("on_start", [None, lambda name: None])
def test_a_task_that_nobody_adds_is_an_error(on_start: Any) -> None:
    with pytest.raises(TaskError, match=r"task 'a' starts, but was not added; call add_task .* on_start="):
        new_learner().fit([Event({"a": batch(4, 3, 0)}, ["a"])], on_start=on_start)


@pytest.mark.parametrize("every", [-1, float("nan"), "often"])
def test_impossible_intervals_are_refused(every: Any) -> None:
    with pytest.raises(SpclError, match=f"every is {every!r}; give the seconds between checkpoints"):
        new_learner().fit(parallel(), every=every)


@pytest.mark.parametrize(("stream", "found"), [({"a": []}, "str"), ([batch(4, 3, 0)], "tuple")])
def test_sources_that_are_no_stream_are_refused(stream: Any, found: str) -> None:
    with pytest.raises(SpclError, match=rf"must yield moments, but it yields a {found}; merge .*LiveStream"):
        new_learner().fit(stream)
