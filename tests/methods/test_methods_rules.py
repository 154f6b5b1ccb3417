"""The rules of the methods against independent references: brute force, generic optimisers, n-dimensional loops."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

from matrices import normal
from spcl.aggregation import AGEMWeighting, MaxDOWeighting, emgd_weights, min_norm_weights
from spcl.errors import SpclError
from spcl.methods import AGEM, DWA, EMGD, ER, MEGA, MGDA, RLW, Gradients, MaxDO, Method, PCGrad


def as_gradients(G: Tensor, losses: list[float] | None = None, names: tuple[str, ...] | None = None) -> Gradients:
    """Return the input of a weighting for gradients that are the rows of G."""
    names = names or tuple(f"task {row}" for row in range(len(G)))
    return Gradients(names, np.array(losses or [1.0] * len(G)), G @ G.T)


def update(method: Method, G: Tensor, losses: list[float] | None = None) -> Tensor:
    return method.weigh(as_gradients(G, losses)).values.double() @ G


def minimised(
    objective: Callable[[np.ndarray], float], T: int, sigma: np.ndarray | None = None, lower: float = 0.0
) -> np.ndarray:
    """The minimiser over σᵀw = 1, w ≥ lower, by a generic optimiser."""
    sigma = np.ones(T) if sigma is None else sigma
    found = minimize(
        objective,
        np.full(T, 1.0 / sigma.sum()),
        method="SLSQP",
        bounds=[(lower, None)] * T,
        constraints={"type": "eq", "fun": lambda w: sigma @ w - 1.0},
        options={"maxiter": 1000, "ftol": 1e-15},
    )
    return np.asarray(found.x)


gradients = st.builds(
    lambda T, n, spread, seed: normal(T, n, seed) * 10.0 ** (spread * normal(T, 1, seed + 1)),
    st.integers(1, 6),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.5, 2.0]),
    st.integers(0, 10_000),
)


# -- MGDA


@given(gradients)
def test_mgda_meets_the_kkt_conditions(G: Tensor) -> None:
    w = min_norm_weights(G @ G.T)
    u = w @ G
    slack = G @ u - u @ u  # multipliers of w ≥ 0
    size = G.norm(dim=1) * G.norm(dim=1).min() + 1e-300
    assert w.min() >= 0.0
    assert w.sum() == pytest.approx(1.0, abs=1e-12)
    assert (slack / size).min() > -1e-6
    assert (w * slack).abs().max() <= 1e-6 * G.norm(dim=1).min() ** 2 + 1e-300


@pytest.mark.parametrize("seed", range(8))
def test_mgda_beats_every_point_of_a_grid_on_the_simplex(seed: int) -> None:
    G = normal(3, 2 + seed % 3, seed)
    u = update(MGDA(), G)
    grid = torch.tensor([[i, j, 100 - i - j] for i in range(101) for j in range(101 - i)], dtype=torch.float64) / 100
    norms = (grid @ G).norm(dim=1)
    assert u.norm() <= norms.min() + 1e-12
    assert u.norm() >= norms.min() - 0.03 * G.norm(dim=1).max()  # the grid comes near


@given(gradients)
def test_mgda_descends_on_every_task(G: Tensor) -> None:
    u = update(MGDA(), G)
    assert (G @ u >= -1e-9 * G.norm(dim=1) * G.norm(dim=1).min()).all()


@pytest.mark.parametrize("rule", [min_norm_weights, MaxDOWeighting()])
@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_min_norm_rules_ignore_scale_and_order(rule: Callable[[Tensor], Tensor], scale: float) -> None:
    G, order = normal(5, 7, 3), torch.tensor([2, 0, 4, 1, 3])
    w = rule(G @ G.T)
    torch.testing.assert_close(rule((scale * G) @ (scale * G).T), w, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(rule(G[order] @ G[order].T), w[order], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("G", [[[0.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [-1.0, 0.0]], [[0.0], [0.0]]])
def test_min_norm_where_zero_is_reached(G: list[list[float]]) -> None:
    rows = torch.tensor(G, dtype=torch.float64)
    assert update(MGDA(), rows).norm() < 1e-12


def test_min_norm_of_nothing_and_of_one() -> None:
    assert min_norm_weights(torch.zeros(0, 0)).shape == (0,)
    assert min_norm_weights(torch.tensor([[4.0]])).tolist() == [1.0]


# -- MaxDO and EMGD


@pytest.mark.parametrize(("T", "seed"), [(1, 0), (2, 1), (3, 2), (4, 3), (6, 4)])
def test_maxdo_by_a_generic_optimiser(T: int, seed: int) -> None:
    G = normal(T, 8, seed).numpy()

    def distance(w: np.ndarray, others: np.ndarray, task: np.ndarray) -> float:
        """AGD(x → y) as it is written, in n dimensions."""
        difference = np.linalg.norm(w @ others - task)
        return float(difference / (difference + np.linalg.norm(task)))

    weights = minimised(lambda w: np.linalg.norm(w @ G), T)
    for i in range(T if T > 1 else 0):
        others = np.delete(np.arange(T), i)
        weights[others] += minimised(lambda w: distance(w, G[others], G[i]), T - 1)  # noqa: B023
    expected = torch.from_numpy(weights / weights.sum())
    torch.testing.assert_close(MaxDO().weigh(as_gradients(torch.from_numpy(G))).values, expected, rtol=0, atol=2e-4)


def test_maxdo_may_conflict() -> None:
    """Unlike MGDA it is no descent direction of every task."""
    G = torch.tensor([[1.0, 0.0], [1.0, 0.1], [-0.2, 0.0]], dtype=torch.float64)
    assert (G @ update(MGDA(), G)).min() > -1e-12
    assert (G @ update(MaxDO(), G)).min() < -0.01


@pytest.mark.parametrize(("T", "seed"), [(1, 0), (2, 1), (3, 2), (5, 3), (7, 4)])
@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])
def test_emgd_by_a_generic_optimiser(T: int, seed: int, size: float) -> None:
    G = size * normal(T, 9, seed).numpy()
    norms = np.linalg.norm(G, axis=1)
    sigma = np.exp(norms / 5.0) / np.exp(norms / 5.0).sum()
    expected = minimised(lambda w: float(np.square(w @ G).sum()) / size**2, T, sigma, 1.0 / (T + 1))
    found = EMGD().weigh(as_gradients(torch.from_numpy(G))).values  # the first running norms are the norms
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=1e-4, atol=1e-4)
    assert found.numpy() @ sigma == pytest.approx(1.0, abs=1e-12)
    assert found.min() >= 1.0 / (T + 1) - 1e-12


def test_emgd_keeps_running_norms_by_name() -> None:
    method = EMGD(momentum=0.75)
    G = torch.diag(torch.tensor([2.0, 4.0, 8.0], dtype=torch.float64))
    method.weigh(as_gradients(G[:2], names=("a", "b")))
    method.weigh(as_gradients(G[1:], names=("b", "memory")))
    method.weigh(as_gradients(G[[2, 0]], names=("a", "memory")))
    assert method.state_dict() == {"norms": {"a": 0.75 * 2 + 0.25 * 8, "b": 4.0, "memory": 0.75 * 8 + 0.25 * 2}}
    again = EMGD(momentum=0.75)
    again.load_state_dict(method.state_dict())
    step = as_gradients(G, names=("a", "b", "memory"))
    torch.testing.assert_close(again.weigh(step).values, method.weigh(step).values, rtol=0, atol=0)


def test_emgd_is_equivariant_but_not_free_of_scale() -> None:
    """Its elastic factors compare norms with a fixed temperature."""
    G, order = normal(4, 6, 1), torch.tensor([3, 1, 0, 2])
    w = emgd_weights(G @ G.T, G.norm(dim=1))
    torch.testing.assert_close(emgd_weights((G @ G.T)[order][:, order], G.norm(dim=1)[order]), w[order])
    assert (emgd_weights(100 * G @ G.T, 10 * G.norm(dim=1)) - w).abs().max() > 0.1


# -- A-GEM, MEGA, ER


@given(st.integers(0, 1000), st.sampled_from([-5.0, 0.0, 5.0]))
def test_agem_is_the_nearest_update_that_does_not_conflict(seed: int, lean: float) -> None:
    g, m = normal(2, 5, seed)
    g = g + lean * m
    u = update(AGEM(), torch.stack([g, m]))
    assert u @ m >= -1e-9
    if g @ m >= 0.0:
        assert torch.equal(u, g)
    else:
        assert abs(u @ m) < 1e-9 * m @ m * (1 + abs(lean))
        torch.testing.assert_close(u, g - (g @ m) / (m @ m) * m)
    for other in normal(20, 5, seed + 1):  # no other point of the half-space is nearer
        candidate = u + other - min(0.0, float(other @ m / (m @ m))) * m
        assert (candidate - g).norm() >= (u - g).norm() - 1e-9


def test_agem_without_memory_or_with_an_empty_gradient() -> None:
    G = torch.tensor([[1.0, 2.0], [0.0, 0.0]], dtype=torch.float64)
    assert update(AGEM(), G[:1]).tolist() == update(AGEM(), G).tolist() == [1.0, 2.0]
    with pytest.raises(SpclError, match="3×3"):
        AGEMWeighting()(torch.eye(3))


@pytest.mark.parametrize(
    ("epsilon", "current", "memory", "expected"),
    [
        (1e-10, 2.0, 3.0, [1.0, 1.5]),
        (1e-10, 2.0, 0.0, [1.0, 0.0]),
        (1e-10, 1e-10, 3.0, [0.0, 1.0]),
        (1e-10, 0.0, 3.0, [0.0, 1.0]),
        (0.5, 0.51, 1.02, [1.0, 2.0]),
        (0.5, 0.5, 1.0, [0.0, 1.0]),
        (0.5, 0.1, 0.0, [0.0, 1.0]),
    ],
)
def test_mega_table_of_cases(epsilon: float, current: float, memory: float, expected: list[float]) -> None:
    step = as_gradients(torch.eye(2), [current, memory], ("current", "memory"))
    assert MEGA(epsilon=epsilon).weigh(step).values.tolist() == pytest.approx(expected)


def test_mega_and_er_before_there_is_memory() -> None:
    step = as_gradients(torch.eye(1), [0.0], ("current",))
    assert MEGA().weigh(step).values.tolist() == ER().weigh(step).values.tolist() == [1.0]


# -- PCGrad


@pytest.mark.parametrize(("T", "n", "seed"), [(1, 3, 0), (2, 2, 1), (3, 2, 2), (4, 3, 3), (6, 4, 4), (6, 40, 5)])
def test_pcgrad_by_the_n_dimensional_loop(T: int, n: int, seed: int) -> None:
    G = normal(T, n, seed)
    torch.manual_seed(seed)
    expected = torch.zeros(n, dtype=torch.float64)
    for i in range(T):
        g = G[i].clone()
        for j in torch.randperm(T).tolist():
            if j != i and g @ G[j] < 0.0:
                g -= (g @ G[j]) / (G[j] @ G[j]) * G[j]
        expected += g
    torch.manual_seed(seed)
    torch.testing.assert_close(update(PCGrad(), G), expected)


@given(st.integers(0, 1000))
def test_pcgrad_of_two_tasks_does_not_conflict(seed: int) -> None:
    G = normal(2, 3, seed)
    assert (G @ update(PCGrad(), G)).min() >= -1e-12


def test_pcgrad_of_three_tasks_may_conflict_and_depends_on_the_order() -> None:
    """A later projection may bring back a conflict that an earlier one took out."""
    torch.manual_seed(0)
    G = torch.tensor([[1.0, 0.0], [-0.6, 0.8], [-0.6, -0.9]], dtype=torch.float64) * torch.tensor([[1.0], [5.0], [5.0]])
    updates = torch.stack([update(PCGrad(), G) for _ in range(40)])
    assert (updates @ G.T).min() < -0.01
    assert updates.unique(dim=0).shape[0] > 1


# -- RLW and DWA


def test_rlw_is_a_softmax_of_normals() -> None:
    method, step = RLW(), as_gradients(torch.eye(4))
    torch.manual_seed(5)
    found = torch.stack([method.weigh(step).values for _ in range(2)])
    torch.manual_seed(5)
    expected = torch.stack([torch.randn(4, dtype=torch.float64).softmax(dim=0) for _ in range(2)])
    assert torch.equal(found, expected)


def test_dwa_by_its_closed_form_while_tasks_come_pause_and_go() -> None:
    method = DWA(temperature=2.0)
    history: dict[str, list[float]] = {}
    steps: list[dict[str, float]] = [
        {"a": 2.0, "b": 1.0},
        {"a": 1.0, "b": 0.9},
        {"a": 0.8, "b": 0.9, "c": 3.0},
        {"b": 0.7, "c": 2.0},
        {"a": 0.5, "c": 2.5, "memory": 1.0},
        {"a": 0.6, "c": 1.0, "memory": 1.2},
        {"a": 0.6, "d": 0.0, "memory": 1.0},
        {"d": 0.0},
        {"d": 1.0, "a": 1.0},
    ]
    for losses in steps:
        exponents = []
        for name in losses:
            known = history.get(name, [])
            exponents.append(known[-1] / known[-2] if len(known) > 1 and known[-2] > 0.0 else 1.0)
        shares = np.exp(np.array(exponents) / 2.0)
        blank = Gradients(tuple(losses), np.full(len(losses), np.nan), None)
        found = method.weigh(blank).values.tolist()
        assert found == pytest.approx((len(losses) * shares / shares.sum()).tolist())
        method.after_step(losses)
        again = DWA()
        again.load_state_dict(method.state_dict())
        assert again.state_dict() == method.state_dict()
        method = again
        for name, loss in losses.items():
            history.setdefault(name, []).append(loss)


def test_dwa_is_uniform_at_first_and_stays_finite() -> None:
    method, step = DWA(), as_gradients(torch.eye(3), names=("a", "b", "c"))
    assert method.weigh(step).values.tolist() == [1.0, 1.0, 1.0]
    method.after_step({"a": 1e-320, "b": 1.0, "c": 1.0})
    assert method.weigh(step).values.tolist() == [1.0, 1.0, 1.0]
    method.after_step({"a": 1.0, "b": 1.0, "c": 1e-9})
    assert method.weigh(step).values.tolist() == [3.0, 0.0, 0.0]


def test_dwa_ignores_the_scale_of_a_loss() -> None:
    weights = []
    for scale in (1.0, 1e6):
        method = DWA()
        for a, b in (2.0, 1.0), (1.5, 0.9):
            method.after_step({"a": scale * a, "b": b})
        weights.append(method.weigh(as_gradients(torch.eye(2), names=("a", "b"))).values)
    torch.testing.assert_close(*weights)
