"""The PS-* protocols: label sets and timelines, from files or drawn by a seed."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from spcl._util.files import user_errors, write_text
from spcl._util.registry import Registry
from spcl.errors import DataError, SpclError
from spcl.streams import LabelSet, Timeline, check_label_set, check_timeline, draw_label_set, task_durations

DRAWN_CONFIGURATIONS = 9
"""The number of configurations of a drawn protocol: three label sets with three timelines each."""

LABEL_SETS: Mapping[str, LabelSet] = {"toy-cifar10": (tuple(range(5)), tuple(range(5, 10)))}
"""The label sets of benchmarks that have a single one, by which the authors' code splits their classes."""

Paradigm = Literal["parallel", "joint", "serial"]
"""When tasks train: by the protocol's timeline (PCL), all from the start (MTL), or one after another (SCL)."""


@dataclass(frozen=True)
class Configuration:
    """One label set and one timeline of a protocol, and their index in it."""

    label_set: LabelSet
    timeline: Timeline
    index: int


@dataclass(frozen=True)
class Protocol:
    """The configurations of a benchmark: label sets, each with the same number of timelines.

    >>> import torch
    >>> protocol = draw_protocol(4, 2, torch.arange(4).repeat(10), batch_size=5, seed=0)
    >>> len(protocol), protocol.configuration(4).label_set == protocol.label_sets[1]
    (9, True)
    """

    benchmark: str
    batch_size: int
    classes: int
    label_sets: tuple[LabelSet, ...]
    timelines: tuple[tuple[Timeline, ...], ...]

    def __post_init__(self) -> None:
        if len(self.timelines) != len(self.label_sets) or len({len(row) for row in self.timelines}) != 1:
            counts = [len(row) for row in self.timelines]
            raise DataError(
                f"{len(self.label_sets)} label sets with {counts} timelines; give each the same number of them"
            )
        for number, (label_set, timelines) in enumerate(zip(self.label_sets, self.timelines, strict=True)):
            try:
                check_label_set(label_set, self.classes)
            except SpclError as error:
                raise DataError(f"label set {number}: {error}") from error
            for position, timeline in enumerate(timelines):
                if len(timeline.spans) != len(label_set):
                    raise DataError(
                        f"label set {number} has {len(label_set)} tasks, its timeline {position} has "
                        f"{len(timeline.spans)}; give each task its first and last step"
                    )

    def __len__(self) -> int:
        return len(self.label_sets) * len(self.timelines[0])

    def configuration(self, index: int) -> Configuration:
        """Return configuration `index`; with three timelines per label set, the index is 3 × label set + timeline."""
        check_configuration(index, len(self))
        label_set, timeline = divmod(index, len(self.timelines[0]))
        return Configuration(self.label_sets[label_set], self.timelines[label_set][timeline], index)

    def save(self, path: str | Path) -> None:
        """Write the protocol as JSON in the format of `load_protocol`."""
        head = json.dumps({"benchmark": self.benchmark, "batch_size": self.batch_size, "classes": self.classes})
        entries = [
            json.dumps({"label_set": label_set, "timelines": [timeline.spans for timeline in timelines]})
            for label_set, timelines in zip(self.label_sets, self.timelines, strict=True)
        ]
        path = Path(path)
        with user_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, f'{head[:-1]}, "label_sets": [\n' + ",\n".join(entries) + "\n]}\n")


def check_configuration(index: int, configurations: int) -> None:
    """Raise an error if a protocol with this number of configurations has none with this index."""
    if not 0 <= index < configurations:
        raise SpclError(f"there is no configuration {index}; the protocol has 0 to {configurations - 1}")


