"""The data of a run, laid out in time as its settings say."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spcl.data import PRESETS, ImageData, from_folder, from_npz, load_data
from spcl.data.protocol import Configuration, Protocol, draw_protocol, fit, in_paradigm, load_protocol
from spcl.data.splits import hold_out
from spcl.errors import DataError
from spcl.runs.settings import RunSettings
from spcl.streams import ParallelStream

__all__ = [
    "DATA_SETTINGS",
    "LAYOUT_SETTINGS",
    "Problem",
    "lay_out",
    "load_benchmark",
    "load_samples",
    "make_problem",
    "make_protocol",
    "warn_of_few_steps",
]

FEW_STEPS = 5

DATA_SETTINGS = ("benchmark", "data_dir", "validation")
"""The settings that decide what :func:`load_samples` returns."""

LAYOUT_SETTINGS = (
    *("protocol", "protocol_seed", "config", "tasks", "batch_size"),
    *("fit", "paradigm", "overlap", "gap"),
)
"""The settings that decide whether :func:`lay_out` accepts these samples."""


@dataclass(frozen=True)
class Problem:
    """The data of a run, laid out in time.

    Attributes:
        data: training and test samples.
        configuration: label set and timeline.
        stream: the moments.
        tests: the samples each task is evaluated on, with local labels.
    """

    data: ImageData
    configuration: Configuration
    stream: ParallelStream
    tests: dict[str, tuple[Tensor, Tensor]]


def make_problem(settings: RunSettings, device: torch.device) -> Problem:
    """Load the data to the device and lay it out in time; warn if a task has very few steps."""
    problem = lay_out(settings, load_samples(settings), device)
    warn_of_few_steps([problem])
    return problem


def load_samples(settings: RunSettings) -> ImageData:
    """Load the data, with a part of the training samples as test samples where ``validation`` is positive."""
    data = load_benchmark(settings.benchmark, settings.data_dir)
    return hold_out(data, settings.validation) if settings.validation else data


def load_benchmark(benchmark: str, data_dir: str | None) -> ImageData:
    """Load a known benchmark by name, or custom data by path: a folder of pictures, or an .npz file with x and y."""
    path = Path(benchmark).expanduser()
    is_path = "/" in benchmark or len(path.parts) > 1 or path.suffix == ".npz"
    if benchmark in PRESETS or not (is_path or path.exists()):
        return load_data(benchmark, data_dir)
    if path.is_dir():
        return from_folder(path)
    if path.suffix == ".npz" and path.exists():
        return from_npz(path)
    fault = "is neither a folder nor an .npz file" if path.exists() else "does not exist"
    raise DataError(
        f"the data {benchmark} {fault}; give a folder of pictures, an .npz file or one of {', '.join(PRESETS)}"
    )


def lay_out(settings: RunSettings, data: ImageData, device: torch.device) -> Problem:
    """Lay out loaded data in time, on the device."""
    configuration = _configuration(settings, data)
    stream = ParallelStream(
        data.train_x.to(device),
        data.train_y,
        configuration.label_set,
        configuration.timeline,
        settings.batch_size,
        settings.seed,
    )
    return Problem(data, configuration, stream, _test_samples(data, stream, device))


def warn_of_few_steps(problems: Iterable[Problem]) -> None:
    """Warn once if a task of these problems, which share their data, trains for very few steps."""
    steps, batch_size, name = min(
        (min(problem.configuration.timeline.durations), problem.stream.batch_size, problem.data.name)
        for problem in problems
    )
    if steps < FEW_STEPS:
        warnings.warn(
            f"a task of {name} trains for only {steps} step{'s' if steps > 1 else ''} at batch_size = {batch_size}; "
            "choose a smaller batch_size or fewer tasks, or give more samples",
            stacklevel=3,
        )


def make_protocol(settings: RunSettings, data: ImageData) -> Protocol:
    """Read the protocol that the settings name, or draw one for the data."""
    if settings.protocol is None:
        return draw_protocol(
            data.classes,
            settings.tasks,
            data.train_y,
            settings.batch_size,
            settings.protocol_seed,
            overlap=settings.overlap,
            gap=settings.gap,
            benchmark=data.name,
        )
    protocol = load_protocol(Path(settings.protocol).expanduser())
    if protocol.classes != data.classes:
        raise DataError(
            f"the protocol {settings.protocol} has {protocol.classes} classes, but {data.name} has {data.classes}; "
            f"choose the protocol of this benchmark"
        )
    return protocol


def _configuration(settings: RunSettings, data: ImageData) -> Configuration:
    configuration = make_protocol(settings, data).configuration(settings.config)
    if settings.fit:
        configuration = fit(configuration, data.train_y, settings.batch_size)
    return in_paradigm(configuration, settings.paradigm)


def _test_samples(data: ImageData, stream: ParallelStream, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    tests = {}
    for name, classes in zip(stream.names, stream.label_set, strict=True):
        local = torch.full((data.classes,), -1)
        local[list(classes)] = torch.arange(len(classes))
        labels = local[data.test_y]
        members = labels >= 0
        if not members.any():
            raise DataError(f"{name}: its classes {list(classes)} have no test sample, so it cannot be evaluated")
        tests[name] = (data.test_x[members].to(device), labels[members])
    return tests
