"""The explicit matrix of a convolution."""

from collections.abc import Sequence
from itertools import product
from math import prod

from torch import Tensor

from spcl.errors import SpclError

Steps = int | Sequence[int]


def toeplitz_matrix(
    kernel: Tensor, input_size: Sequence[int], stride: Steps = 1, dilation: Steps = 1, groups: int = 1
) -> Tensor:
    """Return the doubly-block Toeplitz matrix 𝓜 of a convolution without padding: vec(Y) = 𝓜 vec(X) (paper, §A.2).

    It has N×C blocks, one per pair of channels, for any number of spatial dimensions. For study and tests only.

    Args:
        kernel: The weight of the convolution, N × C/groups × taps.
        input_size: The spatial size of the input.
        stride: As in `torch.nn.Conv2d`: one number, or one per dimension; likewise `dilation`.
        dilation: As in `torch.nn.Conv2d`.
        groups: As in `torch.nn.Conv2d`.

    >>> import torch
    >>> toeplitz_matrix(torch.tensor([[[1.0, 2.0]]]), [4])
    tensor([[1., 2., 0., 0.],
            [0., 1., 2., 0.],
            [0., 0., 1., 2.]])
    >>> toeplitz_matrix(torch.tensor([[[1.0, 2.0]]]), [4], stride=2)
    tensor([[1., 2., 0., 0.],
            [0., 0., 1., 2.]])
    """
    filters, channels, *taps = kernel.shape
    steps, gaps = _per_dimension(stride, len(taps)), _per_dimension(dilation, len(taps))
    spans = [gap * (size - 1) + 1 for gap, size in zip(gaps, taps, strict=True)]
    if len(input_size) != len(taps) or any(n < span for n, span in zip(input_size, spans, strict=True)):
        raise SpclError(
            f"input_size is {tuple(input_size)}, but the kernel spans {tuple(spans)}; choose an input at least as large"
        )
    output_size = [(n - span) // step + 1 for n, span, step in zip(input_size, spans, steps, strict=True)]
    matrix = kernel.new_zeros(filters, *output_size, channels * groups, *input_size)
    for output in product(*map(range, output_size)):
        window = [slice(o * s, o * s + span, gap) for o, s, span, gap in zip(output, steps, spans, gaps, strict=True)]
        for group in range(groups):
            rows = slice(group * filters // groups, (group + 1) * filters // groups)
            columns = slice(group * channels, (group + 1) * channels)
            block: tuple[int | slice, ...] = (rows, *output, columns, *window)
            matrix[block] = kernel[rows]
    return matrix.view(filters * prod(output_size), -1)


def _per_dimension(steps: Steps, dimensions: int) -> Sequence[int]:
    return [steps] * dimensions if isinstance(steps, int) else steps
