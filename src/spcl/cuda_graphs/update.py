"""The optimiser's step as a CUDA graph."""

from torch import Tensor
from torch.optim import Optimizer

from spcl.cuda_graphs.cache import GraphCache
from spcl.cuda_graphs.capture import GraphCapture

__all__ = ["UpdateGraphs"]


class UpdateGraphs:
    """The step of a ``capturable`` optimiser, replayed while it stays the same.

    A graph depends on the parameters that have a gradient, the addresses of gradients and state, and every setting,
    such as a learning rate that a schedule lowers.
    """

    def __init__(self, capture: GraphCapture) -> None:
        self._cache = GraphCache(capture)
        self._state: tuple[object, object] = (None, None)

    def run(self, optimizer: Optimizer) -> None:
        """Make one step of the optimiser."""
        hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        if hooked or not all(group.get("capturable") for group in optimizer.param_groups):
            optimizer.step()
            return
        state = optimizer.state, next(iter(optimizer.state.values()), None)
        if state[0] is not self._state[0] or state[1] is not self._state[1]:
            self._state = state
            self._cache.clear()
        self._cache.run(_key(optimizer), optimizer.step)


def _key(optimizer: Optimizer) -> tuple[object, ...]:
    addresses: list[int] = []
    settings: list[object] = []
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name not in ("params", "tasks"):
                settings.append(id(value) if isinstance(value, Tensor) else value)
        for parameter in group["params"]:
            gradient = parameter.grad
            addresses += (0, 0) if gradient is None else (gradient.data_ptr(), parameter.data_ptr())
    return tuple(addresses), tuple(settings)
