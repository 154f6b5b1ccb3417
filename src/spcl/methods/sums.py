"""Sums of gradients: SORO without orthogonality, and without normalisation."""

from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from spcl.aggregation import SOROSettings, solve_soro
from spcl.methods.base import Gradients, Method, Weights
from spcl.methods.settings import MethodSettings


class ScaledSumSettings(MethodSettings):
    """Settings of :class:`ScaledSum`."""

    cutoff: float = Field(
        2.0**-52,
        gt=0.0,
        lt=1.0,
        description="for σ_min(G), eigenvalues of GᵀG up to this times T times the largest count as zero",
    )


class NormSumSettings(ScaledSumSettings):
    """Settings of :class:`NormSum`."""

    scale: Literal["unit", "min"] = Field(
        "unit", description="as it is (unit), or rescaled to the norm of σ_min(G)·UVᵀ1 (min)"
    )


class NormSum(Method):
    r"""Sum of the normalised gradients: all of them count alike, whatever their norms and angles.

    .. math:: u = \sum_i \frac{g_i}{\|g_i\|}

    With ``scale="min"`` it has the norm of :class:`Procrustes`' update, and what SORO does beyond it is orthogonality.

    Li et al., *Towards Stable Training of Parallel Continual Learning*, 2024: SORO without orthogonality.

    >>> NormSum(scale="min")
    NormSum(scale='min')
    """

    name = "normsum"
    family = "MTL"
    summary = "the sum of the gradients, each divided by its norm"
    reference = "Li et al., Towards Stable Training of Parallel Continual Learning, 2024"
    Settings = NormSumSettings
    settings: NormSumSettings

    def weigh(self, gradients: Gradients) -> Weights:
        """Return the reciprocals of the norms; 0 for a gradient of zeros."""
        gramian = gradients.known_gramian()
        norms = gramian.diagonal().clamp(min=0.0).sqrt()
        weights = torch.where(norms > 0.0, 1.0 / norms, 0.0)
        return Weights(weights if self.settings.scale == "unit" else _rescaled(weights, gramian, self.settings.cutoff))


class ScaledSum(Method):
    r"""Plain sum of the gradients, rescaled to the norm of the update of SORO's starting point.

    .. math:: u = c \sum_i g_i, \qquad \|u\| = \|\sigma_{min}(G)\, U V^\top \mathbf 1\|, \qquad G = U S V^\top

    What :class:`Procrustes` does beyond it is the direction of the update; what it does beyond the plain sum
    (``torchjd:Sum``) is its length.

    Li et al., *Towards Stable Training of Parallel Continual Learning*, 2024: the scale of SORO alone.

    >>> ScaledSum()
    ScaledSum()
    """

    name = "scaledsum"
    family = "MTL"
    summary = "the sum of the gradients, as long as SORO's update"
    reference = "Li et al., Towards Stable Training of Parallel Continual Learning, 2024"
    Settings = ScaledSumSettings
    settings: ScaledSumSettings

    def weigh(self, gradients: Gradients) -> Weights:
        """Return equal weights."""
        gramian = gradients.known_gramian()
        return Weights(_rescaled(torch.ones(len(gramian), dtype=torch.float64), gramian, self.settings.cutoff))


def _rescaled(weights: Tensor, gramian: Tensor, cutoff: float) -> Tensor:
    """Return the weights times the factor that gives their update the norm of σ_min(G)·UVᵀ1; 0 if it has none."""
    orthogonal = solve_soro(gramian, SOROSettings(iterations=0, cutoff=cutoff)).weights
    wanted, norm = (_norm(each, gramian) for each in (orthogonal, weights))
    return weights * (wanted / norm if norm > 0.0 else 0.0)


def _norm(weights: Tensor, gramian: Tensor) -> float:
    return float(np.sqrt(max(float(weights @ gramian @ weights), 0.0)))
