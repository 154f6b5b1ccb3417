"""Stability of a set of gradients: condition number, conflicts and magnitude similarity, from their Gramian."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spcl.aggregation import host_gramian

__all__ = ["Stability", "Summary", "condition_number", "cosines", "magnitude_similarities", "summaries"]

Array = NDArray[np.float64]


def condition_number(gramian: Tensor) -> float:
    r"""Return the condition number of the gradients, :math:`\kappa(G) = \sigma_{max}/\sigma_{min}` (Definition 1).

    Infinite when the gradients are linearly dependent (to float64 precision), NaN when all are zero or there are none.

    >>> import torch
    >>> condition_number(torch.tensor([[16.0, 0.0], [0.0, 1.0]]))
    4.0
    """
    return float(_condition_numbers(host_gramian(gramian)))


def cosines(gramian: Tensor) -> Tensor:
    r"""Return the pairwise cosines :math:`g_i \cdot g_j / (\|g_i\| \|g_j\|)` (paper, eq. 2).

    Gradients with a negative cosine conflict. A zero gradient has cosine 0 with every other.

    >>> import torch
    >>> cosines(torch.tensor([[4.0, -1.0], [-1.0, 1.0]]))
    tensor([[ 1.0000, -0.5000],
            [-0.5000,  1.0000]], dtype=torch.float64)
    """
    return torch.from_numpy(_cosines(host_gramian(gramian)))


def magnitude_similarities(gramian: Tensor) -> Tensor:
    r"""Return the pairwise :math:`2 \|g_i\| \|g_j\| / (\|g_i\|^2 + \|g_j\|^2)` (paper, eq. 2), 1 for equal norms.

    >>> import torch
    >>> magnitude_similarities(torch.tensor([[9.0, 0.0], [0.0, 1.0]]))
    tensor([[1.0000, 0.6000],
            [0.6000, 1.0000]], dtype=torch.float64)
    """
    return torch.from_numpy(_magnitude_similarities(host_gramian(gramian)))


@dataclass(frozen=True)
class Stability:
    """Measures of one Gramian, computed lazily.

    >>> import torch
    >>> stability = Stability(torch.tensor([[4.0, -1.0], [-1.0, 1.0]]))
    >>> round(stability.condition_number, 3), stability.mean_cosine, stability.conflicts
    (2.484, -0.5, 1)
    >>> round(stability.mean_magnitude_similarity, 3)
    0.8
    """

    gramian: Tensor

    @cached_property
    def _matrix(self) -> Array:
        return host_gramian(self.gramian)

    @cached_property
    def condition_number(self) -> float:
        """Condition number κ of the gradient matrix."""
        return float(_condition_numbers(self._matrix))

    @cached_property
    def cosines(self) -> Tensor:
        """Pairwise cosines, T×T."""
        return torch.from_numpy(_cosines(self._matrix))

    @cached_property
    def magnitude_similarities(self) -> Tensor:
        """Pairwise magnitude similarities, T×T."""
        return torch.from_numpy(_magnitude_similarities(self._matrix))

    @property
    def mean_cosine(self) -> float:
        """Mean over pairs of different gradients, NaN when there are fewer than two."""
        return float(_means_over_pairs(self.cosines.numpy()))

    @property
    def mean_magnitude_similarity(self) -> float:
        """Mean over pairs of different gradients, NaN when there are fewer than two."""
        return float(_means_over_pairs(self.magnitude_similarities.numpy()))

    @property
    def conflicts(self) -> int:
        """Number of pairs of gradients with a negative cosine."""
        return int((self.cosines.numpy() < 0.0).sum()) // 2


class Summary(NamedTuple):
    """The measures of :class:`Stability` in three numbers, the last two as means over pairs of different gradients."""

    condition_number: float
    cosine: float
    magnitude_similarity: float


def summaries(gramians: Sequence[Tensor]) -> list[Summary]:
    """Return the summary of each Gramian: bit for bit the numbers of :class:`Stability`, computed in batches.

    The Gramians may differ in size. They must be finite and symmetric, which is not checked.

    >>> import torch
    >>> summaries([torch.tensor([[4.0, 0.0], [0.0, 4.0]]), torch.eye(3)])[0]
    Summary(condition_number=1.0, cosine=0.0, magnitude_similarity=1.0)
    """
    by_size: dict[int, list[int]] = {}
    for position, gramian in enumerate(gramians):
        by_size.setdefault(len(gramian), []).append(position)
    found: dict[int, Summary] = {}
    for positions in by_size.values():
        stacked = torch.stack([gramians[position] for position in positions])
        found |= zip(positions, _summaries_of_stack(stacked.detach().to("cpu", torch.float64).numpy()), strict=True)
    return [found[position] for position in range(len(gramians))]


def _summaries_of_stack(matrices: Array) -> list[Summary]:
    cosine = _means_over_pairs(_cosines(matrices))
    similarity = _means_over_pairs(_magnitude_similarities(matrices))
    measures = (_condition_numbers(matrices), cosine, similarity)
    return [Summary(*values) for values in zip(*(measure.tolist() for measure in measures), strict=True)]


def _condition_numbers(matrices: Array) -> Array:
    count = matrices.shape[-1]
    if not count:
        return np.full(matrices.shape[:-2], np.nan)
    eigenvalues = np.linalg.eigvalsh(matrices)
    smallest, largest = eigenvalues[..., 0], eigenvalues[..., -1]
    independent = smallest > largest * count * np.finfo(np.float64).eps
    ratios = np.divide(largest, smallest, out=np.full_like(largest, np.inf), where=independent)
    result: Array = np.sqrt(np.where(largest > 0.0, ratios, np.nan))
    return result


def _cosines(matrices: Array) -> Array:
    norms = np.sqrt(_squared_norms(matrices))
    inverse = np.divide(1.0, norms, out=np.zeros_like(norms), where=norms > 0.0)
    result: Array = np.clip(matrices * inverse[..., :, None] * inverse[..., None, :], -1.0, 1.0)
    return result


def _magnitude_similarities(matrices: Array) -> Array:
    squares = _squared_norms(matrices)
    norms = np.sqrt(squares)
    sums = squares[..., :, None] + squares[..., None, :]
    products = norms[..., :, None] * norms[..., None, :]
    result: Array = np.divide(2.0 * products, sums, out=np.ones_like(sums), where=sums > 0.0)
    return result


def _squared_norms(matrices: Array) -> Array:
    result: Array = np.maximum(matrices.diagonal(axis1=-2, axis2=-1), 0.0)
    return result


def _means_over_pairs(matrices: Array) -> Array:
    count, batch = matrices.shape[-1], matrices.shape[:-2]
    if count < 2:
        return np.full(batch, np.nan)
    sums = matrices.reshape(*batch, count * count).sum(axis=-1)  # flattened: same summation order for any batch size
    result: Array = (sums - matrices.trace(axis1=-2, axis2=-1)) / (count * (count - 1))
    return result
