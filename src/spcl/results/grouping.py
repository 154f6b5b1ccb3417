"""Grouping of runs and other items by a key."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

__all__ = ["group_by"]

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def group_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items by key, keys and items in the order of their first appearance.

    >>> group_by([1, 2, 3], lambda number: number % 2)
    {1: [1, 3], 0: [2]}
    """
    groups: dict[K, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return dict(groups)
