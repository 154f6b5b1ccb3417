"""SORO against Algorithm 1 on whole gradients, its limits, settings and errors."""

import math
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from matrices import normal, relative_difference, with_condition
from soro_presets import LENGTH, PAPER, PRESETS, RELEASED
from spcl import methods
from spcl.aggregation import SORO, SOROSettings, SOROWeighting, solve_soro
from spcl.errors import SpclError
from spcl.runs import resolve_settings
from spcl.stability import condition_number
from tiny_runs import tiny_data

# --- Algorithm 1 on n×T iterates, written independently --------------------------------------------------------------


@dataclass
class Naive:
    """Ĝ as an explicit n×T matrix, with gradients by autograd."""

    G: Tensor
    sigma: float
    lambda_: float

    def start(self) -> tuple[Tensor, Tensor]:
        U, _, Vh = torch.linalg.svd(self.G, full_matrices=False)
        return U @ Vh, torch.ones(self.G.shape[1], dtype=self.G.dtype)

    def smooth(self, G_hat: Tensor, d: Tensor) -> Tensor:
        return (self.G - G_hat).square().sum() + self.sigma * (G_hat.T @ G_hat - d.diag()).square().sum()

    def objective(self, G_hat: Tensor, d: Tensor) -> float:
        return (self.smooth(G_hat, d) + self.lambda_ * (d - 1.0).square().sum()).item()

    def gradient(self, G_hat: Tensor, d: Tensor) -> Tensor:
        return torch.func.grad(self.smooth)(G_hat, d)

    def best_d(self, G_hat: Tensor) -> Tensor:
        return (self.lambda_ + self.sigma * (G_hat.T @ G_hat).diagonal()) / (self.lambda_ + self.sigma)


def published(
    G: Tensor, *, sigma: float, lambda_: float, eta: float, iterations: int, tolerance: float, momentum: float = 0.0
) -> tuple[Tensor, list[float]]:
    """The loop as published: SGD with a fixed step, whatever the objective does."""
    problem = Naive(G, sigma, lambda_)
    G_hat, d = problem.start()
    G_hat.requires_grad_()
    optimiser = torch.optim.SGD([G_hat], lr=eta, momentum=momentum)
    history = [problem.objective(G_hat, d)]
    for _ in range(iterations):
        optimiser.zero_grad()
        problem.smooth(G_hat, d).backward()
        optimiser.step()
        d = problem.best_d(G_hat.detach())
        history.append(problem.objective(G_hat, d))
        if history[-2] - history[-1] < tolerance:
            break
    return G_hat.detach(), history


def safeguarded(
    G: Tensor, *, sigma: float, lambda_: float, eta: float, iterations: int, tolerance: float, momentum: float = 0.0
) -> tuple[Tensor, list[float], int]:
    """The published loop, but a step that raises the objective is taken back, halved and stripped of its momentum."""
    problem = Naive(G, sigma, lambda_)
    G_hat, d = problem.start()
    velocity, halvings = torch.zeros_like(G), 0
    history = [problem.objective(G_hat, d)]
    for _ in range(iterations):
        gradient = problem.gradient(G_hat, d)
        velocity = momentum * velocity + gradient
        while True:
            trial = G_hat - eta * velocity
            trial_d = problem.best_d(trial)
            value = problem.objective(trial, trial_d)
            if value <= history[-1] + tolerance:
                break
            eta, velocity, halvings = eta / 2.0, gradient, halvings + 1
        G_hat, d = trial, trial_d
        history.append(value)
        if history[-2] - history[-1] < tolerance:
            break
    return G_hat, history, halvings


def without_scale(preset: SOROSettings) -> dict[str, float]:
    return preset.model_dump(exclude={"scale", "cutoff"})


def scale_factor(G: Tensor, preset: SOROSettings) -> float:
    return torch.linalg.svdvals(G)[-1].item() if preset.scale == "min" else 1.0


