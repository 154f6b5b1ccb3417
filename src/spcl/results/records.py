"""Records of runs, read from their folders."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spcl.errors import SpclError
from spcl.methods.registry import usual_replay_loss
from spcl.results.archives import check_unpacked
from spcl.results.formatting import format_value
from spcl.results.index import IndexEntry, read_folder
from spcl.results.variants import find_variants
from spcl.runs import RunFolder
from spcl.runs.result import RunResult
from spcl.runs.settings import with_defaults

__all__ = ["CompleteRun", "RunRecord", "complete_runs", "read_runs"]


@dataclass(frozen=True)
class RunRecord:
    """A run, complete or not.

    Attributes:
        path: its folder.
        settings: the content of ``settings.json``.
        result: the content of ``result.json`` without confusion tables and class names; None while the run is not
            complete.
        variant: the settings, by dotted name, that tell it from other runs on this benchmark in this scenario, see
            :func:`spcl.results.variants.find_variants`; also a paradigm other than ``parallel``, and an evaluation on
            held-out training data.
    """

    path: Path
    settings: Mapping[str, Any]
    result: RunResult | None
    variant: Mapping[str, Any] = field(default_factory=dict)

    @property
    def benchmark(self) -> str:
        """The name of the benchmark; for custom data, that of its file or folder."""
        return Path(self.settings["benchmark"]).name.removesuffix(".npz")

    @property
    def method(self) -> str:
        """The name of the method."""
        return str(self.settings["method"]["name"])

    @property
    def recipe(self) -> str:
        """The method, with a + for the preset ``plus``, and its loss on memory where that is not the method's own.

        >>> RunRecord(Path("x"), {"method": {"name": "soro", "replay_loss": "logits"}}, None).recipe
        'soro + logits'
        >>> RunRecord(Path("x"), {"method": {"name": "der++", "replay_loss": "logits"}}, None).recipe
        'der++'
        >>> RunRecord(Path("x"), {"method": {"name": "soro"}, "preset": "plus"}, None).recipe
        'soro+'
        """
        name = self.method + "+" * (self.settings.get("preset") == "plus")
        usual = usual_replay_loss(self.method)
        replay_loss = self.settings["method"].get("replay_loss", usual)
        return name if replay_loss == usual else f"{name} + {replay_loss}"

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
        """The seed of weights, data order and memory."""
        return int(self.settings["seed"])

    @property
    def paradigm(self) -> str:
        """``parallel``, ``joint`` or ``serial``."""
        return str(self.settings["paradigm"])

    @property
    def preset(self) -> str:
        """``default``, ``plus``, ``paper`` or ``released``."""
        return str(self.settings["preset"])

    @property
    def label(self) -> str:
        """The recipe, with the settings that tell it from its variants.

        >>> settings = {"method": {"name": "soro"}}
        >>> RunRecord(Path("x"), settings, None).label
        'soro'
        >>> RunRecord(Path("x"), settings, None, {"method.sigma": 10.0, "overlap": 0.5}).label
        'soro (sigma=10, overlap=0.5)'
        """
        variant = {name: value for name, value in self.variant.items() if name != "method.replay_loss"}
        if not variant:
            return self.recipe
        differences = (f"{name.removeprefix('method.')}={format_value(value)}" for name, value in variant.items())
        return f"{self.recipe} ({', '.join(differences)})"

    def metrics(self) -> list[dict[str, Any]]:
        """Read the lines of ``metrics.jsonl``, without a last line that is only half written."""
        path = RunFolder(self.path).metrics
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        complete_lines, _, _ = text.rpartition("\n")
        try:
            return [json.loads(line) for line in complete_lines.split("\n") if line]
        except ValueError as error:
            raise SpclError(f"{path} is damaged: {error}; remove the run and make it again") from error

    def full_result(self) -> RunResult | None:
        """Read the whole content of ``result.json``, or None while the run is not complete."""
        return RunFolder(self.path).read_result()

    def confusion(self) -> dict[str, list[list[int]]]:
        """Read for every task how often each of its classes (rows) was predicted as each class (columns)."""
        result = self.full_result()
        return {} if result is None else result.confusion


@dataclass(frozen=True)
class CompleteRun(RunRecord):
    """A run that has a result."""

    result: RunResult

    @property
    def has_skipped_steps(self) -> bool:
        """Whether a task was skipped in a step because its loss or gradient was not finite."""
        return bool(self.result.left_out)


def complete_runs(records: Iterable[RunRecord]) -> list[CompleteRun]:
    """Return the runs that have a result."""
    return [
        CompleteRun(record.path, record.settings, record.result, record.variant)
        for record in records
        if record.result is not None
    ]


def read_runs(*folders: str | Path) -> list[RunRecord]:
    """Return all runs in these folders and the folders below, sorted by benchmark, scenario, method, config and seed.

    A run whose ``result.json`` is damaged counts as not complete. Each folder gets an ``index.json`` that makes reading
    it again fast, see :func:`spcl.results.index.read_folder`.
    """
    found: dict[Path, tuple[Path, IndexEntry]] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise SpclError(f"there is no folder {folder}; name one that 'spcl grid' or 'spcl run' has written")
        runs = read_folder(folder)
        if not runs:
            check_unpacked(folder)
        for path, entry in runs.items():
            found.setdefault(path.resolve(), (path, entry))
    variants = find_variants([with_defaults(entry.settings) for _, entry in found.values()])
    records = [
        RunRecord(path, entry.settings, entry.result, variant)
        for (path, entry), variant in zip(found.values(), variants, strict=True)
    ]
    return sorted(records, key=_sort_key)


def _sort_key(record: RunRecord) -> tuple[Any, ...]:
    return (record.benchmark, record.scenario, record.method, _sortable(record.variant), record.config, record.seed)


def _sortable(variant: Mapping[str, Any]) -> list[tuple[str, bool, Any]]:
    """Sort by names of settings, numbers by value, before everything else as text."""
    return [
        (name, False, value) if isinstance(value, int | float) else (name, True, str(value))
        for name, value in variant.items()
    ]
