"""Random numbers of forward passes, such as dropout's: other ones on every rank, and the same ranks afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from spcl.distributed.world import World

__all__ = ["RankRandomness"]


class RankRandomness:
    """Gives the passes of every rank random numbers of its own, and the ranks the same generators afterwards.

    Where passes draw none, the generators stay as in one process.

    Args:
        world: the ranks.
        device: of the passes.

    Attributes:
        was_used: whether passes of this rank have drawn any since :meth:`advance`.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self._world = world
        self._device = device
        self.was_used = False

    @contextmanager
    def of_rank(self) -> Iterator[None]:
        """Let passes within the block draw the random numbers of this rank."""
        source = torch.Generator()
        source.set_state(torch.get_rng_state())
        seed = int(torch.randint(2**62, (), generator=source)) + self._world.rank
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            before = self._states()
            try:
                yield
            finally:
                self.was_used |= any(map(lambda a, b: not torch.equal(a, b), before, self._states()))

    def _states(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        return [*states, torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else states

    def advance(self, was_used: bool) -> None:
        """Advance the generator of all ranks alike, if passes of any have drawn random numbers."""
        if was_used:
            torch.rand(())
        self.was_used = False
