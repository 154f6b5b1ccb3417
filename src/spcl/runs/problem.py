"""The data of a run, laid out in time as its settings say."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from spcl.batches import Inputs, map_leaves
from spcl.data import ImageData, SourceData
from spcl.data.protocol import (
    LABEL_SETS,
    Configuration,
    Protocol,
    draw_protocol,
    draw_timeline,
    fit,
    in_paradigm,
    load_protocol,
)
from spcl.data.splits import hold_out
from spcl.errors import DataError, SpclError
from spcl.methods.base import MEMORY
from spcl.runs.loading import load_benchmark
from spcl.runs.settings import RunSettings
from spcl.runs.tasks import RunTask, check_losses
from spcl.streams import ParallelStream, StreamTask

__all__ = [
    "DATA_SETTINGS",
    "LAYOUT_SETTINGS",
    "Problem",
    "lay_out",
    "load_samples",
    "make_problem",
    "make_protocol",
    "warn_of_few_steps",
]

FEW_STEPS = 5

DATA_SETTINGS = ("benchmark", "data", "data_dir", "validation")
"""The settings that decide what :func:`load_samples` returns."""

LAYOUT_SETTINGS = (
    *("scenario", "protocol", "protocol_seed", "config", "tasks", "batch_size"),
    *("fit", "paradigm", "overlap", "gap", "epochs", "loss"),
)
"""The settings that decide whether :func:`lay_out` accepts these samples."""


@dataclass(frozen=True)
class Problem:
    """The data of a run, laid out in time.

    Attributes:
        data: training and test samples.
        configuration: label set and timeline; of data of several sources, every source is a task, and the classes of
            all sources are numbered through.
        stream: the moments.
        tests: the samples each task is evaluated on, with local labels.
        tasks: what each task predicts.
    """

    data: ImageData | SourceData
    configuration: Configuration
    stream: ParallelStream
    tests: dict[str, tuple[Inputs, Tensor]]
    tasks: dict[str, RunTask]


def make_problem(settings: RunSettings, device: torch.device, data: ImageData | SourceData | None = None) -> Problem:
    """Load the data to the device, or use that given, and lay it out in time; warn if a task has very few steps."""
    problem = lay_out(settings, load_samples(settings, data), device)
    warn_of_few_steps([problem])
    return problem


def load_samples(settings: RunSettings, data: ImageData | SourceData | None = None) -> ImageData | SourceData:
    """Load the data, with a part of the training samples as test samples where ``validation`` is positive.

    Args:
        settings: the settings of a run.
        data: used instead of the data that the settings name, if given.
    """
    if data is None:
        data = load_benchmark(settings.benchmark, settings.data_dir, **settings.data)
    return hold_out(data, settings.validation) if settings.validation else data


def lay_out(settings: RunSettings, data: ImageData | SourceData, device: torch.device) -> Problem:
    """Lay out loaded data in time, on the device."""
    if isinstance(data, SourceData):
        problem = _lay_out_sources(settings, data, device)
        names = [name for source in data.sources if source.classes for name in source.class_names]
    else:
        problem, names = _lay_out_classes(settings, data, device), list(data.class_names)
    check_losses(problem.tasks.values(), names, settings)
    return problem


def _lay_out_classes(settings: RunSettings, data: ImageData, device: torch.device) -> Problem:
    """Lay out data whose classes are split into tasks."""
    configuration = _stretched(settings, _configuration(settings, data))
    stream = ParallelStream(
        data.train_x.to(device),
        data.train_y,
        configuration.label_set,
        configuration.timeline,
        settings.batch_size,
        settings.seed,
        epochs=settings.epochs,
    )
    counts = torch.bincount(data.train_y, minlength=data.classes).tolist()
    tasks = {
        name: RunTask(
            name=name,
            outputs=len(classes),
            class_names=tuple(data.class_names[label] for label in classes),
            class_counts=tuple(counts[label] for label in classes),
        )
        for name, classes in zip(stream.names, configuration.label_set, strict=True)
    }
    return Problem(data, configuration, stream, _test_samples(data, stream, device), tasks)


def warn_of_few_steps(problems: Iterable[Problem]) -> None:
    """Warn once if a task of these problems, which share their data, trains for very few steps."""
    steps, batch_size, name = min(
        (min(problem.configuration.timeline.durations), problem.stream.batch_size, problem.data.name)
        for problem in problems
    )
    if steps < FEW_STEPS:
        warnings.warn(
            f"a task of {name} trains for only {steps} step{'s' if steps > 1 else ''} at batch_size = {batch_size}; "
            "choose a smaller batch_size, more epochs or fewer tasks, or give more samples",
            stacklevel=3,
        )


def make_protocol(settings: RunSettings, data: ImageData | SourceData) -> Protocol:
    """Read the protocol that the settings name, or draw one for the data: timelines, and label sets unless fixed."""
    if isinstance(data, SourceData):
        raise DataError(
            f"{data.name} has no classes to split into tasks: each of its sources is a task; use no protocol"
        )
    if settings.protocol is None:
        return _drawn_protocol(settings, data)
    protocol = load_protocol(Path(settings.protocol).expanduser())
    if protocol.classes != data.classes:
        raise DataError(
            f"the protocol {settings.protocol} has {protocol.classes} classes, but {data.name} has {data.classes}; "
            f"choose the protocol of this benchmark"
        )
    return protocol


def _drawn_protocol(settings: RunSettings, data: ImageData) -> Protocol:
    """Draw timelines, and label sets where the benchmark has none of its own for so many tasks."""
    label_set = LABEL_SETS.get(settings.benchmark, ())
    return draw_protocol(
        data.classes,
        settings.tasks,
        data.train_y,
        settings.batch_size,
        settings.protocol_seed,
        overlap=settings.overlap,
        gap=settings.gap,
        benchmark=data.name,
        label_set=label_set if len(label_set) == settings.tasks else None,
    )


def _configuration(settings: RunSettings, data: ImageData) -> Configuration:
    configuration = make_protocol(settings, data).configuration(settings.config)
    if settings.fit:
        configuration = fit(configuration, data.train_y, settings.batch_size)
    return in_paradigm(configuration, settings.paradigm)


def _stretched(settings: RunSettings, configuration: Configuration) -> Configuration:
    return replace(configuration, timeline=configuration.timeline.stretched(settings.epochs))


def _lay_out_sources(settings: RunSettings, data: SourceData, device: torch.device) -> Problem:
    """Lay out data whose sources are the tasks."""
    _check_sources(settings, data)
    durations = [-(-len(source.train_y) // settings.batch_size) for source in data.sources]
    timeline = draw_timeline(
        durations, settings.config, settings.protocol_seed, overlap=settings.overlap, gap=settings.gap
    )
    tasks = [
        StreamTask(source.name, _on(device, source.train_x), source.train_y, source.classes) for source in data.sources
    ]
    drawn = in_paradigm(Configuration((), timeline, settings.config), settings.paradigm)
    timeline = _stretched(settings, drawn).timeline
    stream = ParallelStream.of_tasks(tasks, timeline, settings.batch_size, settings.seed, epochs=settings.epochs)
    return Problem(
        data,
        Configuration(stream.label_set, timeline, settings.config),
        stream,
        {source.name: (_on(device, source.test_x), source.test_y) for source in data.sources},
        {
            source.name: RunTask(
                name=source.name,
                kind=source.kind,
                outputs=source.outputs,
                class_names=source.class_names,
                class_counts=source.class_counts,
            )
            for source in data.sources
        },
    )


def _check_sources(settings: RunSettings, data: SourceData) -> None:
    """Refuse settings that do not fit data whose sources are the tasks."""
    if settings.protocol is not None:
        raise DataError(
            f"each source of {data.name} is a task, so that the protocol {settings.protocol} does not apply; "
            f"leave it out, and the timeline is drawn by protocol_seed"
        )
    if settings.tasks != len(data.sources):
        raise DataError(
            f"{data.name} has {len(data.sources)} sources, each of them a task, but tasks = {settings.tasks}; "
            f"leave tasks out"
        )
    for source in data.sources:
        if source.name in ("", MEMORY):
            raise DataError(f"{data.name} has a source named {source.name!r}; give it another name")
        if settings.scenario == "class" and source.kind != "classification":
            raise SpclError(
                f"source {source.name!r} of {data.name} is a {source.kind}, which has no place among the classes of a "
                f"class-incremental run; choose scenario = task"
            )
        if source.kind == "regression" and bool((source.test_y == source.test_y[0]).all()):
            raise DataError(
                f"source {source.name!r} of {data.name}: all test targets are equal, which leaves R² undefined; give "
                f"test samples with different targets"
            )


def _on(device: torch.device, x: Inputs) -> Inputs:
    return map_leaves(lambda part: part.to(device), x)


def _test_samples(data: ImageData, stream: ParallelStream, device: torch.device) -> dict[str, tuple[Inputs, Tensor]]:
    tests: dict[str, tuple[Inputs, Tensor]] = {}
    for name, classes in zip(stream.names, stream.label_set, strict=True):
        local = torch.full((data.classes,), -1)
        local[list(classes)] = torch.arange(len(classes))
        labels = local[data.test_y]
        members = labels >= 0
        if not members.any():
            raise DataError(f"{name}: its classes {list(classes)} have no test sample, so it cannot be evaluated")
        tests[name] = (data.test_x[members].to(device), labels[members])
    return tests
