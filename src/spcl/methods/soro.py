"""The paper's own methods: SORO, and SORO with DBT."""

from pydantic import Field

from spcl.aggregation import SOROPresets, SOROSettings, solve_soro
from spcl.methods.base import Gradients, Method, MethodSettings, Weights

__all__ = ["SORO", "SORODBT"]


class SOROMethodSettings(SOROSettings, MethodSettings):
    """Settings of :class:`SORO`: those of Algorithm 1 and those of every method."""


class SORO(SOROPresets, Method):
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

    def weigh(self, gradients: Gradients) -> Weights:
        """The weights and the adjusted Gramian of Algorithm 1."""
        solution = solve_soro(gradients.known_gramian(), self.settings)
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
