"""A pass of a network over several batches that gives a gradient per segment."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from spcl.batches import Inputs
from spcl.engine import segmented_functions as segmented
from spcl.engine.deferred import FOLLOWING, NOTHING, DeferredTensors
from spcl.engine.segmented_batch_norm import ImageNormalisation, normalise_batches
from spcl.engine.segments import SegmentGradients, Segments, UnsupportedError

__all__ = ["SegmentedMode"]

Function = Callable[..., Any]

ELEMENTWISE = {torch.add, torch.mul, torch.sub, torch.div, torch.true_divide}
ELEMENTWISE |= {getattr(Tensor, f"__{prefix}{name}__") for prefix in ("", "r") for name in ("add", "mul", "sub")}
ELEMENTWISE |= {Tensor.add, Tensor.mul, Tensor.sub, Tensor.div, Tensor.__truediv__}


class SegmentedMode(TorchFunctionMode):
    """Within the block, functions of a network's parameters give gradients per segment, and batch-norm sees batches.

    Everything else is left to PyTorch: what treats every sample by itself needs nothing. Networks that use parameters
    in other ways than these raise an :class:`UnsupportedError`.

    Args:
        segments: the batches of the pass; inputs have their samples in this order.
        target: receives the gradients; None leaves them to autograd.
        names: the names of the parameters, for errors.
        counters: batch-norm's numbers of batches.
        defers: whether batch-norm may be computed together with what follows it. Code of the network, or a hook, that
            looks at its output would find a placeholder, so that this is for networks of known layers.
    """

    def __init__(
        self,
        segments: Segments,
        target: SegmentGradients | None,
        names: Mapping[nn.Parameter, str],
        counters: Iterable[Tensor],
        defers: bool = False,
    ) -> None:
        super().__init__()
        self._segments = segments
        self._target = target
        self._names = names if target is not None else {}
        self._parameters = set(map(id, self._names))
        self._counters = set(map(id, counters))
        self._counts: Counter[Tensor] = Counter()
        self._defers = defers
        self._deferred = DeferredTensors()

    def run(self, network: Callable[[Any], Tensor], x: Inputs) -> Tensor:
        """Return the network's output for the inputs."""
        with self:
            output = network(x)
        (resolved,), _ = self._deferred.resolved([output], {})
        if self._counts:
            torch._foreach_add_(list(self._counts), list(self._counts.values()))
        return cast(Tensor, resolved)

    def __torch_function__(
        self, func: Function, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call the function, or its segmented counterpart if it has parameters among its arguments."""
        kwargs = kwargs or {}
        if not self._deferred.is_empty:
            follows = self._deferred.follow(func, args, kwargs) if func in FOLLOWING else None
            if follows is not None:
                return follows
            args, kwargs = self._deferred.resolved(args, kwargs)
        if func in WITH_BUFFERS or self._uses_parameters(*args, *kwargs.values()):
            return LAYERS[func](self, *args, **kwargs) if func in LAYERS else self._other(func, args, kwargs)
        return func(*args, **kwargs)

    def _uses_parameters(self, *values: Any) -> bool:
        for value in values:
            if id(value) in self._parameters:
                return True
            if isinstance(value, tuple | list) and not self._parameters.isdisjoint(map(id, value)):
                return True
        return False

    # -- layers

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return segmented.linear(x, weight, bias, self._known_target)

    def _convolution(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        dimensions = weight.ndim - 2

        def several(value: int | Sequence[int]) -> list[int]:
            return [value] * dimensions if isinstance(value, int) else list(value) * (dimensions // len(value))

        if isinstance(padding, str) and padding != "valid":
            raise UnsupportedError(f"a convolution has the padding {padding!r}")
        padding = 0 if isinstance(padding, str) else padding
        options = several(stride), several(padding), several(dilation), False, [0] * dimensions, groups
        return segmented.convolution(x, weight, bias, options, self._known_target)

    def _embedding(
        self,
        tokens: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        if max_norm is not None or scale_grad_by_freq or sparse:
            raise UnsupportedError("an embedding has max_norm, scale_grad_by_freq or sparse")
        return segmented.embedding(tokens, weight, padding_idx, self._known_target)

    def _layer_norm(
        self, x: Tensor, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
    ) -> Tensor:
        return segmented.affine(functional.layer_norm(x, shape, eps=eps), weight, bias, shape, self._known_target)

    def _group_norm(self, x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
        normalised = functional.group_norm(x, groups, eps=eps)
        return segmented.affine(normalised, weight, bias, _channel_shape(x), self._known_target)

    def _batch_norm(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        running = None if running_mean is None or running_var is None else (running_mean, running_var)
        target = self._target
        if training and target is not None and weight in target and bias in target:
            compute = ImageNormalisation(x, weight, bias, running, self._batch_sizes(x), momentum, eps, target)
            if compute.has_kernels():
                return self._deferred.add(x, compute) if self._defers else compute(NOTHING)
        if training:
            normalised = normalise_batches(x, running, self._batch_sizes(x), momentum, eps)
        else:
            normalised = functional.batch_norm(x, running_mean, running_var, None, None, False, momentum, eps)
        shape = _channel_shape(x)
        if self._target is not None and (weight in self._target or bias in self._target):
            return segmented.affine(normalised, weight, bias, shape, self._target)
        scaled = normalised if weight is None else normalised * weight.view(shape)
        return scaled if bias is None else scaled + bias.view(shape)

    def _count(self, counter: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Count every batch where batch-norm counts a pass, at its end: in all layers by one kernel."""
        if id(counter) not in self._counters:
            return counter.add_(*args, **kwargs)
        self._counts[counter] += len(self._segments.sizes)
        return counter

    def _batch_sizes(self, x: Tensor) -> list[int]:
        multiple = self._segments.multiple(x)
        return [multiple * size for size in self._segments.sizes]

    # -- parameters used by themselves

    def _other(self, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function of parameters that are broadcast over samples, or that only tells something about them."""
        if func.__name__ != "__get__":
            tensors = [value for value in args if isinstance(value, Tensor)] if func in ELEMENTWISE else []
            widest = max(tensors, key=lambda tensor: tensor.ndim) if tensors else None
            args = [self._per_sample(value, widest) for value in args]
        result = func(*args, **kwargs)
        left = [value for value in _tensors((*args, *kwargs.values())) if value in self._names]
        if left and any(value.requires_grad for value in _tensors((result,))):
            raise UnsupportedError(f"the parameter {self._names[left[0]]!r} is used by {func.__name__}")
        return result

    def _per_sample(self, value: Any, widest: Tensor | None) -> Any:
        """Return parameters that are broadcast over samples once for every sample; other values as they are.

        These are parameters whose first dimension is 1, such as positions and class tokens, and those with fewer
        dimensions than the tensor that they are added to or multiplied by, such as scales.
        """
        if isinstance(value, tuple | list):
            return type(value)(self._per_sample(member, widest) for member in value)
        if not isinstance(value, nn.Parameter) or value not in self._names:
            return value
        if widest is not None and value.ndim < widest.ndim:
            shape = (*[1] * (widest.ndim - value.ndim), *value.shape)
            return segmented.per_sample(value, shape, len(widest), self._known_target)
        if value.ndim > 1 and len(value) == 1:
            return segmented.per_sample(value, value.shape, self._segments.samples, self._known_target)
        return value

    @property
    def _known_target(self) -> SegmentGradients:
        assert self._target is not None
        return self._target


LAYERS: dict[Function, Function] = {
    functional.batch_norm: SegmentedMode._batch_norm,
    Tensor.add_: SegmentedMode._count,
    functional.linear: SegmentedMode._linear,
    functional.embedding: SegmentedMode._embedding,
    functional.layer_norm: SegmentedMode._layer_norm,
    functional.group_norm: SegmentedMode._group_norm,
    functional.conv1d: SegmentedMode._convolution,
    functional.conv2d: SegmentedMode._convolution,
    functional.conv3d: SegmentedMode._convolution,
}
"""Functions of layers, and the methods that compute them by segments."""

WITH_BUFFERS = {functional.batch_norm, Tensor.add_}
"""Those that are computed so whether they have parameters or not."""


def _channel_shape(x: Tensor) -> tuple[int, ...]:
    return (x.shape[1], *[1] * (x.ndim - 2))


def _tensors(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors among values, and among the members of tuples and lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from (member for member in value if isinstance(member, Tensor))
