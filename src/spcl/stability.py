"""How stable a set of gradients is: condition number, conflicts and magnitude similarity, all from their Gramian."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spcl.aggregation import host_gramian

__all__ = ["Stability", "condition_number", "cosines", "magnitude_similarities"]

Array = NDArray[np.float64]


def condition_number(gramian: Tensor) -> float:
    r"""The condition number of the gradients, :math:`\kappa(G) = \sigma_{max}/\sigma_{min}` (paper, Definition 1).

    Infinite when the gradients are linearly dependent (to float64 precision), NaN when all are zero or there are none.

    >>> import torch
    >>> condition_number(torch.tensor([[16.0, 0.0], [0.0, 1.0]]))
    4.0
    """
    return _condition_number(host_gramian(gramian))


def _condition_number(matrix: Array) -> float:
    eigenvalues = np.linalg.eigvalsh(matrix) if len(matrix) else np.zeros(1)
    smallest, largest = float(eigenvalues[0]), float(eigenvalues[-1])
    if largest <= 0.0:
        return float("nan")
    if smallest <= largest * len(matrix) * np.finfo(np.float64).eps:
        return float("inf")
    return float(np.sqrt(largest / smallest))


def cosines(gramian: Tensor) -> Tensor:
    r"""The pairwise cosines :math:`g_i \cdot g_j / (\|g_i\| \|g_j\|)` (paper, eq. 2); a negative one is a conflict.

    A zero gradient has cosine 0 with every other.

    >>> import torch
    >>> cosines(torch.tensor([[4.0, -1.0], [-1.0, 1.0]]))
    tensor([[ 1.0000, -0.5000],
            [-0.5000,  1.0000]], dtype=torch.float64)
    """
    return torch.from_numpy(_cosines(host_gramian(gramian)))


def _cosines(matrix: Array) -> Array:
    norms = np.sqrt(np.maximum(matrix.diagonal(), 0.0))
    inverse = np.divide(1.0, norms, out=np.zeros_like(norms), where=norms > 0.0)
    result: Array = np.clip(matrix * inverse[:, None] * inverse[None, :], -1.0, 1.0)
    return result


def magnitude_similarities(gramian: Tensor) -> Tensor:
    r"""The pairwise :math:`2 \|g_i\| \|g_j\| / (\|g_i\|^2 + \|g_j\|^2)` (paper, eq. 2); 1 for equal norms.

    >>> import torch
    >>> magnitude_similarities(torch.tensor([[9.0, 0.0], [0.0, 1.0]]))
    tensor([[1.0000, 0.6000],
            [0.6000, 1.0000]], dtype=torch.float64)
    """
    return torch.from_numpy(_magnitude_similarities(host_gramian(gramian)))


def _magnitude_similarities(matrix: Array) -> Array:
    squares = np.maximum(matrix.diagonal(), 0.0)
    norms = np.sqrt(squares)
    sums = squares[:, None] + squares[None, :]
    result: Array = np.divide(2.0 * np.outer(norms, norms), sums, out=np.ones_like(sums), where=sums > 0.0)
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
        return _condition_number(self._matrix)

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
        return _mean_over_pairs(self.cosines.numpy())

    @property
    def mean_magnitude_similarity(self) -> float:
        """The mean over pairs of different gradients; NaN when there are fewer than two."""
        return _mean_over_pairs(self.magnitude_similarities.numpy())

    @property
    def conflicts(self) -> int:
        """How many pairs of gradients point against each other."""
        return int((self.cosines.numpy() < 0.0).sum()) // 2


def _mean_over_pairs(matrix: Array) -> float:
    count = len(matrix)
    return float((matrix.sum() - matrix.trace()) / (count * (count - 1))) if count > 1 else float("nan")
