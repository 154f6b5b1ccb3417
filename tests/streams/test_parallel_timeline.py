import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spcl.errors import SpclError
from spcl.runs.view import draw_timeline
from spcl.streams import Timeline

PROTOCOLS = Path(__file__).resolve().parents[3] / "shared" / "protocols"
durations_lists = st.lists(st.integers(1, 60), min_size=1, max_size=8)
seeds = st.integers(0, 2**32)


def windows(timeline: Timeline) -> list[tuple[int, int, int]]:
    """Return for each task after the first the start of the one before, its start, and the latest end before it."""
    spans = timeline.spans
    return [(spans[i - 1][0], spans[i][0], max(last for _, last in spans[:i])) for i in range(1, len(spans))]


def obeys_the_rule(timeline: Timeline) -> bool:
    return timeline.spans[0][0] == 0 and all(before <= start <= latest for before, start, latest in windows(timeline))


@given(durations_lists, seeds)
def test_parallel_follows_the_published_rule(durations: list[int], seed: int) -> None:
    timeline = Timeline.parallel(durations, seed)
    assert obeys_the_rule(timeline)
    assert timeline.durations == tuple(durations)
    assert timeline == Timeline.parallel(durations, seed)


def test_starts_are_uniform_over_the_whole_window() -> None:
    starts = Counter(Timeline.parallel((5, 3), seed).spans[1][0] for seed in range(1000))
    assert set(starts) == {0, 1, 2, 3, 4}
    assert all(140 < count < 260 for count in starts.values())  # 200 expected; the deviation is 13


@given(durations_lists, seeds, st.floats(0, 1), st.integers(0, 10))
def test_overlap_and_gap_bound_the_window(durations: list[int], seed: int, overlap: float, gap: int) -> None:
    timeline = Timeline.parallel(durations, seed, overlap=overlap, gap=gap)
    for before, start, latest in windows(timeline):
        assert latest - overlap * (latest - before) <= start - gap <= latest


@given(durations_lists, seeds)
def test_zero_overlap_and_gap_of_one_is_serial(durations: list[int], seed: int) -> None:
    assert Timeline.parallel(durations, seed, overlap=0, gap=1) == Timeline.serial(durations)


@given(durations_lists, seeds, st.integers(2, 10))
def test_gaps_leave_steps_without_tasks(durations: list[int], seed: int, gap: int) -> None:
    timeline = Timeline.parallel(durations, seed, overlap=0, gap=gap)
    idle = [step for step in range(timeline.steps) if not timeline.active(step)]
    assert len(idle) == (gap - 1) * (len(durations) - 1)


@given(durations_lists)
def test_joint_and_serial(durations: list[int]) -> None:
    joint, serial = Timeline.joint(durations), Timeline.serial(durations)
    assert joint.steps == max(durations)
    assert joint.active(0) == tuple(range(len(durations)))
    assert serial.steps == sum(durations)
    assert all(len(serial.active(step)) == 1 for step in range(serial.steps))
    assert joint.durations == serial.durations == tuple(durations)


@given(durations_lists, seeds, st.integers(0, 5))
def test_properties_agree_with_counting(durations: list[int], seed: int, gap: int) -> None:
    timeline = Timeline.parallel(durations, seed, gap=gap)
    active = [timeline.active(step) for step in range(timeline.steps)]
    assert timeline.active(timeline.steps) == timeline.active(-1) == ()
    assert active[-1] != ()
    for task, duration in enumerate(durations):
        assert sum(task in tasks for tasks in active) == duration == timeline.duration(task)
    some_ended = [any(last < step for _, last in timeline.spans) for step in range(timeline.steps + 1)]
    assert timeline.memory_start == some_ended.index(True)


@given(st.data(), durations_lists, seeds)
def test_rescaling_preserves_the_rule(data: st.DataObject, durations: list[int], seed: int) -> None:
    others = data.draw(st.lists(st.integers(1, 60), min_size=len(durations), max_size=len(durations)))
    timeline = Timeline.parallel(durations, seed)
    rescaled = timeline.rescaled(others)
    assert rescaled.durations == tuple(others)
    assert obeys_the_rule(rescaled)
    assert timeline.rescaled(durations) == timeline
    assert Timeline.joint(durations).rescaled(others) == Timeline.joint(others)
    assert Timeline.serial(durations).rescaled(others) == Timeline.serial(others)