def errors(G: Tensor, preset: SOROSettings, G_hat: Tensor, history: list[float]) -> tuple[float, float, float]:
    """Relative differences between the solution in T×T and Ĝ, before its scale: of update, ĜᵀĜ and history."""
    solution = solve_soro(G.T @ G, preset)
    G_hat = scale_factor(G, preset) * G_hat
    assert len(solution.objective) == len(history)
    return (
        relative_difference(G @ solution.weights, G_hat.sum(dim=1)),
        relative_difference(solution.adjusted, G_hat.T @ G_hat),
        relative_difference(
            torch.tensor(solution.objective, dtype=torch.float64), torch.tensor(history, dtype=torch.float64)
        ),
    )


@PRESETS
@pytest.mark.parametrize("tasks", range(2, 21))
@pytest.mark.parametrize(("condition", "bound"), [(1e2, 1e-10), (1e4, 3e-8), (1e6, 1e-4)])
def test_equals_algorithm_1_on_whole_gradients(
    condition: float, bound: float, tasks: int, preset: SOROSettings
) -> None:
    """To κ² times the precision of float64, at which rounding the Gramian itself moves its smallest eigenvalue."""
    G = with_condition(LENGTH, tasks, condition, seed=tasks)
    G_hat, history, _ = safeguarded(G, **without_scale(preset))
    update, adjusted, objective = errors(G, preset, G_hat, history)
    assert update <= bound
    assert objective <= bound
    assert adjusted <= (4 * bound if preset.scale == "min" else bound)  # the smallest eigenvalue is a factor


@PRESETS
@pytest.mark.parametrize("tasks", [2, 5, 12])
def test_equals_algorithm_1_where_the_step_has_to_shrink(tasks: int, preset: SOROSettings) -> None:
    G = 1e3 * with_condition(LENGTH, tasks, 10.0)
    G_hat, history, halvings = safeguarded(G, **without_scale(preset))
    assert halvings > 0
    assert max(errors(G, preset, G_hat, history)) <= 1e-8


@PRESETS
@pytest.mark.parametrize("tasks", [2, 5, 12])
def test_equals_the_published_loop_where_that_descends(tasks: int, preset: SOROSettings) -> None:
    G = with_condition(LENGTH, tasks, 100.0)
    G_hat, history = published(G, **without_scale(preset))
    assert all(after <= before for before, after in pairwise(history))
    assert max(errors(G, preset, G_hat, history)) <= 1e-8


def test_a_rise_within_the_tolerance_is_accepted_as_converged() -> None:
    G = 1e3 * with_condition(LENGTH, 5, 10.0)
    tolerant = PAPER.model_copy(update={"tolerance": 1e5})
    G_hat, history = published(G, **without_scale(tolerant))
    assert history[0] < history[1] <= history[0] + 1e5
    assert max(errors(G, tolerant, G_hat, history)) <= 1e-8


def test_descends_where_the_published_loop_diverges() -> None:
    G = 1e5 * with_condition(LENGTH, 5, 10.0)
    _, history = published(G, **without_scale(PAPER))
    assert history[-1] > 10.0 * history[0]
    solution = solve_soro(G.T @ G, PAPER)
    assert solution.objective[-1] < solution.objective[0]


# --- What the paper says of the solution -----------------------------------------------------------------------------


@pytest.mark.parametrize("tasks", [2, 7])
def test_strong_penalties_give_the_orthogonal_factor(tasks: int) -> None:
    G = with_condition(LENGTH, tasks, 50.0)
    U, _, Vh = torch.linalg.svd(G, full_matrices=False)
    solution = solve_soro(G.T @ G, SOROSettings.paper(sigma=1e9, lambda_=1e9))
    torch.testing.assert_close(G @ solution.weights, (U @ Vh).sum(dim=1), atol=1e-7, rtol=0.0)
    torch.testing.assert_close(solution.adjusted, torch.eye(tasks, dtype=torch.float64), atol=1e-7, rtol=0.0)
    torch.testing.assert_close(solution.d, torch.ones(tasks, dtype=torch.float64), atol=1e-7, rtol=0.0)


