"""SPCL, the scale-free method."""

from pydantic import Field

from spcl.aggregation import NormScale, solve_scale_free
from spcl.methods.base import Gradients, Weights
from spcl.methods.preference import PreferenceMethod, PreferenceSettings
from spcl.methods.replay import LogitOptions, ReplayLossName


class SPCLSettings(LogitOptions, PreferenceSettings):
    """Settings of :class:`SPCL`, chosen on held-out parts of PS-EMNIST and PS-CIFAR-100."""

    finished_weight: float = Field(
        0.01,
        gt=0.0,
        le=1.0,
        description="class-incrementally, weight of the classes of finished tasks in the softmax of new samples",
    )
    replay_loss: ReplayLossName = Field("logits", description="loss on replayed samples")
    kappa: float = Field(2.0, ge=1.0, description="κ_max, largest condition number of the adjusted unit gradients")
    scale: NormScale = Field(
        "median",
        description="s, length of the adjusted gradients: 1 (unit), the smallest, median or geometric mean of the "
        "gradients' norms (min, median, mean), or such that the update is as long as the sum of the gradients (norm)",
    )


class SPCL(PreferenceMethod):
    r"""Scale-free orthogonal gradients: unit gradients of bounded condition number, times a typical norm, added up.

    .. math:: u = s\, \hat E W, \qquad \hat E = \arg\min_{\kappa(\hat E) \le \kappa_{max}} \|E - \hat E\|_F^2,
        \qquad E = \left(\frac{g_1}{\|g_1\|}, …, \frac{g_T}{\|g_T\|}\right)

    What SORO does for the gradients, this does for their directions, so that κ_max means the same for gradients of any
    size, and multiplying the loss of a task by a positive number leaves the direction of the update as it is. The
    minimum is exact: the singular values of E are clipped to an interval. κ_max = 1 makes the directions orthogonal, a
    large κ_max only normalises them. The scale s gives the update its length, so that it shrinks as the gradients do;
    no single task decides the median. The preference W is all ones, unless ``memory_share`` gives memory a fixed part
    of it, or a part that follows from its classes, its samples or the slope of its loss
    (:class:`spcl.methods.preference.PreferenceMethod`). Replayed samples are trained towards their labels and towards
    the logits of the model that had just finished their task (``replay_loss="logits"``).

    Class-incrementally, new samples push down the logits of all other classes, and memory has few samples to raise the
    logits of finished tasks again. So classes of finished tasks count by ``finished_weight`` w in the softmax of new
    samples, beside the classes A of running tasks. Replayed samples are trained against all classes alike:

    .. math:: \ell(x, y) = -\log \frac{e^{z_y}}{\sum_{c \in A} e^{z_c} + w \sum_{c \notin A} e^{z_c}}

    Gradients of zeros are skipped. If gradients depend linearly on one another, κ is the condition number on their
    range.

    After Li et al., *Towards Stable Training of Parallel Continual Learning*, 2024, eq. 7
    (:func:`spcl.aggregation.solve_scale_free`).

    >>> SPCL(kappa=4.0, memory_share=0.5)
    SPCL(memory_share=0.5, kappa=4.0)
    """

    name = "spcl"
    family = "PCL"
    summary = "unit gradients of bounded condition number, added up; memory keeps its labels and logits"
    reference = "Li et al., Towards Stable Training of Parallel Continual Learning, 2024"
    Settings = SPCLSettings
    settings: SPCLSettings

    def weigh(self, gradients: Gradients) -> Weights:
        """Return the weights and the Gramian of the adjusted gradients."""
        solution = solve_scale_free(
            gradients.known_gramian(),
            max_condition=self.settings.kappa,
            scale=self.settings.scale,
            preference=self.preference(gradients),
        )
        return Weights(solution.weights, solution.adjusted)
