"""Whether the gradients of a step are held, or only their Gramian."""

import warnings
from dataclasses import dataclass
from typing import Literal

from spcl.engine.free_memory import free_memory
from spcl.engine.gradients import GradientMatrix
from spcl.errors import SpclError
from spcl.methods.base import Method

__all__ = ["LowMemory", "LowMemoryChoice", "low_memory_state"]

LowMemory = bool | Literal["auto"]

LARGEST_SHARE = 0.75
"""The share of the free memory that gradients may take; the rest is for passes and the optimiser."""


@dataclass
class LowMemoryChoice:
    """Decides before a step whether it runs in low-memory mode; once chosen, the mode stays.

    Attributes:
        setting: True, False, or ``"auto"`` for when the gradients would not fit.
        is_chosen: whether the mode is in use.
    """

    setting: LowMemory
    is_chosen: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.setting, bool) and self.setting != "auto":
            raise SpclError(f"low_memory is {self.setting!r}; give True, False or 'auto'")
        self._has_warned = False

    def choose(self, rows: int, method: Method, gradients: GradientMatrix) -> bool:
        """Return whether the mode is chosen with this step, whose gradients are so many rows."""
        if self.is_chosen or self.setting is False or rows < 2 or rows <= len(gradients.buffer):
            return False
        estimate = self._estimate(rows, gradients)
        if estimate is None:
            return False
        reason = _obstacle(method)
        if reason is None:
            self.is_chosen = True
            if self.setting == "auto":
                _warn(f"{estimate}: low_memory is used from now on, with two backward passes a step")
        elif not self._has_warned:
            self._has_warned = True
            _warn(f"{estimate}, but low_memory is not possible: {reason}")
        return self.is_chosen

    def _estimate(self, rows: int, gradients: GradientMatrix) -> str | None:
        """Return, in words, how much memory the rows take, if that is a reason not to hold them."""
        needed = rows * gradients.length * gradients.dtype.itemsize
        text = f"the {rows} gradients of a step take {_mebibytes(needed)}"
        if self.setting is True:
            return text
        free = free_memory(gradients.device)
        if free is None:
            return None
        free += gradients.buffer.nbytes
        return f"{text} of {_mebibytes(free)} free" if needed > LARGEST_SHARE * free else None


def low_memory_state(choice: LowMemoryChoice) -> dict[str, LowMemory]:
    """Return what a checkpoint says of a choice: the setting, unless it is the default, and that gradients do not fit.

    A learner that is loaded goes on in low-memory mode even where it would find more memory.

    >>> low_memory_state(LowMemoryChoice("auto", is_chosen=True))
    {'holds_gradients': False}
    """
    setting: dict[str, LowMemory] = {} if choice.setting == "auto" else {"low_memory": choice.setting}
    return setting | ({"holds_gradients": False} if choice.is_chosen else {})


def _obstacle(method: Method) -> str | None:
    if method.elementwise:
        return f"{method!r} combines gradients entry by entry"
    if method.edits_memory:
        return f"{method!r} edits memory along the gradients"
    if method.settings.weigh_heads:
        return f"{method!r} weighs the gradients of heads, too"
    return None


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=5)
