"""The update of the weights as a CUDA graph."""

from torch import Tensor
from torch.optim import Optimizer

from spcl.cuda_graphs.cache import GraphCache
from spcl.cuda_graphs.capture import GraphCapture
from spcl.engine.update import Update

__all__ = ["UpdateGraphs"]


class UpdateGraphs:
    """The update with a ``capturable`` optimiser, replayed while it stays the same; with others it runs eagerly.

    A graph depends on the parameters that have a gradient, the addresses of gradients, state and averages, and every
    setting, such as a learning rate that is a number. A learner's schedule fills tensors, which needs no new graph.
    """

    def __init__(self, capture: GraphCapture) -> None:
        self._cache = GraphCache(capture)
        self._state: tuple[object, object] = (None, None)

    def run(self, update: Update) -> None:
        """Update the weights."""
        update.set_learning_rates()
        optimizer = update.optimizer
        hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        if hooked or not all(group.get("capturable") for group in optimizer.param_groups):
            update.apply()
            return
        state = optimizer.state, next(iter(optimizer.state.values()), None)
        if state[0] is not self._state[0] or state[1] is not self._state[1]:
            self._state = state
            self._cache.clear()
        average = update.average
        averaged = () if average is None else (average.decay, *average.addresses())
        self._cache.run((*_key(optimizer), update.clip_norm, averaged), update.apply)


def _key(optimizer: Optimizer) -> tuple[object, ...]:
    addresses: list[int] = []
    settings: list[object] = []
    for group in optimizer.param_groups:
        values = [value for name, value in group.items() if name not in ("params", "tasks")]
        settings += [id(value) if isinstance(value, Tensor) else value for value in values]
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        addresses += [tensor.data_ptr() for parameter in trained for tensor in (parameter, parameter.grad)]
    return tuple(addresses), tuple(settings)
