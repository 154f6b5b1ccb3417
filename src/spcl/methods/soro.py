"""The paper's own methods: SORO, and SORO with DBT."""

from typing import Any, Literal

from pydantic import Field

from spcl.aggregation import SOROWeighting
from spcl.methods.base import Gradients, Method, MethodSettings, Weights

__all__ = ["SORO", "SORODBT"]


class SOROMethodSettings(MethodSettings):
    """Settings of Algorithm 1, as in :func:`spcl.aggregation.solve_soro`."""

    sigma: float = Field(100.0, gt=0.0, description="σ, how strongly the adjusted gradients are made orthogonal")
    lambda_: float = Field(100.0, ge=0.0, description="λ, how strongly their norms are drawn to 1")
    eta: float | None = Field(None, gt=0.0, description="η, step of the descent; 1/(8σ+2) if not given")
    iterations: int = Field(100, ge=0, description="the most iterations")
    tolerance: float = Field(1e-3, ge=0.0, description="stop when the objective falls by less")
    momentum: float = Field(0.0, ge=0.0, lt=1.0, description="momentum of the descent")
    scale: Literal["unit", "min"] = Field("min", description="multiply the result by 1 or by σ_min(G)")


class SORO(Method):
    r"""Structured orthogonal regularisation optimisation: orthogonalise the gradients, then add them up.

    .. math:: u = \hat G \mathbf 1, \qquad \hat G \approx \arg\min_{\hat G, d} \|G-\hat G\|_F^2
        + \sigma\|\hat G^\top\hat G - \mathrm{diag}(d)\|_F^2 + \lambda\|d-1\|_2^2

    Li et al., *Towards Stable Training of Parallel Continual Learning*, 2024, eq. 9 and Algorithm 1. σ, λ and the
    tolerance are the paper's. The scale of Ĝ, of which the paper says nothing, is that of the code its authors
    published: times the smallest singular value of G, so that the update shrinks as the gradients do. The rest of what
    that code uses is ``SORO(**spcl.aggregation.RELEASED)``.

    >>> SORO(sigma=50.0)
    SORO(sigma=50.0)
    """

    name = "soro"
    family = "PCL"
    summary = "makes the tasks' gradients nearly orthogonal before adding them"
    reference = "Li et al., Towards Stable Training of Parallel Continual Learning, 2024"
    Settings = SOROMethodSettings
    settings: SOROMethodSettings

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._weighting = SOROWeighting(**self.settings.model_dump(exclude={"alpha", "decoupled"}))

    def weigh(self, gradients: Gradients) -> Weights:
        """The weights and the adjusted Gramian of Algorithm 1."""
        solution = self._weighting.solve(gradients.known_gramian())
        return Weights(solution.weights, solution.adjusted)


class SORODBT(SORO):
    """SORO with DBT: orthogonal gradients and, by the penalty of eq. 4, orthogonal convolutions.

    The paper gives no value of α; the default is the largest power of ten that cost little accuracy on held-out data of
    PS-EMNIST, where no value gained any.

    >>> SORODBT().settings.alpha
    1e-05
    """

    name = "soro+dbt"
    summary = "SORO, with the convolutions drawn to orthogonality as well"

    class Settings(SOROMethodSettings):
        """SORO's settings, with the penalty switched on."""

        alpha: float = Field(1e-5, ge=0.0, description="α, weight of the DBT orthogonality penalty (paper, eq. 4)")
