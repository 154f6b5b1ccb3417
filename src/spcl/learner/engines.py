"""Which engine computes the steps of a learner."""

import warnings

from spcl.engine.base import Engine
from spcl.engine.eager import EagerEngine
from spcl.engine.graphs import CudaGraphEngine
from spcl.engine.low_memory import LowMemoryEngine, free_memory
from spcl.engine.micro import MicroBatchEngine
from spcl.engine.model import SharedModel
from spcl.engine.ranks import DistributedEngine, ShardedEngine, World
from spcl.engine.ranks.sharded import check_sharded, is_sharded
from spcl.engine.rows import GradientMatrix
from spcl.errors import SpclError
from spcl.methods.base import Method
from spcl.options import LowMemory

UNCAPTURED_RANKS = "ranks that train together capture no CUDA graphs, so their kernels are launched one by one"

UNCAPTURED_PARTS = "micro_batch computes batches in parts, for which no CUDA graphs are captured"

LARGEST_SHARE = 0.75
"""The share of the free memory that gradients may take; the rest is for passes and the optimiser."""


class Engines:
    """Makes the engine for a model, method, device and ranks; makes a low-memory one when the gradients would not fit.

    Args:
        model: the shared model.
        method: how gradients become an update.
        capture: whether CUDA graphs are captured on a GPU.
        low_memory: True: hold only the Gramian; ``"auto"``: only once the gradients would not fit.
        micro_batch: the largest number of samples in a pass, or None for whole batches.
        distributed: the ranks that train the model together, or None.

    Attributes:
        is_sharded: whether the backbone's parameters are sharded over ranks.
        is_low_memory: whether gradients are not held; never reset.
    """

    def __init__(
        self,
        model: SharedModel,
        method: Method,
        *,
        capture: bool,
        low_memory: LowMemory,
        micro_batch: int | None,
        distributed: World | None,
    ) -> None:
        check_sharded(model.backbone, method, distributed)
        if distributed is not None and low_memory is True:
            raise SpclError(
                "low_memory holds no gradients, but ranks exchange them; leave low_memory out, or distributed: every "
                "rank holds the gradients of its own tasks, and a part of all others"
            )
        if micro_batch is not None and (distributed is not None or low_memory is True):
            other = "ranks split batches themselves" if distributed else "low_memory makes one pass over all batches"
            raise SpclError(f"micro_batch computes batches in parts, but {other}; leave one of the two out")
        self._model = model
        self._method = method
        self._captures = capture and model.device.type == "cuda"
        self._low_memory = low_memory
        self._micro_batch = micro_batch
        self._distributed = distributed
        self.is_sharded = is_sharded(model.backbone)
        self.is_low_memory = False
        self._has_warned = False

    def make(self) -> Engine:
        """Return a new engine."""
        if self._distributed is not None:
            kind = ShardedEngine if self.is_sharded else DistributedEngine
            ranks = kind(self._model, self._method, self._distributed)
            ranks.fallback_reason = UNCAPTURED_RANKS if self._captures else None
            return ranks
        if self.is_low_memory:
            return LowMemoryEngine(self._model, self._method)
        if self._micro_batch is not None:
            in_parts = MicroBatchEngine(self._model, self._method, self._micro_batch)
            in_parts.fallback_reason = UNCAPTURED_PARTS if self._captures else None
            return in_parts
        return (CudaGraphEngine if self._captures else EagerEngine)(self._model, self._method)

    def should_use_low_memory(self, rows: int, gradients: GradientMatrix) -> bool:
        """Return whether the next step must switch to low memory because its ``rows`` gradients do not fit.

        Warn, once, if it must and cannot.
        """
        if self.is_low_memory or self._low_memory is False or self._distributed is not None or rows < 2:
            return False
        estimate = self._estimate(rows, gradients)
        if estimate is None:
            return False
        reason = "micro_batch computes batches in parts" if self._micro_batch else _obstacle(self._method)
        if reason is not None:
            if not self._has_warned:
                self._has_warned = True
                _warn(f"{estimate}, but low_memory is not possible: {reason}")
            return False
        if self._low_memory == "auto":
            _warn(f"{estimate}: low_memory is used from now on, with two backward passes a step")
        return True

    def _estimate(self, rows: int, gradients: GradientMatrix) -> str | None:
        """Return, in words, how much memory the rows take, if that is a reason not to hold them."""
        needed = rows * gradients.length * gradients.dtype.itemsize
        text = f"the {rows} gradients of a step take {_mebibytes(needed)}"
        if self._low_memory is True:
            return text
        free = free_memory(gradients.device)
        if free is None:
            return None
        free += gradients.buffer.nbytes
        return f"{text} of {_mebibytes(free)} free" if needed > LARGEST_SHARE * free else None


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
