"""SORO as an aggregator and a weighting of TorchJD."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchjd.autogram import Engine
from torchjd.autojac import backward, jac_to_grad, mtl_backward

from matrices import normal
from soro_presets import PRESETS, RELEASED
from spcl.aggregation import SORO, SOROSettings, SOROWeighting, solve_soro


@pytest.mark.parametrize("optimised", [False, True])
@PRESETS
def test_autojac_backward(preset: SOROSettings, optimised: bool) -> None:
    first, second = normal(3, 4, 0).requires_grad_(), normal(4, 2, 1).requires_grad_()
    losses = (normal(3, 3, 2) @ first @ second).tanh().square().sum(dim=1)
    rows = [torch.autograd.grad(loss, [first, second], retain_graph=True) for loss in losses]
    G = torch.stack([torch.cat([gradient.flatten() for gradient in row]) for row in rows], dim=1)
    solution = solve_soro(G.T @ G, preset)

    backward(losses)
    weights = jac_to_grad([first, second], SORO(**preset.model_dump()), optimize_gramian_computation=optimised)

    torch.testing.assert_close(weights, solution.weights)
    torch.testing.assert_close(torch.cat([first.grad.flatten(), second.grad.flatten()]), G @ solution.weights)


@pytest.mark.parametrize("optimised", [False, True])
def test_autojac_mtl_backward(optimised: bool) -> None:
    torch.manual_seed(0)
    shared, heads = nn.Linear(5, 4), [nn.Linear(4, 1), nn.Linear(4, 2)]
    x = torch.randn(8, 5)
    features = shared(x).relu()
    losses = [head(features).square().mean() for head in heads]
    parameters = list(shared.parameters())
    rows = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    expected = SORO()(torch.stack([torch.cat([gradient.flatten() for gradient in row]) for row in rows]))

    mtl_backward(losses, features=features)
    jac_to_grad(parameters, SORO(), optimize_gramian_computation=optimised)

    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in parameters]), expected)
    assert all(parameter.grad is not None for head in heads for parameter in head.parameters())


def test_autogram_engine() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    engine = Engine(model, batch_dim=None)
    losses = model(torch.randn(6, 5, dtype=torch.float64)).square().mean(dim=0)
    parameters = list(model.parameters())
    rows = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    jacobian = torch.stack([torch.cat([gradient.flatten() for gradient in row]) for row in rows])

    weights = SOROWeighting.released()(engine.compute_gramian(losses))
    losses.backward(weights)

    torch.testing.assert_close(weights, solve_soro(jacobian @ jacobian.T, RELEASED).weights)
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in parameters]), weights @ jacobian)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_have_the_type_of_the_gramian(dtype: torch.dtype) -> None:
    assert SOROWeighting()(torch.eye(3, dtype=dtype)).dtype == dtype
    assert SORO()(torch.eye(3, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("maker", [SORO, SORO.paper, SORO.released, SOROWeighting, SOROWeighting.released])
@pytest.mark.parametrize("changes", [{}, {"momentum": 0.5, "preference": torch.tensor([1.0, 2.0, 1.0]) / 3.0}])
def test_repr_round_trips(maker: Callable[..., SORO | SOROWeighting], changes: dict[str, Any]) -> None:
    original = maker(**changes)
    copy = eval(repr(original), {"torch": torch, "SORO": SORO, "SOROWeighting": SOROWeighting})
    rows = normal(3, 3, 5)
    assert type(copy) is type(original)
    assert repr(copy) == repr(original)
    assert torch.equal(copy(rows @ rows.T), original(rows @ rows.T))
