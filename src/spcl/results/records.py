"""Finding runs again: every run under a folder as a record, quickly even for thousands of them."""

import json
import os
import shlex
import tarfile
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spcl.errors import SpclError
from spcl.files import read_json, write_text
from spcl.runs import RunFolder, RunResult
from spcl.runs.identity import decisive_settings, flat_settings

__all__ = ["RunRecord", "read_runs"]

INDEX = "index.json"
ARCHIVE = "records.tar.gz"
VERSION = 1

TELLING = {"paradigm": "parallel", "validation": 0.0}  # what is said of a run unless it has this value

IDENTITY = frozenset({"benchmark", "scenario", "method.name", "config", "seed"})


@dataclass(frozen=True)
class RunRecord:
    """One run as it lies on the disk.

    Attributes:
        path: its folder.
        settings: the content of ``settings.json``.
        result: the content of ``result.json`` but for the confusion tables; None while the run is not complete.
        variant: the settings, by dotted name, that tell it from other runs on this benchmark: those of its method
            that vary, and all others that do; also a paradigm other than ``parallel``, and an evaluation on held-out
            training data.
    """

    path: Path
    settings: Mapping[str, Any]
    result: Mapping[str, Any] | None
    variant: Mapping[str, Any] = field(default_factory=dict)

    @property
    def benchmark(self) -> str:
        """The benchmark's name; for your own data, that of its file or folder."""
        return Path(self.settings["benchmark"]).name.removesuffix(".npz")

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.settings["method"]["name"])

    @property
    def scenario(self) -> str:
        """``task`` or ``class`` (incremental)."""
        return str(self.settings["scenario"])

    @property
    def config(self) -> int:
        """The number of the label set and timeline."""
        return int(self.settings["config"])

    @property
    def seed(self) -> int:
        """Of weights, data order and memory."""
        return int(self.settings["seed"])

    @property
    def timeline(self) -> tuple[tuple[int, int], ...]:
        """The first and last step of every task; empty while the run is not complete, or where that was left out."""
        return tuple((first, last) for first, last in (self.result or {}).get("timeline", ()))

    @property
    def not_finite(self) -> bool:
        """Whether a task was left out of a step, because its loss or gradient was not finite."""
        return bool((self.result or {}).get("left_out"))

    @property
    def paradigm(self) -> str:
        """``parallel``, ``joint`` or ``serial``."""
        return str(self.settings["paradigm"])

    @property
    def preset(self) -> str:
        """``default`` or ``paper``."""
        return str(self.settings["preset"])

    @property
    def label(self) -> str:
        """The method, with the settings that tell it from its variants.

        >>> settings = {"method": {"name": "soro"}}
        >>> RunRecord(Path("x"), settings, None).label
        'soro'
        >>> RunRecord(Path("x"), settings, None, {"method.sigma": 10.0, "overlap": 0.5}).label
        'soro (sigma=10, overlap=0.5)'
        """
        if not self.variant:
            return self.method
        differences = (f"{name.removeprefix('method.')}={_short(value)}" for name, value in self.variant.items())
        return f"{self.method} ({', '.join(differences)})"

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``, read now; a last line that is only half written is left out."""
        try:
            text = RunFolder(self.path).metrics.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        complete_lines, _, _ = text.rpartition("\n")
        try:
            return [json.loads(line) for line in complete_lines.split("\n") if line]
        except ValueError as error:
            raise SpclError(
                f"{RunFolder(self.path).metrics} is damaged: {error}; remove the run and make it again"
            ) from error

    def confusion(self) -> dict[str, list[list[int]]]:
        """For every task how often each of its classes (rows) was taken for each class (columns), read now."""
        result = RunFolder(self.path).read_result()
        return {} if result is None else result.confusion


def read_runs(*folders: Path) -> list[RunRecord]:
    """Every run in these folders and the folders below, in the order of benchmark, scenario, method, config and seed.

    A run whose ``result.json`` is damaged counts as not complete.

    What was read is kept in each folder's ``index.json``; an entry of it is used only while the run's own files are
    the ones it was made from, so the index may be deleted, damaged or out of date.
    """
    found: dict[Path, tuple[Path, _Entry]] = {}
    for folder in folders:
        if not folder.is_dir():
            raise SpclError(f"there is no folder {folder}; 'spcl grid' and 'spcl run' make one with --out")
        runs = _read_folder(folder)
        if not runs:
            _check_unpacked(folder)
        for path, entry in runs.items():
            found.setdefault(path.resolve(), (path, entry))
    variants = _variants([entry.settings for _, entry in found.values()])
    records = [
        RunRecord(path, entry.settings, entry.result, variant)
        for (path, entry), variant in zip(found.values(), variants, strict=True)
    ]
    return sorted(records, key=_order)


# -- one folder and its index


@dataclass(frozen=True)
class _Entry:
    """What the index keeps of a run; the stamp tells whether its files are still the same."""

    stamp: list[int]
    settings: Mapping[str, Any]
    result: Mapping[str, Any] | None


def _read_folder(folder: Path) -> dict[Path, _Entry]:
    known = _read_index(folder)
    found: dict[str, _Entry] = {}
    for run in _run_folders(folder):
        name = str(run.relative_to(folder))
        stamp = _stamp(run)
        entry = known.get(name)
        if entry is None or entry.stamp != stamp:
            entry = _read_run(run, stamp)
        if entry is not None:
            found[name] = entry
    if found != known and "." not in found:
        _write_index(folder, found)
    return {folder / name: entry for name, entry in found.items()}


def _run_folders(folder: Path) -> Iterator[Path]:
    """The folders that hold a ``settings.json``; nothing below them is looked at."""
    for path, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if RunFolder(Path(path)).settings.name in files:
            folders.clear()
            yield Path(path)


def _check_unpacked(folder: Path) -> None:
    """Raise an error if all that the folder holds of runs is an archive of them."""
    archives = sorted(folder.rglob(ARCHIVE))
    if not archives:
        return
    commands = [shlex.join(["tar", "xzf", str(path), "-C", str(_place(path))]) for path in archives]
    raise SpclError("\n  ".join([f"the runs in {folder} are packed in {ARCHIVE}; unpack them first:", *commands]))


def _place(archive: Path) -> Path:
    """Where to unpack, so that the runs are in the archive's folder, directly if it has the name of the packed one."""
    try:
        with tarfile.open(archive) as packed:
            first = packed.next()
    except (OSError, EOFError, tarfile.TarError):
        first = None
    has_its_name = first is not None and Path(first.name).parts[0] == archive.parent.name
    return archive.parent.parent if has_its_name else archive.parent


