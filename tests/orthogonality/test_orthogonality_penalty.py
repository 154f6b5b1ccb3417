"""The DBT penalty and its gradient against the explicit Toeplitz matrix, brute force, and the paper's conv2d(K, K)."""

from collections import defaultdict
from collections.abc import Callable
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.func import functional_call
from torch.nn.functional import conv2d
from torch.nn.utils.parametrizations import weight_norm

from cuda_sync import synchronization_forbidden
from spcl.orthogonality import orthogonality_penalty, penalty, toeplitz_matrix
from spcl.orthogonality.penalty import phase_penalty, shift_penalty

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "3x3": lambda: nn.Conv2d(3, 2, 3),
    "3x3 more filters than channels": lambda: nn.Conv2d(2, 5, 3),
    "3x3 stride 2": lambda: nn.Conv2d(3, 4, 3, stride=2),
    "5x5 stride 3": lambda: nn.Conv2d(2, 3, 5, stride=3),
    "4x4": lambda: nn.Conv2d(2, 3, 4),
    "4x4 stride 2": lambda: nn.Conv2d(2, 3, 4, stride=2),
    "2x2 stride 2": lambda: nn.Conv2d(2, 3, 2, stride=2),
    "2x2 stride 3": lambda: nn.Conv2d(1, 6, 2, stride=3),
    "1x1": lambda: nn.Conv2d(4, 3, 1),
    "1x1 stride 2": lambda: nn.Conv2d(3, 5, 1, stride=2),
    "3x2": lambda: nn.Conv2d(2, 3, (3, 2)),
    "1x3": lambda: nn.Conv2d(2, 3, (1, 3)),
    "3x4 stride 1x2": lambda: nn.Conv2d(2, 3, (3, 4), stride=(1, 2)),
    "3x2 stride 1x2": lambda: nn.Conv2d(2, 3, (3, 2), stride=(1, 2)),
    "groups": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "groups stride 2": lambda: nn.Conv2d(6, 6, 3, stride=2, groups=3),
    "groups 1x1": lambda: nn.Conv2d(4, 6, 1, groups=2),
    "depthwise": lambda: nn.Conv2d(3, 3, 3, groups=3),
    "dilation 2": lambda: nn.Conv2d(2, 3, 3, dilation=2),
    "dilation 2 stride 2": lambda: nn.Conv2d(2, 3, 3, dilation=2, stride=2),
    "dilation 2 stride 3": lambda: nn.Conv2d(1, 2, 4, dilation=2, stride=3),
    "dilation 3x1 stride 2": lambda: nn.Conv2d(2, 2, 3, dilation=(3, 1), stride=2),
    "dilation 4 stride 6": lambda: nn.Conv1d(2, 3, 5, dilation=4, stride=6),
    "1d": lambda: nn.Conv1d(3, 2, 4),
    "1d stride 2": lambda: nn.Conv1d(3, 2, 5, stride=2),
    "3d": lambda: nn.Conv3d(2, 2, (2, 1, 3)),
    "3d stride 2": lambda: nn.Conv3d(1, 2, 3, stride=(1, 2, 2)),
    "transposed 1d": lambda: nn.ConvTranspose1d(3, 2, 3),
    "transposed 2d": lambda: nn.ConvTranspose2d(3, 2, 4, stride=2),
    "transposed 2d groups": lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2),
    "transposed 3d": lambda: nn.ConvTranspose3d(2, 1, 2, dilation=2),
    "linear": lambda: nn.Linear(5, 3),
    "linear more rows than columns": lambda: nn.Linear(3, 5),
}

every_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


