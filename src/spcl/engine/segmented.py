"""A pass of a network over a joint batch whose backward pass gives one gradient per segment."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from spcl.batches import Inputs
from spcl.engine import layers
from spcl.engine.layers import NOTHING, Followers, ImageNormalisation, normalise_batches
from spcl.engine.segments import SegmentGradients, Segments, UnsupportedError

Function = Callable[..., Any]

ELEMENTWISE = {torch.add, torch.mul, torch.sub, torch.div, torch.true_divide}
ELEMENTWISE |= {getattr(Tensor, f"__{prefix}{name}__") for prefix in ("", "r") for name in ("add", "mul", "sub")}
ELEMENTWISE |= {Tensor.add, Tensor.mul, Tensor.sub, Tensor.div, Tensor.__truediv__}


class SegmentedMode(TorchFunctionMode):
    """Replaces the functions of layers by versions that give one gradient per segment, and one normalisation per batch.

    Functions without parameters, which must treat every sample by itself, are left to PyTorch. A function that uses
    parameters in an unknown way raises an :class:`UnsupportedError`.

    Args:
        segments: the batches and segments of the joint batch, in the order of its samples.
        target: receives the gradients; None leaves gradients to autograd.
        names: the names of the parameters, for errors.
        counters: the ``num_batches_tracked`` of batch-norm layers.
        defers: whether batch-norm may be computed together with the functions that follow it. Only for networks of
            known layers: a hook, or other code that reads the output of a batch-norm layer, would find a placeholder.
        others: parameters of the network whose gradients are left to autograd; a function that uses one of them
            together with a parameter of the target is unknown.
    """

    def __init__(
        self,
        segments: Segments,
        target: SegmentGradients | None,
        names: Mapping[nn.Parameter, str],
        counters: Iterable[Tensor],
        defers: bool = False,
        others: Iterable[nn.Parameter] = (),
    ) -> None:
        super().__init__()
        self._others = set(map(id, others))
        self._segments = segments
        self._target = target
        self._names = names if target is not None else {}
        self._parameters = set(map(id, self._names))
        self._counters = set(map(id, counters))
        self._counts: Counter[Tensor] = Counter()
        self._defers = defers
        self._deferred = DeferredTensors()

    def run(self, network: Callable[[Any], Tensor], x: Inputs) -> Tensor:
        """Run the network on the inputs of the joint batch; return its output."""
        with self:
            output = network(x)
        (resolved,), _ = self._deferred.resolved([output], {})
        if self._counts:
            torch._foreach_add_(list(self._counts), list(self._counts.values()))
        return cast(Tensor, resolved)

    def __torch_function__(
        self, func: Function, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call the function, or its segmented version if it has parameters among its arguments."""
        kwargs = kwargs or {}
        if not self._deferred.is_empty:
            follows = self._deferred.follow(func, args, kwargs) if func in FOLLOWING else None
            if follows is not None:
                return follows
            args, kwargs = self._deferred.resolved(args, kwargs)
        if func in WITH_BUFFERS or self._uses_parameters(*args, *kwargs.values()):
            if self._others and self._target is not None and self._uses(self._others, *args, *kwargs.values()):
                raise UnsupportedError(f"{func.__name__} uses shared parameters together with a source's own")
            return LAYERS[func](self, *args, **kwargs) if func in LAYERS else self._other(func, args, kwargs)
        return func(*args, **kwargs)

    def _uses_parameters(self, *values: Any) -> bool:
        return self._uses(self._parameters, *values)

    @staticmethod
    def _uses(parameters: set[int], *values: Any) -> bool:
        for value in values:
            if id(value) in parameters:
                return True
            if isinstance(value, tuple | list) and not parameters.isdisjoint(map(id, value)):
                return True
        return False

    # -- layers

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return layers.linear(x, weight, bias, self._known_target)

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
        options = layers.ConvolutionOptions(
            several(stride),
            several(padding),
            several(dilation),
            transposed=False,
            output_padding=[0] * dimensions,
            groups=groups,
        )
        return layers.convolution(x, weight, bias, options, self._known_target)

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
        return layers.embedding(tokens, weight, padding_idx, self._known_target)

    def _layer_norm(
        self, x: Tensor, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
    ) -> Tensor:
        return layers.affine(functional.layer_norm(x, shape, eps=eps), weight, bias, shape, self._known_target)

    def _group_norm(self, x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
        normalised = functional.group_norm(x, groups, eps=eps)
        return layers.affine(normalised, weight, bias, _channel_shape(x), self._known_target)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        width: int,
        heads: int,
        in_weight: Tensor | None,
        in_bias: Tensor | None,
        bias_k: Tensor | None,
        bias_v: Tensor | None,
        add_zero_attn: bool,
        dropout_p: float,
        out_weight: Tensor,
        out_bias: Tensor | None,
        training: bool = True,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute ``nn.MultiheadAttention`` of a sequence with itself; sequences are tokens × samples × width."""
        is_plain = bias_k is None and bias_v is None and not add_zero_attn and query.ndim == 3
        if not is_plain or in_weight is None or not query is key is value or others.get("static_k") is not None:
            raise UnsupportedError("nn.MultiheadAttention is not of a sequence with itself, or has options")
        tokens, samples, _ = query.shape
        projected = self._linear(query.transpose(0, 1), in_weight, in_bias)
        queries, keys, values = projected.view(samples, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
        mask = _additive(key_padding_mask, attn_mask, samples, queries)
        if not need_weights:
            dropped = dropout_p if training else 0.0
            attended = functional.scaled_dot_product_attention(queries, keys, values, mask, dropped)
            return self._joined_heads(attended, out_weight, out_bias), None
        scores = queries @ keys.transpose(2, 3) * (width // heads) ** -0.5
        weights = functional.dropout((scores if mask is None else scores + mask).softmax(dim=3), dropout_p, training)
        shown = weights.mean(dim=1) if others.get("average_attn_weights", True) else weights
        return self._joined_heads(weights @ values, out_weight, out_bias), shown

    def _joined_heads(self, attended: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Project what the heads attended to, samples × heads × tokens × width, to tokens × samples × width."""
        return self._linear(attended.transpose(1, 2).flatten(2), weight, bias).transpose(0, 1)

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
            return layers.affine(normalised, weight, bias, shape, self._target)
        scaled = normalised if weight is None else normalised * weight.view(shape)
        return scaled if bias is None else scaled + bias.view(shape)

    def _count(self, counter: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Note that a batch-norm layer counts its batches; :meth:`run` adds the counts of all layers at once."""
        if id(counter) not in self._counters:
            return counter.add_(*args, **kwargs)
        self._counts[counter] += len(self._segments.sizes)
        return counter

    def _batch_sizes(self, x: Tensor) -> list[int]:
        multiple = self._segments.multiple(x)
        return [multiple * size for size in self._segments.sizes]

    # -- parameters used by themselves

    def _other(self, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function that broadcasts parameters over samples, or only reads their properties, like ``size``."""
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
        """Return a parameter that is broadcast over samples as one copy per sample; return other values unchanged.

        A parameter is broadcast if its first dimension is 1, like a class token, or if it has fewer dimensions than
        ``widest``, the tensor to which it is added or by which it is multiplied, like a scale.
        """
        if isinstance(value, tuple | list):
            return type(value)(self._per_sample(member, widest) for member in value)
        if not isinstance(value, nn.Parameter) or value not in self._names:
            return value
        if widest is not None and value.ndim < widest.ndim:
            shape = (*[1] * (widest.ndim - value.ndim), *value.shape)
            return layers.per_sample(value, shape, len(widest), self._known_target)
        if value.ndim > 1 and len(value) == 1:
            return layers.per_sample(value, value.shape, self._segments.samples, self._known_target)
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
    functional.multi_head_attention_forward: SegmentedMode._attention,
}
"""Functions of layers, and the methods that compute them segment by segment."""

WITH_BUFFERS = {functional.batch_norm, Tensor.add_}
"""Functions that change buffers: they are replaced even without parameters."""


def _additive(padding: Tensor | None, mask: Tensor | None, samples: int, queries: Tensor) -> Tensor | None:
    """Return masks of attention as one that is added to scores: −∞ where a mask of booleans is true."""
    shaped = [] if padding is None else [padding[:, None, None, :]]
    if mask is not None:
        shaped.append(mask if mask.ndim == 2 else mask.view(samples, -1, *mask.shape[1:]))
    added: Tensor | None = None
    for each in shaped:
        numbers = queries.new_zeros(each.shape).masked_fill(each, -torch.inf) if each.dtype == torch.bool else each
        added = numbers if added is None else added + numbers
    return added


def _channel_shape(x: Tensor) -> tuple[int, ...]:
    return (x.shape[1], *[1] * (x.ndim - 2))


def _tensors(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors among values, and among the members of tuples and lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from (member for member in value if isinstance(member, Tensor))


# -- deferred tensors

Compute = Callable[[Followers], Tensor]
"""Computes a deferred tensor together with the functions that follow it."""

IN_PLACE = {torch.relu_, Tensor.relu_, Tensor.__iadd__, Tensor.add_}
RELUS = {functional.relu, torch.relu, Tensor.relu, torch.relu_, Tensor.relu_}
ADDITIONS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__}
POOLS = {functional.max_pool2d}
FOLLOWING = RELUS | ADDITIONS | POOLS
"""Functions that can be computed together with their deferred argument."""


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A deferred tensor, not computed yet; before its followers it has the shape and type of ``images``."""

    placeholder: Tensor
    images: Tensor
    compute: Compute
    followers: Followers


class DeferredTensors:
    """Placeholders for tensors that are computed when they are used, together with the functions that follow.

    An addition, ReLU and max-pooling that follow directly become part of the computation; any other use starts it. All
    function calls must pass through :meth:`follow` and :meth:`resolved`, as in a ``TorchFunctionMode``.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}
        self._known: dict[int, tuple[Tensor, Tensor | None]] = {}

    def add(self, images: Tensor, compute: Compute) -> Tensor:
        """Return a placeholder for a tensor of the images' shape and type."""
        return self._wait(_Waiting(images.new_empty(0), images, compute, NOTHING))

    @property
    def is_empty(self) -> bool:
        """Whether there are no placeholders."""
        return not (self._waiting or self._known)

    def follow(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return a placeholder for the function's result, or None if it cannot be computed with a deferred tensor."""
        if function in ADDITIONS:
            return self._follow_by_addition(function, args, kwargs)
        waiting = self._waiting.get(id(args[0])) if args else None
        if waiting is None or waiting.followers.pool:
            return None
        if function in RELUS and len(args) == 1:
            in_place = function in IN_PLACE or kwargs.get("inplace", False)
            return self._extend(waiting, in_place, relu=True)
        is_plain = waiting.followers.relu and waiting.followers.addend is None
        if function in POOLS and is_plain and _halves(waiting.images, *args[1:], **kwargs):
            return self._extend(waiting, in_place=False, pool=True)
        return None

    def _follow_by_addition(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor | None:
        if len(args) != 2 or kwargs or args[0] is args[1]:
            return None
        for one, other in (args, args[::-1]):
            waiting = self._waiting.get(id(one))
            if waiting is None or waiting.followers is not NOTHING or (function in IN_PLACE and one is not args[0]):
                continue
            addend = self._value(other)
            if isinstance(addend, Tensor) and (addend.shape, addend.dtype) == (
                waiting.images.shape,
                waiting.images.dtype,
            ):
                return self._extend(waiting, function in IN_PLACE, addend=addend)
        return None

    def _extend(self, waiting: _Waiting, in_place: bool, **changes: Any) -> Tensor:
        """Return a placeholder for the tensor with one more follower.

        If the follower works in place, the old placeholder stands for the new one; else it must not be used again.
        """
        old = waiting.placeholder
        followers = replace(waiting.followers, **changes)
        result = self._wait(_Waiting(old.new_empty(0), waiting.images, waiting.compute, followers))
        del self._waiting[id(old)]
        self._known[id(old)] = old, result if in_place else None
        return result

    def _wait(self, waiting: _Waiting) -> Tensor:
        self._waiting[id(waiting.placeholder)] = waiting
        return waiting.placeholder

    def resolved(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return arguments in which computed tensors replace placeholders."""
        if self.is_empty:
            return args, dict(kwargs)
        return [self._value(each) for each in args], {name: self._value(each) for name, each in kwargs.items()}

    def _value(self, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(self._value, value))
        if (waiting := self._waiting.pop(id(value), None)) is not None:
            self._known[id(value)] = waiting.placeholder, waiting.compute(waiting.followers)
        if id(value) not in self._known:
            return value
        known = self._known[id(value)][1]
        if known is None:
            raise UnsupportedError(
                "the output of a batch-norm layer is used again after a function that is computed together with it"
            )
        return self._value(known)


def _halves(
    images: Tensor,
    kernel_size: Any = None,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> bool:
    """Return whether a max-pooling with these arguments keeps the largest of every 2×2 pixels of even-sided images."""
    is_plain = padding in (0, (0, 0)) and dilation in (1, (1, 1)) and not return_indices
    is_halving = kernel_size in (2, (2, 2)) and stride in (None, 2, (2, 2))
    return is_plain and is_halving and images.shape[2] % 2 == 0 and images.shape[3] % 2 == 0
