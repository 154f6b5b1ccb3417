"""A stream over a data set whose tasks overlap in time: its timeline, the split of its classes, and its moments."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, chain
from operator import index
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from spcl._util.validation import check_content, check_seed
from spcl.batches import Batch, Inputs, leaves, map_leaves
from spcl.errors import CheckpointError, DataError, SpclError, TimelineError

# -- timelines


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

    @classmethod
    def at_once(cls, durations: Sequence[int], count: int, seed: int) -> "Timeline":
        """Let `count` tasks run at once: whenever one has ended, the next one starts.

        The first starts at step 0, the others of the first `count` at random while it runs, in the order of the tasks.

        >>> Timeline.at_once((4, 4, 3, 2), 2, seed=0).spans
        ((0, 3), (3, 6), (4, 6), (7, 8))
        """
        _check_durations(durations)
        if count < 1:
            raise SpclError(f"{count} tasks are to run at once; give at least 1")
        drawn = np.random.default_rng(seed).integers(durations[0], size=min(count, len(durations)) - 1)
        starts = [0, *sorted(drawn.tolist())]
        ends: list[int] = []
        for task, duration in enumerate(durations):
            if task >= len(starts):
                starts.append(max(starts[-1], heappop(ends) + 1))
            heappush(ends, starts[task] + duration - 1)
        return cls(tuple((start, start + duration - 1) for start, duration in zip(starts, durations, strict=True)))

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


# -- moments


@dataclass(frozen=True, eq=False)
class Moment:
    """One step of parallel learning: a batch of every task that has data.

    A training loop adds the tasks that started, takes a step on the batches, and finishes the tasks that ended.

    Attributes:
        step: The index of the step.
        batches: `(x, y)` of each task, by name; x is a tensor, or a dict or tuple of tensors, and labels are local to
            the task.
        started: The tasks whose first batch is in this moment.
        ended: The tasks without batches after this moment.

    >>> import torch
    >>> moment = Moment(0, {"camera": (torch.zeros(8, 3), torch.zeros(8))}, started=("camera",), ended=())
    >>> for name, (x, y) in moment.batches.items():
    ...     print(name, tuple(x.shape), "new" if name in moment.started else "known")
    camera (8, 3) new
    """

    step: int
    batches: dict[str, Batch]
    started: tuple[str, ...]
    ended: tuple[str, ...]


# -- label sets

LabelSet = tuple[tuple[int, ...], ...]
"""The classes of each task; the position of a class in its task is its local label."""


def draw_label_set(classes: int, tasks: int | Sequence[int], seed: int) -> LabelSet:
    """Split the classes 0 … `classes`-1 at random into tasks, every class in exactly one.

    Args:
        classes: The number of classes.
        tasks: The number of tasks, of sizes as equal as possible (later tasks get the remainder); or the number of
            classes of each task.
        seed: The same seed gives the same split.

    >>> label_set = draw_label_set(62, 5, seed=0)
    >>> [len(task) for task in label_set]
    [12, 12, 12, 13, 13]
    >>> [len(task) for task in draw_label_set(10, (2, 8), seed=0)]
    [2, 8]
    """
    sizes = _equal_sizes(classes, tasks) if isinstance(tasks, int) else list(tasks)
    if min(sizes, default=0) < 1 or sum(sizes) != classes:
        raise SpclError(
            f"tasks of {sizes} classes do not split {classes} classes; give sizes of at least 1 that add up to it"
        )
    order = np.random.default_rng(seed).permutation(classes).tolist()
    return tuple(tuple(order[end - size : end]) for size, end in zip(sizes, accumulate(sizes), strict=True))


def check_label_set(label_set: LabelSet, classes: int) -> None:
    """Raise a `DataError` unless every class 0 … `classes`-1 is in exactly one task and no task is empty.

    >>> check_label_set(((0, 2), (1, 2)), classes=3)
    Traceback (most recent call last):
    spcl.errors.DataError: class 2 is in the label set 2 times; assign every class to exactly one task
    """
    for task, members in enumerate(label_set):
        if not members:
            raise DataError(f"task {task} of the label set has no class; give it one, or remove the task")
        for label in members:
            if not 0 <= label < classes:
                raise DataError(
                    f"task {task} of the label set has class {label}; choose from the classes 0 to {classes - 1}"
                )
    times = Counter(chain.from_iterable(label_set))
    for label in range(classes):
        if times[label] != 1:
            raise DataError(
                f"class {label} is in the label set {times[label]} times; assign every class to exactly one task"
            )


def split_by_task(labels: Tensor, label_set: LabelSet) -> list[tuple[Tensor, Tensor]]:
    """Return for each task the indices of its samples, in the data's order, and their labels local to the task.

    >>> import torch
    >>> split_by_task(torch.tensor([2, 0, 1, 2]), ((2, 0), (1,)))
    [(tensor([0, 1, 3]), tensor([0, 1, 0])), (tensor([2]), tensor([0]))]
    """
    classes = sum(map(len, label_set))
    check_label_set(label_set, classes)
    labels = _checked_labels(labels, classes)
    task_of, local_of = torch.empty(classes, dtype=torch.int64), torch.empty(classes, dtype=torch.int64)
    for task, members in enumerate(label_set):
        task_of[list(members)] = task
        local_of[list(members)] = torch.arange(len(members))
    owner = task_of[labels]
    indices = [torch.nonzero(owner == task).flatten() for task in range(len(label_set))]
    return [(index, local_of[labels[index]]) for index in indices]


def task_durations(labels: Tensor, label_set: LabelSet, batch_size: int) -> tuple[int, ...]:
    """Return the steps of each task in one pass over its nᵢ samples, `⌈nᵢ / batch_size⌉`.

    >>> import torch
    >>> task_durations(torch.tensor([0, 0, 0, 1, 1]), ((0,), (1,)), batch_size=2)
    (2, 1)
    """
    if batch_size < 1:
        raise SpclError(f"the batch size is {batch_size}; give at least 1")
    return tuple(-(-len(index) // batch_size) for index, _ in split_by_task(labels, label_set))


def _equal_sizes(classes: int, tasks: int) -> list[int]:
    if not 1 <= tasks <= classes:
        raise SpclError(f"cannot split {classes} classes into {tasks} tasks; choose 1 to {classes} tasks")
    return [classes // tasks + (task >= tasks - classes % tasks) for task in range(tasks)]


def _checked_labels(labels: Tensor, classes: int) -> Tensor:
    if labels.dim() != 1 or labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise DataError(f"labels are {labels.dtype} of shape {tuple(labels.shape)}; give one integer per sample")
    labels = labels.detach().to("cpu", torch.int64)
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        found = int(labels.min()) if labels.min() < 0 else int(labels.max())
        raise DataError(f"label {found} belongs to no task; the label set has the classes 0 to {classes - 1}")
    return labels


# -- the stream


@dataclass(frozen=True, eq=False)
class StreamTask:
    """The samples of one source of a stream: a task of its own, or one of several that answer a task.

    Attributes:
        name: Its name.
        x: The inputs: a tensor, or a dict or tuple of tensors with one first dimension.
        y: The targets, of any type and shape; labels of classes are local to the task.
        classes: The number of classes, None for other kinds of targets.
        task: The name of the task that the samples answer; by default the source's own name.
    """

    name: str
    x: Inputs
    y: Tensor
    classes: int | None = None
    task: str | None = None


class ParallelStream:
    """Moments of a labelled data set whose classes are split into tasks, each with its own span of steps (paper §5.1).

    Every sample is seen exactly once in each epoch: the k-th batch of a task holds the samples [k·B, (k+1)·B) of a
    permutation seeded by `(seed, task)`, or `(seed, task, epoch)` after the first epoch. A task of nᵢ samples needs
    ⌈nᵢ/B⌉ steps for each epoch, and a timeline that gives it more or fewer is an error. Steps without any task are
    skipped.

    Iterating continues from the current position, also after `load_state_dict`; `stream[k]` is the k-th moment and can
    be accessed in any order.

    Args:
        x: The samples, on any device and of any dtype; batches are gathered on that device.
        labels: The class of each sample. Labels in moments are local to the task, and on the CPU.
        label_set: The classes of each task.
        timeline: The first and last step of each task.
        batch_size: The number of samples of a task in a step; its last batch may be smaller.
        seed: The same seed gives the same stream.
        names: The names of the sources, by default `task-0`, `task-1`, …
        epochs: How often every task passes over its samples; see `Timeline.stretched`.

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
        *,
        epochs: int = 1,
    ) -> None:
        check_seed(seed)
        if len(x) != len(labels):
            raise DataError(f"{len(x)} samples and {len(labels)} labels; give one label per sample")
        check_timeline(labels, label_set, timeline, batch_size, epochs)
        tasks = [_Samples(x, *split, (seed, i)) for i, split in enumerate(split_by_task(labels, label_set))]
        self._begin(tasks, _checked_names(names, len(label_set)), label_set, timeline, batch_size)

    @classmethod
    def of_tasks(
        cls, tasks: Sequence[StreamTask], timeline: Timeline, batch_size: int, seed: int, *, epochs: int = 1
    ) -> Self:
        """Return a stream of tasks with samples of their own, which may be of different kinds and shapes.

        >>> import torch
        >>> text = StreamTask("text", {"input_ids": torch.zeros(4, 8, dtype=torch.int64)}, torch.arange(4) % 2, 2)
        >>> speed = StreamTask("speed", torch.zeros(6, 3), torch.zeros(6, 1))
        >>> stream = ParallelStream.of_tasks([text, speed], Timeline(((0, 1), (1, 3))), batch_size=2, seed=0)
        >>> [list(moment.batches) for moment in stream], stream.classes
        ([['text'], ['text', 'speed'], ['speed'], ['speed']], {'text': 2})
        >>> people = [StreamTask(name, torch.zeros(2, 3), torch.arange(2), 2, "activity") for name in ("ann", "ben")]
        >>> stream = ParallelStream.of_tasks(people, Timeline(((0, 0), (1, 1))), batch_size=2, seed=0)
        >>> stream.tasks, stream.classes
        ({'ann': 'activity', 'ben': 'activity'}, {'activity': 2})
        """
        check_seed(seed)
        for task in tasks:
            if {len(part) for part in leaves(task.x).values()} != {len(task.y)}:
                counts = ", ".join(str(len(part)) for part in leaves(task.x).values())
                raise DataError(f"task {task.name!r} has {counts} samples and {len(task.y)} targets; give one for each")
        _check_steps([len(task.y) for task in tasks], timeline, batch_size, epochs)
        classes = {task.task or task.name: task.classes or 0 for task in tasks}
        for task in tasks:
            if (task.classes or 0) != classes[task.task or task.name]:
                raise DataError(f"sources of task {task.task!r} have different numbers of classes; give all the same")
        ends = dict(zip(classes, accumulate(classes.values()), strict=True))
        labels = {name: tuple(range(ends[name] - count, ends[name])) for name, count in classes.items()}
        label_set = tuple(labels[task.task or task.name] for task in tasks)
        stream = cls.__new__(cls)
        samples = [_Samples(task.x, None, task.y, (seed, i)) for i, task in enumerate(tasks)]
        names = _checked_names([task.name for task in tasks], len(tasks))
        stream._begin(samples, names, label_set, timeline, batch_size)
        stream.tasks = {task.name: task.task or task.name for task in tasks}
        return stream

    def _begin(
        self,
        tasks: Sequence["_Samples"],
        names: tuple[str, ...],
        label_set: LabelSet,
        timeline: Timeline,
        batch_size: int,
    ) -> None:
        self.names = names
        self.tasks = {name: name for name in names}
        self.label_set = label_set
        self.timeline = timeline
        self.batch_size = batch_size
        self._tasks = tasks
        self._steps = [step for step in range(timeline.steps) if timeline.active(step)]
        self._position = 0
        self._prefetched: tuple[int, Moment] | None = None

    @property
    def classes(self) -> dict[str, int]:
        """Number of classes of each task that has classes."""
        pairs = zip(self.names, self.label_set, strict=True)
        return {self.tasks[name]: len(members) for name, members in pairs if members}

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, position: int) -> Moment:
        step = self._steps[position]
        active, spans = self.timeline.active(step), self.timeline.spans
        return Moment(
            step,
            batches={
                self.names[task]: self._tasks[task].batch(step - spans[task][0], self.batch_size) for task in active
            },
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
        check_content("the stream", state, {"position": int, "moments": int})
        position, moments = state["position"], state["moments"]
        if moments != len(self) or position not in range(moments + 1):
            raise CheckpointError(
                f"the saved position {position} of {moments} moments does not fit this stream of {len(self)} moments; "
                "resume with the data, protocol and batch size of the saved run"
            )
        self._position = position


def check_timeline(labels: Tensor, label_set: LabelSet, timeline: Timeline, batch_size: int, epochs: int = 1) -> None:
    """Raise a `TimelineError` naming the tasks for which the timeline is too long or too short, and by how much.

    >>> import torch
    >>> check_timeline(torch.tensor([0, 0, 0, 1]), ((0,), (1,)), Timeline(((0, 4), (3, 3))), batch_size=2)
    Traceback (most recent call last):
    spcl.errors.TimelineError: the timeline does not fit the data at batch size 2: task 0 has 5 steps and needs 2
    (3 too many); fit the timeline to the data (Timeline.rescaled)
    """
    needed = task_durations(labels, label_set, batch_size)
    if len(needed) == len(timeline.spans) and 0 in needed:
        raise DataError(
            f"task {needed.index(0)} has no sample: its classes {label_set[needed.index(0)]} are not in the data; "
            "remove the task or add samples"
        )
    _check_fit(needed, timeline, batch_size, epochs)


def _check_steps(samples: Sequence[int], timeline: Timeline, batch_size: int, epochs: int) -> None:
    if 0 in samples:
        raise DataError(f"task {samples.index(0)} has no sample; remove the task or add samples")
    if batch_size < 1:
        raise SpclError(f"the batch size is {batch_size}; give at least 1")
    _check_fit([-(-count // batch_size) for count in samples], timeline, batch_size, epochs)


def _check_fit(needed: Sequence[int], timeline: Timeline, batch_size: int, epochs: int) -> None:
    """Raise an error unless the timeline gives every task the steps that it needs in each epoch, times the epochs."""
    if epochs < 1:
        raise SpclError(f"epochs is {epochs}; give at least 1")
    if len(needed) != len(timeline.spans):
        raise DataError(
            f"there are {len(needed)} tasks, but the timeline has {len(timeline.spans)}; give both the same number"
        )
    misfits = [
        f"task {task} has {has} steps and needs {needs} ({abs(has - needs)} too {'many' if has > needs else 'few'})"
        for task, (has, needs) in enumerate(zip(timeline.durations, (epochs * steps for steps in needed), strict=True))
        if has != needs
    ]
    if misfits:
        passes = f" in {epochs} epochs" if epochs > 1 else ""
        raise TimelineError(
            f"the timeline does not fit the data at batch size {batch_size}{passes}: {', '.join(misfits)}; "
            "fit the timeline to the data (Timeline.rescaled)"
        )


class _Samples:
    """The samples of a task, in another order in every epoch.

    Args:
        x: Inputs.
        indices: The indices of the task's samples in x; None for all.
        y: A target for each of the task's samples.
        seed: Of the order.
    """

    def __init__(self, x: Inputs, indices: Tensor | None, y: Tensor, seed: tuple[int, int]) -> None:
        self._x, self._indices, self._y, self._seed = x, indices, y, seed
        self._device = next(iter(leaves(x).values())).device
        self._epoch, (self._order, self._targets) = 0, self._shuffled(0)

    def batch(self, number: int, batch_size: int) -> Batch:
        """Return the batch of this number, counted over all epochs."""
        epoch, number = divmod(number, -(-len(self._y) // batch_size))
        if epoch != self._epoch:
            self._epoch, (self._order, self._targets) = epoch, self._shuffled(epoch)
        batch = slice(number * batch_size, (number + 1) * batch_size)
        order = self._order[batch]
        return map_leaves(lambda part: part.index_select(0, order), self._x), self._targets[batch].clone()

    def _shuffled(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Return the indices into x and the targets in the order of an epoch."""
        seed = (*self._seed, epoch) if epoch else self._seed
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(self._y)))
        indices = order if self._indices is None else self._indices[order]
        return indices.to(self._device), self._y[order]


def _checked_names(names: Sequence[str] | None, tasks: int) -> tuple[str, ...]:
    checked = tuple(f"task-{task}" for task in range(tasks)) if names is None else tuple(names)
    if len(set(checked)) != tasks or len(checked) != tasks:
        raise SpclError(f"the names {checked} are not {tasks} different names; give one per task")
    return checked
