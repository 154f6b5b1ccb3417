"""Checks of planned jobs before anything runs."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from spcl.grids.plan import Job
from spcl.runs import RunFolder, RunSettings
from spcl.runs.problem import DATA_SETTINGS, LAYOUT_SETTINGS, lay_out, load_samples

__all__ = ["check_data", "check_folders"]


def check_folders(jobs: Iterable[Job]) -> None:
    """Raise an error if a folder holds another run than the one planned there."""
    for job in jobs:
        RunFolder(job.out).check_settings(job.settings)


def check_data(jobs: Iterable[Job]) -> None:
    """Raise an error if data is missing or does not fit the label sets and timelines; all data is loaded once."""
    by_data: dict[tuple[Any, ...], dict[tuple[Any, ...], RunSettings]] = defaultdict(dict)
    for job in jobs:
        by_data[_values(job.settings, DATA_SETTINGS)][_values(job.settings, LAYOUT_SETTINGS)] = job.settings
    for layouts in by_data.values():
        data = load_samples(next(iter(layouts.values())))
        for settings in layouts.values():
            lay_out(settings, data, torch.device("cpu"))


def _values(settings: RunSettings, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(getattr(settings, name) for name in names)
