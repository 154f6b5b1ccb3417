"""The layers of a network on a joint batch: autograd functions whose backward pass gives one gradient per segment.

On a GPU with Triton, convolutions and batch-norm of images have kernels of their own (``spcl.engine.kernels``).
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from spcl.engine.segments import SegmentGradients, SideStreams

Parameters = tuple[Any, Any]
"""Weight and bias, in a tuple so that autograd ignores them: their gradients go to :class:`SegmentGradients`."""


class ConvolutionOptions(NamedTuple):
    """The arguments of ``torch.ops.aten.convolution`` after the bias."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, target: SegmentGradients) -> Tensor:
    """Return ``x weightᵀ + bias``."""
    return _Linear.apply(x, (weight, bias), target, target.follow(weight, bias))  # type: ignore[no-any-return, no-untyped-call]


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, options: ConvolutionOptions, target: SegmentGradients
) -> Tensor:
    """Return a convolution."""
    return _Convolution.apply(x, (weight, bias), options, target, target.follow(weight, bias))  # type: ignore[no-any-return, no-untyped-call]


def affine(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int], target: SegmentGradients
) -> Tensor:
    """Return ``x · weight + bias``, with weight and bias viewed in ``shape``."""
    return _Affine.apply(x, (weight, bias), shape, target, target.follow(weight, bias))  # type: ignore[no-any-return, no-untyped-call]


def embedding(tokens: Tensor, weight: Tensor, padding_idx: int | None, target: SegmentGradients) -> Tensor:
    """Return the rows of the weight that the tokens select."""
    return _Embedding.apply(tokens, (weight,), padding_idx, target, target.follow(weight))  # type: ignore[no-any-return, no-untyped-call]


def per_sample(parameter: Tensor, shape: Sequence[int], count: int, target: SegmentGradients) -> Tensor:
    """Return ``count`` copies of a parameter, one per sample; it is viewed in ``shape``, which begins with 1."""
    return _PerSample.apply((parameter,), shape, count, target, target.follow(parameter))  # type: ignore[no-any-return, no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parameters: Parameters, target: SegmentGradients, anchor: Tensor) -> Any:
        weight, bias = parameters
        ctx.dtype, (x, value) = x.dtype, _as_autocast(x, weight, target)
        # without the weight where no gradient of x is needed: activation checkpoints compare what PyTorch saves
        ctx.save_for_backward(x, *([value] if ctx.needs_input_grad[0] else []))
        ctx.weight, ctx.bias, ctx.target = weight, bias, target
        return functional.linear(x, value, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *value = ctx.saved_tensors
        left, right = (gradient, x) if x.ndim == 2 else (gradient.flatten(0, -2), x.flatten(0, -2))
        ctx.target.add_products(ctx.weight, left, right)
        ctx.target.add_sums(ctx.bias, gradient, gradient.shape[-1:])
        return gradient.matmul(*value).to(ctx.dtype) if value else None, None, None, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        parameters: Parameters,
        options: ConvolutionOptions,
        target: SegmentGradients,
        anchor: Tensor,
    ) -> Any:
        weight, bias = parameters
        ctx.dtype, (x, value) = x.dtype, _as_autocast(x, weight, target)
        ctx.save_for_backward(x, value)
        ctx.weight, ctx.bias, ctx.options, ctx.target = weight, bias, options, target
        return _convolve(x, value, None if bias is None else bias.to(x.dtype), options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, value), target, found = ctx.saved_tensors, ctx.target, None
        with SideStreams(x.device) as streams:
            if ctx.weight in target:
                _add_weight_gradients(x, gradient, ctx.weight, value, ctx.options, target, streams)
            if ctx.needs_input_grad[0]:
                found = _convolution_backward(gradient, x, value, ctx.options, (True, False, False))[0].to(ctx.dtype)
        target.add_sums(ctx.bias, gradient, (gradient.shape[1], *[1] * (gradient.ndim - 2)))
        return found, None, None, None, None


