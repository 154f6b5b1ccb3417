"""Experiments: one run and its record."""

from spcl.experiments.run import InterruptedRunError, execute, resume_settings
from spcl.experiments.settings import RunSettings, load_settings_file, parse_assignments, resolve_settings

__all__ = [
    "InterruptedRunError",
    "RunSettings",
    "execute",
    "load_settings_file",
    "parse_assignments",
    "resolve_settings",
    "resume_settings",
]
