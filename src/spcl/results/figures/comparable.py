"""Which runs may be compared: those that differ in nothing but what is compared."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from spcl.results.figures.curves import grouped
from spcl.results.records import RunRecord
from spcl.results.tables.tables import method_order
from spcl.runs.identity import decisive_settings

__all__ = ["circumstances", "comparable", "identity", "left_out_note"]

MOST_NAMED = 4

Key = tuple[tuple[str, str], ...]


def identity(run: RunRecord, *ignored: str) -> Key:
    """All settings that decide a run, apart from those ignored; runs for which they are equal differ only in these.

    >>> from pathlib import Path
    >>> identity(RunRecord(Path(), {"seed": 0, "gap": 1, "method": {"name": "er"}}, None), "seed")
    (('gap', '1'), ('method.name', "'er'"))
    """
    decisive = decisive_settings(run.settings)
    return tuple((name, repr(value)) for name, value in sorted(decisive.items()) if name not in ignored)


def circumstances(run: RunRecord, *ignored: str) -> Key:
    """The identity of a run without its method."""
    return tuple((name, value) for name, value in identity(run, *ignored) if not name.startswith("method."))


def comparable(runs: Sequence[RunRecord], *ignored: str) -> dict[str, list[RunRecord]]:
    """Runs by method, in the order of the paper's tables, that all have the same circumstances but for those ignored.

    Of several circumstances, those in which most methods were run; of several variants of a method, the one with
    most runs.
    """
    cells = grouped(runs, lambda run: circumstances(run, *ignored)).values()
    cell = max(cells, key=lambda cell: (len({run.method for run in cell}), len(cell)), default=[])
    methods = grouped(sorted(cell, key=lambda run: method_order(run.method)), lambda run: run.method)
    return {method: _largest(group, lambda run: identity(run, *ignored)) for method, group in methods.items()}


def left_out_note(runs: Sequence[RunRecord], shown: Iterable[Mapping[str, Sequence[RunRecord]]]) -> str:
    """What a caption says of runs that :func:`comparable` has not chosen; empty if there are none."""
    chosen = {run.path for cell in shown for group in cell.values() for run in group}
    others = sorted({f"{run.label} {run.scenario}-incrementally" for run in runs if run.path not in chosen})
    if not others:
        return ""
    named = ", ".join([*others[:MOST_NAMED], *([f"{len(others) - MOST_NAMED} more"] if others[MOST_NAMED:] else [])])
    return f" Not shown, as their settings are others: {named}; choose runs with --where."


def _largest(runs: Iterable[RunRecord], key: Callable[[RunRecord], Hashable]) -> list[RunRecord]:
    return max(grouped(runs, key).values(), key=len)
