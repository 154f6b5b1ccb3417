"""The learner of a run from its settings: device, backbone, memory, optimiser, heads and losses."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from spcl._util.registry import named_options
from spcl.data import ImageData, SourceData
from spcl.distributed import World
from spcl.errors import SpclError, did_you_mean
from spcl.learner import Learner
from spcl.learner.parameters import matching
from spcl.losses import LOSSES, Loss
from spcl.memory import MEMORIES, Memory
from spcl.methods import make_method
from spcl.models import BACKBONES, Backbone, InputSpec, Normalise
from spcl.optimizers import OPTIMIZERS
from spcl.options import OPTIONS
from spcl.runs.settings import RunSettings
from spcl.schedules import SCHEDULES
from spcl.tasks import TaskDescription
from spcl.transforms import compose

SAMPLES_FOR_NORMALISATION = 10_000


def make_learner(
    settings: RunSettings,
    data: ImageData | SourceData,
    device: torch.device,
    steps: int,
    distributed: World | None = None,
) -> Learner:
    """Make the untrained learner of a run of ``steps`` steps; seeds PyTorch's global generator."""
    torch.manual_seed(settings.seed)
    options = learner_options(settings)
    options["memory_batch"] = options["memory_batch"] or settings.batch_size
    return Learner(**learner_parts(settings, data, device, steps), **options, distributed=distributed)


def learner_options(settings: RunSettings) -> dict[str, Any]:
    """Return the arguments of a new ``Learner`` that settings say directly; a loaded one has them in its state."""
    plain = {name: getattr(settings, option.setting) for name, option in OPTIONS.items()}
    return plain | {"autocast": torch.bfloat16 if settings.precision == "bfloat16" else None}


def learner_parts(
    settings: RunSettings, data: ImageData | SourceData | Sequence[InputSpec], device: torch.device, steps: int
) -> dict[str, Any]:
    """Make the parts of the learner of a run of ``steps`` steps, as arguments of ``Learner`` and ``Learner.load``.

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
    """Make the optimiser that the settings name, for these parameters."""
    optimizer: Optimizer = OPTIMIZERS.make(settings.optimizer, parameters, lr=settings.learning_rate)
    return optimizer


# -- devices by name


USUAL = ("auto", "cpu", "cuda", "cuda:0", "mps")


class DeviceError(SpclError):
    """A device that cannot compute here."""


def check_device(name: str) -> None:
    """Refuse a name that PyTorch does not know; whether there is such a device here is another question.

    >>> check_device("cuda:7")
    >>> check_device("gpu:1")
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: there is no device 'gpu:1'; did you mean 'cuda:1'?
    """
    if name == "auto":
        return
    try:
        torch.device(name)
    except RuntimeError:
        kind, colon, number = name.partition(":")
        hint = f"did you mean 'cuda{colon}{number}'?" if kind.lower() == "gpu" else did_you_mean(name, USUAL)
        raise SpclError(f"there is no device {name!r}; {hint}") from None


def pick_device(name: str) -> torch.device:
    """Return the device of this name; ``auto`` is a GPU if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_device(name)
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # "meta" has tensors, but no values in them
    except (RuntimeError, AssertionError, ImportError) as error:
        has_none = name.partition(":")[0] == "mps" and not torch.backends.mps.is_available()
        reason = "there is none on this machine" if has_none else str(error).splitlines()[0]
        raise DeviceError(f"cannot use device {name!r}: {reason}; choose another, such as cpu") from error
    return device


# -- heads and losses of tasks


PLAIN_LOSS = "cross-entropy"


def add_task(learner: Learner, task: TaskDescription, settings: RunSettings) -> None:
    """Add a task of a run to the learner: a classifier, or a linear head with the loss of the task's kind."""
    if task.kind == "classification":
        names = task.class_names or ()
        named = all(names) and len(set(names)) == task.classes  # published names may repeat
        loss = make_losses([task], settings).get(task.name)
        learner.add_task(task.name, classes=names if named else task.classes, loss=loss)
    else:
        head, loss = make_heads([task], learner.model.backbone, settings)[task.name]
        learner.add_task(task.name, head=head, loss=loss)


def make_losses(tasks: Iterable[TaskDescription], settings: RunSettings) -> dict[str, Loss]:
    """Make the losses of classification tasks, as :meth:`Learner.load` takes them; none for plain cross-entropy."""
    if settings.loss == PLAIN_LOSS:
        return {}
    return {task.name: _loss(task, settings) for task in tasks if task.kind == "classification"}


def check_losses(tasks: Iterable[TaskDescription], class_names: Iterable[str], settings: RunSettings) -> None:
    """Raise an error if cross-entropy does not fit these tasks, or weighs a class that the data does not have.

    Args:
        tasks: of a run.
        class_names: of all classes of the data; the data may have classes that no task has.
        settings: of the run.
    """
    name, options = named_options(settings.loss, "loss")
    if name != PLAIN_LOSS:
        return
    make_losses(tasks, settings)
    weights = options.get("class_weights")
    known = sorted(set(class_names))
    for weighted in map(str, weights) if isinstance(weights, Mapping) else ():
        if weighted not in known:
            hint = did_you_mean(weighted, known) if known else "it has no classes"
            raise SpclError(f"class_weights of the loss names {weighted!r}, no class of {settings.benchmark}; {hint}")


def make_heads(
    tasks: Iterable[TaskDescription], backbone: nn.Module, settings: RunSettings
) -> dict[str, tuple[nn.Module, Loss]]:
    """Make head and loss of every task that is not a classification, as :meth:`Learner.load` takes them.

    The weights of a head depend on the seed and the task's name only.
    """
    others = [task for task in tasks if task.kind != "classification"]
    return {task.name: (_linear(task, backbone, settings.seed), _loss(task, settings)) for task in others}


def _loss(task: TaskDescription, settings: RunSettings) -> Loss:
    by_kind = {
        "classification": settings.loss,
        "regression": settings.regression_loss,
        "multilabel": settings.multilabel_loss,
    }
    loss: Loss = LOSSES.make(by_kind[task.kind], task)
    return loss


def _linear(task: TaskDescription, backbone: nn.Module, seed: int) -> nn.Module:
    features = getattr(backbone, "feature_dim", None)
    if not isinstance(features, int):
        raise SpclError(
            f"task {task.name!r} is a {task.kind}, whose head must know the number of features; "
            f"give the backbone {type(backbone).__name__} the attribute feature_dim"
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed * 1_000_003 + zlib.crc32(task.name.encode()))
        return nn.Linear(features, task.classes or 1)