def _as_autocast(x: Tensor, weight: Tensor, target: SegmentGradients) -> tuple[Tensor, Tensor]:
    """Return inputs and weight in the type of autocast, or in the type of the inputs without autocast."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x, weight.to(x.dtype)
    lower = torch.get_autocast_dtype(device)
    return x.to(lower), target.converted(weight, lower)


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, parameters: Parameters, shape: Sequence[int], target: SegmentGradients, anchor: Tensor
    ) -> Tensor:
        weight, bias = parameters
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.shape, ctx.target = weight, bias, shape, target
        scaled = x if weight is None else x * weight.view(shape)
        return scaled if bias is None else scaled + bias.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,), target = ctx.saved_tensors, ctx.target
        if ctx.weight in target:
            target.add_sums(ctx.weight, gradient * x, ctx.shape)
        target.add_sums(ctx.bias, gradient, ctx.shape)
        return gradient if ctx.weight is None else gradient * ctx.weight.view(ctx.shape), None, None, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, parameters: Any, padding_idx: int | None, target: SegmentGradients, anchor: Tensor
    ) -> Tensor:
        (weight,) = parameters
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.padding_idx, ctx.target = weight, padding_idx, target
        return functional.embedding(tokens, weight, padding_idx)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        tokens, values = tokens.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
        if ctx.padding_idx is not None:
            values = values.masked_fill((tokens == ctx.padding_idx).unsqueeze(1), 0.0)
        ctx.target.add_at(ctx.weight, tokens, values)
        return None, None, None, None, None


class _PerSample(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parameters: Any, shape: Sequence[int], count: int, target: SegmentGradients, anchor: Tensor
    ) -> Tensor:
        (parameter,) = parameters
        ctx.parameter, ctx.shape, ctx.target = parameter, shape, target
        expanded: Tensor = parameter.detach().view(shape).expand(count, *shape[1:])
        return expanded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.target.add_sums(ctx.parameter, gradient, ctx.shape)
        return None, None, None, None, None


ALL = slice(None)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, options: ConvolutionOptions) -> Tensor:
    """Compute a convolution; filters with few weights have a kernel of their own on a GPU."""
    if bias is None and _has_convolution_kernels(x, weight, options):
        from spcl.engine.kernels.convolution import Geometry, convolve, has_few_columns

        if has_few_columns(weight):
            with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # where Triton launches kernels
                return convolve(x, weight, Geometry.of(x, weight, options))
    return torch.ops.aten.convolution(x, weight, bias, *options)  # type: ignore[no-any-return]


def _add_weight_gradients(
    x: Tensor,
    gradient: Tensor,
    parameter: nn.Parameter,
    weight: Tensor,
    options: ConvolutionOptions,
    target: SegmentGradients,
    streams: SideStreams,
) -> None:
    """Add the weight gradient of every segment; ``weight`` is the parameter in the type of the inputs."""
    segments = target.segments
    block = target.claim_rows(parameter) if _has_convolution_kernels(x, parameter, options) else None
    if block is not None:
        from spcl.engine.kernels.convolution import Geometry, write_weight_gradients

        geometry = Geometry.of(x, weight, options)
        streams.run(partial(write_weight_gradients, x, gradient, geometry, segments, block))
        return

    def of_segment(gradient: Tensor, x: Tensor, part: slice = ALL) -> Tensor:
        return _convolution_backward(gradient[:, part], x, weight[part], options, (False, True, False))[1]

    parts = zip(segments.split(gradient), segments.split(x), strict=True)
    works = [partial(of_segment, of_result, inputs) for of_result, inputs in parts]
    target.add_from(parameter, works, streams, separable=options.groups == 1)


def _has_convolution_kernels(x: Tensor, weight: Tensor, options: ConvolutionOptions) -> bool:
    """Return whether there are kernels: for images in half precision and filters in channels-last format."""
    if not has_kernels(x) or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    from spcl.engine.kernels.convolution import Geometry

    geometry = Geometry.of(x, weight, options)
    is_valid = options.groups == 1 and weight.shape[1] == x.shape[1] and min(geometry.result) > 0
    is_small = len(x) * geometry.pixels * geometry.filters < MOST_NUMBERS
    return is_valid and is_small and weight.is_contiguous(memory_format=torch.channels_last)


def _convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, options: ConvolutionOptions, mask: tuple[bool, ...]
) -> Sequence[Tensor]:
    return torch.ops.aten.convolution_backward(gradient, x, weight, None, *options, mask)  # type: ignore[no-any-return]


TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types of images that the kernels normalise; they compute in float32."""


