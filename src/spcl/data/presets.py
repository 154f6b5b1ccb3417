"""Backbone, budget and learning rate of every benchmark, as typed presets."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from spcl.data.image_data import ImageData

__all__ = ["PRESETS", "BackboneName", "Preset", "PresetName", "preset_for"]

BackboneName = Literal["mlp", "cnn", "resnet18"]
PresetName = Literal["default", "paper"]


class Preset(BaseModel):
    """What a benchmark is trained with unless the user says otherwise.

    Networks and memory budgets are the paper's (§5.2), learning rates and batch sizes those of its code and protocols.

    >>> PRESETS["ps-cifar100"]["paper"].batch_norm_momentum
    0.01
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tasks: int = Field(5, ge=1, description="into how many tasks the classes are split")
    batch_size: int = Field(128, ge=1, description="samples of a task in a step")
    memory_budget: int = Field(0, ge=0, description="samples kept for rehearsal in all; 0 rehearses nothing")
    backbone: BackboneName = Field("cnn", description="the shared network: mlp, cnn or resnet18")
    learning_rate: float = Field(1e-3, gt=0.0, description="of the optimiser")
    batch_norm_momentum: float = Field(
        0.1, gt=0.0, le=1.0, description="of batch-norm's running averages, in PyTorch's convention"
    )


def _both(preset: Preset) -> dict[PresetName, Preset]:
    """The preset, and the paper's: it published batch-norm averages of momentum 0.99, which PyTorch writes 0.01."""
    return {"default": preset, "paper": preset.model_copy(update={"batch_norm_momentum": 0.01})}


PRESETS: dict[str, dict[PresetName, Preset]] = {
    "ps-glyphs": _both(Preset(tasks=5, memory_budget=5 * 62, backbone="mlp", learning_rate=3e-3)),
    "ps-emnist": _both(Preset(tasks=5, memory_budget=5 * 62, backbone="mlp", learning_rate=3e-3)),
    "ps-cifar100": _both(Preset(tasks=10, memory_budget=30 * 100, backbone="resnet18", learning_rate=4e-4)),
    "ps-tiny-imagenet": _both(
        Preset(tasks=10, batch_size=32, memory_budget=15 * 200, backbone="resnet18", learning_rate=5e-4)
    ),
    "toy-cifar10": _both(Preset(tasks=2, memory_budget=30 * 10, backbone="cnn", learning_rate=1e-3)),
}
"""The presets of the known benchmarks."""


def preset_for(benchmark: str, name: PresetName, data: ImageData | None = None) -> Preset:
    """The preset of a known benchmark, or one for your own data: two classes a task at least, ten samples a class kept.

    >>> preset_for("ps-emnist", "default").memory_budget
    310
    """
    if benchmark in PRESETS or data is None:
        return PRESETS[benchmark][name]
    backbone: BackboneName = "cnn" if len(data.shape) == 3 else "mlp"
    own = Preset(tasks=max(1, min(5, data.classes // 2)), memory_budget=10 * data.classes, backbone=backbone)
    return _both(own)[name]
