"""One run: its settings, its data laid out in time, training, evaluation and the files that it leaves."""

from spcl.runs.run import InterruptedRunError, execute, resume_settings
from spcl.runs.settings import RunSettings, load_settings_file, parse_assignments, resolve_settings

__all__ = [
    "InterruptedRunError",
    "RunSettings",
    "execute",
    "load_settings_file",
    "parse_assignments",
    "resolve_settings",
    "resume_settings",
]
