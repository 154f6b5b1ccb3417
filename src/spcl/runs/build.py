"""The learner of a run from its settings: device, backbone, memory and optimiser."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from spcl.data import ImageData
from spcl.errors import SpclError
from spcl.learner import Learner
from spcl.memory import BalancedCoreset, Memory, Reservoir
from spcl.methods import Method, make_method
from spcl.models import MLP, Backbone, Inputs, Normalise, ResNet18, ResNet34, SmallCNN, VisionTransformer
from spcl.runs.settings import RunSettings

__all__ = [
    "DeviceError",
    "make_backbone",
    "make_learner",
    "make_memory",
    "pick_device",
    "restore_learner",
    "untrained_backbone",
]

SAMPLES_FOR_NORMALISATION = 10_000


class DeviceError(SpclError):
    """A device that is unknown or cannot compute here."""


def make_learner(settings: RunSettings, data: ImageData, device: torch.device) -> Learner:
    """Make the learner before its first step; seeds PyTorch's global generator."""
    torch.manual_seed(settings.seed)
    method = _make_method(settings)
    return Learner(
        make_backbone(settings, data, device),
        method,
        optimizer=partial(_make_optimizer, settings),
        memory=make_memory(settings, method.edits_memory, device),
        scenario=settings.scenario,
        memory_batch=settings.batch_size,
        autocast=torch.bfloat16 if settings.precision == "bfloat16" else None,
        measure_stability=settings.stability,
        capture=settings.capture,
        seed=settings.seed,
    )


def restore_learner(settings: RunSettings, inputs: Inputs, state: Mapping[str, Any], device: torch.device) -> Learner:
    """Make the learner of a model that was trained on such samples, with a new optimiser and an empty memory."""
    method = _make_method(settings)
    with torch.random.fork_rng(devices=[]):
        backbone = untrained_backbone(settings, inputs, device)
    return Learner.load(
        state,
        backbone=backbone,
        method=method,
        optimizer=partial(_make_optimizer, settings),
        memory=make_memory(settings, method.edits_memory, device),
    )


def make_backbone(settings: RunSettings, data: ImageData, device: torch.device) -> nn.Module:
    """Make the shared network on its device; bytes are normalised by statistics of (a part of) the training data."""
    backbone = untrained_backbone(settings, Inputs.of(data.train_x), device)
    if isinstance(backbone, Backbone) and isinstance(normalise := backbone[0], Normalise):
        sample = data.train_x[:: max(1, len(data.train_x) // SAMPLES_FOR_NORMALISATION)].to(device)
        std, mean = torch.std_mean(sample.float() / 255, dim=[0, 2, 3])
        normalise.mean.copy_(mean)
        normalise.std.copy_(std.clamp(min=1e-3))
    return backbone


def untrained_backbone(settings: RunSettings, inputs: Inputs, device: torch.device) -> nn.Module:
    """Make the shared network for such samples on its device, without the statistics that normalise bytes."""
    backbone = _network(settings, inputs.shape).to(device)
    if device.type == "cuda":
        backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if inputs.dtype != torch.uint8:
        return backbone
    channels = inputs.shape[0]
    return Backbone(Normalise([0.0] * channels, [1.0] * channels).to(device), backbone)


def make_memory(settings: RunSettings, edited: bool, device: torch.device) -> Memory | None:
    """Make the replay memory, or None for a budget of 0; memory whose samples a method edits stores floats."""
    if not settings.memory_budget:
        return None
    policy = BalancedCoreset if settings.memory == "balanced" else Reservoir
    dtype = torch.float32 if edited else None
    return policy(settings.memory_budget, seed=settings.seed, device=device, dtype=dtype)


def pick_device(name: str) -> torch.device:
    """Return the device of this name; ``auto`` is a GPU if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # "meta" has tensors, but no values in them
    except (RuntimeError, AssertionError, ImportError) as error:
        has_none = name.partition(":")[0] == "mps" and not torch.backends.mps.is_available()
        reason = "there is none on this machine" if has_none else str(error).splitlines()[0]
        raise DeviceError(f"cannot use device {name!r}: {reason}; choose another, such as cpu") from error
    return device


def _make_method(settings: RunSettings) -> Method:
    return make_method(settings.method["name"], **{k: v for k, v in settings.method.items() if k != "name"})


def _make_optimizer(settings: RunSettings, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=settings.learning_rate, fused=True)
    on_cuda = parameters[0].is_cuda
    return torch.optim.Adam(parameters, lr=settings.learning_rate, fused=True, capturable=on_cuda)


def _network(settings: RunSettings, shape: Sequence[int]) -> nn.Module:
    if settings.backbone == "mlp":
        return MLP(int(np.prod(shape)))
    if len(shape) != 3:
        raise SpclError(f"backbone {settings.backbone!r} needs images, but the samples are {tuple(shape)}; use mlp")
    channels, height, width = shape
    if settings.backbone == "cnn":
        return SmallCNN(channels, (height, width))
    if settings.backbone == "vit":
        return VisionTransformer(channels, (height, width))
    network = ResNet18 if settings.backbone == "resnet18" else ResNet34
    return network(channels, settings.batch_norm_momentum)