@pytest.mark.parametrize("sigma", [10.0, 100.0])
def test_larger_lambda_lowers_the_condition_number(sigma: float) -> None:
    G = normal(LENGTH, 4)
    G = G / G.norm(dim=0) * torch.tensor([1.0, 5.0, 20.0, 50.0])
    gramian = G.T @ G
    long = SOROSettings(sigma=sigma, iterations=5000, tolerance=1e-7)
    conditions = [
        condition_number(solve_soro(gramian, long.model_copy(update={"lambda_": lambda_})).adjusted)
        for lambda_ in (1.0, 10.0, 100.0, 1000.0)
    ]
    assert conditions == sorted(conditions, reverse=True)
    assert conditions[0] > 1.5 * conditions[-1]
    assert conditions[0] < condition_number(gramian) / 10.0


def test_converges_to_a_stationary_point() -> None:
    G = 3.0 * with_condition(LENGTH, 3, 20.0)
    long = SOROSettings.paper(iterations=3000, tolerance=0.0)
    M = torch.stack([solve_soro(G.T @ G, long, preference=column).weights for column in torch.eye(3)], dim=1)
    d = solve_soro(G.T @ G, long).d
    problem = Naive(G, 100.0, 100.0)
    assert problem.gradient(G @ M, d).norm() < 1e-5 * problem.gradient(*problem.start()).norm()


# --- Any gradients ---------------------------------------------------------------------------------------------------

DAMAGE: dict[str, Callable[[Tensor], None]] = {
    "none": lambda G: None,
    "zero gradient": lambda G: G[:, 0].zero_(),
    "equal gradients": lambda G: G[:, 0].copy_(G[:, -1]),
    "opposite gradients": lambda G: G[:, 0].copy_(-G[:, -1]),
    "one huge gradient": lambda G: G[:, 0].mul_(1e8),
    "all zero": lambda G: G.zero_(),
}


@st.composite
def any_gradients(draw: st.DrawFn) -> Tensor:
    tasks, length = draw(st.integers(1, 12)), draw(st.integers(1, 30))
    condition, scale = 10.0 ** draw(st.floats(0.0, 8.0)), 10.0 ** draw(st.integers(-12, 12))
    G = scale * with_condition(length, tasks, condition, seed=draw(st.integers(0, 1000)))
    DAMAGE[draw(st.sampled_from(sorted(DAMAGE)))](G)
    return G


presets = st.sampled_from([PAPER, RELEASED])


@given(any_gradients(), presets)
def test_weights_are_finite_and_the_objective_never_rises(G: Tensor, preset: SOROSettings) -> None:
    solution = solve_soro(G.T @ G, preset)
    assert solution.weights.shape == (G.shape[1],)
    for found in (
        solution.weights,
        solution.adjusted,
        solution.d,
        torch.tensor(solution.objective, dtype=torch.float64),
    ):
        assert found.isfinite().all()
    for before, after in pairwise(solution.objective):
        assert after <= before + preset.tolerance


@given(any_gradients(), presets)
def test_single_precision_aggregation_is_finite(G: Tensor, preset: SOROSettings) -> None:
    assert SORO(**preset.model_dump())(G.T.float()).isfinite().all()


@given(st.integers(2, 12).flatmap(lambda tasks: st.permutations(range(tasks))), st.integers(0, 100), presets)
def test_permuting_the_tasks_permutes_the_weights(order: list[int], seed: int, preset: SOROSettings) -> None:
    G = with_condition(30, len(order), 100.0, seed)
    weights = solve_soro(G.T @ G, preset).weights
    permuted = G[:, order]
    torch.testing.assert_close(
        solve_soro(permuted.T @ permuted, preset).weights,
        weights[order],
        rtol=1e-7,
        atol=1e-9 * weights.norm().item(),
    )


