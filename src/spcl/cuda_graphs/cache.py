"""A cache of CUDA graphs."""

from collections import Counter
from collections.abc import Callable

from spcl.cuda_graphs.capture import MOST_GRAPHS, GraphCapture

__all__ = ["GraphCache"]

WARM_UPS = 1
"""How often work must have run before it is captured."""

MOST_KEYS = 1000
"""How many kinds of work are counted before counting starts again."""


class GraphCache:
    """Cache of graphs for small, repeated work.

    A key identifies a kind of work; once a kind has run a few times it is captured. At most :data:`MOST_GRAPHS` graphs
    are kept, the oldest is evicted.
    """

    def __init__(self, capture: GraphCapture) -> None:
        self._capture = capture
        self._counts: Counter[object] = Counter()
        self._replays: dict[object, Callable[[], None]] = {}

    def run(self, key: object, work: Callable[[], None]) -> None:
        """Run the work, or replay its graph."""
        if key in self._replays:
            self._replays[key]()
            return
        if self._capture.unsupported is not None:
            work()
            return
        if len(self._counts) > MOST_KEYS:
            self._counts.clear()
        self._counts[key] += 1
        replays = self._capture.capture([work]) if self._counts[key] > WARM_UPS else None
        if replays is None:
            self._capture.warm_up(work)
            return
        if len(self._replays) == MOST_GRAPHS:
            del self._replays[next(iter(self._replays))]
        (self._replays[key],) = replays
        self._replays[key]()

    def clear(self) -> None:
        """Drop all graphs and counts."""
        self._counts.clear()
        self._replays.clear()
