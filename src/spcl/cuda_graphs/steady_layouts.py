"""Which sizes the batches of steps have again and again."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from spcl.engine.segments import Segments

__all__ = ["SteadyLayouts"]

STEADY_STEPS = 6
"""How many steps must have had batches of the same sizes before they share a graph: capturing takes time."""

MOST_LAYOUTS = 1000
"""How many layouts are counted before counting starts again."""


class SteadyLayouts:
    """Counts the steps whose batches had the same sizes, and gradients the same rows.

    >>> layouts, segments = SteadyLayouts(), Segments((8, 8), (0, 1))
    >>> [layouts.is_steady(segments, weighted=False) for _ in range(8)]
    [False, False, False, False, False, False, True, True]
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[tuple[int, ...], tuple[int, ...], bool]] = Counter()

    def is_steady(self, segments: Segments, weighted: bool) -> bool:
        """Count a step; return whether there were enough like it before. ``weighted`` gradients have coefficients."""
        layout = segments.sizes, segments.targets, weighted
        if self._counts[layout] == STEADY_STEPS:
            return True
        if len(self._counts) > MOST_LAYOUTS:
            self._counts.clear()
        self._counts[layout] += 1
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain data: a resumed run joins batches in the same steps."""
        layouts = [[list(sizes), list(rows), weighted, n] for (sizes, rows, weighted), n in self._counts.items()]
        return {"layouts": layouts} if layouts else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from :meth:`state_dict`."""
        self._counts.clear()
        for sizes, rows, weighted, count in state.get("layouts", []):
            self._counts[tuple(sizes), tuple(rows), weighted] = count