@PRESETS
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_a_zero_gradient_weighs_nothing_and_changes_nothing(scale: float, preset: SOROSettings) -> None:
    G = scale * with_condition(LENGTH, 5, 10.0)
    G[:, 2] = 0.0
    others = G[:, [0, 1, 3, 4]]
    weights = solve_soro(G.T @ G, preset).weights
    assert abs(weights[2]) <= 1e-12 * weights.norm()
    torch.testing.assert_close(weights[[0, 1, 3, 4]], solve_soro(others.T @ others, preset).weights)


@PRESETS
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_equal_gradients_weigh_the_same_and_opposite_ones_cancel(scale: float, preset: SOROSettings) -> None:
    G = scale * with_condition(LENGTH, 5, 10.0)
    G[:, 3] = G[:, 1]
    weights = solve_soro(G.T @ G, preset).weights
    torch.testing.assert_close(weights[3], weights[1])
    G[:, 3] = -G[:, 1]
    weights = solve_soro(G.T @ G, preset).weights
    torch.testing.assert_close(weights[3], -weights[1])


def test_a_single_gradient_is_kept_or_with_unit_scale_normalised() -> None:
    row = torch.tensor([[3.0, -4.0, 0.5]])
    torch.testing.assert_close(SORO()(row), row[0])
    torch.testing.assert_close(SORO.released(preference=torch.tensor([2.0]))(row), 2.0 * row[0])
    torch.testing.assert_close(SORO.paper()(row), row[0] / row.norm())
    torch.testing.assert_close(SORO.paper(preference=torch.tensor([2.0]))(row), 2.0 * row[0] / row.norm())
    torch.testing.assert_close(SORO.paper()(torch.zeros(1, 3)), torch.zeros(3))


def test_no_task_gives_no_weight() -> None:
    assert solve_soro(torch.zeros(0, 0)).weights.shape == (0,)
    torch.testing.assert_close(SORO.released()(torch.zeros(0, 3)), torch.zeros(3))


def test_nothing_of_the_caller_is_shared_or_changed() -> None:
    for tasks in (1, 3):
        preference, gramian = (
            torch.full((tasks,), 2.0, dtype=torch.float64),
            4.0 * torch.eye(tasks, dtype=torch.float64),
        )
        solution = solve_soro(gramian, preference=preference)
        for result in (solution.weights, solution.adjusted, solution.d):
            result.zero_()
        assert (preference == 2.0).all()
        assert torch.equal(gramian, 4.0 * torch.eye(tasks, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients_are_combined_in_single_precision(dtype: torch.dtype) -> None:
    rows = (1e-5 * normal(4, 300)).to(dtype)  # the weights, about 1e5, are beyond float16
    found = SORO.paper()(rows)
    assert found.dtype == dtype
    torch.testing.assert_close(found, SORO.paper()(rows.double()).to(dtype))


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


# --- The benchmark of its limits -------------------------------------------------------------------------------------

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/soro_limit.py"


def test_differences_are_those_of_the_updates_of_a_run(tmp_path: Path) -> None:
    script = runpy.run_path(str(SCRIPT))
    settings = resolve_settings(
        {"benchmark": str(tiny_data(tmp_path)), "tasks": 2, "batch_size": 8, "method": "soro", "device": "cpu"}
    )
    gramians = script["training_gramians"](settings)
    assert len(gramians) > 3
    found = script["differences"](gramians, SOROSettings())
    for gramian, difference in zip(gramians, found, strict=True):
        G = torch.linalg.cholesky(gramian).T  # gradients with these inner products
        updates = [G @ solve_soro(gramian, SOROSettings(iterations=count)).weights for count in (100, 0)]
        np.testing.assert_allclose(difference, (updates[0] - updates[1]).norm() / updates[1].norm(), rtol=1e-6)
    assert not script["differences"](gramians, SOROSettings(iterations=0)).any()
