"""SORO-κ: gradients of bounded condition number."""

from pydantic import Field

from spcl.aggregation import solve_condition
from spcl.methods.base import Gradients, Weights
from spcl.methods.preference import PreferenceMethod, PreferenceSettings


class SOROKappaSettings(PreferenceSettings):
    """Settings of :class:`SOROKappa`; the default was not tuned."""

    max_condition: float = Field(2.0, ge=1.0, description="κ_max, largest condition number of the adjusted gradients")
    lambda_: float | None = Field(
        None, gt=0.0, description="λ, weight of the condition number in eq. 7, which is then minimised instead"
    )
    cutoff: float = Field(
        2.0**-52, gt=0.0, lt=1.0, description="eigenvalues of GᵀG up to this times T times the largest count as zero"
    )


class SOROKappa(PreferenceMethod):
    r"""SORO's objective itself: the gradients nearest to G with a condition number of at most κ_max, added up.

    .. math:: u = \hat G W, \qquad \hat G = \arg\min_{\kappa(\hat G) \le \kappa_{max}} \|G - \hat G\|_F^2
        \qquad\text{or, with } \lambda,\qquad \arg\min_{\hat G} \|G - \hat G\|_F^2 + \lambda\, \kappa(\hat G)

    The paper calls the second (eq. 7) intractable and relaxes it to SORO (eq. 9). But both are solved exactly, in T×T
    matrices: the best Ĝ has the singular vectors of G, and its singular values clipped to an interval. Gradients that
    are well conditioned stay as they are. W is all ones unless ``memory_share`` is given. With κ_max = 1, Ĝ is
    :math:`UV^\top` times the mean singular value of G.

    Li et al., *Towards Stable Training of Parallel Continual Learning*, 2024, eq. 7
    (:func:`spcl.aggregation.solve_condition`).

    >>> SOROKappa(max_condition=4.0)
    SOROKappa(max_condition=4.0)
    """

    name = "soro-kappa"
    family = "PCL"
    summary = "the nearest gradients whose condition number is bounded, added up"
    reference = "Li et al., Towards Stable Training of Parallel Continual Learning, 2024"
    Settings = SOROKappaSettings
    settings: SOROKappaSettings

    def weigh(self, gradients: Gradients) -> Weights:
        """Return the weights and the Gramian of the adjusted gradients."""
        lambda_ = self.settings.lambda_
        solution = solve_condition(
            gradients.known_gramian(),
            max_condition=self.settings.max_condition if lambda_ is None else None,
            lambda_=lambda_,
            cutoff=self.settings.cutoff,
            preference=self.preference(gradients),
        )
        return Weights(solution.weights, solution.adjusted)
