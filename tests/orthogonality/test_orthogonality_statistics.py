"""Filter statistics against plain loops, and the Toeplitz matrix against PyTorch's convolutions."""

from math import inf, isnan

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import block_diag
from torch import nn
from torch.nn.functional import conv1d, conv2d, conv3d

from spcl.errors import SpclError
from spcl.orthogonality import filter_statistics, toeplitz_matrix


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 5, 3),
        nn.Conv1d(4, 6, 2, groups=2),
        nn.Conv2d(4, 8, 1, groups=4),
        nn.Linear(3, 7),
        nn.ConvTranspose2d(4, 2, 3),
        nn.ConvTranspose2d(4, 6, 3, groups=2),
    ],
    ids=repr,
)
def test_statistics_equal_plain_loops(layer: nn.Module) -> None:
    weight, groups = layer.weight.detach().double().flatten(1).numpy(), getattr(layer, "groups", 1)
    filters = block_diag(*np.split(weight, groups))
    cosines = [
        abs(a @ b) / (np.linalg.norm(a) * np.linalg.norm(b)) for i, a in enumerate(filters) for b in filters[i + 1 :]
    ]
    (found,) = filter_statistics(layer).values()
    assert found.condition_number == pytest.approx(np.linalg.cond(filters))
    assert found.norm == pytest.approx(np.linalg.norm(filters, 2))
    assert found.correlation == pytest.approx(sum(cosines) / (len(filters) * (len(filters) - 1)))


def statistics_of(weight: torch.Tensor) -> tuple[float, float, float]:
    layer = nn.Linear(*weight.shape[::-1])
    layer.weight = nn.Parameter(weight)
    found = filter_statistics(layer)[""]
    return found.condition_number, found.norm, found.correlation


def test_identity_convolution_is_orthogonal() -> None:
    layer = nn.Conv2d(4, 4, 1, groups=4)
    nn.init.ones_(layer.weight)
    (found,) = filter_statistics(layer).values()
    assert (found.condition_number, found.norm, found.correlation) == (1, 1, 0)


def test_statistics_of_extreme_kernels() -> None:
    assert statistics_of(torch.eye(4)[:3]) == (1, 1, 0)
    assert statistics_of(torch.ones(4, 3)) == (inf, pytest.approx(12**0.5), pytest.approx(0.5))
    assert statistics_of(torch.zeros(3, 2)) == (inf, 0, 0)
    assert statistics_of(torch.tensor([[3.0, 4.0]])) == (1, pytest.approx(5), 0)
    assert all(map(isnan, statistics_of(torch.tensor([[1.0, torch.nan]]))))


@given(data=st.data(), dimensions=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_toeplitz_matrix_is_the_convolution(data: st.DataObject, dimensions: int) -> None:
    def several(least: int, most: int) -> list[int]:
        return [data.draw(st.integers(least, most)) for _ in range(dimensions)]

    groups, filters, channels = several(1, 2)[0], *(data.draw(st.integers(1, 2)) for _ in range(2))
    taps, stride, dilation = several(1, 3), several(1, 3), several(1, 2)
    size = [d * (k - 1) + 1 + extra for d, k, extra in zip(dilation, taps, several(0, 3), strict=True)]
    kernel = torch.randn(groups * filters, channels, *taps, dtype=torch.float64)
    x = torch.randn(groups * channels, *size, dtype=torch.float64)
    convolve = (conv1d, conv2d, conv3d)[dimensions - 1]
    expected = convolve(x, kernel, stride=stride, dilation=dilation, groups=groups)
    matrix = toeplitz_matrix(kernel, size, stride, dilation, groups)
    torch.testing.assert_close(matrix @ x.flatten(), expected.flatten())


@pytest.mark.parametrize("size", [(2, 5), (5,)])
def test_toeplitz_matrix_refuses_an_input_smaller_than_the_kernel(size: tuple[int, ...]) -> None:
    with pytest.raises(SpclError, match=r"but the kernel spans \(3, 3\)"):
        toeplitz_matrix(torch.ones(1, 1, 2, 2), size, dilation=2)
