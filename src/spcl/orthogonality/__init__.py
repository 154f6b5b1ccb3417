"""Orthogonal convolutions: the doubly-block Toeplitz (DBT) penalty, its gradient, and statistics of filters."""

from spcl.orthogonality.layers import LayerChoice, is_convolution
from spcl.orthogonality.penalty import add_orthogonality_gradient, orthogonality_penalty
from spcl.orthogonality.statistics import FilterStatistics, filter_statistics
from spcl.orthogonality.toeplitz import toeplitz_matrix

__all__ = [
    "FilterStatistics",
    "LayerChoice",
    "add_orthogonality_gradient",
    "filter_statistics",
    "is_convolution",
    "orthogonality_penalty",
    "toeplitz_matrix",
]
