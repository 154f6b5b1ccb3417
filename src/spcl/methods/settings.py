"""The settings that every method has."""

from functools import cache
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, create_model

from spcl.methods.replay import ReplayLossName, ReplayOptions


class MethodSettings(BaseModel):
    """Settings that every method has; unknown names and values out of range are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    alpha: float = Field(0.0, ge=0.0, description="α, weight of the DBT orthogonality penalty (paper, eq. 4); 0 is off")
    decoupled: bool = Field(
        False,
        description="add the orthogonality gradient to the update after the weighting, not to every task's gradient",
    )
    adaptive: bool = Field(
        False,
        description="α is relative, per layer: the orthogonality gradient is added to the update after the weighting, "
        "scaled to α times the norm of the layer's update, and to less once the layer is nearly orthogonal",
    )
    layers: Literal["all", "convolutions"] = Field(
        "all", description="what the penalty is on: all convolutions and linear layers, or convolutions only"
    )
    weigh_heads: bool = Field(
        False,
        description="weigh the gradients of the heads together with the gradients of the backbone, as columns of one G",
    )
    head_init: Literal["torch", "glorot"] = Field(
        "torch", description="initialisation of classifiers: PyTorch's of a linear layer, or Glorot's with biases of 0"
    )
    finished_weight: float = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="class-incrementally, weight of the classes of finished tasks in the cross-entropy of new samples: "
        "the smaller, the less new samples lower their logits; a loss of another kind does not know it",
    )
    replay_loss: ReplayLossName = Field(
        "labels", description="loss on replayed samples, whose options are settings as well"
    )

    @property
    def coupled(self) -> bool:
        """Whether the orthogonality gradient is added to every task's gradient, and not to the update."""
        return not (self.decoupled or self.adaptive)


@cache
def with_options(settings: type[MethodSettings], options: type[ReplayOptions]) -> type[MethodSettings]:
    """Return settings with the options of a loss on replayed samples, for which they may have defaults of their own."""
    if issubclass(settings, options) or not options.model_fields:
        return settings
    bases: Any = settings, options
    return cast(type[MethodSettings], create_model(settings.__name__, __base__=bases, __doc__=settings.__doc__))
