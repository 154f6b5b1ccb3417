"""One run: its settings, its data laid out in time, training, evaluation and the files of its folder."""

from spcl.runs.build import make_learner
from spcl.runs.devices import DeviceError
from spcl.runs.folder import FolderError, FolderInUseError, RunFolder, UnfinishedRunError
from spcl.runs.loading import load_benchmark
from spcl.runs.model import TrainedRun, load_run, read_run
from spcl.runs.problem import Problem, make_problem
from spcl.runs.resolve import resolve_settings, resume_settings
from spcl.runs.result import DataSummary, Environment, RunResult, TaskResult
from spcl.runs.run import execute
from spcl.runs.settings import RunSettings, load_settings_file, parse_assignments
from spcl.runs.training import InterruptedRunError
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
]
