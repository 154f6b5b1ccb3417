"""Taking a step back: what a backward pass changes before its outcome is known."""

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from spcl.learner.method import Method
from spcl.learner.model import SharedModel
from spcl.memory import Memory

__all__ = ["StepGuard"]


class StepGuard:
    """Remembers all that is touched on the way to an update, so that a step can be undone or repeated.

    These are the buffers of backbone and heads (a forward pass leaves its mark on the running averages of batch-norm),
    the random numbers of dropout, the draws of the memory, and what the method remembers.
    """

    def __init__(self, model: SharedModel, method: Method, memory: Memory | None) -> None:
        self._model = model
        self._method = method
        self._memory = memory
        self._cuda_generator = _cuda_generator(model.device)
        self._modules = 0
        self._buffers: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._averages: list[Tensor] = []

    @torch.no_grad()
    def remember(self) -> None:
        """Take everything as it is for good."""
        modules = self._model.modules()
        if len(modules) != self._modules:
            self._modules = len(modules)
            self._buffers = [buffer for module in modules for buffer in module.buffers()]
            self._copies = [buffer.clone() for buffer in self._buffers]
            self._averages = [buffer for buffer in self._buffers if buffer.is_floating_point()]
        elif self._buffers:
            torch._foreach_copy_(self._copies, self._buffers)
        self._random = torch.get_rng_state()
        self._cuda_offset = 0 if self._cuda_generator is None else self._cuda_generator.get_offset()
        self._draws = {} if self._memory is None else self._memory.generator.bit_generator.state
        self._method_state = self._method.state_dict()

    @torch.no_grad()
    def restore(self, draws: bool = True) -> None:
        """Set everything back to what it was, or all but the draws of the memory."""
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._copies)
        torch.set_rng_state(self._random)
        if self._cuda_generator is not None:
            self._cuda_generator.set_offset(self._cuda_offset)
        if self._memory is not None and draws:
            self._memory.generator.bit_generator.state = self._draws
        self._method.load_state_dict(self._method_state)

    @torch.no_grad()
    def averages_size(self) -> Tensor:
        """The norm of all floating-point buffers: finite as long as the running averages are."""
        return get_total_norm(self._averages).to(self._model.device)

    def averages_were_finite(self) -> bool:
        """Whether they were when remembered; a mask with infinities, for one, never is."""
        return all(bool(copy.isfinite().all()) for copy in self._copies)


def _cuda_generator(device: torch.device) -> torch.Generator | None:
    """The generator behind dropout on a GPU: within a step only its offset moves."""
    if device.type != "cuda":
        return None
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
