"""Training on a stream equals the loop by hand, and continues exactly from its checkpoints."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ExponentialLR

from _learning import PlainMoment, TinyResNet, assert_same, batch, complete_state, images
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
    monkeypatch.setattr("spcl.learner.fit.time.monotonic", lambda: now)
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


def test_any_iterable_of_moments_is_a_stream(tmp_path: Path) -> None:
    learner = new_learner()
    learner.add_task("a", classes=3)
    learner.fit([PlainMoment({"a": batch(4, 3, 0)}, ["a"]), PlainMoment(ended=["a"])], checkpoint=tmp_path / "c")
    assert learner.steps == 1
    assert learner.active_tasks == []
    assert read_checkpoint(tmp_path / "c")["sources"] == {}


BAD_BATCHES = {
    "label out of range": ((images(4, 8), torch.tensor([0, 1, 2, 9])), "task 'b' has classes 0 to 2, but .* label 9"),
    "wrong shape": ((images(4, 8)[..., :3], torch.arange(4) % 3), "task 'b': its samples are .* but this batch has"),
    "no batch": (None, "task 'b': a batch is a pair of tensors"),
    "the model raises": (
        (torch.full((4, 2, 4, 4), 1e9), torch.arange(4) % 3),
        "task 'b': the model raised .* too bright",
    ),
}


class DarkResNet(TinyResNet):
    """Raises an error on bright images, but only in training."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and float(x.max()) > 1e6:
            raise RuntimeError("too bright")
        return super().forward(x)


def moments(bad: Any) -> list[PlainMoment]:
    """Two tasks that end in the third moment, in which one of them has a bad batch, and one that goes on."""
    first, second, third, fourth = ({name: batch(4, 3, 10 * k + i) for i, name in enumerate("abc")} for k in range(4))
    last = PlainMoment(
        third | {"b": bad} if bad != "left out" else {"a": third["a"], "c": third["c"]}, ended=["a", "b"]
    )
    return [
        PlainMoment(first, ["a", "b", "c"]),
        PlainMoment(second),
        last,
        PlainMoment({"c": fourth["c"]}, ended=["c"]),
    ]


def dark_learner() -> Learner:
    torch.manual_seed(0)
    learner = Learner(DarkResNet(dropout=0.2), SORO(), memory=Reservoir(9))
    for name in "abc":
        learner.add_task(name, classes=3)
    return learner


@pytest.mark.parametrize("kind", BAD_BATCHES)
def test_a_bad_batch_is_an_error_and_costs_no_other_batch(kind: str, tmp_path: Path) -> None:
    bad, message = BAD_BATCHES[kind]
    expected = dark_learner()
    expected.fit(moments("left out"))
    learner, stream, reports = dark_learner(), iter(moments(bad)), list[StepReport]()
    with pytest.raises(TaskError, match=message) as caught:
        learner.fit(stream, checkpoint=tmp_path / "c", on_step=reports.append)
    assert caught.value.__notes__ == [
        "all other batches of that moment were learned; call fit again to continue with the next moment"
    ]
    assert [sorted(set(report.losses) - {"memory"}) for report in reports] == [[*"abc"], [*"abc"], [*"ac"]]
    assert learner.active_tasks == ["c"]
    saved = Learner.load(tmp_path / "c", backbone=DarkResNet(dropout=0.2))
    assert (saved.steps, saved.active_tasks) == (3, ["c"])
    learner.fit(stream)
    assert_same(complete_state(learner), complete_state(expected))


def test_all_bad_batches_of_a_moment_are_named() -> None:
    learner = new_learner()
    learner.add_task("a", classes=3)
    learner.add_task("b", classes=2)
    bad = {"a": batch(4, 3, 0), "b": (images(4, 1), torch.full((4,), 5)), "radar": batch(4, 2, 2)}
    with pytest.raises(TaskError, match="task 'b' has classes 0 to 1, but the batch has label 5") as caught:
        learner.fit([PlainMoment(bad, ["a", "b"])])
    assert caught.value.__notes__[0].startswith("there is no source 'radar'")
    assert learner.steps == 1
    assert learner.tasks["a"].signature is not None


