"""Differentiable functions of parameters whose backward pass gives a gradient per segment of the batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from spcl.engine import segmented_convolution
from spcl.engine.segments import SegmentGradients
from spcl.engine.side_streams import SideStreams

Parameters = tuple[Any, Any]
"""Weight and bias; in a tuple autograd does not follow them: their gradients go to the segments."""

__all__ = ["affine", "convolution", "embedding", "linear", "per_sample"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, target: SegmentGradients) -> Tensor:
    """Return ``x weightᵀ + bias``."""
    return _Linear.apply(x, (weight, bias), target, target.follow(weight, bias))  # type: ignore[no-any-return, no-untyped-call]


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, options: tuple[Any, ...], target: SegmentGradients
) -> Tensor:
    """Return a convolution; the options are those of ``torch.ops.aten.convolution`` after the bias."""
    return _Convolution.apply(x, (weight, bias), options, target, target.follow(weight, bias))  # type: ignore[no-any-return, no-untyped-call]


def affine(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int], target: SegmentGradients
) -> Tensor:
    """Return ``x · weight + bias``, both of which are viewed in this shape."""
    return _Affine.apply(x, (weight, bias), shape, target, target.follow(weight, bias))  # type: ignore[no-any-return, no-untyped-call]


def embedding(tokens: Tensor, weight: Tensor, padding_idx: int | None, target: SegmentGradients) -> Tensor:
    """Return the rows of the weight that the tokens select."""
    return _Embedding.apply(tokens, (weight,), padding_idx, target, target.follow(weight))  # type: ignore[no-any-return, no-untyped-call]


def per_sample(parameter: Tensor, shape: Sequence[int], count: int, target: SegmentGradients) -> Tensor:
    """Return a parameter, viewed in a shape that begins with 1, once for each of ``count`` samples."""
    return _PerSample.apply((parameter,), shape, count, target, target.follow(parameter))  # type: ignore[no-any-return, no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parameters: Parameters, target: SegmentGradients, anchor: Tensor) -> Any:
        weight, bias = parameters
        ctx.dtype, (x, value) = x.dtype, _as_autocast(x, weight, target)
        # as PyTorch does, for activation checkpoints
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
        ctx: Any, x: Tensor, parameters: Parameters, options: Any, target: SegmentGradients, anchor: Tensor
    ) -> Any:
        weight, bias = parameters
        ctx.dtype, (x, value) = x.dtype, _as_autocast(x, weight, target)
        ctx.save_for_backward(x, value)
        ctx.weight, ctx.bias, ctx.options, ctx.target = weight, bias, options, target
        return segmented_convolution.forward(x, value, None if bias is None else bias.to(x.dtype), options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, value), target, found = ctx.saved_tensors, ctx.target, None
        with SideStreams(x.device) as streams:
            if ctx.weight in target:
                segmented_convolution.add_weight_gradients(x, gradient, ctx.weight, value, ctx.options, target, streams)
            if ctx.needs_input_grad[0]:
                found = segmented_convolution.input_gradient(x, gradient, value, ctx.options).to(ctx.dtype)
        target.add_sums(ctx.bias, gradient, (gradient.shape[1], *[1] * (gradient.ndim - 2)))
        return found, None, None, None, None


def _as_autocast(x: Tensor, weight: Tensor, target: SegmentGradients) -> tuple[Tensor, Tensor]:
    """Return inputs and weight in the type in which products are computed now."""
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
