"""Ranks that have nothing to do, since a step has fewer gradients than there are groups of ranks to share them."""

import warnings

from spcl.distributed.world import World

__all__ = ["IdleRanks"]

STEPS = 50
"""After how many steps in a row there is a warning; tasks may start later."""


class IdleRanks:
    """Warns once, on the first rank, where ranks have had no gradients for many steps.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._steps = 0

    def note(self, gradients: int) -> None:
        """Note that a step has so many gradients."""
        groups = self._world.tasks.size
        self._steps = self._steps + 1 if gradients < groups else 0
        if self._steps == STEPS and self._world.is_first:
            warnings.warn(
                f"{groups - gradients} of {groups} task groups of ranks had no gradient to compute in {STEPS} steps in "
                f"a row; split the batches of tasks over the ranks, with the split 'data'",
                RuntimeWarning,
                stacklevel=2,
            )
