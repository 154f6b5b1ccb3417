"""Statistics of the filters of a layer: condition number, norm and correlation."""

from dataclasses import dataclass
from math import inf, nan

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from spcl.orthogonality.layers import LayerChoice, find_layers

WELL_CONDITIONED = 1e-8  # relative to the largest eigenvalue: rounding changes it by less than a millionth


@dataclass(frozen=True)
class FilterStatistics:
    """Statistics of one layer's kernel as a matrix with one row per filter, N × (C·k·k).

    In a grouped layer the filters of different groups apply to different channels: the matrix is block-diagonal.

    Attributes:
        condition_number: σ_max/σ_min, 1 for orthogonal filters of equal norm and infinite without full rank.
        norm: The spectral norm σ_max, 1 for an orthogonal layer of any size.
        correlation: The paper's filter correlation (Eq. 11), `1/(m(m−1)) · Σ_{i<j} |cos(W_i, W_j)|` over the m
            filters. As in the paper, the sum over m(m−1)/2 pairs is divided by m(m−1): equal filters have 1/2,
            orthogonal filters 0.
    """

    condition_number: float
    norm: float
    correlation: float


@torch.no_grad()
def filter_statistics(module: nn.Module, layers: LayerChoice = None) -> dict[str, FilterStatistics]:
    """Return condition number, norm and filter correlation of the chosen layers, by name (paper, §5.5).

    Layers are chosen as in `orthogonality_penalty`. For a non-finite kernel all three are NaN.

    >>> linear = nn.Linear(2, 2)
    >>> _ = linear.weight.data.copy_(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
    >>> filter_statistics(nn.Sequential(linear))
    {'0': FilterStatistics(condition_number=3.0, norm=3.0, correlation=0.0)}
    """
    return {layer.name: _statistics(layer.weight.double(), layer.groups) for layer in find_layers(module, layers)}


def _statistics(weight: Tensor, groups: int) -> FilterStatistics:
    filters = weight.reshape(groups, len(weight) // groups, -1)  # G × N/G × (C/G·k·k)
    if not filters.isfinite().all():
        return FilterStatistics(nan, nan, nan)
    smallest, largest = _extreme_singular_values(filters)
    rounding = largest * max(filters.shape[1:]) * torch.finfo(filters.dtype).eps
    return FilterStatistics(
        condition_number=largest / smallest if smallest > rounding else inf,
        norm=largest,
        correlation=_correlation(filters),
    )


def _extreme_singular_values(filters: Tensor) -> tuple[float, float]:
    """Return the smallest and largest singular value, from eigenvalues, ten times as fast, if they are accurate."""
    products = filters @ filters.mT if filters.shape[1] <= filters.shape[2] else filters.mT @ filters
    smallest, largest = map(float, torch.linalg.eigvalsh(products).aminmax())
    if smallest > WELL_CONDITIONED * largest:
        return smallest**0.5, largest**0.5
    smallest, largest = map(float, torch.linalg.svdvals(filters).aminmax())
    return smallest, largest


def _correlation(filters: Tensor) -> float:
    count = filters.shape[0] * filters.shape[1]
    directions = normalize(filters, dim=2)
    pairs = (directions @ directions.mT).abs().triu(diagonal=1)
    return pairs.sum().item() / max(count * (count - 1), 1)
