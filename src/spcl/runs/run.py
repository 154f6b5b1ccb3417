"""One run, from its settings to ``result.json``."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from spcl.data import ImageData, SourceData
from spcl.distributed import World
from spcl.errors import OutOfMemoryError, is_out_of_memory
from spcl.files import write_json
from spcl.plugins import load_plugins
from spcl.runs.folder import RunFolder, UnfinishedRunError
from spcl.runs.identity import BOOKKEEPING, decisive_settings, flat_settings
from spcl.runs.loading import check_data
from spcl.runs.result import RunResult
from spcl.runs.settings import RunSettings
from spcl.runs.training import TrainingRun
from spcl.runs.view import SilentView, View
from spcl.trackers import TRACKERS, Tracker

__all__ = ["execute"]


def execute(
    settings: RunSettings,
    out: str | Path,
    *,
    resume: bool = False,
    view: View | None = None,
    trackers: Sequence[Tracker] = (),
    data: ImageData | SourceData | None = None,
    distributed: World | None = None,
) -> RunResult:
    """Train and evaluate as the settings say, write everything to the folder ``out`` and return the result.

    The run can be interrupted after every step and resumed exactly. A complete run is not repeated.

    ``data`` from Python replaces that which the settings name; they are then those of ``resolve_settings(…,
    data=data)``, and the same data is needed to resume.

    With ``distributed``, the ranks of ``spcl.distributed.join_world()``, all of them make this call with the same
    settings and data, share the work of every step, and return the result; the first one writes. Where the settings
    leave CPU threads open, every rank has one.

    Raises:
        UnfinishedRunError: if the folder holds an unfinished run and ``resume`` is false.
        FolderError: if the folder holds a run with other settings, or an unfinished one of other data.
        InterruptedRunError: if SIGINT or SIGTERM stopped the run after it was saved.
    """
    load_plugins(settings.plugins)
    check_data(settings, data)
    if distributed is not None:
        settings = settings.model_copy(update={"threads": settings.threads or 1})
        distributed.check_same("settings", _common_settings(settings))
    with ExitStack() as opened, _memory_errors():
        prepare = partial(_prepare, settings, folder := RunFolder(Path(out)), resume, opened)
        result = prepare() if distributed is None else distributed.from_first(prepare)
        if result is not None:
            return result
        if distributed is not None and not distributed.is_first:
            return TrainingRun(settings, folder, SilentView(), [], data, distributed).complete()
        trackers = [*trackers, *_make_trackers(settings, folder.path)]
        return TrainingRun(settings, folder, view or SilentView(), trackers, data, distributed).complete()


def _common_settings(settings: RunSettings) -> dict[str, Any]:
    """Return what must be the same on all ranks: all settings, but files by name alone, since machines may differ."""
    content = settings.model_dump(mode="json")
    return decisive_settings(content) | {name: content[name] for name in BOOKKEEPING - {"data_dir"}}


def _prepare(settings: RunSettings, folder: RunFolder, resume: bool, opened: ExitStack) -> RunResult | None:
    """Lock the folder; return the result of a complete run, or record the settings of a new one."""
    opened.enter_context(folder.locked())
    result, begun = folder.read_result(), folder.has_checkpoint()
    if begun and result is None and not resume:
        raise UnfinishedRunError(f"{folder.path} holds an unfinished run; resume it, or choose another folder")
    if begun or result is not None:
        folder.check_settings(settings)
    if result is None and not (begun and folder.settings.exists()):
        write_json(folder.settings, settings.model_dump(mode="json"))
    return result


def _make_trackers(settings: RunSettings, out: Path) -> list[Tracker]:
    options = flat_settings(settings.model_dump(mode="json"))
    return [TRACKERS.make(tracker, out, options) for tracker in settings.trackers]


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
