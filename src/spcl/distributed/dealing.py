"""Which rank computes which gradients."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

__all__ = ["deal"]


def deal(costs: Sequence[float], ranks: int) -> list[range]:
    """Split gradients into consecutive blocks, one per rank, of which the most expensive one costs least.

    Blocks are consecutive, so that ranks one after the other have the order of one process, on which batch-norm's
    running averages depend. With more ranks than gradients, some have none.

    >>> deal([1, 1, 1, 3], 2)
    [range(0, 3), range(3, 4)]
    >>> deal([1], 2)
    [range(0, 1), range(1, 1)]
    """
    bounds = _bounds(tuple(costs), ranks)
    return [range(first, last) for first, last in pairwise(bounds)]


@lru_cache(maxsize=64)
def _bounds(costs: tuple[float, ...], ranks: int) -> tuple[int, ...]:
    """Return where the blocks begin and end: the smallest bound of their costs for which as many blocks suffice."""
    sums = [0.0, *accumulate(costs)]
    limits = sorted({sums[j] - sums[i] for i in range(len(sums)) for j in range(i + 1, len(sums))})
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_filled(costs, limits[middle])) <= ranks else (middle + 1, high)
    ends = _filled(costs, limits[low]) if costs else []
    return (0, *ends, *[len(costs)] * (ranks - len(ends)))


def _filled(costs: Sequence[float], limit: float) -> list[int]:
    """Return the ends of blocks that cost at most the limit, each as long as possible."""
    ends, spent = [], 0.0
    for index, cost in enumerate(costs):
        if spent + cost > limit and spent:
            ends.append(index)
            spent = 0.0
        spent += cost
    return [*ends, len(costs)]
