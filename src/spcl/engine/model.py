"""The shared backbone under a growing set of heads."""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

from spcl.batches import Inputs, concatenate, describe, map_leaves, number_of_samples, sample_kind
from spcl.engine.broadcasting import RefuseBroadcast
from spcl.engine.head_gradients import HeadGradients
from spcl.errors import SpclError, TaskError, is_out_of_memory
from spcl.methods.tasks import Output, Task

__all__ = ["Samples", "Scenario", "SharedModel", "checked_loss"]

Scenario = Literal["task", "class"]


@dataclass(frozen=True)
class Samples:
    """A batch of one task: inputs, targets and, if replayed, stored logits.

    Attributes:
        task: the task.
        x: the inputs.
        y: the targets.
        stored: the logits that memory has stored with the samples, or None.
        replayed: whether they are from memory.
        share: which part of a batch these samples are, where ranks split it; the loss on them counts as much.
    """

    task: Task
    x: Inputs
    y: Tensor
    stored: Tensor | None = None
    replayed: bool = False
    share: float = 1.0

    @property
    def kind(self) -> Hashable:
        """Structure, shape and type of an input: samples of one kind can be one batch."""
        return sample_kind(self.x)


class SharedModel:
    """One backbone, one head per task; task-incremental or class-incremental logits.

    Task-incremental, a sample gets the logits of its own task's head. Class-incremental, it gets those of every
    classifier that was added so far, side by side in that order; with ``joint_logits`` so it does in training also
    task-incrementally. In the class-incremental loss of new samples, the classes of finished tasks count by
    ``finished_weight``.

    Attributes:
        head_gradients: those of the weights and of the biases of heads that are computed together.
    """

    def __init__(
        self,
        backbone: nn.Module,
        scenario: Scenario,
        make_head: Callable[[int, int], nn.Module],
        seed: int,
        autocast: torch.dtype | None,
        joint_logits: bool = False,
        finished_weight: float = 1.0,
    ) -> None:
        if scenario not in ("task", "class"):
            raise SpclError(f"scenario must be 'task' or 'class', but it is {scenario!r}")
        if autocast not in (None, torch.bfloat16):
            raise SpclError(
                f"autocast must be None or torch.bfloat16, which needs no loss scaling, but it is {autocast}"
            )
        self.backbone = backbone
        self.scenario: Scenario = scenario
        self._joint = joint_logits or scenario == "class"
        self._finished_weight = finished_weight
        self._finished: list[bool] = []
        self._offsets: Tensor | None = None
        self.tasks: dict[str, Task] = {}
        self.feature_dim: int | None = getattr(backbone, "feature_dim", None)
        self._make_head = make_head
        self._seed = seed
        self.autocast = autocast
        self.device, self.dtype = _device_and_dtype(backbone)
        self._features_of: dict[Hashable, int] = {}
        self._known_heads = 0
        self._head_parameters: list[nn.Parameter] = []
        self.head_gradients = HeadGradients(), HeadGradients()

    @property
    def has_joint_logits(self) -> bool:
        """Whether samples in training get the logits of the classes of all tasks."""
        return self._joint

    @property
    def classifiers(self) -> list[Task]:
        """The classification tasks, in the order they were added."""
        return [task for task in self.tasks.values() if task.classes is not None]

    def build_heads(self, feature_dim: int) -> list[Task]:
        """Make the heads that are missing, each from a seed of its own; return the tasks that got one."""
        self.feature_dim = feature_dim
        made = []
        for index, task in enumerate(self.tasks.values()):
            if task.head is None and task.classes is not None:
                with torch.random.fork_rng(devices=[]):
                    torch.default_generator.manual_seed(self._seed * 1_000_003 + index)
                    task.head = self._make_head(feature_dim, task.classes).to(self.device, self.dtype)
                made.append(task)
        return made

    def outputs(
        self,
        samples: Sequence[Samples],
        inputs: Sequence[Inputs] | None = None,
        backbone: Callable[[Inputs], Tensor] | None = None,
    ) -> list[Output]:
        """Return the outputs for samples of one or more tasks, in their order.

        Samples of one structure, shape and type take one pass through the backbone (or a substitute) together.
        """
        inputs = inputs if inputs is not None else [group.x for group in samples]
        alike: dict[Hashable, list[int]] = {}
        for index, x in enumerate(inputs):
            alike.setdefault(sample_kind(x), []).append(index)
        outputs: dict[int, Output] = {}
        for indices in alike.values():
            members, parts = [samples[index] for index in indices], [inputs[index] for index in indices]
            outputs |= zip(indices, self._outputs_of_one_kind(members, parts, backbone or self.backbone), strict=True)
        return [outputs[index] for index in range(len(samples))]

    def _outputs_of_one_kind(
        self, samples: Sequence[Samples], inputs: Sequence[Inputs], backbone: Callable[[Inputs], Tensor]
    ) -> list[Output]:
        with self.precision():
            features = backbone(concatenate([self.on_device(part) for part in inputs]))
            return self.head_outputs(samples, features)

    def head_outputs(self, samples: Sequence[Samples], features: Tensor) -> list[Output]:
        """Return the outputs of the heads for samples with these features, in their order."""
        sizes = [group.y.shape[0] for group in samples]
        parts = torch.split_with_sizes(features, sizes)
        joints: Sequence[Tensor | None] = [None] * len(samples)
        if self._is_joint(samples):
            joints = torch.split_with_sizes(self._joint_logits(features), sizes)
        offsets = self.loss_offsets()
        return [self._output(*each, offsets) for each in zip(samples, parts, joints, strict=True)]

    def on_device(self, x: Inputs) -> Inputs:
        """Return inputs on the model's device."""
        if isinstance(x, Tensor):
            return x if x.device == self.device else x.to(self.device, non_blocking=True)
        return map_leaves(lambda leaf: leaf.to(self.device, non_blocking=True), x)

    def logits(self, x: Inputs, task: Task | None) -> Tensor:
        """Return logits (or a custom head's output) for evaluation, over all classes seen if ``task`` is None."""
        with self.precision():
            features = self.backbone(self.on_device(x))
            return self._joint_logits(features) if task is None else self._head_output(task, features)

    def probe(self, group: Samples) -> int | None:
        """Run the first samples of a task without training; return the number of features, for a classifier.

        An error names the task and leaves the model unchanged. Of classifiers with plain cross-entropy, one for every
        kind of samples tells enough.
        """
        kind, is_plain = sample_kind(group.x), group.task.loss is cross_entropy
        if is_plain and group.task.classes is not None and kind in self._features_of:
            return self._features_of[kind]
        with self.task_errors(group.task, group.x, group.y), torch.no_grad(), self.evaluating(), self.precision():
            features = self.backbone(self.on_device(group.x))
            if not isinstance(features, Tensor):
                raise TaskError(
                    f"the backbone must give a tensor of features, but it gives a {type(features).__name__}; "
                    f"wrap it in a module that returns the features alone"
                )
            if group.task.classes is None:
                checked_loss(self._output(group, features, None))
                return None
            if features.ndim != 2:
                raise TaskError(
                    f"task {group.task.name!r}: a classifier needs features of shape (batch, features), but the "
                    f"backbone gives {tuple(features.shape)}; pass head= and loss= instead of classes="
                )
            self._check_classifier_loss(group, features)
        self._features_of[kind] = int(features.shape[1])
        return self._features_of[kind]

    def _check_classifier_loss(self, group: Samples, features: Tensor) -> None:
        """Refuse a loss that does not give one number for logits of zeros."""
        if group.task.loss is not cross_entropy:
            tasks = self.classifiers if self._joint else [group.task]
            logits = features.new_zeros(len(features), sum(task.classes or 0 for task in tasks))
            logits = logits.float() if logits.dtype == self.autocast else logits
            checked_loss(self._classifier_output(group, logits))

    def modules(self) -> list[nn.Module]:
        """Return the backbone and the heads that exist."""
        return [self.backbone, *(task.head for task in self.tasks.values() if task.head is not None)]

    def head(self, task: Task) -> nn.Module:
        """Return the head of a task; a classifier has none before its first batch."""
        if task.head is None:
            raise TaskError(f"task {task.name!r} has seen no data yet")
        return task.head

    def head_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all heads that exist."""
        heads = self.modules()[1:]
        if len(heads) != self._known_heads:
            self._known_heads = len(heads)
            self._head_parameters = [parameter for head in heads for parameter in head.parameters()]
        return self._head_parameters

    def trained_head_parameters(self, samples: Sequence[Samples]) -> list[nn.Parameter]:
        """Return the parameters of the heads that a loss on these samples may reach."""
        if self._is_joint(samples):
            return self.head_parameters()
        heads = [group.task.head for group in samples if group.task.head is not None]
        return [parameter for head in heads for parameter in head.parameters()]

    @contextmanager
    def task_errors(self, task: Task | None, x: Inputs, *targets: Tensor) -> Iterator[None]:
        """Turn errors raised inside the model into a :class:`TaskError` that names the task and its samples."""
        try:
            yield
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            if isinstance(error, TaskError) or is_out_of_memory(error):
                raise
            kind = " with targets ".join(describe(some, 1) for some in (x, *targets))
            whose = "" if task is None else f"task {task.name!r}: "
            reason = f"KeyError: {error}" if isinstance(error, KeyError) else str(error)
            raise TaskError(
                f"{whose}the model raised an error on {number_of_samples(x)} samples of {kind}: {reason}"
            ) from error

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put backbone and heads into evaluation mode within the block."""
        modes = [(part, part.training) for module in self.modules() for part in module.modules()]
        for module in self.modules():
            module.eval()
        try:
            yield
        finally:
            for part, mode in modes:
                part.training = mode

    def _is_joint(self, samples: Sequence[Samples]) -> bool:
        return self._joint and any(group.task.classes is not None for group in samples)

    def _joint_logits(self, features: Tensor) -> Tensor:
        return torch.cat([self._head_output(task, features) for task in self.classifiers], dim=1)

    def _head_output(self, task: Task, features: Tensor) -> Tensor:
        value: Tensor = self.head(task)(features)
        return value.float() if value.dtype == self.autocast else value  # losses are computed in full precision

    def _output(self, group: Samples, features: Tensor, joint: Tensor | None, offsets: Tensor | None = None) -> Output:
        if group.task.classes is not None:
            logits = self._head_output(group.task, features) if joint is None else joint
            return self._classifier_output(group, logits, offsets)
        y, stored = self._targets(group)
        return Output(group.task, self._head_output(group.task, features), y, slice(0, None), stored)

    def _classifier_output(self, group: Samples, logits: Tensor, offsets: Tensor | None = None) -> Output:
        """Return the output of a classifier, with targets that fit the logits: its own or those of all classes."""
        task, (y, stored) = group.task, self._targets(group)
        classes = task.classes or 0
        offset = task.offset if self._joint else 0
        own = slice(offset, offset + classes)
        if y.is_floating_point():
            targets = y.to(logits.dtype)
            if self._joint:
                targets = functional.pad(targets, (offset, logits.shape[1] - own.stop))
        else:
            targets = y + offset if self._joint else y
        return Output(task, logits, targets, own, stored, None if group.replayed else offsets)

    def loss_offsets(self) -> Tensor | None:
        """Return what the cross-entropy of new samples adds to the logits of all classes; None for nothing.

        It is the logarithm of ``finished_weight`` for the classes of finished tasks.
        """
        if self.scenario == "task" or self._finished_weight == 1.0:
            return None
        finished = [task.finished for task in self.classifiers]
        if finished != self._finished:
            logarithms = [task.finished * math.log(self._finished_weight) for task in self.classifiers]
            offsets = np.repeat(logarithms, [task.classes or 0 for task in self.classifiers])
            moved = torch.from_numpy(offsets).to(self.device, self.dtype, non_blocking=True)
            self._offsets = moved if any(finished) else None
            self._finished = finished
        return self._offsets

    def _targets(self, group: Samples) -> tuple[Tensor, Tensor | None]:
        stored = None if group.stored is None else group.stored.to(self.device, non_blocking=True)
        return group.y.to(self.device, non_blocking=True), stored

    def precision(self) -> AbstractContextManager[object]:
        """Return the autocast context of forward passes, without a cache of casts, which a graph must not capture."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast, cache_enabled=False)


def _device_and_dtype(backbone: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return where, and in which type, a backbone computes: those of its first trainable tensor, or of any."""
    tensors = [tensor for tensor in (*backbone.parameters(), *backbone.buffers()) if tensor.is_floating_point()]
    first = next((tensor for tensor in tensors if tensor.requires_grad), tensors[0] if tensors else torch.empty(0))
    return first.device, first.dtype


def checked_loss(output: Output) -> Tensor:
    """Return the task's loss, or raise an error if it is not one number of matching samples."""
    name = output.task.name
    with RefuseBroadcast(name, output.value, output.targets):
        loss: object = output.loss()
    if not isinstance(loss, Tensor):
        raise TaskError(f"task {name!r}: its loss must be a tensor, but it is {loss!r:.80}")
    if loss.ndim != 0:
        raise TaskError(f"task {name!r}: its loss must be one number, but has shape {tuple(loss.shape)}")
    return loss
