"""Records of runs: read from their folders, told apart by their settings, and chosen by them."""

import json
import os
import re
import shlex
import tarfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from spcl.data.catalogue import PRESETS
from spcl.errors import SpclError, did_you_mean
from spcl.methods.registry import usual_replay_loss
from spcl.results.names import format_value
from spcl.runs import RunFolder
from spcl.runs.records import RunResult
from spcl.runs.settings import (
    NAMED,
    VARIED,
    decisive_settings,
    flat_settings,
    merge_settings,
    parse_assignments,
    split_values,
    with_defaults,
)

ARCHIVE = "records.tar.gz"
"""The name of an archive of run folders."""

REQUIRED = frozenset({"benchmark", "method", "paradigm", "preset", *VARIED})
"""Settings without which a record cannot be used."""

Settings = Mapping[str, Any]
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class RunRecord:
    """A run, complete or not.

    Attributes:
        path: its folder.
        settings: the content of ``settings.json``.
        result: the content of ``result.json`` without confusion tables and class names; None while the run is not
            complete.
        variant: the settings, by dotted name, that tell it from other runs on this benchmark in this scenario, see
            :func:`find_variants`; also a paradigm other than ``parallel``, and an evaluation on
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

    @cached_property
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

    @cached_property
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


# -- reading


def read_runs(*folders: str | Path) -> list[RunRecord]:
    """Return all runs in these folders and the folders below, sorted by benchmark, scenario, method, config and seed.

    A run whose ``result.json`` is damaged counts as not complete; a run whose settings cannot be read is skipped with a
    warning.
    """
    found: dict[Path, tuple[Path, Settings]] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise SpclError(f"there is no folder {folder}; name one that 'spcl grid' or 'spcl run' has written")
        runs = {path: settings for path in _run_folders(folder) if (settings := _read_settings(path)) is not None}
        if not runs:
            check_unpacked(folder)
        for path, settings in runs.items():
            found.setdefault(path.resolve(), (path, settings))
    variants = find_variants([with_defaults(settings) for _, settings in found.values()])
    records = [
        RunRecord(path, settings, _read_result(path), variant)
        for (path, settings), variant in zip(found.values(), variants, strict=True)
    ]
    return sorted(records, key=_sort_key)


def _run_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders with a ``settings.json``, but none below them."""
    for path, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if "settings.json" in files:
            folders.clear()
            yield Path(path)


def _read_settings(path: Path) -> Settings | None:
    """Return the settings of a run; None, with a warning, if they cannot be read or lack what tables need."""
    settings = RunFolder(path).read_settings() or {}
    if settings.keys() >= REQUIRED and isinstance(settings["method"], dict) and "name" in settings["method"]:
        return settings
    warnings.warn(f"{path / 'settings.json'} cannot be read; the run is skipped", stacklevel=3)
    return None


def _read_result(path: Path) -> RunResult | None:
    """Return the result of a run without the large parts, which few readers of many runs need."""
    result = RunFolder(path).read_result()
    return None if result is None else result.model_copy(update={"confusion": {}, "class_names": {}})


def _sort_key(record: RunRecord) -> tuple[Any, ...]:
    return (record.benchmark, record.scenario, record.method, _sortable(record.variant), record.config, record.seed)


def _sortable(variant: Mapping[str, Any]) -> list[tuple[str, bool, Any]]:
    """Sort by names of settings, numbers by value, before everything else as text."""
    return [
        (name, False, value) if isinstance(value, int | float) else (name, True, str(value))
        for name, value in variant.items()
    ]


def check_unpacked(folder: Path) -> None:
    """Raise an error with the commands that unpack them if the folder contains archives of runs."""
    archives = sorted(folder.rglob(ARCHIVE))
    if not archives:
        return
    commands = [shlex.join(["tar", "xzf", str(path), "-C", str(_target(path))]) for path in archives]
    raise SpclError("\n  ".join([f"the runs in {folder} are packed in {ARCHIVE}; unpack them first:", *commands]))


