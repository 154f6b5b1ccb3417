"""Text for values, counts and ranges of numbers."""

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["format_count", "format_ranges", "format_value", "joined"]


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
