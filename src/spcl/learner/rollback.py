"""Taking a step back: what a backward pass changes before its outcome is known."""

from collections.abc import Iterable
from operator import is_

import torch
from torch import Tensor

from spcl.cuda_graphs.graphs import Recurring
from spcl.engine.model import SharedModel
from spcl.memory import Memory
from spcl.methods.base import Method

__all__ = ["StepGuard", "size_of"]


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
        self.copying: Recurring | None = None
        self._times_kept = 0
        self._shelves: list[dict[str, Tensor | None]] = []
        self._held: list[dict[str, Tensor | None]] = []
        self._kept: list[tuple[list[Tensor], list[Tensor]]] = []
        self._some_number = torch.zeros((), device=model.device)

    @torch.no_grad()
    def remember(self) -> None:
        """Take everything as it is for good."""
        modules = self._model.modules()
        if len(modules) != self._modules:
            self._modules = len(modules)
            self._shelves = [part._buffers for module in modules for part in module.modules() if part._buffers]
        self._keep(_buffers(self._shelves))
        if self.copying is not None and self._kept:
            self.copying(self._times_kept, self._copy)
        else:
            self._copy()
        self._random = torch.get_rng_state()
        self._cuda_offset = 0 if self._cuda_generator is None else self._cuda_generator.get_offset()
        self._draws = {} if self._memory is None else self._memory.generator.bit_generator.state
        self._method_state = self._method.state_dict()

    @torch.no_grad()
    def restore(self, draws: bool = True) -> None:
        """Set everything back to what it was, or all but the draws of the memory."""
        for copies, buffers in self._kept:
            torch._foreach_copy_(buffers, copies)
        for shelf, held in zip(self._shelves, self._held, strict=True):
            for name, buffer in held.items():
                if shelf[name] is not buffer:  # a forward pass may also have put another in its place
                    shelf[name] = buffer
        torch.set_rng_state(self._random)
        if self._cuda_generator is not None:
            self._cuda_generator.set_offset(self._cuda_offset)
        if self._memory is not None and draws:
            self._memory.generator.bit_generator.state = self._draws
        self._method.load_state_dict(self._method_state)

    @torch.no_grad()
    def averages_size(self) -> Tensor:
        """A number that is finite as long as the running averages, and all other buffers, are."""
        return size_of(_floats(_buffers(self._shelves)), self._some_number)

    def averages_were_finite(self) -> bool:
        """Whether that number was when they were remembered; with a mask of huge numbers, for one, it never is."""
        copies = [copy for copies, _ in self._kept for copy in copies]
        return bool(size_of(_floats(copies), self._some_number).isfinite())

    def _copy(self) -> None:
        for copies, buffers in self._kept:
            torch._foreach_copy_(copies, buffers)

    def _keep(self, buffers: list[Tensor | None]) -> None:
        """Make room for copies of these, type by type: those of one type are copied at once."""
        before = _buffers(self._held)
        if len(buffers) == len(before) and all(map(is_, buffers, before)):
            return
        self._times_kept += 1
        self._held = [dict(shelf.items()) for shelf in self._shelves]
        alike: dict[torch.dtype, list[Tensor]] = {}
        for buffer in buffers:
            if buffer is not None:
                alike.setdefault(buffer.dtype, []).append(buffer)
        self._kept = [([buffer.clone() for buffer in some], some) for some in alike.values()]


def _buffers(shelves: list[dict[str, Tensor | None]]) -> list[Tensor | None]:
    return [buffer for shelf in shelves for buffer in shelf.values()]


def _floats(buffers: Iterable[Tensor | None]) -> list[Tensor]:
    return [buffer for buffer in buffers if buffer is not None and buffer.is_floating_point()]


def size_of(tensors: list[Tensor], like: Tensor) -> Tensor:
    """A number on the device of ``like`` that is finite exactly as long as all of these, and their squares, are.

    >>> size_of([torch.ones(4), torch.ones(9)], torch.zeros(()))
    tensor(5.)
    """
    if not tensors:
        return torch.zeros_like(like)
    norms = torch._foreach_norm(tensors)
    if any(norm.device != like.device for norm in norms):
        norms = tuple(norm.to(like.device) for norm in norms)
    return torch.stack(norms).sum()


def _cuda_generator(device: torch.device) -> torch.Generator | None:
    """The generator behind dropout on a GPU: within a step only its offset moves."""
    if device.type != "cuda":
        return None
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
