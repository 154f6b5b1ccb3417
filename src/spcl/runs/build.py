"""The learner of a run from its settings: backbone, memory and optimiser."""

from collections.abc import Sequence
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from spcl.data import ImageData, SourceData
from spcl.distributed import World
from spcl.learner import Learner
from spcl.learner.freezing import matching
from spcl.memory import MEMORIES, Memory
from spcl.methods import make_method
from spcl.models import BACKBONES, Backbone, InputSpec, Normalise
from spcl.optimizers import OPTIMIZERS
from spcl.registry import named_options
from spcl.runs.settings import RunSettings
from spcl.schedules import SCHEDULES
from spcl.transforms import compose

__all__ = [
    "inputs_of",
    "learner_options",
    "learner_parts",
    "make_backbone",
    "make_learner",
    "make_memory",
    "make_optimizer",
]

SAMPLES_FOR_NORMALISATION = 10_000


def make_learner(
    settings: RunSettings,
    data: ImageData | SourceData,
    device: torch.device,
    steps: int,
    distributed: World | None = None,
) -> Learner:
    """Make the learner before the first of so many steps; seeds PyTorch's global generator."""
    torch.manual_seed(settings.seed)
    return Learner(
        **learner_parts(settings, data, device, steps),
        **learner_options(settings),
        memory_batch=settings.memory_batch or settings.batch_size,
        distributed=distributed,
    )


def learner_options(settings: RunSettings) -> dict[str, Any]:
    """Return the arguments of a new ``Learner`` that settings say directly; a loaded one has them in its state."""
    return {
        "scenario": settings.scenario,
        "clip_norm": settings.clip_norm,
        "average": settings.average,
        "predict_by": settings.predict_by,
        "updates": settings.updates,
        "autocast": torch.bfloat16 if settings.precision == "bfloat16" else None,
        "measure_stability": settings.stability,
        "capture": settings.capture,
        "low_memory": settings.low_memory,
        "seed": settings.seed,
    }


def learner_parts(
    settings: RunSettings, data: ImageData | SourceData | Sequence[InputSpec], device: torch.device, steps: int
) -> dict[str, Any]:
    """Make the parts of a learner of a run of so many steps, as arguments of ``Learner`` and ``Learner.load``.

    For a learner that is loaded, the :func:`inputs_of` the data are enough, since its state has the statistics of the
    training samples.
    """
    name, options = named_options(settings.method, "method")
    method = make_method(name, **options)
    return {
        "backbone": make_backbone(settings, data, device),
        "method": method,
        "optimizer": partial(make_optimizer, settings),
        "memory": make_memory(settings, method.edits_memory, device),
        "schedule": None if settings.schedule == "constant" else SCHEDULES.make(settings.schedule, steps),
        "augment": compose(settings.augment) if settings.augment else None,
    }


def inputs_of(data: ImageData | SourceData) -> list[InputSpec]:
    """Return shape and type of the training samples, of every source where there are several."""
    return [InputSpec.of(x) for x in _training_samples(data)]


def make_backbone(
    settings: RunSettings, data: ImageData | SourceData | Sequence[InputSpec], device: torch.device
) -> nn.Module:
    """Make the shared network on its device; bytes are normalised by statistics of (a part of) the training data,
    or scaled to 0…1.

    Where sources have samples of several shapes or types, bytes reach the network as they are.
    """
    kinds = inputs_of(data) if isinstance(data, ImageData | SourceData) else data
    inputs, momentum = reduce(or_, kinds), settings.batch_norm_momentum
    backbone: nn.Module = BACKBONES.make(settings.backbone, inputs, batch_norm_momentum=momentum).to(device)
    for parameter in matching(backbone, settings.frozen) if settings.frozen else ():
        parameter.requires_grad_(False)
    if device.type == "cuda":
        backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if any(kind.parts is not None or kind.dtype != torch.uint8 or kind.shape != inputs.shape for kind in kinds):
        return backbone
    if not settings.normalise or not isinstance(data, ImageData | SourceData):
        channels = inputs.shape[0]
        return Backbone(Normalise([0.0] * channels, [1.0] * channels).to(device), backbone)
    images = _training_samples(data)
    every = max(1, sum(map(len, images)) // SAMPLES_FOR_NORMALISATION)
    sample = torch.cat([x[::every] for x in images]).to(device)
    std, mean = torch.std_mean(sample.float() / 255, dim=[0, 2, 3])
    return Backbone(Normalise(mean.tolist(), std.clamp(min=1e-3).tolist()).to(device), backbone)


def _training_samples(data: ImageData | SourceData) -> list[Any]:
    return [source.train_x for source in data.sources] if isinstance(data, SourceData) else [data.train_x]


def make_memory(settings: RunSettings, edited: bool, device: torch.device) -> Memory | None:
    """Make the replay memory, or None for a budget of 0; memory whose samples a method edits stores floats."""
    if not settings.memory_budget:
        return None
    dtype = torch.float32 if edited else None
    memory: Memory = MEMORIES.make(
        settings.memory, settings.memory_budget, seed=settings.seed, device=device, dtype=dtype
    )
    return memory


def make_optimizer(settings: RunSettings, parameters: list[nn.Parameter]) -> Optimizer:
    """Make the optimiser of these parameters."""
    optimizer: Optimizer = OPTIMIZERS.make(settings.optimizer, parameters, lr=settings.learning_rate)
    return optimizer