@given(durations_lists, seeds, st.integers(2, 5), st.integers(0, 5))
def test_rescaling_to_a_multiple_multiplies_every_start(durations: list[int], seed: int, factor: int, gap: int) -> None:
    timeline = Timeline.parallel(durations, seed, gap=gap)
    rescaled = timeline.rescaled([factor * duration for duration in durations])
    assert [first for first, _ in rescaled.spans] == [factor * first for first, _ in timeline.spans]


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ((), "has no task; give at least one"),
        (((0, 3), (4, 2)), r"task 1 has the span \(4, 2\)"),
        (((0, 3), (4, 5, 6)), r"task 1 has the span \(4, 5, 6\)"),
        (((1, 3),), "task 0 starts at step 1"),
        (((-1, 3),), "task 0 starts at step -1"),
        (((0, 3), (3, 4), (2, 4)), "task 2 starts at step 2, before task 1 at 3"),
    ],
)
def test_invalid_spans_are_named(spans: tuple[tuple[int, int], ...], message: str) -> None:
    with pytest.raises(SpclError, match=message):
        Timeline(spans)


def test_invalid_arguments_are_named() -> None:
    with pytest.raises(SpclError, match="task 1 lasts 0 steps"):
        Timeline.parallel((3, 0), seed=0)
    with pytest.raises(SpclError, match=r"overlap is 1\.5"):
        Timeline.parallel((3, 3), seed=0, overlap=1.5)
    with pytest.raises(SpclError, match="gap is -1"):
        Timeline.parallel((3, 3), seed=0, gap=-1)
    with pytest.raises(SpclError, match="no durations"):
        Timeline.serial(())
    with pytest.raises(SpclError, match="3 durations for a timeline of 2 tasks"):
        Timeline.joint((3, 3)).rescaled((1, 2, 3))


def test_lists_become_tuples() -> None:
    assert Timeline([[0, 3], [1, 2]]) == Timeline(((0, 3), (1, 2)))  # type: ignore[arg-type, list-item]
    with pytest.raises(TypeError):
        Timeline(((0, 3.5),))  # type: ignore[arg-type]


@given(durations_lists, seeds, st.integers(5, 80))
def test_drawing_shows_a_task_where_it_is_active(durations: list[int], seed: int, width: int) -> None:
    timeline = Timeline.parallel(durations, seed)
    *bars, memory, axis = draw_timeline(timeline, width).plain.split("\n")
    margin = len("memory ")
    for task, bar in enumerate(bars):
        cells = bar[margin:].ljust(width)
        for column in range(width):
            # a column stands for the time [column, column + 1) · steps / width, an active step t for [t, t + 1)
            first, last = timeline.spans[task]
            shown = first * width < (column + 1) * timeline.steps and column * timeline.steps < (last + 1) * width
            assert (cells[column] == "█") == shown
    assert memory[margin:].strip() == "" or memory[margin:].rstrip().endswith("█")
    assert axis.split() == ["0", str(timeline.steps - 1)]


@given(durations_lists, st.integers(5, 80))
def test_drawing_splits_past_and_future(durations: list[int], width: int) -> None:
    timeline = Timeline.serial(durations)
    whole, begin, end = (draw_timeline(timeline, width, now=now).plain for now in (None, 0, timeline.steps))
    assert whole == end
    assert "█" not in begin
    assert begin.replace("░", "█") == whole


def test_published_timelines_follow_the_rule() -> None:
    if not PROTOCOLS.is_dir():
        pytest.skip(f"no published protocols in {PROTOCOLS}")
    for path in PROTOCOLS.glob("*.json"):
        for entry in json.loads(path.read_text())["label_sets"]:
            for spans in entry["timelines"]:
                timeline = Timeline(spans)
                assert obeys_the_rule(timeline)
                assert obeys_the_rule(timeline.rescaled([max(1, duration // 6) for duration in timeline.durations]))