def _target(archive: Path) -> Path:
    """Return the folder to unpack into.

    The runs end up in the archive's folder: directly if the packed folder has the same name, below it otherwise.
    """
    try:
        with tarfile.open(archive) as packed:
            first = packed.next()
    except (OSError, EOFError, tarfile.TarError):
        first = None
    same_name = first is not None and Path(first.name).parts[0] == archive.parent.name
    return archive.parent.parent if same_name else archive.parent


# -- variants

IDENTITY = frozenset({"benchmark", "method.name", *VARIED})
"""Settings that every table and figure shows by itself."""

USUAL_VALUES = {"paradigm": "parallel", "validation": 0.0}
"""Settings that belong to the variant exactly where they have another value than this."""

REPEATED = frozenset(VARIED) - {"scenario"}
"""Settings whose values are repetitions of one variant."""


def find_variants(runs: Sequence[Settings]) -> list[dict[str, Any]]:
    """Return for each run, given by its settings, those that tell it from others on its benchmark and in its scenario.

    They are the settings of its method in which the runs of this method differ, options of its loss on memory among
    them, and the other settings in which any runs differ; without those that have the value of most variants.

    >>> runs = [{"benchmark": "b", "method": {"name": "soro", "sigma": sigma}} for sigma in (1.0, 9.0)]
    >>> find_variants(runs)
    [{'method.sigma': 1.0}, {'method.sigma': 9.0}]
    >>> find_variants([each | {"tasks": tasks} for each in runs for tasks in (5, 5, 5)] + [runs[0] | {"tasks": 9}])[-2:]
    [{'method.sigma': 9.0}, {'tasks': 9}]
    """
    flat = [decisive_settings(settings) for settings in runs]
    of_benchmark = _usual_values(flat, _benchmark)
    of_method, of_recipe = _usual_values(flat, _benchmark_and_method), _usual_values(flat, _benchmark_and_recipe)
    variants = []
    for settings in flat:
        shared = {name: value for name, value in of_benchmark[_benchmark(settings)].items() if "method." not in name}
        own = of_recipe[_benchmark_and_recipe(settings)] | of_method[_benchmark_and_method(settings)]
        usual = shared | own | USUAL_VALUES
        variants.append({name: value for name, value in settings.items() if usual.get(name, value) != value})
    return variants


def _benchmark(settings: Settings) -> tuple[str, str, bool]:
    """Return benchmark and scenario, and whether the preset is ``plus``, which the name of a method says."""
    return str(settings["benchmark"]), str(settings.get("scenario")), settings.get("preset") == "plus"


def _benchmark_and_method(settings: Settings) -> tuple[object, ...]:
    return *_benchmark(settings), str(settings["method.name"])


def _benchmark_and_recipe(settings: Settings) -> tuple[object, ...]:
    return *_benchmark_and_method(settings), str(settings.get("method.replay_loss"))


def _usual_values(runs: Sequence[Settings], key: Callable[[Settings], object]) -> dict[object, dict[str, Any]]:
    """Return by group the settings in which its members differ, each with its usual value."""
    return {group: _usual(members) for group, members in group_by(runs, key).items()}


def _usual(members: Sequence[Settings]) -> dict[str, Any]:
    """Return the settings that all members have, but in which they differ, each with the value of most variants.

    A value that no run has stands for several that are equally frequent, so that every run names its own.
    """
    first, *others = members
    shared = [name for name in first if name not in IDENTITY and all(name in other for other in others)]
    differing = [name for name in shared if any(other[name] != first[name] for other in others)]
    variants = {repr([item for item in member.items() if item[0] not in REPEATED]): member for member in members}
    return {name: _most_frequent([variant[name] for variant in variants.values()]) for name in differing}


def _most_frequent(values: Sequence[Any]) -> Any:
    """Return the most frequent value, or an object that equals none if there are several.

    >>> _most_frequent([3, 1, 1]), _most_frequent([3, 1]) in (3, 1)
    (1, False)
    """
    by_text = {repr(value): value for value in values}
    (text, count), *others = Counter(map(repr, values)).most_common()
    return object() if others and others[0][1] == count else by_text[text]


