"""Undoing a step: restoring what its forward and backward passes changed."""

import torch

from spcl.engine.base import Engine
from spcl.memory import Memory
from spcl.methods.base import Method

__all__ = ["Rollback"]


class Rollback:
    """The state that a step changes before its update is known to be finite.

    These are the buffers of backbone and heads (batch-norm's running averages), the random number generators of
    dropout, the draws and the samples of the memory, and the state of the method.
    """

    def __init__(self, engine: Engine, method: Method, memory: Memory | None, device: torch.device) -> None:
        self._engine = engine
        self._method = method
        self._memory = memory
        self._cuda_generator = _cuda_generator(device)

    def save(self) -> None:
        """Save the state before a step."""
        self._buffers = self._engine.snapshot()
        self._random = torch.get_rng_state()
        self._cuda_offset = 0 if self._cuda_generator is None else self._cuda_generator.get_offset()
        if self._memory is not None:
            self._memory.begin()
        self._method_state = self._method.state_dict()

    def restore(self, draws: bool = True) -> None:
        """Restore the saved state, or all of it but the draws of the memory."""
        self._buffers.restore()
        torch.set_rng_state(self._random)
        if self._cuda_generator is not None:
            self._cuda_generator.set_offset(self._cuda_offset)
        if self._memory is not None:
            self._memory.rollback(draws)
        self._method.load_state_dict(self._method_state)

    def end(self) -> None:
        """End the step: what memory has stored stays."""
        if self._memory is not None:
            self._memory.commit()

    def buffers_were_finite(self) -> bool:
        """Return whether the model's buffers were finite before the step."""
        return self._buffers.was_finite()


def _cuda_generator(device: torch.device) -> torch.Generator | None:
    """Return the generator of dropout on a GPU; within a step only its offset changes."""
    if device.type != "cuda":
        return None
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
