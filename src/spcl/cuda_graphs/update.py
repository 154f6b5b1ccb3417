"""The optimiser's step as a CUDA graph."""

from torch import Tensor
from torch.optim import Optimizer

from spcl.cuda_graphs.graphs import Graphs, Recurring

__all__ = ["CapturedUpdate"]


class CapturedUpdate:
    """The step of an optimiser that says it is ``capturable``, replayed while nothing about it changes.

    What could change are the parameters that have a gradient, where gradients and state lie, and every setting, such as
    a learning rate that a schedule lowers.
    """

    def __init__(self, graphs: Graphs) -> None:
        self._recurring = Recurring(graphs)
        self._state: tuple[object, object] = (None, None)

    def __call__(self, optimizer: Optimizer) -> None:
        """One step."""
        hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        if hooked or not all(group.get("capturable") for group in optimizer.param_groups):
            optimizer.step()
            return
        state = optimizer.state, next(iter(optimizer.state.values()), None)
        if state[0] is not self._state[0] or state[1] is not self._state[1]:
            self._state = state
            self._recurring.forget()
        self._recurring(_key(optimizer), optimizer.step)


def _key(optimizer: Optimizer) -> tuple[object, ...]:
    places: list[int] = []
    settings: list[object] = []
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name not in ("params", "tasks"):
                settings.append(id(value) if isinstance(value, Tensor) else value)
        for parameter in group["params"]:
            gradient = parameter.grad
            places += (0, 0) if gradient is None else (gradient.data_ptr(), parameter.data_ptr())
    return tuple(places), tuple(settings)
