"""One run, from its settings to ``result.json``."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from spcl.data import ImageData, SourceData
from spcl.errors import OutOfMemoryError, is_out_of_memory
from spcl.files import write_json
from spcl.plugins import load_plugins
from spcl.runs.folder import RunFolder, UnfinishedRunError
from spcl.runs.identity import flat_settings
from spcl.runs.loading import check_data
from spcl.runs.result import RunResult
from spcl.runs.settings import RunSettings
from spcl.runs.training import TrainingRun
from spcl.runs.view import SilentView, View
from spcl.trackers import TRACKERS, Tracker

__all__ = ["execute"]


def execute(
    settings: RunSettings,
    out: Path,
    *,
    resume: bool = False,
    view: View | None = None,
    trackers: Sequence[Tracker] = (),
    data: ImageData | SourceData | None = None,
) -> RunResult:
    """Train and evaluate as the settings say, write everything to the folder ``out`` and return the result.

    The run can be interrupted after every step and resumed exactly. A complete run is not repeated: its result is
    returned.

    ``data`` from Python replaces that which the settings name; they are then those of ``resolve_settings(…,
    data=data)``, and the same data is needed to resume.

    Raises:
        UnfinishedRunError: if the folder holds an unfinished run and ``resume`` is false.
        FolderError: if the folder holds a run with other settings, or an unfinished one of other data.
        InterruptedRunError: if SIGINT or SIGTERM stopped the run after it was saved.
    """
    load_plugins(settings.plugins)
    check_data(settings, data)
    folder, recorded = RunFolder(out), settings.model_dump(mode="json")
    with folder.locked():
        result, begun = folder.read_result(), folder.has_checkpoint()
        if begun and result is None and not resume:
            raise UnfinishedRunError(f"{out} holds an unfinished run; resume it, or choose another folder")
        if begun or result is not None:
            folder.check_settings(settings)
        if result is not None:
            return result
        if not (begun and folder.settings.exists()):
            write_json(folder.settings, recorded)
        with _memory_errors():
            made = [TRACKERS.make(tracker, out, flat_settings(recorded)) for tracker in settings.trackers]
            return TrainingRun(settings, folder, view or SilentView(), [*trackers, *made], data).complete()


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Raise any library's out-of-memory error as a one-line :class:`OutOfMemoryError`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason, _, _ = str(error).partition(". GPU")  # PyTorch appends the memory of every process
        raise OutOfMemoryError(f"{reason}; choose a smaller batch_size, or make fewer runs at once") from error