def _stamp(run: Path) -> list[int]:
    """Size and time of the run's files."""
    stamp = []
    for path in (RunFolder(run).settings, RunFolder(run).result):
        try:
            status = path.stat()
            stamp += [status.st_size, status.st_mtime_ns]
        except FileNotFoundError:
            stamp += [0, 0]
    return stamp


def _read_run(run: Path, stamp: list[int]) -> _Entry | None:
    folder = RunFolder(run)
    try:
        settings = json.loads(folder.settings.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        settings = None
    if not _is_settings(settings):
        warnings.warn(f"{folder.settings} cannot be read; the run is left out", stacklevel=2)
        return None
    result = read_json(folder.result)
    parsed = RunResult.parse(result)
    if parsed is None:
        return _Entry(stamp, settings, None)
    result.pop("confusion", None)
    if parsed.data is not None:
        result["data"] = str(parsed.data)
    return _Entry(stamp, settings, result)


def _is_settings(content: Any) -> bool:
    needed = IDENTITY | {"paradigm", "preset"}
    return isinstance(content, dict) and needed <= flat_settings(content).keys()


def _read_index(folder: Path) -> dict[str, _Entry]:
    """The entries of the index that make sense; none if there is no index or it is damaged."""
    try:
        content = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            return {}
        entries = {name: _Entry(**entry) for name, entry in content["runs"].items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return {}
    return {
        name: entry
        for name, entry in entries.items()
        if _is_settings(entry.settings) and (entry.result is None or RunResult.parse(entry.result) is not None)
    }


def _write_index(folder: Path, entries: Mapping[str, _Entry]) -> None:
    """Keep the index if the folder lets us; reading does not depend on it."""
    content = {"version": VERSION, "runs": {name: vars(entry) for name, entry in entries.items()}}
    with suppress(OSError):
        write_text(folder / INDEX, json.dumps(content, ensure_ascii=False, separators=(",", ":")))


# -- variants


def _variants(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each run the settings of its method in which the method's runs on its benchmark differ, and the other
    settings in which any runs on that benchmark do.

    >>> a = {"benchmark": "b", "method": {"name": "soro", "sigma": 1.0}, "seed": 0}
    >>> b = {"benchmark": "b", "method": {"name": "soro", "sigma": 9.0}, "seed": 1}
    >>> _variants([a, b])
    [{'method.sigma': 1.0}, {'method.sigma': 9.0}]
    """
    flat = [decisive_settings(settings) for settings in runs]
    by_benchmark: dict[str, list[dict[str, Any]]] = defaultdict(list)
    by_method: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for settings in flat:
        by_benchmark[settings["benchmark"]].append(settings)
        by_method[settings["benchmark"], settings["method.name"]].append(settings)
    of_benchmark = {key: _varying(members) - TELLING.keys() for key, members in by_benchmark.items()}
    of_method = {key: _varying(members) for key, members in by_method.items()}
    return [
        {
            name: value
            for name, value in settings.items()
            if name in of_method[settings["benchmark"], settings["method.name"]]
            or (name in of_benchmark[settings["benchmark"]] and not name.startswith("method."))
            or TELLING.get(name, value) != value
        }
        for settings in flat
    ]


def _varying(members: Sequence[Mapping[str, Any]]) -> set[str]:
    """The settings that all members have, and not all with the same value."""
    first, *others = members
    shared = [name for name in first if name not in IDENTITY and all(name in other for other in others)]
    return {name for name in shared if any(other[name] != first[name] for other in others)}


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _order(record: RunRecord) -> tuple[Any, ...]:
    return (record.benchmark, record.scenario, record.method, _sortable(record.variant), record.config, record.seed)


def _sortable(variant: Mapping[str, Any]) -> list[tuple[bool, Any]]:
    """Numbers in their order, before anything else as text."""
    return [(False, value) if isinstance(value, int | float) else (True, str(value)) for value in variant.values()]
