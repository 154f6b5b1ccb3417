"""Timelines: the steps in which each task trains."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import numpy as np

from spcl.errors import SpclError


@dataclass(frozen=True)
class Timeline:
    """The first and last step (inclusive) of each task; tasks are ordered by their start, the first at step 0.

    >>> timeline = Timeline(((0, 3), (2, 6)))
    >>> timeline.steps, timeline.durations, timeline.memory_start
    (7, (4, 5), 4)
    >>> [timeline.active(step) for step in (0, 2, 6)]
    [(0,), (0, 1), (1,)]
    """

    spans: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        spans = [tuple(map(index, span)) for span in self.spans]
        if not spans:
            raise SpclError("the timeline has no task; give at least one")
        earliest = 0
        for task, span in enumerate(spans):
            if len(span) != 2 or span[1] < span[0]:
                raise SpclError(
                    f"task {task} has the span {span}; give its first and last step, the last not before the first"
                )
            if task == 0 and span[0] != 0:
                raise SpclError(f"task 0 starts at step {span[0]}; the first task must start at step 0")
            if span[0] < earliest:
                raise SpclError(
                    f"task {task} starts at step {span[0]}, before task {task - 1} at {earliest}; order tasks by start"
                )
            earliest = span[0]
        object.__setattr__(self, "spans", tuple(spans))

    @classmethod
    def parallel(cls, durations: Sequence[int], seed: int, *, overlap: float = 1.0, gap: int = 0) -> "Timeline":
        """Draw a random timeline by the rule of the published PS-* protocols.

        The start of task i is uniform between the start s of task i-1 and the latest end e so far. `overlap` and `gap`
        adjust that window to [e - ⌊overlap·(e - s)⌋ + gap, e + gap]; the defaults give the published protocols.

        Args:
            durations: The number of steps of each task.
            seed: The same seed gives the same timeline.
            overlap: From 1, the whole window, to 0, only its end: a task then shares one step with those before.
            gap: Steps by which every start is delayed; with 2 or more there may be steps without any task.

        >>> Timeline.parallel((40, 40, 40), seed=0).spans
        ((0, 39), (5, 44), (19, 58))
        >>> Timeline.parallel((40, 40, 40), seed=0, overlap=0.0, gap=1) == Timeline.serial((40, 40, 40))
        True
        """
        if not 0.0 <= overlap <= 1.0:
            raise SpclError(f"overlap is {overlap}; give a number between 0 and 1")
        if gap < 0:
            raise SpclError(f"gap is {gap}; give 0 or more steps")
        _check_durations(durations)
        generator = np.random.default_rng(seed)
        spans = [(0, durations[0] - 1)]
        for duration in durations[1:]:
            latest = max(last for _, last in spans)
            window = int(overlap * (latest - spans[-1][0]))
            start = latest + gap - int(generator.integers(window, endpoint=True))
            spans.append((start, start + duration - 1))
        return cls(tuple(spans))

    @classmethod
    def joint(cls, durations: Sequence[int]) -> "Timeline":
        """Start all tasks at step 0 (multi-task learning).

        >>> Timeline.joint((3, 5)).spans
        ((0, 2), (0, 4))
        """
        _check_durations(durations)
        return cls(tuple((0, duration - 1) for duration in durations))

    @classmethod
    def serial(cls, durations: Sequence[int]) -> "Timeline":
        """Train one task after another (serial continual learning).

        >>> Timeline.serial((3, 5)).spans
        ((0, 2), (3, 7))
        """
        _check_durations(durations)
        ends = np.cumsum(durations).tolist()
        return cls(tuple((end - duration, end - 1) for duration, end in zip(durations, ends, strict=True)))

    @property
    def steps(self) -> int:
        """Number of steps until the last task has ended."""
        return max(last for _, last in self.spans) + 1

    @property
    def durations(self) -> tuple[int, ...]:
        """Number of steps of each task."""
        return tuple(map(self.duration, range(len(self.spans))))

    @property
    def memory_start(self) -> int:
        """First step with replay, the one after the first end of a task."""
        return min(last for _, last in self.spans) + 1

    def duration(self, task: int) -> int:
        """Return the number of steps of a task."""
        first, last = self.spans[task]
        return last - first + 1

    def active(self, step: int) -> tuple[int, ...]:
        """Return the tasks that train at this step."""
        return tuple(task for task, (first, last) in enumerate(self.spans) if first <= step <= last)

    def stretched(self, factor: int) -> "Timeline":
        """Return this timeline with every step repeated `factor` times, for as many passes over the data.

        >>> Timeline(((0, 3), (2, 6))).stretched(3).spans
        ((0, 11), (6, 20))
        """
        if factor < 1:
            raise SpclError(f"the timeline is stretched by {factor}; give at least 1")
        return Timeline(tuple((factor * first, factor * (last + 1) - 1) for first, last in self.spans))

    def rescaled(self, durations: Sequence[int]) -> "Timeline":
        """Return this timeline for tasks of other lengths.

        Every task starts at the same fraction of its window, which reaches from the start of the task before to the
        first step after all tasks before. Overlapping tasks still overlap, a parallel timeline still follows its rule,
        joint and serial timelines stay joint and serial, and gaps scale with the tasks before them.

        >>> Timeline(((0, 39), (20, 59), (50, 89))).rescaled((8, 8, 4)).spans
        ((0, 7), (4, 11), (10, 13))
        """
        _check_durations(durations)
        if len(durations) != len(self.spans):
            raise SpclError(f"{len(durations)} durations for a timeline of {len(self.spans)} tasks; give one per task")
        spans: list[tuple[int, int]] = []
        start, end, new_start, new_end = 0, 0, 0, 0
        for (first, last), duration in zip(self.spans, durations, strict=True):
            window = max(end - start, 1)
            new_start += (first - start) * (new_end - new_start) // window
            spans.append((new_start, new_start + duration - 1))
            start, end, new_end = first, max(end, last + 1), max(new_end, new_start + duration)
        return Timeline(tuple(spans))


def _check_durations(durations: Sequence[int]) -> None:
    if not durations:
        raise SpclError("no durations are given for the timeline; give at least one")
    for task, duration in enumerate(durations):
        if duration < 1:
            raise SpclError(f"task {task} lasts {duration} steps; give at least 1")