def test_a_live_stream_goes_on_after_a_bad_batch() -> None:
    def source(classes: int, seed: int) -> list[tuple[Tensor, Tensor]]:
        return [batch(4, classes, 10 * seed + number) for number in range(5)]

    good, broken = source(3, 1), source(3, 2)
    broken[2] = images(4, 3), torch.tensor([0, 1, 2, 3])
    learner, reports = new_learner(), list[StepReport]()
    with LiveStream({"good": good, "broken": broken}, together=True) as stream:
        with pytest.raises(TaskError, match="task 'broken' has classes 0 to 2, but the batch has label 3"):
            learner.fit(stream, on_start=lambda name: learner.add_task(name, classes=3), on_step=reports.append)
        learner.fit(stream, on_step=reports.append)
    learned = [name for report in reports for name in report.losses]
    assert (learned.count("good"), learned.count("broken")) == (5, 4)
    assert learner.active_tasks == []


def test_an_error_of_no_batch_alone_is_raised_as_it_is() -> None:
    learner = Learner(nn.Flatten(), SORO())
    learner.add_task("narrow", classes=2)
    learner.add_task("wide", classes=2)
    labels = torch.tensor([0, 1])
    with pytest.raises(TaskError, match="task 'wide': the backbone gives 4 features for it and 3") as caught:
        learner.fit([PlainMoment({"narrow": (torch.zeros(2, 3), labels), "wide": (torch.zeros(2, 4), labels)})])
    assert not hasattr(caught.value, "__notes__")
    assert learner.steps == 0


@pytest.mark.parametrize("on_start", [None, lambda name: None])
def test_a_task_that_nobody_adds_is_an_error(on_start: Any) -> None:
    with pytest.raises(TaskError, match=r"source 'a' starts, but was not added; call add_task .* on_start="):
        new_learner().fit([PlainMoment({"a": batch(4, 3, 0)}, ["a"])], on_start=on_start)


@pytest.mark.parametrize("every", [-1, float("nan"), "often"])
def test_impossible_intervals_are_refused(every: Any) -> None:
    with pytest.raises(SpclError, match=f"every is {every!r}; give the seconds between checkpoints"):
        new_learner().fit(parallel(), every=every)


@pytest.mark.parametrize(("stream", "found"), [({"a": []}, "str"), ([batch(4, 3, 0)], "tuple")])
def test_sources_that_are_no_stream_are_refused(stream: Any, found: str) -> None:
    with pytest.raises(SpclError, match=rf"must yield moments, but it yields a {found}; merge .*LiveStream"):
        new_learner().fit(stream)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": 3}, r"fit has no option 'epochs', and a source of type int cannot be saved .*; choose one of"),
        ({"checkpoints": "c"}, r"fit has no option 'checkpoints', .*; did you mean 'checkpoint'\?"),
        ({"backbone": nn.Linear(1, 1)}, r"a source cannot be saved as 'backbone'"),
    ],
)
def test_options_that_there_are_not_are_refused_before_anything_is_learned(given: Any, message: str) -> None:
    learner = new_learner()
    with pytest.raises(SpclError, match=message):
        learner.fit(parallel(), **given)
    assert learner.steps == 0


def test_what_has_no_state_cannot_be_saved_with_a_learner(tmp_path: Path) -> None:
    with pytest.raises(SpclError, match=r"save has no option 'kep', .*; did you mean 'keep'\?"):
        new_learner().save(tmp_path / "c", kep=3)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


# -- one fit per checkpoint

HOLD = """
import sys
from test_fit import new_learner, parallel
def on_step(report):
    print("running", flush=True)
    sys.stdin.read()
new_learner().fit(parallel(), checkpoint=sys.argv[1], on_step=on_step)
"""


def test_two_fits_on_one_checkpoint_are_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    link = tmp_path / "link.safetensors"
    link.symlink_to(path)

    def second(report: StepReport) -> None:
        for name in (path, str(path), link):
            with pytest.raises(SpclError, match=r"another fit is saving to .*safetensors, .*wait .* or give another"):
                new_learner().fit(parallel(), checkpoint=name)
        new_learner().fit([], checkpoint=tmp_path / "other.safetensors")
        raise PowerCutError

    with pytest.raises(PowerCutError):
        new_learner().fit(parallel(), checkpoint=path, on_step=second)
    new_learner().fit(parallel(), checkpoint=path)  # the error has released it


def test_a_killed_fit_releases_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    command = [sys.executable, "-c", HOLD, str(path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        with pytest.raises(SpclError, match="another fit is saving"):
            new_learner().fit(parallel(), checkpoint=path)
        process.kill()
    new_learner().fit(parallel(), checkpoint=path)