# -- grouping


def group_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items by key, keys and items in the order of their first appearance.

    >>> group_by([1, 2, 3], lambda number: number % 2)
    {1: [1, 3], 0: [2]}
    """
    groups: dict[K, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return dict(groups)


# -- runs that stand for the same cell of a table


def check_duplicates(records: Iterable[RunRecord]) -> None:
    """Raise an error if complete runs have the same label, configuration and seed, or custom data the same name.

    Runs with equal settings in several sweeps of one grid (or trials of one search) are allowed: the sweeps have this
    point in common. Custom data of one name is allowed where it is the same data.
    """
    complete = complete_runs(records)
    _check_custom_data(complete)
    known: dict[tuple[Any, ...], CompleteRun] = {}
    for run in complete:
        other = known.setdefault((run.benchmark, run.scenario, run.label, run.config, run.seed), run)
        same_folder = run is other or run.path.resolve() == other.path.resolve()
        if not same_folder and not _is_shared_by_sweeps(run, other):
            raise _duplicate_error(other, run)


def _check_custom_data(runs: Iterable[CompleteRun]) -> None:
    """Raise an error if files of the same name hold different data."""
    known: dict[tuple[str, Any], CompleteRun] = {}
    for run in runs:
        if run.settings["benchmark"] in PRESETS:
            continue
        other = known.setdefault((run.benchmark, run.settings.get("validation")), run)
        if not _has_same_data(other, run):
            raise SpclError(
                f"the data of {other.path} and {run.path} have the same name {run.benchmark!r}, but differ: "
                f"{_describe_data(other)} and {_describe_data(run)}; use the runs of each by themselves"
            )


def _has_same_data(one: CompleteRun, other: CompleteRun) -> bool:
    """Compare sizes and checksums where both runs have recorded them."""
    pairs = ((one.result.data, other.result.data), (one.result.fingerprint, other.result.fingerprint))
    return all(first == second or None in (first, second) for first, second in pairs)


def _describe_data(run: CompleteRun) -> str:
    parts = (run.result.data, run.result.fingerprint)
    return ", checksum ".join(str(part) for part in parts if part is not None)


def _is_shared_by_sweeps(one: RunRecord, other: RunRecord) -> bool:
    return _path_without_sweep(one.path) == _path_without_sweep(other.path) and (
        decisive_settings(one.settings) == decisive_settings(other.settings)
    )


def _path_without_sweep(path: Path) -> tuple[str, ...]:
    """Return the parts of a path that name neither a swept value nor a trial.

    >>> _path_without_sweep(Path("/x/task/soro/sigma=10/config-0/seed-0"))
    ('/', 'x', 'task', 'soro', 'config-0', 'seed-0')
    """
    return tuple(part for part in path.resolve().parts if "=" not in part and not re.fullmatch(r"trial-\d+", part))


def _duplicate_error(one: RunRecord, other: RunRecord) -> SpclError:
    first, second = _differing_folders(one.path, other.path)
    benchmarks = dict.fromkeys(str(record.settings["benchmark"]) for record in (one, other))
    return SpclError(
        f"{first} and {second} both hold a run of {one.label} on {' and '.join(benchmarks)}, "
        f"{one.scenario}-incremental, configuration {one.config}, seed {one.seed}, and no setting distinguishes them; "
        "use only one of these folders"
    )


def _differing_folders(one: Path, other: Path) -> tuple[Path, Path]:
    """Return the paths without their common ending, or whole where one would then contain the other.

    >>> [str(path) for path in _differing_folders(Path("a/er/seed-0"), Path("b/er/seed-0"))]
    ['a', 'b']
    """
    first, second = one, other
    while first.name and first.name == second.name:
        first, second = first.parent, second.parent
    nested = first.is_relative_to(second) or second.is_relative_to(first)
    return (one, other) if nested else (first, second)


# -- filters by settings


MOST_VALUES = 20
THINGS = ("method", *NAMED)
"""Settings that give the name of a thing, or its name and options."""


def parse_conditions(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Parse conditions ``name=value`` or ``name=value,value,…``; the values of one name are alternatives.

    >>> parse_conditions(["method=soro,er", "method.sigma=1e2", "seed=0", "seed=1"])
    {'method.name': ['soro', 'er'], 'method.sigma': [100.0], 'seed': [0, 1]}
    """
    conditions: dict[str, list[Any]] = {}
    for text in texts:
        name, separator, values = text.partition("=")
        assignments = [f"{name}={value}" for value in split_values(values)] if separator else [text]
        for assignment in assignments:
            for flat, value in flat_settings(parse_assignments([assignment])).items():
                conditions.setdefault(flat, []).append(value)
    return conditions


