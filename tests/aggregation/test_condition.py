"""SORO-κ against brute force, and what SORO reduces to."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import LinearConstraint, minimize
from torch import Tensor

from method_runs import weigh
from spcl.aggregation import SOROSettings, solve_condition, solve_soro
from spcl.errors import SpclError
from spcl.learner import Learner
from spcl.methods import METHODS, SORO, NormSum, Procrustes, ScaledSum, SOROKappa, make_method
from spcl.results.names import display_name, family_of

SIZES = pytest.mark.parametrize("tasks", [2, 3, 4])


def gradients(tasks: int, seed: int, length: int = 7) -> Tensor:
    """Return an n×T matrix with singular values from 0.1 to 10."""
    generator = np.random.default_rng(seed)
    U, _, Vh = np.linalg.svd(generator.normal(size=(length, tasks)), full_matrices=False)
    return torch.from_numpy(U * 10.0 ** generator.uniform(-1, 1, tasks) @ Vh)


def adjusted(G: Tensor, **options: float) -> Tensor:
    """Return Ĝ = G M itself; the solution holds only its Gramian."""
    U, _, Vh = torch.linalg.svd(G, full_matrices=False)
    solution = solve_condition(G.T @ G, **options)
    eigenvalues, V = torch.linalg.eigh(solution.adjusted)
    root = V @ torch.diag(eigenvalues.clamp(min=0).sqrt()) @ V.T
    return U @ Vh @ root  # the polar decomposition: Ĝ = (UVᵀ)(ĜᵀĜ)^½


def condition(G: Tensor) -> float:
    values = torch.linalg.svdvals(G)
    return float(values[0] / values[-1])


def bounded(S: np.ndarray, bound: float) -> np.ndarray:
    """The nearest values, none more than ``bound`` times another: a quadratic programme."""
    pairs = list(itertools.permutations(range(len(S)), 2))
    matrix = np.zeros((len(pairs), len(S)))
    for row, (i, j) in enumerate(pairs):
        matrix[row, i], matrix[row, j] = 1.0, -bound
    found = minimize(
        lambda s: ((s - S) ** 2).sum(),
        np.full(len(S), S.mean()),
        jac=lambda s: 2 * (s - S),
        method="SLSQP",
        constraints=LinearConstraint(matrix, -np.inf, 0.0),
        options={"ftol": 1e-14, "maxiter": 500},
    )
    return np.asarray(found.x)


@SIZES
@pytest.mark.parametrize("bound", [1.0, 1.5, 3.0, 20.0, 1e4])
def test_the_bounded_form_equals_a_quadratic_programme(tasks: int, bound: float) -> None:
    for seed in range(4):
        G = gradients(tasks, seed)
        G_hat = adjusted(G, max_condition=bound)
        expected = bounded(torch.linalg.svdvals(G).numpy(), bound)
        np.testing.assert_allclose(torch.linalg.svdvals(G_hat).numpy(), np.sort(expected)[::-1], atol=2e-5)
        assert condition(G_hat) <= bound * (1 + 1e-9)


@SIZES
@pytest.mark.parametrize("lambda_", [1e-3, 0.1, 1.0, 30.0])
def test_the_penalised_form_is_the_best_over_all_bounds(tasks: int, lambda_: float) -> None:
    G = gradients(tasks, seed=tasks)
    S = torch.linalg.svdvals(G).numpy()
    bounds = np.geomspace(1.0, S[0] / S[-1], 120)
    best = min(((bounded(S, bound) - S) ** 2).sum() + lambda_ * bound for bound in bounds)
    found = objective(G, adjusted(G, lambda_=lambda_), lambda_)
    assert found <= best + 1e-7
    assert found == pytest.approx(best, rel=5e-3)


def objective(G: Tensor, G_hat: Tensor, lambda_: float) -> float:
    return float((G - G_hat).square().sum()) + lambda_ * condition(G_hat)


@SIZES
def test_no_matrix_nearby_has_a_lower_objective(tasks: int) -> None:
    generator = torch.Generator().manual_seed(tasks)
    for seed, lambda_ in ((0, 0.01), (1, 0.3), (2, 5.0)):
        G = gradients(tasks, seed)
        G_hat = adjusted(G, lambda_=lambda_)
        found = objective(G, G_hat, lambda_)
        for size in (1e-4, 1e-2, 1.0):
            for _ in range(50):
                other = G_hat + size * torch.randn(G.shape, generator=generator, dtype=G.dtype)
                assert objective(G, other, lambda_) >= found - 1e-9


def test_no_descent_from_any_start_finds_a_lower_objective() -> None:
    """Eq. 7 over whole matrices, without the singular value decomposition."""
    G = gradients(2, seed=5, length=3)
    found = objective(G, adjusted(G, lambda_=0.5), 0.5)
    generator = np.random.default_rng(0)
    starts = [G.numpy().ravel(), *(G.numpy().ravel() + generator.normal(size=6) for _ in range(4))]
    values = [minimize(lambda x: objective(G, torch.from_numpy(x.reshape(3, 2)), 0.5), start).fun for start in starts]
    assert min(values) >= found - 1e-8
    assert min(values) == pytest.approx(found, rel=1e-4)


def test_weights_give_the_sum_of_the_adjusted_gradients() -> None:
    G = gradients(4, seed=0)
    for options in ({"max_condition": 2.0}, {"lambda_": 0.3}):
        weights = solve_condition(G.T @ G, **options).weights
        torch.testing.assert_close(G @ weights, adjusted(G, **options).sum(dim=1), rtol=1e-9, atol=1e-9)


def test_dependent_and_zero_gradients_keep_their_range() -> None:
    G = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 5.0]], dtype=torch.float64)
    solution = solve_condition(G.T @ G, max_condition=1.0)
    values = torch.linalg.eigvalsh(solution.adjusted)
    torch.testing.assert_close(values, torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64) * values[-1])
    assert not solve_condition(torch.zeros(2, 2), max_condition=2.0).weights.any()
    with pytest.raises(SpclError, match="give one of them"):
        solve_condition(G.T @ G)


def test_the_method_bounds_the_condition_number_in_training() -> None:
    torch.manual_seed(0)
    learner = Learner(torch.nn.Linear(6, 8), SOROKappa(max_condition=1.5))
    for name, classes in (("a", 2), ("b", 3)):
        learner.add_task(name, classes=classes)
    x = torch.randn(16, 6)
    report = learner.step({"a": (x, torch.arange(16) % 2), "b": (4 * x, torch.arange(16) % 3)})
    assert report.before.condition_number > 1.5
    assert report.after.condition_number == pytest.approx(1.5)


def test_the_parts_of_soro_are_what_they_say() -> None:
    G = gradients(4, seed=3)
    U, S, Vh = torch.linalg.svd(G, full_matrices=False)
    start = S[-1] * (U @ Vh).sum(dim=1)
    torch.testing.assert_close(weigh(Procrustes(), G), start)
    torch.testing.assert_close(weigh(SORO(iterations=0), G), start)
    torch.testing.assert_close(4 * weigh(make_method("torchjd:AlignedMTL"), G), start)
    normalised, total = (G / G.norm(dim=0)).sum(dim=1), G.sum(dim=1)
    torch.testing.assert_close(weigh(NormSum(), G), normalised)
    torch.testing.assert_close(weigh(NormSum(scale="min"), G), normalised * (start.norm() / normalised.norm()))
    torch.testing.assert_close(weigh(ScaledSum(), G), total * (start.norm() / total.norm()))
    assert not weigh(NormSum(), 0 * G).any()
    assert not weigh(ScaledSum(), 0 * G).any()
    assert not weigh(ScaledSum(), torch.tensor([[1.0, -1.0]], dtype=torch.float64)).any()


def test_soro_stays_near_its_start_for_gradients_of_usual_norm() -> None:
    for seed in range(5):
        G = gradients(5, seed)
        G = G / G.norm(dim=0).max()
        C = G.T @ G
        change = G @ (solve_soro(C, SOROSettings()).weights - solve_soro(C, SOROSettings(iterations=0)).weights)
        assert change.norm() < 0.01 * weigh(Procrustes(), G).norm()


def test_they_are_methods_with_rows_of_their_own() -> None:
    shown = {name: (display_name(name), family_of(name)) for name in ("procrustes", "normsum", "scaledsum")}
    assert shown == {
        "procrustes": ("Procrustes", "PCL"),
        "normsum": ("NormSum", "MTL"),
        "scaledsum": ("ScaledSum", "MTL"),
    }
    assert family_of("soro-kappa") == "PCL"
    assert METHODS["soro-kappa"] is SOROKappa
