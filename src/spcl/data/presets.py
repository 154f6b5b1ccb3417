"""Presets of every benchmark: tasks, batch size, memory budget, backbone and learning rate."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from spcl.batches import Inputs, leaves
from spcl.data.image_data import TOKEN_TYPES, ImageData
from spcl.data.source_data import SourceData
from spcl.registry import Named

__all__ = ["PRESETS", "Preset", "PresetName", "preset_for"]

PresetName = Literal["default", "plus", "paper", "released"]

MIN_STEPS = 20
MIN_BATCH = 4
MAX_BATCH = 128
MIN_SIDE_OF_CNN = 18
MEMORY_OF_CLASS = 10
CLASSES_OF_OTHERS = 5
"""As many classes a source without classes counts for in memory."""


class Preset(BaseModel):
    """Network, batches and memory; the defaults depend on the benchmark.

    Backbones and memory budgets are the paper's (§5.2), learning rates and batch sizes those of its code and protocols.
    What else ``plus`` and ``released`` set is in :mod:`spcl.runs.plus` and :mod:`spcl.runs.released`.

    >>> PRESETS["ps-cifar100"]["paper"].batch_norm_momentum
    0.01
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tasks: int = Field(5, ge=1, description="number of tasks that the classes are split into")
    batch_size: int = Field(128, ge=1, description="samples of a task per step")
    memory_budget: int = Field(0, ge=0, description="samples kept for replay in all; 0 disables replay")
    backbone: Named = Field("cnn", description="shared network: its name, and its own options")
    learning_rate: float = Field(1e-3, gt=0.0, description="learning rate of the optimiser")
    batch_norm_momentum: float = Field(
        0.1, gt=0.0, le=1.0, description="momentum of batch-norm's running averages, in PyTorch's convention"
    )


def _all(preset: Preset) -> dict[PresetName, Preset]:
    """Return the preset as default and as published, where batch-norm's momentum is 0.99, 0.01 in PyTorch."""
    published = preset.model_copy(update={"batch_norm_momentum": 0.01})
    return {"default": preset, "plus": preset, "paper": published, "released": published}


PRESETS: dict[str, dict[PresetName, Preset]] = {
    "ps-glyphs": _all(Preset(tasks=5, memory_budget=5 * 62, backbone="mlp", learning_rate=3e-3)),
    "ps-emnist": _all(Preset(tasks=5, memory_budget=5 * 62, backbone="mlp", learning_rate=3e-3)),
    "ps-cifar100": _all(Preset(tasks=10, memory_budget=30 * 100, backbone="resnet18", learning_rate=4e-4)),
    "ps-tiny-imagenet": _all(
        Preset(tasks=10, batch_size=32, memory_budget=15 * 200, backbone="resnet18", learning_rate=5e-4)
    ),
    "toy-cifar10": _all(Preset(tasks=2, batch_size=32, memory_budget=30 * 10, backbone="cnn", learning_rate=2e-3)),
}
"""The presets of the known benchmarks."""


def preset_for(
    benchmark: str, name: PresetName, data: ImageData | SourceData | None = None, *, tasks: int | None = None
) -> Preset:
    """Return the preset of a known benchmark, or one for custom data that is split into so many tasks.

    Custom data gets at most five tasks of at least two classes unless `tasks` is given, a memory of ten samples per
    class, and a batch size at which a task of average size has at least twenty steps, from 4 to 128. The tasks of data
    of several sources are the sources; the smallest of them decides the batch size, and one without classes adds fifty
    samples to the memory.

    >>> preset_for("ps-emnist", "default").memory_budget
    310
    """
    if benchmark in PRESETS or data is None:
        return PRESETS[benchmark][name]
    if isinstance(data, SourceData):
        return _all(_preset_of_sources(data))[name]
    tasks = tasks or max(1, min(5, data.classes // 2))
    custom = Preset(
        tasks=tasks,
        batch_size=_fitting_batch_size(len(data.train_y) // tasks),
        memory_budget=MEMORY_OF_CLASS * data.classes,
        backbone=_fitting_backbone(data.train_x),
    )
    return _all(custom)[name]


def _preset_of_sources(data: SourceData) -> Preset:
    return Preset(
        tasks=len(data.sources),
        batch_size=_fitting_batch_size(min(len(source.train_y) for source in data.sources)),
        memory_budget=sum(MEMORY_OF_CLASS * (source.classes or CLASSES_OF_OTHERS) for source in data.sources),
        backbone=_fitting_backbone(data.sources[0].train_x),
    )


def _fitting_backbone(x: Inputs) -> str:
    """Return the backbone for samples such as these: tokens, images that convolutions can take, or other features."""
    first = next(iter(leaves(x).values()))
    if first.dtype in TOKEN_TYPES:
        return "text"
    return "cnn" if first.ndim == 4 and min(first.shape[2:]) >= MIN_SIDE_OF_CNN else "mlp"


def _fitting_batch_size(samples: int) -> int:
    """Return the largest power of two that gives so many samples enough steps, within the bounds of a batch.

    >>> [_fitting_batch_size(samples) for samples in (5, 80, 400, 2559, 2560, 100_000)]
    [4, 4, 16, 64, 128, 128]
    """
    return min(MAX_BATCH, max(MIN_BATCH, 1 << (samples // MIN_STEPS).bit_length() >> 1))
