"""Base class of what predicts classes, and the trained heads themselves."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from spcl.memory import Memory
from spcl.methods.tasks import Task
from spcl.registry import Registry

__all__ = ["PREDICTORS", "ClassPredictor", "StepSamples", "StoredFeatures", "TrainedHeads"]

StepSamples = list[tuple[Task, Tensor]]
"""The tasks of a step, each with the targets of its batch."""


@dataclass(frozen=True)
class StoredFeatures:
    """The samples of a task that memory holds: features of the averaged weights, if there are any, and labels."""

    features: Tensor
    labels: Tensor


class ClassPredictor(ABC):
    """Makes the heads by which classifiers predict instead of those that were trained.

    A head is a module on the backbone's features, so that predictions, saved models and exports need nothing else.
    """

    needs_memory: ClassVar[bool] = True
    keeps_heads: ClassVar[bool] = False
    """Whether a head is made of a task's samples alone: without any in memory, a task then keeps its latest head."""

    @abstractmethod
    def new_head(self, head: nn.Module, features: int, classes: int) -> nn.Module | None:
        """Return a head of which :meth:`fit` sets the values, given the trained one; None to predict by that."""

    def fit(self, heads: Mapping[str, nn.Module], stored: Mapping[str, StoredFeatures], joint: bool) -> None:
        """Set the values of new heads.

        Args:
            heads: of all classifiers, by task, in their order.
            stored: the samples in memory of those that have any.
            joint: whether a sample is compared with the classes of all tasks.
        """
        return

    def observe(self, samples: StepSamples, memory: Memory, memory_batch: int | None) -> None:
        """Receive the targets that a step was trained on."""
        return

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from :meth:`state_dict`."""
        return


PREDICTORS: Registry[Callable[..., ClassPredictor]] = Registry("predictor", ClassPredictor)
"""What may predict classes, by name: factories with options."""


@PREDICTORS.register("head")
class TrainedHeads(ClassPredictor):
    """The trained heads."""

    needs_memory: ClassVar[bool] = False

    def new_head(self, head: nn.Module, features: int, classes: int) -> None:
        """Return None."""
        return
