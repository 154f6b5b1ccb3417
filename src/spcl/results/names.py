"""How tables and figures write methods, values and counts, and what publications report of methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spcl._util.registry import Registry
from spcl.methods import FAMILIES, METHODS, Method

if TYPE_CHECKING:
    from spcl.results.records import RunRecord

# -- values and counts


def format_value(value: Any) -> str:
    """Return the value of a setting as short text.

    >>> format_value(10.0), format_value("adam")
    ('10', 'adam')
    """
    return f"{value:g}" if isinstance(value, float) else str(value)


def format_count(numbers: Iterable[int], noun: str) -> str:
    """Return the smallest and largest of several counts, with a noun.

    >>> format_count([1], "run"), format_count([3, 2, 2], "run")
    ('1 run', '2 to 3 runs')
    """
    counts = sorted(numbers)
    low, high = counts[0], counts[-1]
    return f"{low if low == high else f'{low} to {high}'} {noun}{'' if high == 1 else 's'}"


def format_ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges.

    >>> format_ranges([0, 1, 2, 5, 7, 8])
    '0–2, 5, 7–8'
    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}–{part[-1]}" for part in parts)


def joined(parts: Sequence[str], word: str) -> str:
    """Return an enumeration.

    >>> joined(["a", "b", "c"], "and")
    'a, b and c'
    """
    *first, last = parts
    return f"{', '.join(first)} {word} {last}" if first else last


# -- publications


@dataclass(frozen=True)
class PublishedResult:
    """Accuracy and forgetting with their standard deviations, in per cent, as published."""

    accuracy: float
    accuracy_std: float
    forgetting: float
    forgetting_std: float


class Published(ABC):
    """The results of a publication, which tables show beside the results of runs.

    Attributes:
        methods: the methods of its tables, in their order.
    """

    methods: Sequence[str] = ()

    @abstractmethod
    def result(self, run: RunRecord) -> PublishedResult | None:
        """Return the published result of the run's method; None if there is none or the run solves another problem."""

    @abstractmethod
    def note(self, runs: Sequence[RunRecord]) -> str:
        """Return how runs on one benchmark differ from the published ones; empty if they do not."""


PUBLISHED: Registry[Callable[[], Published]] = Registry("published results", Published)
"""The publications to compare with, by name."""

published = PUBLISHED.register


def published_for(runs: Sequence[RunRecord]) -> Published | None:
    """Return the first publication with results for runs on one benchmark, otherwise the first of all, if any."""
    known: list[Published] = [PUBLISHED.make(name) for name in PUBLISHED]
    return next((each for each in known if any(map(each.result, runs))), known[0] if known else None)


# -- methods


def display_name(label: str) -> str:
    """Return a method's label with the name as papers write it.

    >>> display_name("soro+dbt"), display_name("pcgrad (alpha=0.1)"), display_name("torchjd:UPGrad")
    ('SORO+DBT', 'PCGrad (alpha=0.1)', 'torchjd:UPGrad')
    >>> display_name("soro + logits"), display_name("der+++")
    ('SORO + logits', 'DER+++')
    """
    name, method = _method(label)
    if method is None:
        return label
    written = method.__name__
    return (written if written.lower() == name else name.upper()) + label.removeprefix(name)


def family_of(label: str) -> str:
    """Return the family of a method: ``MTL``, ``SCL`` or ``PCL``; ``TorchJD`` for the aggregators of that library.

    >>> family_of("er"), family_of("er + logits"), family_of("torchjd:UPGrad"), family_of("mine")
    ('SCL', 'SCL', 'TorchJD', 'other')
    """
    return _family(*_method(label))


def method_order(label: str) -> tuple[int, int, str]:
    """Return a sort key for the order of tables: by family, then as published, other methods at the end.

    >>> sorted(["soro", "torchjd:UPGrad", "er", "mgda"], key=method_order)
    ['mgda', 'er', 'soro', 'torchjd:UPGrad']
    """
    name, method = _method(label)
    family, families = _family(name, method), list(FAMILIES)
    published = [each for publication in PUBLISHED for each in PUBLISHED.make(publication).methods]
    return (
        families.index(family) if family in families else len(families),
        published.index(name) if name in published else len(published),
        label,
    )


def _method(label: str) -> tuple[str, type[Method] | None]:
    """Return the name of the method in a label, without the + of the preset ``plus``, and its class if it is known."""
    name = label.partition(" ")[0]
    method = METHODS.get(name)
    if method is None and name.endswith("+"):
        name = name.removesuffix("+")
        method = METHODS.get(name)
    return name, method


def _family(name: str, method: type[Method] | None) -> str:
    if method is not None:
        return method.family
    return "TorchJD" if name.startswith("torchjd:") else "other"