def filter_runs(runs: Sequence[RunRecord], conditions: Mapping[str, Any]) -> list[RunRecord]:
    """Return the runs with the given settings, which may be nested as in ``settings.json`` or have dotted names.

    A list of values are alternatives. ``method`` is the method's name, in any case, ``optimizer`` that of the
    optimiser, and so on. An error names the settings and values that no run has.

    >>> from pathlib import Path
    >>> runs = [RunRecord(Path(), {"benchmark": "ps-glyphs", "seed": seed}, None) for seed in range(4)]
    >>> [run.seed for run in filter_runs(runs, {"seed": [1, 3]})]
    [1, 3]
    """
    chosen = list(runs)
    for name, value in flat_settings(conditions).items():
        wanted = value if isinstance(value, list) else [value]
        chosen = _filtered(chosen, f"{name}.name" if name in THINGS else name, wanted, len(runs))
    return chosen


def _filtered(runs: Sequence[RunRecord], name: str, wanted: Sequence[Any], total: int) -> list[RunRecord]:
    """Return the runs where the setting has one of these values; raise an error if any value is in no run."""
    settings = [flat_settings(merge_settings(run.settings)) | {"benchmark": run.benchmark} for run in runs]
    known = dict.fromkeys(key for flat in settings for key in flat)
    if runs and name not in known:
        raise SpclError(f"no run has a setting {name}; {_suggestion(name, map(_shown, known))}")
    present = [_comparable(name, flat[name]) if name in flat else None for flat in settings]
    for value in wanted:
        if runs and _comparable(name, value) not in present:
            among = f"none of {len(runs)} runs" if len(runs) == total else f"none of the {len(runs)} runs chosen so far"
            found = _listed(flat[name] for flat in settings if name in flat)
            raise SpclError(f"{among} has {_shown(name)}={format_value(value)}; there are {found}")
    accepted = [_comparable(name, value) for value in wanted]
    return [run for run, value, flat in zip(runs, present, settings, strict=True) if name in flat and value in accepted]


def _comparable(name: str, value: Any) -> Any:
    """Return names of methods in lower case, since tables and figures show display names."""
    return str(value).lower() if name == "method.name" else value


def _suggestion(name: str, known: Iterable[str]) -> str:
    """Suggest a setting: the method's of that name, or the most similar one.

    >>> _suggestion("sigma", ["seed", "method.sigma"])
    "did you mean 'method.sigma'?"
    """
    names, of_method = list(known), f"method.{name}"
    return f"did you mean {of_method!r}?" if of_method in names else did_you_mean(name, names)


def _shown(name: str) -> str:
    thing = name.removesuffix(".name")
    return thing if thing in THINGS else name


def _listed(values: Iterable[Any]) -> str:
    """Return the different values, numbers in their order and then text.

    >>> _listed([10, "b", 2, "a", 10])
    '2, 10, a, b'
    """
    unique = {format_value(value): value for value in values}
    order = sorted(unique, key=lambda text: (isinstance(unique[text], str), _number(unique[text]), text))
    more = [f"{len(order) - MOST_VALUES} more"] if len(order) > MOST_VALUES else []
    return ", ".join([*order[:MOST_VALUES], *more])


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
