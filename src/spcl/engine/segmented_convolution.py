"""Convolutions of a joint batch whose weight gradient is computed for every segment."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spcl.engine.kernel_support import MOST_NUMBERS, has_kernels
from spcl.engine.segments import SegmentGradients
from spcl.engine.side_streams import SideStreams

__all__ = ["add_weight_gradients", "forward", "input_gradient"]

Options = tuple[Any, ...]
"""Those of ``torch.ops.aten.convolution`` after the bias: stride, padding, dilation, …, groups."""

ALL = slice(None)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """Return the convolution."""
    if bias is None and _supports(x, weight, options):
        from spcl.engine.kernels import convolution

        if convolution.has_few_columns(weight):
            with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # where Triton launches kernels
                return convolution.convolve(x, weight, convolution.Geometry.of(x, weight, options))
    return torch.ops.aten.convolution(x, weight, bias, *options)  # type: ignore[no-any-return]


def input_gradient(x: Tensor, gradient: Tensor, weight: Tensor, options: Options) -> Tensor:
    """Return the gradient of the inputs."""
    return _backward(gradient, x, weight, options, (True, False, False))[0]


def add_weight_gradients(
    x: Tensor,
    gradient: Tensor,
    parameter: nn.Parameter,
    weight: Tensor,
    options: Options,
    target: SegmentGradients,
    streams: SideStreams,
) -> None:
    """Add the weight gradient of every segment to those of the parameter; the weight is in the type of the inputs."""
    segments = target.segments
    block = target.claim_rows(parameter) if _supports(x, parameter, options) else None
    if block is not None:
        from spcl.engine.kernels.convolution import Geometry, write_weight_gradients

        geometry = Geometry.of(x, weight, options)
        streams.run(partial(write_weight_gradients, x, gradient, geometry, segments, block))
        return

    def of_segment(gradient: Tensor, x: Tensor, part: slice = ALL) -> Tensor:
        return _backward(gradient[:, part], x, weight[part], options, (False, True, False))[1]

    parts = zip(segments.split(gradient), segments.split(x), strict=True)
    target.add_from(parameter, [partial(of_segment, *part) for part in parts], streams, separable=options[-1] == 1)


def _supports(x: Tensor, weight: Tensor, options: Options) -> bool:
    """Return whether there are kernels: for images of half precision and filters whose channels come last."""
    if not has_kernels(x) or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    from spcl.engine.kernels.convolution import Geometry

    geometry = Geometry.of(x, weight, options)
    is_valid = options[-1] == 1 and weight.shape[1] == x.shape[1] and min(geometry.result) > 0
    is_small = len(x) * geometry.pixels * geometry.filters < MOST_NUMBERS
    return is_valid and is_small and weight.is_contiguous(memory_format=torch.channels_last)


def _backward(
    gradient: Tensor, x: Tensor, weight: Tensor, options: Options, mask: tuple[bool, ...]
) -> Sequence[Tensor]:
    return torch.ops.aten.convolution_backward(gradient, x, weight, None, *options, mask)  # type: ignore[no-any-return]