class Penalty(nn.Module):
    """A module that returns the penalty of a layer, so that `functional_call` makes it a function of the parameters."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self) -> Tensor:
        return orthogonality_penalty(self.layer)


def penalty_of(layer: nn.Module, parameter: Tensor, name: str = "weight") -> Tensor:
    return functional_call(Penalty(layer), {f"layer.{name}": parameter}, ())


def value_and_gradient(function: Callable[[Tensor], Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
    weight = weight.detach().clone().requires_grad_()
    value = function(weight)
    return value.detach(), torch.autograd.grad(value, weight)[0]


def toeplitz_penalty(layer: nn.Module, weight: Tensor) -> Tensor:
    """‖𝓜𝓜ᵀ − I‖² in the rows of an output position that has all its neighbours."""
    if isinstance(layer, nn.Linear):
        matrix, filters, positions, centre = weight, len(weight), 1, 0
    else:
        spans = [d * (k - 1) + 1 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        reach = [(span - 1) // s for span, s in zip(spans, layer.stride, strict=True)]
        size = [2 * r * s + span for r, s, span in zip(reach, layer.stride, spans, strict=True)]
        matrix = toeplitz_matrix(weight, size, layer.stride, layer.dilation, layer.groups)
        filters, positions = len(weight), prod(2 * r + 1 for r in reach)
        centre = positions // 2
    rows = matrix.view(filters, positions, -1)[:, centre]
    identity = torch.eye(len(matrix), dtype=matrix.dtype).view(filters, positions, -1)[:, centre]
    return (rows @ matrix.T - identity).square().sum()


@every_layer
def test_penalty_equals_the_explicit_toeplitz_matrix(make: Callable[[], nn.Module]) -> None:
    layer = build(make)
    value, gradient = value_and_gradient(lambda weight: penalty_of(layer, weight), layer.weight)
    expected, expected_gradient = value_and_gradient(lambda weight: toeplitz_penalty(layer, weight), layer.weight)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


@every_layer
def test_gradcheck(make: Callable[[], nn.Module]) -> None:
    layer = build(make)
    assert gradcheck(lambda weight: penalty_of(layer, weight), layer.weight)


def brute_force(weight: Tensor, stride: tuple[int, ...], dilation: tuple[int, ...], groups: int) -> Tensor:
    """Compute the penalty from every pair of taps of every two filters, by the shift that makes them overlap."""
    correlation: dict[tuple[int, ...], Tensor] = defaultdict(lambda: torch.zeros(len(weight), len(weight)).double())
    per_group = len(weight) // groups
    taps = list(product(*map(range, weight.shape[2:])))
    for n, m in product(range(len(weight)), repeat=2):
        if n // per_group != m // per_group:
            continue
        for p, q in product(taps, repeat=2):
            shift = tuple(d * (a - b) for d, a, b in zip(dilation, p, q, strict=True))
            if all(u % s == 0 for u, s in zip(shift, stride, strict=True)):
                entry = torch.zeros(len(weight), len(weight)).double()
                entry[n, m] = 1
                correlation[shift] = correlation[shift] + entry * (
                    weight[(n, slice(None), *p)] @ weight[(m, slice(None), *q)]
                )
    zero = (0,) * len(stride)
    correlation[zero] = correlation[zero] - torch.eye(len(weight))
    return torch.stack([entry.square().sum() for entry in correlation.values()]).sum()


@st.composite
def convolutions(draw: st.DrawFn) -> nn.Module:
    dimensions = draw(st.integers(1, 2))
    largest = 5 if dimensions == 1 else 3

    def sizes(most: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(1, most)) for _ in range(dimensions))

    groups = draw(st.integers(1, 3))
    kind = {1: (nn.Conv1d, nn.ConvTranspose1d), 2: (nn.Conv2d, nn.ConvTranspose2d)}[dimensions][draw(st.integers(0, 1))]
    channels, filters = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    return build(
        lambda: kind(channels, filters, sizes(largest), stride=sizes(3), dilation=sizes(3), groups=groups, bias=False)
    )


@given(layer=convolutions(), scale=st.sampled_from([0.1, 1.0, 10.0]))
@settings(max_examples=40, deadline=None)
def test_penalty_equals_brute_force_for_any_shape(layer: nn.Module, scale: float) -> None:
    weight = layer.weight.detach() * scale
    value, gradient = value_and_gradient(lambda w: penalty_of(layer, w), weight)
    expected, expected_gradient = value_and_gradient(
        lambda w: brute_force(w, layer.stride, layer.dilation, layer.groups), weight
    )
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("size", "stride"), [(3, 1), (3, 2), (5, 2), (4, 1), (4, 3)])
def test_penalty_equals_the_convolution_of_the_kernel_with_itself(size: int, stride: int) -> None:
    layer = build(lambda: nn.Conv2d(6, 4, size, stride=stride))

    def paper(kernel: Tensor) -> Tensor:
        padding = (size - 1) // stride * stride
        correlation = conv2d(kernel, kernel, padding=padding, stride=stride)
        identity = torch.zeros_like(correlation)
        identity[:, :, padding // stride, padding // stride] = torch.eye(4)
        return (correlation - identity).square().sum()

    torch.testing.assert_close(
        value_and_gradient(lambda weight: penalty_of(layer, weight), layer.weight),
        value_and_gradient(paper, layer.weight),
    )


@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"stride": 2, "groups": 2}, {"dilation": 2}])
def test_transposed_convolution_is_penalized_by_its_columns(options: dict[str, int]) -> None:
    layer = build(lambda: nn.ConvTranspose1d(4, 2, 3, bias=False, **options))
    inputs = 9  # more than a kernel spans, so that the middle one has all its neighbours
    unit = torch.eye(4 * inputs).double().view(-1, 4, inputs)
    columns = layer(unit).flatten(1)  # one row for the image of every unit vector: the columns of the map
    excess = (columns @ columns.T - torch.eye(4 * inputs)).view(4, inputs, -1)[:, inputs // 2]
    torch.testing.assert_close(orthogonality_penalty(layer), excess.square().sum())


@pytest.mark.parametrize("channels", [(5, 3), (3, 5)])
def test_penalty_is_independent_of_the_chunk_size(channels: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = build(lambda: nn.Conv2d(*channels, 3, groups=1))
    together = value_and_gradient(lambda weight: penalty_of(layer, weight), layer.weight)
    for chunk in (1, 5 * prod(channels)):
        monkeypatch.setattr(penalty, "CPU_CHUNK", chunk)
        torch.testing.assert_close(value_and_gradient(lambda weight: penalty_of(layer, weight), layer.weight), together)


def test_penalty_sums_over_layers() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.Linear(4, 2), nn.ConvTranspose1d(2, 3, 2))
    )
    parts = [orthogonality_penalty(layer) for layer in (net[0], net[2][0], net[2][1])]
    torch.testing.assert_close(orthogonality_penalty(net), torch.stack(parts).sum())


def test_gradient_is_scaled_by_the_output_gradient() -> None:
    layer = build(lambda: nn.Conv2d(3, 4, 3))
    (plain,) = torch.autograd.grad(orthogonality_penalty(layer), layer.weight)
    (scaled,) = torch.autograd.grad(0.5 * orthogonality_penalty(layer).square(), layer.weight)
    torch.testing.assert_close(scaled, orthogonality_penalty(layer).detach() * plain)


def test_double_backward_is_refused() -> None:
    layer = build(lambda: nn.Linear(3, 2))
    (gradient,) = torch.autograd.grad(orthogonality_penalty(layer), layer.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        gradient.sum().backward()


LENGTH = "parametrizations.weight.original0"


def test_gradient_reaches_parametrizations() -> None:
    layer = weight_norm(build(lambda: nn.Conv2d(3, 4, 3)))
    assert gradcheck(lambda length: penalty_of(layer, length, LENGTH), layer.get_parameter(LENGTH))


def test_penalty_requires_no_grad_without_trainable_weights() -> None:
    layer = build(lambda: nn.Conv2d(3, 4, 3))
    value = orthogonality_penalty(layer).detach()
    with torch.no_grad():
        assert not orthogonality_penalty(layer).requires_grad
    layer.weight.requires_grad_(False)
    assert not orthogonality_penalty(layer).requires_grad
    torch.testing.assert_close(orthogonality_penalty(layer), value)


@every_layer
def test_single_precision(make: Callable[[], nn.Module]) -> None:
    layer = build(make)
    exact, exact_gradient = value_and_gradient(lambda weight: penalty_of(layer, weight), layer.weight)
    value, gradient = value_and_gradient(lambda weight: penalty_of(layer, weight), layer.weight.float())
    assert value.dtype == gradient.dtype == torch.float32
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_autocast_and_half_weights_lose_no_accuracy(stride: int) -> None:
    layer = build(lambda: nn.Conv2d(3, 4, 3, stride=stride)).bfloat16()
    exact, exact_gradient = value_and_gradient(lambda weight: penalty_of(layer, weight), layer.weight.double())
    with torch.autocast("cpu", torch.bfloat16):
        single = value_and_gradient(lambda weight: penalty_of(layer, weight), layer.weight.float())
    torch.testing.assert_close(single, (exact.float(), exact_gradient.float()))
    half, half_gradient = value_and_gradient(lambda weight: penalty_of(layer, weight), layer.weight)
    torch.testing.assert_close(half, exact.float())
    assert half_gradient.dtype == torch.bfloat16
    assert (half_gradient - exact_gradient).norm() < 1e-2 * exact_gradient.norm()


@every_layer
def test_penalty_is_independent_of_the_memory_format(make: Callable[[], nn.Module]) -> None:
    layer = build(make)
    plain = value_and_gradient(lambda weight: penalty_of(layer, weight), layer.weight)
    order = [*range(layer.weight.dim())][::-1]
    reversed_in_memory = layer.weight.permute(order).contiguous().permute(order)
    torch.testing.assert_close(value_and_gradient(lambda weight: penalty_of(layer, weight), reversed_in_memory), plain)


@pytest.mark.parametrize(
    ("sizes", "stride"), [((3, 3), (2, 2)), ((5, 3), (2, 1)), ((4,), (3,)), ((2, 5), (2, 3)), ((3, 2, 4), (2, 1, 3))]
)
def test_phases_and_shifts_of_a_strided_kernel_agree(sizes: tuple[int, ...], stride: tuple[int, ...]) -> None:
    kernel = torch.randn(2, 4, 3, *sizes, generator=torch.Generator().manual_seed(0)).double()
    gradients = [torch.ones_like(kernel) for _ in range(2)]
    values = [
        method(kernel, stride, gradient, 0.5)
        for method, gradient in zip((shift_penalty, phase_penalty), gradients, strict=True)
    ]
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(phase_penalty(kernel, stride, None, 0.5), values[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_cuda_equals_cpu_without_synchronizing(stride: int) -> None:
    layer = build(lambda: nn.Conv2d(3, 4, 3, stride=stride))
    expected = value_and_gradient(lambda weight: penalty_of(layer, weight), layer.weight)
    layer = layer.cuda()
    orthogonality_penalty(layer)  # copies the transform matrices to the device, once per shape
    with synchronization_forbidden():
        value, gradient = value_and_gradient(lambda weight: penalty_of(layer, weight), layer.weight)
    torch.testing.assert_close((value.cpu(), gradient.cpu()), expected)
