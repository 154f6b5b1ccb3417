"""Theorem 1 of the paper: properties of orthogonal layers, for layers made orthogonal by the penalty's gradient.

With h = Wx: (1) ‖h‖ = ‖x‖; (2) cov(h) = cov(x) = σ²I; (3) ‖∂L/∂x‖ = ‖∂L/∂h‖; (4) cov(∂L/∂x) = cov(∂L/∂h) = σ²I.
All four hold for a square W, (2) and (3) for one with fewer rows than columns, (1) and (4) for one with more.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from spcl.orthogonality import add_orthogonality_gradient, orthogonality_penalty

SQUARE = {"linear": lambda: nn.Linear(5, 5), "1x1": lambda: nn.Conv2d(4, 4, 1), "2x2/2": lambda: nn.Conv2d(2, 8, 2, 2)}
WIDE = {
    "linear": lambda: nn.Linear(6, 4),
    "2x2": lambda: nn.Conv2d(4, 3, 2),
    "3x3/2": lambda: nn.Conv2d(2, 5, 3, stride=2),
    "dilated": lambda: nn.Conv2d(4, 3, 2, dilation=2),
    "grouped": lambda: nn.Conv2d(8, 6, 2, groups=2),
}
TALL = {
    "linear": lambda: nn.Linear(4, 6),
    "1x1": lambda: nn.Conv2d(2, 3, 1),
    "transposed": lambda: nn.ConvTranspose2d(3, 4, 2),
}


def layers(*families: dict[str, Callable[[], nn.Module]]) -> pytest.MarkDecorator:
    cases = [pytest.param(make, id=name) for family in families for name, make in family.items()]
    return pytest.mark.parametrize("make", cases)


def orthogonal(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    layer = make().double()
    layer.bias = None
    optimiser = torch.optim.LBFGS([layer.weight], max_iter=300, tolerance_change=1e-15, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        layer.weight.grad = torch.zeros_like(layer.weight)
        return add_orthogonality_gradient(layer, {layer.weight: layer.weight.grad})

    optimiser.step(closure)
    return layer


def some_input(layer: nn.Module, count: int) -> Tensor:
    features = layer.weight.shape[1] if isinstance(layer, nn.Linear) else layer.in_channels
    space = () if isinstance(layer, nn.Linear) else (4, 4)
    return torch.randn(count, features, *space, dtype=torch.float64)


def white(count: int, like: Tensor) -> Tensor:
    """Samples whose mean is exactly 0 and whose covariance exactly I, in the shape of `like`."""
    samples = torch.randn(count, like[0].numel(), dtype=torch.float64)
    orthonormal, _ = torch.linalg.qr(samples - samples.mean(0))
    return orthonormal.mul(count**0.5).view(count, *like.shape[1:])


def assert_white(samples: Tensor) -> None:
    flat = samples.detach().flatten(1)
    torch.testing.assert_close(flat.mean(0), torch.zeros_like(flat[0]), atol=1e-4, rtol=0)
    torch.testing.assert_close(flat.T @ flat / len(flat), torch.eye(flat.shape[1]).double(), atol=1e-4, rtol=0)


def norms(samples: Tensor) -> Tensor:
    return samples.detach().flatten(1).norm(dim=1)


def backward(layer: nn.Module, x: Tensor, output_gradient: Tensor) -> Tensor:
    return torch.autograd.grad(layer(x), x, output_gradient)[0]


@layers(SQUARE, WIDE)
def test_penalty_vanishes(make: Callable[[], nn.Module]) -> None:
    assert orthogonality_penalty(orthogonal(make)) < 1e-8


def test_with_more_rows_than_columns_the_columns_become_orthonormal() -> None:
    layer = orthogonal(lambda: nn.Linear(4, 6))
    assert orthogonality_penalty(layer).item() == pytest.approx(6 - 4)
    torch.testing.assert_close(layer.weight.T @ layer.weight, torch.eye(4).double())


@layers(SQUARE, TALL)
def test_1_activations_preserve_norms(make: Callable[[], nn.Module]) -> None:
    layer = orthogonal(make)
    x = some_input(layer, 10)
    torch.testing.assert_close(norms(layer(x)), norms(x), rtol=1e-4, atol=0)


@layers(SQUARE, WIDE)
def test_2_activations_stay_white(make: Callable[[], nn.Module]) -> None:
    layer = orthogonal(make)
    assert_white(layer(white(300, some_input(layer, 1))))


@layers(SQUARE, WIDE)
def test_3_gradients_preserve_norms(make: Callable[[], nn.Module]) -> None:
    layer = orthogonal(make)
    x = some_input(layer, 10).requires_grad_()
    output_gradient = torch.randn_like(layer(x))
    torch.testing.assert_close(norms(backward(layer, x, output_gradient)), norms(output_gradient), rtol=1e-4, atol=0)


@layers(SQUARE, TALL)
def test_4_gradients_stay_white(make: Callable[[], nn.Module]) -> None:
    layer = orthogonal(make)
    x = some_input(layer, 300).requires_grad_()
    assert_white(backward(layer, x, white(300, layer(x).detach())))
