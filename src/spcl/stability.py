"""How stable a set of gradients is: condition number, conflicts and magnitude similarity, all from their Gramian."""

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
    r"""The condition number of the gradients, :math:`\kappa(G) = \sigma_{max}/\sigma_{min}` (paper, Definition 1).

    Infinite when the gradients are linearly dependent (to float64 precision), NaN when all are zero or there are none.

    >>> import torch
    >>> condition_number(torch.tensor([[16.0, 0.0], [0.0, 1.0]]))
    4.0
    """
    return float(_condition_numbers(host_gramian(gramian)))


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


def cosines(gramian: Tensor) -> Tensor:
    r"""The pairwise cosines :math:`g_i \cdot g_j / (\|g_i\| \|g_j\|)` (paper, eq. 2); a negative one is a conflict.

    A zero gradient has cosine 0 with every other.

    >>> import torch
    >>> cosines(torch.tensor([[4.0, -1.0], [-1.0, 1.0]]))
    tensor([[ 1.0000, -0.5000],
            [-0.5000,  1.0000]], dtype=torch.float64)
    """
    return torch.from_numpy(_cosines(host_gramian(gramian)))


def _cosines(matrices: Array) -> Array:
    norms = np.sqrt(_squares(matrices))
    inverse = np.divide(1.0, norms, out=np.zeros_like(norms), where=norms > 0.0)
    result: Array = np.clip(matrices * inverse[..., :, None] * inverse[..., None, :], -1.0, 1.0)
    return result


def _squares(matrices: Array) -> Array:
    """The squared norms of the gradients."""
    result: Array = np.maximum(matrices.diagonal(axis1=-2, axis2=-1), 0.0)
    return result


def magnitude_similarities(gramian: Tensor) -> Tensor:
    r"""The pairwise :math:`2 \|g_i\| \|g_j\| / (\|g_i\|^2 + \|g_j\|^2)` (paper, eq. 2); 1 for equal norms.

    >>> import torch
    >>> magnitude_similarities(torch.tensor([[9.0, 0.0], [0.0, 1.0]]))
    tensor([[1.0000, 0.6000],
            [0.6000, 1.0000]], dtype=torch.float64)
    """
    return torch.from_numpy(_magnitude_similarities(host_gramian(gramian)))


def _magnitude_similarities(matrices: Array) -> Array:
    squares = _squares(matrices)
    norms = np.sqrt(squares)
    sums = squares[..., :, None] + squares[..., None, :]
    products = norms[..., :, None] * norms[..., None, :]
    result: Array = np.divide(2.0 * products, sums, out=np.ones_like(sums), where=sums > 0.0)
    return result


def _means_over_pairs(matrices: Array) -> Array:
    count, several = matrices.shape[-1], matrices.shape[:-2]
    if count < 2:
        return np.full(several, np.nan)
    sums = matrices.reshape(*several, count * count).sum(axis=-1)  # in an order that does not depend on how many
    result: Array = (sums - matrices.trace(axis1=-2, axis2=-1)) / (count * (count - 1))
    return result


@dataclass(frozen=True)
class Stability:
    """The three measures of one Gramian, computed when first asked for.

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
        """κ of the gradient matrix."""
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
        """The mean over pairs of different gradients; NaN when there are fewer than two."""
        return float(_means_over_pairs(self.cosines.numpy()))

    @property
    def mean_magnitude_similarity(self) -> float:
        """The mean over pairs of different gradients; NaN when there are fewer than two."""
        return float(_means_over_pairs(self.magnitude_similarities.numpy()))

    @property
    def conflicts(self) -> int:
        """How many pairs of gradients point against each other."""
        return int((self.cosines.numpy() < 0.0).sum()) // 2


class Summary(NamedTuple):
    """The measures of :class:`Stability` in three numbers, the last two as means over pairs of different gradients."""

    condition_number: float
    cosine: float
    magnitude_similarity: float


def summaries(gramians: Sequence[Tensor]) -> list[Summary]:
    """The summary of each of many Gramians, to the last bit what :class:`Stability` has, in a fraction of its time.

    They may differ in size and, unlike there, are not checked: they must be finite and symmetric.

    >>> import torch
    >>> summaries([torch.tensor([[4.0, 0.0], [0.0, 4.0]]), torch.eye(3)])[0]
    Summary(condition_number=1.0, cosine=0.0, magnitude_similarity=1.0)
    """
    of_size: dict[int, list[int]] = {}
    for position, gramian in enumerate(gramians):
        of_size.setdefault(len(gramian), []).append(position)
    found: dict[int, Summary] = {}
    for positions in of_size.values():
        stacked = torch.stack([gramians[position] for position in positions])
        found |= zip(positions, _summaries_of_stack(stacked.detach().to("cpu", torch.float64).numpy()), strict=True)
    return [found[position] for position in range(len(gramians))]


def _summaries_of_stack(matrices: Array) -> list[Summary]:
    cosine = _means_over_pairs(_cosines(matrices))
    similarity = _means_over_pairs(_magnitude_similarities(matrices))
    measures = (_condition_numbers(matrices), cosine, similarity)
    return [Summary(*values) for values in zip(*(measure.tolist() for measure in measures), strict=True)]
