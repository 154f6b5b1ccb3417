"""SORO, structured orthogonal regularisation optimisation, with and without DBT."""

from pydantic import Field

from spcl.aggregation import SOROPresets, SOROSettings, solve_soro
from spcl.methods.base import Gradients, Weights
from spcl.methods.preference import PreferenceMethod, PreferenceSettings


class SOROMethodSettings(SOROSettings, PreferenceSettings):
    """Settings of :class:`SORO`: the settings of Algorithm 1 and of every method."""


class SORO(SOROPresets, PreferenceMethod):
    r"""Structured orthogonal regularisation optimisation: gradients are made nearly orthogonal, then added up.

    .. math:: u = s\, \hat G W, \qquad \hat G \approx \arg\min_{\hat G, d} \|G-\hat G\|_F^2
        + \sigma\|\hat G^\top\hat G - \mathrm{diag}(d)\|_F^2 + \lambda\|d-1\|_2^2

    The adjusted gradients have norms near 1. The scale s, which the paper does not mention, is taken from its authors'
    code: the smallest singular value of G that is not zero up to rounding. So the update shrinks as the gradients do,
    and is short where two of them nearly agree. σ, λ and the tolerance are the paper's. W is all ones, as in the paper,
    unless ``memory_share`` is given (:class:`spcl.methods.preference.PreferenceMethod`).

    ``SORO.paper()`` is the paper to the letter, with s = 1. ``SORO.released()`` has all settings of the published SPCL
    code: σ = 500, λ = 10, and at most 100 iterations with η = 1e-5, momentum 0.9 and tolerance 1e-5, and a
    cut-off of 1e-7 for eigenvalues.

    Li et al., *Towards Stable Training of Parallel Continual Learning*, 2024, eq. 9 and Algorithm 1
    (:func:`spcl.aggregation.solve_soro`).

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
        """Return the weights and the adjusted Gramian of Algorithm 1."""
        solution = solve_soro(gradients.known_gramian(), self.settings, self.preference(gradients))
        return Weights(solution.weights, solution.adjusted)


class SORODBT(SORO):
    r"""SORO with DBT: orthogonal gradients and, by a penalty, orthogonal convolutions and linear layers.

    .. math:: g_i \leftarrow g_i + \alpha \nabla \sum_l \lim_{P_l \to \infty}
        \tfrac{1}{P_l} \|\mathcal M_l \mathcal M_l^\top - I\|_F^2

    with the doubly-block Toeplitz matrix :math:`\mathcal M_l` of layer l and its number :math:`P_l` of output
    positions: the penalty is the contribution of an output position far from the borders, whatever the size of the
    images. The paper gives no value of α; the default is the largest power of ten that cost little accuracy on held-out
    data of PS-EMNIST, where no value gained any. The published SPCL code penalises squared cosines between flattened
    kernels of hand-picked layers instead, with α = 1e-6.

    Li et al., *Towards Stable Training of Parallel Continual Learning*, 2024, eq. 4
    (:func:`spcl.orthogonality.orthogonality_penalty`).

    >>> SORODBT().settings.alpha
    1e-05
    """

    name = "soro+dbt"
    summary = "SORO, with a penalty that makes the layers orthogonal as well"

    class Settings(SOROMethodSettings):
        """Settings of :class:`SORODBT`: the settings of :class:`SORO` with the penalty switched on."""

        alpha: float = Field(1e-5, ge=0.0, description="α, weight of the DBT orthogonality penalty (paper, eq. 4)")
