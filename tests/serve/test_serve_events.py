"""The history of a service is bounded, loses no samples when it gets coarser, and tells readers only what is new."""

import json
import math
import random
from collections import Counter

import pytest

from spcl.serve.events import CheckpointEvent, Cursor, DeadLetterEvent, History, StepEvent, TaskEvent

POINTS = 16


def steps(count: int, seed: int = 0) -> list[StepEvent]:
    """Steps at irregular times; some of three tasks take part in each."""
    draw = random.Random(seed)
    time, made = 1000.0, []
    for number in range(count):
        time += draw.expovariate(1.0)
        active = [task for task in "abc" if draw.random() < 0.7]
        losses = {task: draw.choice((draw.random(), math.nan)) for task in active}
        kappa = draw.choice((None, draw.uniform(1.0, 50.0), math.inf))
        samples = {task: draw.randrange(1, 9) for task in active}
        made.append(StepEvent(time, number, samples, losses, {}, kappa, kappa, (), 0.5))
    return made


def filled(events: list[StepEvent]) -> History:
    history = History(points=POINTS)
    for event in events:
        history.add(event)
    return history


@pytest.mark.parametrize("count", [1, 10, 100, 1000])
def test_series_is_bounded_and_covers_everything(count: int) -> None:
    events = steps(count)
    changes = filled(events).since(Cursor())
    buckets = [json.loads(bucket) for bucket in changes.buckets]
    starts = [bucket["start"] for bucket in buckets]
    assert len(starts) <= POINTS
    assert starts == sorted(set(starts))
    assert sum(bucket["steps"] for bucket in buckets) == count
    for bucket in buckets:
        end = bucket["start"] + changes.interval
        inside = [event for event in events if bucket["start"] <= event.time < end]
        expected = sum((Counter(event.samples) for event in inside), Counter())
        assert bucket["samples"] == dict(expected)
        for task, loss in bucket["losses"].items():
            values = [event.losses[task] for event in inside if math.isfinite(event.losses.get(task, math.nan))]
            assert loss == pytest.approx(sum(values) / len(values), rel=1e-4)
        logs = [math.log(event.kappa_before) for event in inside if event.kappa_before not in (None, math.inf)]
        assert bucket["kappas"].get("before") == (
            pytest.approx(math.exp(sum(logs) / len(logs)), rel=1e-4) if logs else None
        )


def test_a_reader_who_follows_has_what_a_new_reader_gets() -> None:
    history, cursor, mine = History(points=POINTS), Cursor(), []
    for number, event in enumerate(steps(300)):
        history.add(event)
        history.add_lags({"a": float(number)}) if number == 299 else None
        if number % 7 == 0 or number == 299:
            changes = history.since(cursor)
            cursor = changes.cursor
            new = [json.loads(bucket) for bucket in changes.buckets]
            mine = new if changes.reset else [old for old in mine if old["start"] < new[0]["start"]] + new
    assert mine == [json.loads(bucket) for bucket in history.since(Cursor()).buckets]
    json.dumps(mine, allow_nan=False)


def test_events_are_told_once_and_only_the_latest_are_kept() -> None:
    history = History(events=3)
    history.add(TaskEvent(1.0, "a", "started", ""))
    first = history.since(Cursor())
    assert [name for name, _ in first.events] == ["task"]
    assert history.since(first.cursor).events == []
    for number in range(5):
        history.add(DeadLetterEvent(2.0, "a", str(number), "no batch"))
    assert [event["position"] for _, event in history.since(first.cursor).events] == ["2", "3", "4"]
    history.add(CheckpointEvent(3.0, 7, 0.1, 10))
    totals = history.totals()
    assert totals.dead_letters == {"a": 5}
    assert totals.checkpoint is not None
    assert totals.checkpoint.step == 7


def test_totals_are_sums_over_all_steps() -> None:
    events = steps(200)
    totals = filled(events).totals()
    assert totals.samples == dict(sum((Counter(event.samples) for event in events), Counter()))
    assert (totals.steps, totals.seconds) == (200, 100.0)
    latest = next(event for event in reversed(events) if event.kappa_before is not None)
    assert totals.kappa_before == latest.kappa_before
