"""A stream over a data set whose tasks overlap in time."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spcl.errors import CheckpointError, DataError, SpclError, TimelineError
from spcl.streams.labels import LabelSet, split_by_task, task_durations
from spcl.streams.moment import Moment
from spcl.streams.timeline import Timeline

__all__ = ["ParallelStream", "check_timeline"]


class ParallelStream:
    """Moments of a labelled data set whose classes are split into tasks, each with its own span of steps (paper §5.1).

    Every sample is seen exactly once: the k-th batch of a task holds the samples [k·B, (k+1)·B) of a permutation seeded
    by `(seed, task)`. A task of nᵢ samples needs ⌈nᵢ/B⌉ steps, and a timeline that gives it more or fewer is an error.
    Steps without any task are skipped.

    Iterating continues from the current position, also after `load_state_dict`; `stream[k]` is the k-th moment and can
    be accessed in any order.

    Args:
        x: The samples, on any device and of any dtype; batches are gathered on that device.
        labels: The class of each sample. Labels in moments are local to the task, and on the CPU.
        label_set: The classes of each task.
        timeline: The first and last step of each task.
        batch_size: The number of samples of a task in a step; its last batch may be smaller.
        seed: The same seed gives the same stream.
        names: The tasks' names, by default `task-0`, `task-1`, …

    >>> import torch
    >>> labels = torch.tensor([0, 1, 2, 3] * 3)
    >>> stream = ParallelStream(torch.arange(12), labels, ((0, 1), (2, 3)), Timeline(((0, 2), (1, 3))), 2, seed=0)
    >>> for moment in stream:
    ...     print(moment.step, list(moment.batches), moment.started, moment.ended)
    0 ['task-0'] ('task-0',) ()
    1 ['task-0', 'task-1'] ('task-1',) ()
    2 ['task-0', 'task-1'] () ('task-0',)
    3 ['task-1'] () ('task-1',)
    """

    def __init__(
        self,
        x: Tensor,
        labels: Tensor,
        label_set: LabelSet,
        timeline: Timeline,
        batch_size: int,
        seed: int,
        names: Sequence[str] | None = None,
    ) -> None:
        if len(x) != len(labels):
            raise DataError(f"{len(x)} samples and {len(labels)} labels; give one label per sample")
        check_timeline(labels, label_set, timeline, batch_size)
        self.names = _checked_names(names, len(label_set))
        self.label_set = label_set
        self.timeline = timeline
        self.batch_size = batch_size
        self._x = x
        tasks = [_shuffled(*task, (seed, i)) for i, task in enumerate(split_by_task(labels, label_set))]
        self._tasks = [(order.to(x.device), local) for order, local in tasks]
        self._steps = [step for step in range(timeline.steps) if timeline.active(step)]
        self._position = 0
        self._prefetched: tuple[int, Moment] | None = None

    @property
    def classes(self) -> dict[str, int]:
        """Number of classes of each task."""
        return {name: len(members) for name, members in zip(self.names, self.label_set, strict=True)}

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, position: int) -> Moment:
        step = self._steps[position]
        active, spans = self.timeline.active(step), self.timeline.spans
        return Moment(
            step,
            batches={self.names[task]: self._batch(task, step - spans[task][0]) for task in active},
            started=tuple(self.names[task] for task in active if spans[task][0] == step),
            ended=tuple(self.names[task] for task in active if spans[task][1] == step),
        )

    def __iter__(self) -> Iterator[Moment]:
        while self._position < len(self):
            position, moment = self._prefetched or (-1, None)
            self._position += 1
            yield moment if moment is not None and position == self._position - 1 else self[self._position - 1]

    def prefetch(self) -> None:
        """Gather the next moment in advance, for example while a GPU still works; the position does not change."""
        if self._position < len(self):
            self._prefetched = self._position, self[self._position]

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the number of moments yielded so far."""
        return {"position": self._position, "moments": len(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position from `state_dict()`."""
        position, moments = state["position"], state["moments"]
        if moments != len(self) or not 0 <= position <= moments:
            raise CheckpointError(
                f"the saved position {position} of {moments} moments does not fit this stream of {len(self)} moments; "
                "resume with the data, protocol and batch size of the saved run"
            )
        self._position = position

    def _batch(self, task: int, number: int) -> tuple[Tensor, Tensor]:
        order, labels = self._tasks[task]
        batch = slice(number * self.batch_size, (number + 1) * self.batch_size)
        return self._x.index_select(0, order[batch]), labels[batch].clone()


def check_timeline(labels: Tensor, label_set: LabelSet, timeline: Timeline, batch_size: int) -> None:
    """Raise a `TimelineError` naming the tasks for which the timeline is too long or too short, and by how much.

    >>> import torch
    >>> check_timeline(torch.tensor([0, 0, 0, 1]), ((0,), (1,)), Timeline(((0, 4), (3, 3))), batch_size=2)
    Traceback (most recent call last):
    spcl.errors.TimelineError: the timeline does not fit the data at batch size 2: task 0 has 5 steps and needs 2
    (3 too many); fit the timeline to the data (Timeline.rescaled)
    """
    needed = task_durations(labels, label_set, batch_size)
    if len(needed) != len(timeline.spans):
        raise DataError(
            f"the label set has {len(needed)} tasks and the timeline {len(timeline.spans)}; give both the same number"
        )
    if 0 in needed:
        raise DataError(
            f"task {needed.index(0)} has no sample: its classes {label_set[needed.index(0)]} are not in the data; "
            "remove the task or add samples"
        )
    misfits = [
        f"task {task} has {has} steps and needs {needs} ({abs(has - needs)} too {'many' if has > needs else 'few'})"
        for task, (has, needs) in enumerate(zip(timeline.durations, needed, strict=True))
        if has != needs
    ]
    if misfits:
        raise TimelineError(
            f"the timeline does not fit the data at batch size {batch_size}: {', '.join(misfits)}; "
            "fit the timeline to the data (Timeline.rescaled)"
        )


def _checked_names(names: Sequence[str] | None, tasks: int) -> tuple[str, ...]:
    checked = tuple(f"task-{task}" for task in range(tasks)) if names is None else tuple(names)
    if len(set(checked)) != tasks or len(checked) != tasks:
        raise SpclError(f"the names {checked} are not {tasks} different ones; give one per task")
    return checked


def _shuffled(indices: Tensor, labels: Tensor, seed: tuple[int, int]) -> tuple[Tensor, Tensor]:
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(indices)))
    return indices[order], labels[order]