def normalise_batches(
    x: Tensor, running: tuple[Tensor, Tensor] | None, sizes: Sequence[int], momentum: float, eps: float
) -> Tensor:
    """Normalise every batch by its mean and variance; update the running averages batch after batch.

    >>> x = torch.tensor([[1.0], [3.0], [10.0], [30.0]])
    >>> mean, variance = torch.zeros(1), torch.ones(1)
    >>> normalise_batches(x, (mean, variance), (2, 2), momentum=0.5, eps=1e-9).T
    tensor([[-1.,  1., -1.,  1.]])
    >>> mean, variance
    (tensor([10.5000]), tensor([100.7500]))
    """
    mean, variance = running or (None, None)
    parts = torch.split_with_sizes(x, list(sizes))
    return torch.cat([functional.batch_norm(part, mean, variance, None, None, True, momentum, eps) for part in parts])


@dataclass(frozen=True, eq=False)
class Followers:
    """The functions computed together with batch-norm: an addition, then ReLU, then max-pooling.

    Attributes:
        addend: a tensor of the same shape to add, or None.
        relu: whether ReLU follows.
        pool: whether 2×2 max-pooling follows.
    """

    addend: Tensor | None = None
    relu: bool = False
    pool: bool = False


NOTHING = Followers()
"""No function follows."""


@dataclass(frozen=True, eq=False)
class ImageNormalisation:
    """Batch-norm of the images of several batches by few kernels on a GPU, with the functions that follow it.

    Attributes:
        x: the images.
        weight, bias: the parameters of the layer.
        running: running mean and variance, or None.
        sizes: the number of images of every batch.
        momentum, eps: the options of the layer.
        target: receives the gradients of weight and bias.
    """

    x: Tensor
    weight: Any
    bias: Any
    running: tuple[Tensor, Tensor] | None
    sizes: Sequence[int]
    momentum: float
    eps: float
    target: SegmentGradients

    def __call__(self, followers: Followers) -> Tensor:
        """Compute batch-norm and its followers."""
        from spcl.engine.kernels.batch_norm import BatchNorm, BatchNormOptions

        options = BatchNormOptions(
            sizes=tuple(self.sizes),
            momentum=self.momentum,
            eps=self.eps,
            relu=followers.relu,
            pool=followers.pool,
            add_gradients=partial(_add_gradients, self.target, self.weight, self.bias),  # a method would hold x
            tables=self.target.segments.tables,
        )
        anchor = self.target.follow(self.weight, self.bias)
        parameters = self.weight, self.bias
        with torch.cuda.device_of(self.x):  # type: ignore[no-untyped-call]  # where Triton launches kernels
            return BatchNorm.apply(self.x, followers.addend, parameters, self.running, options, anchor)  # type: ignore[no-any-return, no-untyped-call]

    def has_kernels(self) -> bool:
        """Return whether kernels can compute it: parameters are contiguous, and batches have more than one pixel."""
        x, vectors = self.x, [self.weight, self.bias, *(self.running or ())]
        is_fit = all(vector.is_contiguous() and vector.shape == x.shape[1:2] for vector in vectors)
        return is_fit and has_kernels(x) and x.dtype in TYPES and min(self.sizes) * x.shape[2] * x.shape[3] > 1


def _add_gradients(target: SegmentGradients, weight: Any, bias: Any, of_weight: Tensor, of_bias: Tensor) -> None:
    target.add_by_batch(weight, of_weight)
    target.add_by_batch(bias, of_bias)


# -- whether there are kernels

DEVICES = {"cuda"}
"""Types of devices that run Triton kernels."""

MOST_NUMBERS = 2**31 - 2**10
"""The most entries of a tensor: kernels index entries, and a few beyond the end, with 32 bits."""


def has_kernels(x: Tensor) -> bool:
    """Return whether kernels can work on these images: on a GPU, if Triton is installed and works."""
    return x.device.type in DEVICES and x.ndim == 4 and 0 < x.numel() < MOST_NUMBERS and _triton_works(x.device)


@cache
def _triton_works(device: torch.device) -> bool:
    """Return whether Triton can compile kernels for a device; warn once if it cannot."""
    if find_spec("triton") is None:
        return False
    from spcl.engine.kernels.chunks import launch_first

    try:
        launch_first(device)
    except Exception as error:  # raised by Triton, the compiler or the driver
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        warnings.warn(
            f"Triton cannot compile kernels ({reason}), so PyTorch's slower kernels are used; install a C compiler and "
            "Python's headers",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True
