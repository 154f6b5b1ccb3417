"""MDMTR, multi-domain multi-task rehearsal."""

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, normalize, one_hot

from spcl.batches import Inputs
from spcl.errors import TaskError
from spcl.memory import Memory
from spcl.methods.base import Output
from spcl.methods.er import ER
from spcl.methods.settings import MethodSettings
from spcl.tasks import Task

SMALLEST_SQUARED_SINE = 1e-7


class CosineHead(nn.Module):
    """Classifier whose logits are the cosines between the features and one vector per class.

    >>> head = CosineHead(8, 3)
    >>> bool((head(torch.randn(5, 8)).abs() <= 1.0 + 1e-6).all())
    True
    """

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(classes, features)))

    def forward(self, features: Tensor) -> Tensor:
        """Return the cosines, of shape (batch, classes)."""
        return linear(normalize(features, dim=1), normalize(self.weight, dim=1))


class MDMTRSettings(MethodSettings):
    """Settings of :class:`MDMTR`; the publication gives no values of the margins."""

    scale: float = Field(20.0, gt=0.0, description="s, factor of the cosines in the softmax")
    task_margin: float = Field(0.01, ge=0.0, description="m_t, margin in radians against the classes of other tasks")
    class_margin: float = Field(0.01, ge=0.0, description="m_c, margin in radians against all other classes")


class MDMTR(ER):
    r"""Multi-domain multi-task rehearsal: one cosine classifier over all tasks, with margins for task and class.

    .. math:: \ell = -\log \frac{e^{s \cos(\theta_y + m_t + m_c)}}{e^{s \cos(\theta_y + m_t + m_c)}
        + \sum_{k \in t,\, k \ne y} e^{s \cos(\theta_k + m_t)} + \sum_{k \notin t} e^{s \cos \theta_k}}

    for a sample of class y and task t, with :math:`\theta_k` the angle between the features and the vector of class k.
    Gradients are averaged as in :class:`ER`. The softmax covers the classes of all tasks seen, in training also
    task-incrementally, since among the classes of one task a margin for tasks would have no effect; task-incremental
    predictions compare the task's own classes only. The publication's optional episodic distillation is not included.
    Tasks with a head and loss of their own are an error.

    Lyu et al., *Multi-Domain Multi-Task Rehearsal for Lifelong Learning*, AAAI 2021.

    >>> MDMTR(scale=30.0)
    MDMTR(scale=30.0)
    """

    name = "mdmtr"
    family = "SCL"
    order = 5
    summary = "one cosine classifier over all tasks, with angular margins for task and class"
    reference = "Lyu et al., Multi-Domain Multi-Task Rehearsal for Lifelong Learning, AAAI 2021"
    joint_logits = True
    Settings = MDMTRSettings
    settings: MDMTRSettings

    def check_task(self, task: Task, x: Inputs, memory: Memory | None) -> None:
        """Raise an error if the task is not a classification task, or has a loss of its own."""
        super().check_task(task, x, memory)
        if task.classes is None:
            raise TaskError(
                f"task {task.name!r} has a head and loss of its own, but method 'mdmtr' is a loss for classifiers: "
                f"add the task with classes=, or choose another method, e.g. 'er'"
            )
        if task.loss is not cross_entropy:
            raise TaskError(
                f"task {task.name!r} has a loss of its own, but method 'mdmtr' is itself a loss: add the task without "
                f"loss=, or choose another method, e.g. 'er'"
            )

    def make_head(self, features: int, classes: int) -> nn.Module:
        """Return a cosine classifier."""
        return CosineHead(features, classes)

    def task_loss(self, output: Output) -> Tensor:
        """Return the two-level angular margin loss."""
        cosines = output.value
        probabilities = output.targets
        if not probabilities.is_floating_point():
            probabilities = one_hot(probabilities, cosines.shape[1])
        margins = self.settings.class_margin * probabilities.to(cosines)
        margins[:, output.own] += self.settings.task_margin
        sines = (1.0 - cosines.square()).clamp(min=SMALLEST_SQUARED_SINE).sqrt()  # finite slope where θ is 0 or π
        with_margins = cosines * margins.cos() - sines * margins.sin()
        return cross_entropy(output.with_offsets(self.settings.scale * with_margins), output.targets)
