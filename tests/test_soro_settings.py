"""Settings and errors of SORO, and its use in TorchJD."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchjd.autogram import Engine
from torchjd.autojac import backward, jac_to_grad, mtl_backward

from matrices import normal, with_condition
from soro_presets import LENGTH, PAPER, PRESETS, RELEASED
from spcl import methods
from spcl.aggregation import SORO, SOROSettings, SOROWeighting, solve_soro
from spcl.errors import SpclError

# --- Settings --------------------------------------------------------------------------------------------------------


def test_preference_combines_the_adjusted_gradients() -> None:
    G = with_condition(LENGTH, 6, 30.0)
    gramian = G.T @ G
    M = torch.stack([solve_soro(gramian, preference=column).weights for column in torch.eye(6)], dim=1)
    preference = torch.tensor([0.1, 2.0, 0.0, -1.0, 1.0, 3.0], dtype=torch.float64)
    solution = solve_soro(gramian, preference=preference)
    torch.testing.assert_close(solution.weights, M @ preference)
    torch.testing.assert_close(solution.adjusted, M.T @ gramian @ M)
    torch.testing.assert_close(solve_soro(gramian).weights, M.sum(dim=1))


def test_scale_min_multiplies_by_the_smallest_singular_value() -> None:
    G = with_condition(LENGTH, 5, 40.0)
    unit, least = (solve_soro(G.T @ G, SOROSettings(scale=scale)) for scale in ("unit", "min"))
    torch.testing.assert_close(least.weights, unit.weights / 40.0)
    torch.testing.assert_close(least.adjusted, unit.adjusted / 1600.0)
    assert least.objective == unit.objective


def test_paper_settings_leave_only_the_step_size_to_the_default() -> None:
    G = with_condition(LENGTH, 4, 10.0)
    assert torch.equal(solve_soro(G.T @ G, SOROSettings.paper()).weights, solve_soro(G.T @ G, PAPER).weights)
    assert torch.equal(SORO.paper()(G.T), SORO(**PAPER.model_dump())(G.T))


@pytest.mark.parametrize("maker", [SORO, SOROWeighting, methods.SORO, methods.SORODBT])
def test_weighting_aggregator_and_method_have_one_default(maker: Callable[..., Any]) -> None:
    def soro_settings(made: Any) -> dict[str, Any]:
        settings = made.gramian_weighting.settings if isinstance(made, SORO) else made.settings
        return settings.model_dump(include=set(SOROSettings.model_fields))

    paper = {"sigma": 100.0, "lambda_": 100.0, "eta": None, "iterations": 100, "tolerance": 1e-3, "momentum": 0.0}
    paper["cutoff"] = 2.0**-52
    released = {"sigma": 500.0, "lambda_": 10.0, "eta": 1e-5, "iterations": 100, "tolerance": 1e-5, "momentum": 0.9}
    released["cutoff"] = 1e-7
    assert soro_settings(maker()) == SOROSettings().model_dump() == paper | {"scale": "min"}
    assert soro_settings(maker.paper()) == paper | {"scale": "unit"}
    assert soro_settings(maker.released()) == released | {"scale": "min"}
    assert soro_settings(maker.released(sigma=7.0, scale="unit")) == released | {"sigma": 7.0, "scale": "unit"}


def test_aggregator_and_method_give_the_same_update() -> None:
    G = with_condition(LENGTH, 4, 10.0)
    for name in ("default", "paper", "released"):
        aggregator, method = (
            (maker() if name == "default" else getattr(maker, name)()) for maker in (SORO, methods.SORO)
        )
        weights = method.weigh(methods.Gradients(tuple("abcd"), np.ones(4), G.T @ G)).values
        torch.testing.assert_close(aggregator(G.T), weights @ G.T)


def test_released_settings_can_be_changed() -> None:
    G = with_condition(LENGTH, 4, 10.0)
    torch.testing.assert_close(
        SOROWeighting.released(iterations=7)(G.T @ G),
        solve_soro(G.T @ G, SOROSettings.released(iterations=7)).weights,
    )
    torch.testing.assert_close(SORO.released()(G.T), solve_soro(G.T @ G, RELEASED).weights @ G.T)


def test_stop_reports_why_the_descent_ended() -> None:
    G = 3.0 * with_condition(LENGTH, 5, 20.0)
    gramian = G.T @ G
    start = torch.linalg.svd(G, full_matrices=False)
    few = solve_soro(gramian, SOROSettings.paper(iterations=2, tolerance=0.0))
    assert (few.stop, len(few.objective)) == ("iterations", 3)
    none = solve_soro(gramian, SOROSettings.paper(iterations=0))
    assert (none.stop, len(none.objective)) == ("iterations", 1)
    many = solve_soro(gramian, SOROSettings.paper(iterations=10_000, tolerance=1e-6))
    assert many.stop == "converged"
    assert many.objective[-2] - many.objective[-1] < 1e-6 <= many.objective[-3] - many.objective[-2]
    hopeless = solve_soro(gramian, SOROSettings.paper(eta=1e300))
    assert (hopeless.stop, len(hopeless.objective)) == ("stalled", 1)
    for unmoved in (none, hopeless):
        torch.testing.assert_close(G @ unmoved.weights, (start.U @ start.Vh).sum(dim=1))


# --- Errors ----------------------------------------------------------------------------------------------------------


def with_entry(row: int, column: int, value: float) -> Tensor:
    gramian = 2.0 * torch.eye(3, dtype=torch.float64)
    gramian[row, column] = value
    return gramian


@pytest.mark.parametrize(
    ("gramian", "message"),
    [
        (torch.eye(3)[:2], r"square matrix, but its shape is \(2, 3\)"),
        (torch.ones(4), r"square matrix, but its shape is \(4,\)"),
        (with_entry(0, 2, 1.0), r"symmetric, but entry \(0, 2\) is 1.0 and entry \(2, 0\) is 0.0"),
        (with_entry(1, 1, math.nan), r"finite, but entry \(1, 1\) is nan"),
        (with_entry(2, 0, math.inf), r"finite, but entry \(2, 0\) is inf"),
        (with_entry(2, 2, -1.0), r"no negative eigenvalue, but -1.0 was found"),
    ],
)
def test_a_bad_gramian_is_named(gramian: Tensor, message: str) -> None:
    with pytest.raises(SpclError, match=message):
        solve_soro(gramian)
    with pytest.raises(SpclError, match=message):
        SOROWeighting()(gramian)


def test_a_gradient_that_is_not_finite_is_named() -> None:
    rows = torch.ones(3, 5000)
    rows[1, 4000] = math.nan
    with pytest.raises(SpclError, match=r"finite, but entry \(0, 1\) is nan; skip that task"):
        SORO()(rows)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sigma": 0.0}, "sigma = 0.0: Input should be greater than 0"),
        ({"sigma": math.inf}, "sigma = inf: Input should be a finite number"),
        ({"lambda_": -1.0}, "lambda_ = -1.0: Input should be greater than or equal to 0"),
        ({"eta": 0.0}, "eta = 0.0: Input should be greater than 0"),
        ({"eta": math.nan}, "eta = nan: Input should be a finite number"),
        ({"iterations": -1}, "iterations = -1: Input should be greater than or equal to 0"),
        ({"tolerance": math.nan}, "tolerance = nan: Input should be a finite number"),
        ({"momentum": 1.0}, "momentum = 1.0: Input should be less than 1"),
        ({"scale": "max"}, "scale = 'max': Input should be 'unit' or 'min'"),
        ({"sigmma": 1.0}, "there is no setting 'sigmma'; did you mean 'sigma'\\?"),
        ({"preference": torch.ones(2, 2)}, r"preference .* its shape is \(2, 2\)"),
    ],
)
def test_a_bad_setting_is_named_at_once(settings: dict[str, Any], message: str) -> None:
    for maker in (SORO, SOROWeighting, SORO.paper, SORO.released):
        with pytest.raises(SpclError, match=message):
            maker(**settings)


@pytest.mark.parametrize(
    ("preference", "message"),
    [
        (torch.ones(3), r"one number for each of 2 tasks, but its shape is \(3,\)"),
        (torch.tensor([1.0, math.nan]), r"preference must be finite, but it is \[1.0, nan\]"),
    ],
)
def test_a_preference_that_does_not_fit_is_named(preference: Tensor, message: str) -> None:
    with pytest.raises(SpclError, match=message):
        SORO(preference=preference)(torch.eye(2))


# --- Within TorchJD --------------------------------------------------------------------------------------------------


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
