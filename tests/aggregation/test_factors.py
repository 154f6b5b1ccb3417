"""Products of gradients that are kept as factors, and eigenvectors of a Gramian."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spcl.aggregation.factors import FactoredGradients, factored_products
from spcl.aggregation.gramians import eigenvectors


@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=9), equal=st.booleans(), seed=st.integers(0, 99))
def test_factored_gradients_are_the_matrices_they_stand_for(lengths: list[int], equal: bool, seed: int) -> None:
    lengths = [lengths[0]] * len(lengths) if equal else lengths
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(sum(lengths), width, generator=generator, dtype=torch.float64) for width in (3, 5))
    factored = FactoredGradients(left, right, lengths)
    ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    dense = torch.stack([left[end - n : end].T @ right[end - n : end] for end, n in zip(ends, lengths, strict=True)])
    weights = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    torch.testing.assert_close(factored_products([factored])[0], dense.flatten(1) @ dense.flatten(1).T)
    torch.testing.assert_close(factored.dense(), dense)
    torch.testing.assert_close(factored.weighted_sum(weights), (weights.view(-1, 1, 1) * dense).sum(dim=0))
    bias, sums = FactoredGradients(left, None, lengths), torch.stack([part.sum(dim=0) for part in left.split(lengths)])
    torch.testing.assert_close(bias.dense(), sums)
    torch.testing.assert_close(bias.weighted_sum(weights), weights @ sums)
    other = FactoredGradients(right, left, lengths)
    whole = torch.cat([dense.flatten(1), sums, other.dense().flatten(1)], dim=1)
    for order in ([factored, bias, other], [bias, other, factored]):
        products, scale = factored_products(order)
        torch.testing.assert_close(products, whole @ whole.T)
        norms = (left.square().sum(dim=1), right.square().sum(dim=1))
        torch.testing.assert_close(scale, (2 * norms[0] * norms[1] + norms[0]).sum())


@pytest.mark.parametrize("rows", [1, 25, 26, 64])
def test_eigenvectors_are_orthonormal_and_restore_the_matrix(rows: int) -> None:
    root = np.random.default_rng(rows).normal(size=(rows, rows))
    matrix = root @ root.T
    values, vectors = eigenvectors(matrix)
    assert (np.diff(values) >= 0.0).all()
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(rows), atol=1e-12)
    np.testing.assert_allclose(vectors * values @ vectors.T, matrix, atol=1e-10 * rows)
