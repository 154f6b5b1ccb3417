"""What a service measures while it trains: accuracies on new batches and κ, in a hundredth of the time."""

from pathlib import Path

import pytest

from list_hub import ListHub, batch
from serving import list_of_tests, publish, running, settings_of, until
from spcl.serve import Event, StepEvent
from spcl.serve.build import new_learner
from spcl.serve.records import Records, TaskRecord
from spcl.serve.trainer import MEASURING_SHARE, Trainer
from spcl.sources import Schema
from spcl.streams import Moment

TICK = 0.001


class Clock:
    """Goes on by a tick whenever it is read, and by what is added."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += TICK
        return self.now


class Training:
    """A trainer of two tasks by that clock."""

    def __init__(self, folder: Path) -> None:
        settings = settings_of(folder)
        records = Records({name: TaskRecord(name, Schema.of(classes=2)) for name in ("a", "b")})
        learner = new_learner(settings.run_settings(), settings.inputs.spec(), records)
        events: list[Event] = []
        self.clock, self._events = Clock(), events
        self._trainer = Trainer(learner, settings.run_settings(), records, events.append, pytest.fail, self.clock)
        self._step = 0

    def measured(self, moments: int, pause: float) -> list[StepEvent]:
        """Train so many moments with pauses between them; return the steps with κ."""
        begin = len(self._events)
        for _ in range(moments):
            self.clock.now += pause
            batches = {"a": batch(1 + self._step % 7), "b": batch(2 + self._step % 5)}
            self._trainer.train(Moment(self._step, batches, (), ()))
            self._step += 1
        steps = [event for event in self._events[begin:] if isinstance(event, StepEvent)]
        assert len(steps) == moments
        return [event for event in steps if event.kappa_before is not None]


def test_where_batches_come_rarely_all_are_measured(tmp_path: Path) -> None:
    steps = Training(tmp_path).measured(20, pause=10.0)
    assert len(steps) == 20
    assert all(event.accuracies.keys() == {"a", "b"} for event in steps[1:])  # no task is known before its first batch


def test_where_they_come_without_a_pause_measuring_takes_its_share(tmp_path: Path) -> None:
    training = Training(tmp_path)
    cost = 2 * TICK  # a test, and κ
    for idle in (0.0, 1e5):  # time without batches is not saved up
        training.clock.now += idle
        begin = training.clock.now
        steps = training.measured(300, pause=0.0)
        share = MEASURING_SHARE * (training.clock.now - begin)
        assert share / 2 < cost * len(steps) < share + 2 * cost


def test_a_service_reports_what_it_measures(tmp_path: Path) -> None:
    hub: ListHub = list_of_tests(str(tmp_path))
    events: list[Event]
    with running(settings_of(tmp_path)) as (_, events):

        def is_measured() -> bool:
            for name in ("a", "b"):
                publish(hub, name, 1, start=1)  # a batch of zeros would have gradients of zeros, whose κ is NaN
            steps = [event for event in list(events) if isinstance(event, StepEvent)]
            return any(event.accuracies for event in steps) and any((event.kappa_before or 0) >= 1 for event in steps)

        until(is_measured)
    accuracies = [event.accuracies for event in events if isinstance(event, StepEvent)]
    assert all(0 <= accuracy <= 1 for each in accuracies for accuracy in each.values())
