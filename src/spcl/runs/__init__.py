"""One run: its settings, its data laid out in time, training, evaluation and the files of its folder."""

from spcl.runs.build import DeviceError, Problem, load_benchmark, make_learner, make_problem
from spcl.runs.bundle import bundle_run, unpack_bundle
from spcl.runs.presets import resolve_settings, resume_settings
from spcl.runs.records import (
    DataSummary,
    Environment,
    FolderError,
    FolderInUseError,
    RunFolder,
    RunResult,
    TaskResult,
    UnfinishedRunError,
)
from spcl.runs.run import InterruptedRunError, evaluate_run, execute
from spcl.runs.settings import RunSettings, load_settings_file, parse_assignments
from spcl.runs.trained import TrainedRun, load_run, read_run
from spcl.runs.view import LiveView, PlainView, SilentView, View

__all__ = [
    "DataSummary",
    "DeviceError",
    "Environment",
    "FolderError",
    "FolderInUseError",
    "InterruptedRunError",
    "LiveView",
    "PlainView",
    "Problem",
    "RunFolder",
    "RunResult",
    "RunSettings",
    "SilentView",
    "TaskResult",
    "TrainedRun",
    "UnfinishedRunError",
    "View",
    "bundle_run",
    "evaluate_run",
    "execute",
    "load_benchmark",
    "load_run",
    "load_settings_file",
    "make_learner",
    "make_problem",
    "parse_assignments",
    "read_run",
    "resolve_settings",
    "resume_settings",
    "unpack_bundle",
]
