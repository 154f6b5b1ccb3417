"""Checks of planned jobs before anything runs."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from spcl.data.protocol import DRAWN_CONFIGURATIONS, check_configuration, load_protocol
from spcl.grids.plan import Job
from spcl.runs import RunFolder, RunSettings
from spcl.runs.problem import DATA_SETTINGS, LAYOUT_SETTINGS, lay_out, load_samples, warn_of_few_steps

__all__ = ["check_configurations", "check_data", "check_folders", "check_jobs"]


def check_jobs(jobs: Sequence[Job]) -> None:
    """Raise an error if a job cannot run; what needs no data is checked first.

    Raises:
        MissingDataError: if all else is well, but the files of a published data set are not here.
        SpclError: if a folder holds another run, or configurations or data do not fit the protocol.
    """
    check_folders(jobs)
    missing = [job for job in jobs if not job.is_done()]
    check_configurations(missing)
    check_data(missing)


def check_folders(jobs: Iterable[Job]) -> None:
    """Raise an error if a folder holds another run than the one planned there."""
    for job in jobs:
        RunFolder(job.out).check_settings(job.settings)


def check_configurations(jobs: Iterable[Job]) -> None:
    """Raise an error if the protocol of a job lacks its configuration."""
    by_protocol: dict[str | None, set[int]] = defaultdict(set)
    for job in jobs:
        by_protocol[job.settings.protocol].add(job.settings.config)
    for path, configs in by_protocol.items():
        configurations = DRAWN_CONFIGURATIONS if path is None else len(load_protocol(Path(path)))
        for config in sorted(configs):
            check_configuration(config, configurations)


def check_data(jobs: Iterable[Job]) -> None:
    """Raise an error if data is missing or does not fit the label sets and timelines; all data is loaded once.

    Warn if a task has very few steps.
    """
    by_data: dict[tuple[Any, ...], dict[tuple[Any, ...], RunSettings]] = defaultdict(dict)
    for job in jobs:
        by_data[_values(job.settings, DATA_SETTINGS)][_values(job.settings, LAYOUT_SETTINGS)] = job.settings
    for layouts in by_data.values():
        data = load_samples(next(iter(layouts.values())))
        warn_of_few_steps(lay_out(settings, data, torch.device("cpu")) for settings in layouts.values())


def _values(settings: RunSettings, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(repr(getattr(settings, name)) for name in names)  # options are dicts, which have no hash