def load_protocol(path: str | Path) -> Protocol:
    """Read a protocol file; raise a `DataError` that names the file and the invalid entry.

    The format is JSON: `benchmark`, `batch_size`, `classes`, and `label_sets`, a list of `label_set` (the classes of
    each task) and its `timelines` (the first and last step of each task, inclusive).

    >>> load_protocol("absent.json")
    Traceback (most recent call last):
    spcl.errors.DataError: cannot read the protocol absent.json: No such file or directory
    """
    try:
        content = _File.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise DataError(f"cannot read the protocol {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        entry = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(f"the protocol {path} is not valid at {entry}: {first['msg']}") from error
    try:
        timelines = tuple(_timelines(number, entry) for number, entry in enumerate(content.label_sets))
        label_sets = tuple(entry.label_set for entry in content.label_sets)
        return Protocol(content.benchmark, content.batch_size, content.classes, label_sets, timelines)
    except SpclError as error:
        raise DataError(f"the protocol {path} is not valid: {error}") from error


PROTOCOL_FORMATS: Registry[Callable[[str | Path, str, int], Protocol]] = Registry("protocol format", Protocol)
"""Readers of published protocols: functions of a file's path and of what it may not name, benchmark and batch size."""


def convert_protocol(path: str | Path, benchmark: str, batch_size: int, form: str = "paper") -> Protocol:
    """Read a protocol in a published format; ``paper`` is the YAML of the paper's authors.

    >>> convert_protocol("absent.yml", "ps-emnist", 128)
    Traceback (most recent call last):
    spcl.errors.DataError: cannot read the protocol absent.yml: No such file or directory
    """
    return PROTOCOL_FORMATS[form](path, benchmark, batch_size)


def draw_protocol(
    classes: int,
    tasks: int | Sequence[int],
    labels: Tensor,
    batch_size: int,
    seed: int,
    *,
    overlap: float = 1.0,
    gap: int = 0,
    benchmark: str = "custom",
    label_set: LabelSet | None = None,
) -> Protocol:
    """Draw three label sets and, for each, three timelines that fit the data, by the rules of the PS-* protocols.

    Timeline k of every label set is drawn from the same seed, as in the published protocols: it is the same for all
    label sets whose tasks have equal lengths. For a given label set nine timelines are drawn.

    Args:
        classes: The number of classes.
        tasks: The number of tasks, or the number of classes of each.
        labels: The training labels, which determine the length of each task.
        batch_size: The number of samples of a task in a step.
        seed: The same seed gives the same protocol.
        overlap, gap: See `Timeline.parallel`.
        benchmark: The name of the benchmark.
        label_set: The classes of each task, where they are not drawn.

    >>> import torch
    >>> protocol = draw_protocol(6, 2, torch.arange(6).repeat(100), batch_size=10, seed=0)
    >>> [configuration.timeline.spans for configuration in map(protocol.configuration, range(3))]
    [((0, 29), (12, 41)), ((0, 29), (6, 35)), ((0, 29), (22, 51))]
    """
    if label_set is None:
        label_sets, seeds = _draw_label_sets(classes, tasks, seed)
    else:
        label_sets, seeds = (label_set,), _seeds(seed, DRAWN_CONFIGURATIONS)
    draw = partial(Timeline.parallel, overlap=overlap, gap=gap)
    lengths = [task_durations(labels, each, batch_size) for each in label_sets]
    timelines = tuple(tuple(draw(durations, each) for each in seeds) for durations in lengths)
    return Protocol(benchmark, batch_size, classes, label_sets, timelines)


def draw_timeline(durations: Sequence[int], index: int, seed: int, *, overlap: float = 1.0, gap: int = 0) -> Timeline:
    """Return timeline `index` of nine that are drawn for tasks of given lengths, where there is no label set to draw.

    >>> [draw_timeline((30, 30), index, seed=0).spans for index in (0, 8)]
    [((0, 29), (8, 37)), ((0, 29), (28, 57))]
    """
    check_configuration(index, DRAWN_CONFIGURATIONS)
    return Timeline.parallel(durations, _seeds(seed, DRAWN_CONFIGURATIONS)[index], overlap=overlap, gap=gap)


def _draw_label_sets(classes: int, tasks: int | Sequence[int], seed: int) -> tuple[tuple[LabelSet, ...], list[int]]:
    """Return three label sets, and the seeds of their timelines."""
    seeds = _seeds(seed, 6)
    return tuple(draw_label_set(classes, tasks, each) for each in seeds[:3]), seeds[3:]


def _seeds(seed: int, count: int) -> list[int]:
    seeds: list[int] = np.random.SeedSequence(seed).generate_state(count).tolist()
    return seeds


def in_paradigm(configuration: Configuration, paradigm: Paradigm) -> Configuration:
    """Return the configuration with the timeline of another paradigm; "parallel" keeps the timeline.

    >>> configuration = Configuration(((0,), (1,)), Timeline(((0, 4), (3, 5))), index=0)
    >>> in_paradigm(configuration, "serial").timeline.spans
    ((0, 4), (5, 7))
    >>> in_paradigm(configuration, "joint").timeline.spans
    ((0, 4), (0, 2))
    """
    durations = configuration.timeline.durations
    match paradigm:
        case "parallel":
            return configuration
        case "joint":
            return replace(configuration, timeline=Timeline.joint(durations))
        case "serial":
            return replace(configuration, timeline=Timeline.serial(durations))
        case _:
            raise SpclError(f"there is no paradigm {paradigm!r}; choose one of {', '.join(get_args(Paradigm))}")


def check_fit(configuration: Configuration, labels: Tensor, batch_size: int) -> None:
    """Raise a `TimelineError` with the differences if the timeline does not fit the data; see `fit`.

    >>> import torch
    >>> check_fit(Configuration(((0,), (1,)), Timeline(((0, 4), (3, 5))), 0), torch.tensor([0, 0, 1]), batch_size=1)
    Traceback (most recent call last):
    spcl.errors.TimelineError: the timeline does not fit the data at batch size 1: task 0 has 5 steps and needs 2 ...
    """
    check_timeline(labels, configuration.label_set, configuration.timeline, batch_size)


def fit(configuration: Configuration, labels: Tensor, batch_size: int) -> Configuration:
    """Return the configuration with its timeline rescaled to the data; one that fits is unchanged.

    >>> import torch
    >>> configuration = Configuration(((0,), (1,)), Timeline(((0, 39), (20, 59))), index=0)
    >>> fit(configuration, torch.tensor([0] * 40 + [1] * 20), batch_size=10).timeline.spans
    ((0, 3), (2, 3))
    """
    durations = task_durations(labels, configuration.label_set, batch_size)
    return replace(configuration, timeline=configuration.timeline.rescaled(durations))


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Entry(_Strict):
    label_set: tuple[tuple[int, ...], ...] = Field(min_length=1)
    timelines: tuple[tuple[tuple[int, int], ...], ...] = Field(min_length=1)


class _File(_Strict):
    benchmark: str
    batch_size: int = Field(ge=1)
    classes: int = Field(ge=1)
    label_sets: tuple[_Entry, ...] = Field(min_length=1)


def _timelines(number: int, entry: _Entry) -> tuple[Timeline, ...]:
    timelines = []
    for position, spans in enumerate(entry.timelines):
        try:
            timelines.append(Timeline(spans))
        except SpclError as error:
            raise DataError(f"label set {number}, timeline {position}: {error}") from error
    return tuple(timelines)
