import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cosine_similarity

from matrices import normal, with_condition
from spcl.aggregation import solve_soro
from spcl.errors import SpclError
from spcl.stability import Stability, condition_number, cosines, magnitude_similarities, summaries

MEASURES = pytest.mark.parametrize("measure", [condition_number, cosines, magnitude_similarities])

gradients = st.builds(
    lambda tasks, seed, exponent, norms: 10.0**exponent * normal(40, tasks, seed) * torch.tensor(norms[:tasks]),
    st.integers(2, 8),
    st.integers(0, 1000),
    st.integers(-12, 12),
    st.lists(st.floats(0.01, 100.0), min_size=8, max_size=8),
)


@given(gradients)
def test_condition_number_is_the_ratio_of_singular_values(G: Tensor) -> None:
    singular = torch.linalg.svdvals(G)
    assert condition_number(G.T @ G) == pytest.approx((singular[0] / singular[-1]).item(), rel=1e-6)


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6])
def test_condition_number_of_a_matrix_with_known_condition(condition: float) -> None:
    G = with_condition(100, 6, condition)
    assert condition_number(G.T @ G) == pytest.approx(condition, rel=1e-3)


@given(gradients)
def test_cosines_and_magnitude_similarities_of_every_pair(G: Tensor) -> None:
    tasks, gramian = G.shape[1], G.T @ G
    pairs = [(i, j) for i in range(tasks) for j in range(tasks)]
    angles = torch.stack([cosine_similarity(G[:, i], G[:, j], dim=0, eps=0.0) for i, j in pairs])
    a, b = (G[:, list(side)].norm(dim=0) for side in zip(*pairs, strict=True))
    torch.testing.assert_close(cosines(gramian).flatten(), angles, rtol=0.0, atol=1e-12)
    torch.testing.assert_close(magnitude_similarities(gramian).flatten(), 2.0 * a * b / (a**2 + b**2))


@given(gradients)
def test_summary_over_pairs_of_different_gradients(G: Tensor) -> None:
    stability = Stability(G.T @ G)
    pairs = [(i, j) for i in range(G.shape[1]) for j in range(i)]
    angles = [stability.cosines[i, j].item() for i, j in pairs]
    similarities = [stability.magnitude_similarities[i, j].item() for i, j in pairs]
    assert stability.condition_number == condition_number(G.T @ G)
    assert stability.mean_cosine == pytest.approx(sum(angles) / len(pairs))
    assert stability.mean_magnitude_similarity == pytest.approx(sum(similarities) / len(pairs))
    assert stability.conflicts == sum(angle < 0.0 for angle in angles)


def summary_of(gramian: Tensor) -> str:
    stability = Stability(gramian)
    return repr((stability.condition_number, stability.mean_cosine, stability.mean_magnitude_similarity))


@given(st.lists(gradients, max_size=12))
def test_batched_summaries_equal_single_ones_to_the_last_bit(many: list[Tensor]) -> None:
    special = [torch.zeros(3, 3), torch.ones(2, 2), torch.tensor([[9.0]]), torch.zeros(0, 0)]
    gramians = [G.T @ G for G in many] + special
    assert [repr(tuple(found)) for found in summaries(gramians)] == [summary_of(gramian) for gramian in gramians]


def test_adjustment_makes_gradients_more_stable() -> None:
    G = normal(50, 5) * torch.tensor([1.0, 3.0, 0.1, 1.0, 10.0])
    G[:, 3] -= 2.0 * G[:, 0]
    before, after = Stability(G.T @ G), Stability(solve_soro(G.T @ G).adjusted)
    assert after.condition_number < before.condition_number / 20.0
    assert after.cosines.triu(1).abs().max() < before.cosines.triu(1).abs().max() / 20.0
    assert after.mean_magnitude_similarity > 0.99 > before.mean_magnitude_similarity


def test_zero_gradient() -> None:
    G = torch.tensor([[3.0, 0.0, 0.0], [4.0, 0.0, 0.0]])
    stability = Stability(G.T @ G)
    assert stability.condition_number == math.inf
    assert stability.cosines.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert stability.magnitude_similarities.tolist() == [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]
    assert stability.conflicts == 0


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_dependent_gradients(sign: float) -> None:
    G = normal(50, 3)
    G[:, 2] = sign * 2.0 * G[:, 0]
    stability = Stability(G.T @ G)
    assert stability.condition_number == math.inf
    assert stability.cosines[0, 2].item() == pytest.approx(sign)
    assert stability.magnitude_similarities[0, 2].item() == pytest.approx(0.8)


def test_single_gradient() -> None:
    stability = Stability(torch.tensor([[9.0]]))
    assert stability.condition_number == 1.0
    assert stability.cosines.tolist() == stability.magnitude_similarities.tolist() == [[1.0]]
    assert math.isnan(stability.mean_cosine)
    assert math.isnan(stability.mean_magnitude_similarity)
    assert stability.conflicts == 0


def test_no_gradients_or_all_zero() -> None:
    assert math.isnan(condition_number(torch.zeros(0, 0)))
    assert math.isnan(condition_number(torch.zeros(3, 3)))
    assert cosines(torch.zeros(0, 0)).shape == magnitude_similarities(torch.zeros(0, 0)).shape == (0, 0)
    assert Stability(torch.zeros(0, 0)).conflicts == 0


@MEASURES
@pytest.mark.parametrize(
    ("gramian", "message"),
    [
        (torch.ones(2, 3), r"square matrix, but its shape is \(2, 3\)"),
        (torch.tensor([[1.0, 0.0], [math.nan, 1.0]]), r"finite, but entry \(1, 0\) is nan"),
        (torch.tensor([[1.0, 0.5], [0.0, 1.0]]), r"symmetric, but entry \(0, 1\) is 0.5"),
    ],
)
def test_invalid_gramian_is_named(measure: object, gramian: Tensor, message: str) -> None:
    assert callable(measure)
    with pytest.raises(SpclError, match=message):
        measure(gramian)
