"""Copies of the model's buffers, such as batch-norm's running averages, from which a step is undone."""

from collections.abc import Iterable
from operator import is_

import torch
from torch import Tensor

from spcl.engine.model import SharedModel

__all__ = ["BufferSnapshot", "total_norm"]


class BufferSnapshot:
    """The buffers of backbone and heads as they were before a step.

    A forward pass changes them in place, or puts other tensors in their place; both can be undone.

    Attributes:
        generation: incremented when buffers are replaced and their copies reallocated.
    """

    def __init__(self, model: SharedModel) -> None:
        self._model = model
        self._modules = 0
        self.generation = 0
        self._owners: list[dict[str, Tensor | None]] = []
        self._held: list[dict[str, Tensor | None]] = []
        self._copies: list[tuple[list[Tensor], list[Tensor]]] = []
        self._zero = torch.zeros((), device=model.device)

    def refresh(self) -> None:
        """Reallocate the copies if the set of buffers has changed."""
        modules = self._model.modules()
        if len(modules) != self._modules:
            self._modules = len(modules)
            self._owners = [part._buffers for module in modules for part in module.modules() if part._buffers]
        buffers, before = _buffers(self._owners), _buffers(self._held)
        if len(buffers) == len(before) and all(map(is_, buffers, before)):
            return
        self.generation += 1
        self._held = [dict(owner.items()) for owner in self._owners]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in buffers:
            if buffer is not None:
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
        self._copies = [([buffer.clone() for buffer in some], some) for some in by_dtype.values()]

    @property
    def is_empty(self) -> bool:
        """Whether the model has no buffers."""
        return not self._copies

    @torch.no_grad()
    def copy(self) -> None:
        """Copy the buffers, those of one type with one kernel launch."""
        for copies, buffers in self._copies:
            torch._foreach_copy_(copies, buffers)

    @torch.no_grad()
    def restore(self) -> None:
        """Set the buffers back to their copies."""
        for copies, buffers in self._copies:
            torch._foreach_copy_(buffers, copies)
        for owner, held in zip(self._owners, self._held, strict=True):
            for name, buffer in held.items():
                if owner[name] is not buffer:
                    owner[name] = buffer

    def norm(self) -> Tensor:
        """Return the summed norm of all floating-point buffers; non-finite if any buffer is."""
        if not self._owners:
            return self._zero
        with torch.no_grad():
            return total_norm(_floating_point(_buffers(self._owners)), self._zero)

    def was_finite(self) -> bool:
        """Return whether :meth:`norm` was finite before the step.

        Constant buffers whose squares overflow, such as masks of huge numbers, make it False in every step.
        """
        copies = [copy for copies, _ in self._copies for copy in copies]
        return bool(total_norm(_floating_point(copies), self._zero).isfinite())


def total_norm(tensors: list[Tensor], like: Tensor) -> Tensor:
    """Return the sum of the tensors' norms on the device of ``like``: finite exactly if all their squares are.

    >>> total_norm([torch.ones(4), torch.ones(9)], torch.zeros(()))
    tensor(5.)
    """
    if not tensors:
        return torch.zeros_like(like)
    norms = torch._foreach_norm(tensors)
    if any(norm.device != like.device for norm in norms):
        norms = tuple(norm.to(like.device) for norm in norms)
    return torch.stack(norms).sum()


def _buffers(owners: list[dict[str, Tensor | None]]) -> list[Tensor | None]:
    return [buffer for owner in owners for buffer in owner.values()]


def _floating_point(buffers: Iterable[Tensor | None]) -> list[Tensor]:
    return [buffer for buffer in buffers if buffer is not None and buffer.is_floating_point()]
