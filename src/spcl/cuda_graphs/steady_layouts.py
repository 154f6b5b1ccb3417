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
    >>> for _ in range(6):
    ...     assert not layouts.is_steady(segments, weighted=False)
    ...     layouts.count(segments, weighted=False)
    >>> layouts.is_steady(segments, weighted=False)
    True
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[tuple[int, ...], tuple[int, ...], bool]] = Counter()

    def is_steady(self, segments: Segments, weighted: bool) -> bool:
        """Return whether there were enough steps with these batches; ``weighted`` gradients have coefficients."""
        return self._counts[segments.sizes, segments.targets, weighted] >= STEADY_STEPS

    def count(self, segments: Segments, weighted: bool) -> None:
        """Count a step that was made."""
        if len(self._counts) > MOST_LAYOUTS:
            self._counts.clear()
        layout = segments.sizes, segments.targets, weighted
        self._counts[layout] = min(self._counts[layout] + 1, STEADY_STEPS)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain data: a resumed run joins batches in the same steps."""
        layouts = [[list(sizes), list(rows), weighted, n] for (sizes, rows, weighted), n in self._counts.items()]
        return {"layouts": layouts} if layouts else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from :meth:`state_dict`."""
        self._counts.clear()
        for sizes, rows, weighted, count in state.get("layouts", []):
            self._counts[tuple(sizes), tuple(rows), weighted] = count
