"""The shared backbone between encoders of sources and heads of tasks, and copies of its buffers to undo a step."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from spcl.batches import Inputs, concatenate, describe, map_leaves, number_of_samples, sample_kind
from spcl.encoders import ENCODERS
from spcl.errors import SpclError, TaskError, is_out_of_memory
from spcl.methods.base import Method, Output
from spcl.options import Scenario
from spcl.tasks import Task, TaskSource

Encode = Callable[[nn.Module, Inputs, Sequence[int]], Inputs]
"""Computes a pass through an encoder, given its joint inputs and the indices of their samples."""


@dataclass(frozen=True)
class Samples:
    """A batch of one source: inputs, targets and, if replayed, stored logits.

    Attributes:
        source: who brings them.
        x: the inputs, as they enter the source's encoder.
        y: the targets.
        stored: the logits that memory has stored with the samples, or None.
        replayed: whether they are from memory.
        share: which part of a batch these samples are, where ranks split it; the loss on them counts as much.
        task: the task that they answer.
        name: the name of the source.
    """

    source: TaskSource
    x: Inputs
    y: Tensor
    stored: Tensor | None = None
    replayed: bool = False
    share: float = 1.0
    task: Task = field(init=False)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "task", self.source.task)
        object.__setattr__(self, "name", self.source.name)


@dataclass(frozen=True, eq=False)
class StepBatch:
    """A batch of a step.

    Attributes:
        gradient: the index of its gradient in the step.
        samples: the samples of one source, or of a replay batch by source.
        draw: the number of the replay batch in the step, or None for the batch of a source.
    """

    gradient: int
    samples: Sequence[Samples]
    draw: int | None = None

    @cached_property
    def size(self) -> int:
        """The number of samples."""
        return sum([group.y.shape[0] for group in self.samples])

    def loss(self, method: Method, outputs: Sequence[Output]) -> Tensor:
        """Return the method's loss on the batch."""
        return method.task_loss(outputs[0]) if self.draw is None else method.memory_loss(outputs, self.draw)


def with_inputs(samples: Sequence[Samples], inputs: Sequence[Inputs]) -> list[Samples]:
    """Return the samples with other inputs."""
    return [replace(group, x=x) for group, x in zip(samples, inputs, strict=True)]


class SharedModel:
    r"""One backbone, one head per task, and encoders in front of the backbone for the sources that have one.

    The parameters that several sources can reach are shared: the backbone's, and parameters of encoders that sources
    have in common. Their gradients, one per source, are weighed. What a single source reaches, its own encoder, has the
    plain gradient of that source and of its samples in memory, like the head of a task.

    Task-incremental, a sample gets the logits of its own task's head. Class-incremental, it gets the logits of every
    classifier added so far, side by side in that order; with ``joint_logits`` so it does in training also
    task-incrementally. In the class-incremental loss of new samples, the classes of finished tasks count by
    ``finished_weight``. Domain-incrementally there is one task, whose sources are the domains.

    Attributes:
        has_joint_logits: whether samples in training get the logits of the classes of all tasks.
        tasks: all tasks ever added, by name.
        sources: the sources of all tasks, by name.
        encoders: the encoders of all sources, each once.
        shared_encoder_parameters: the trained parameters of encoders that several sources can reach.
        own_encoder_parameters: those that a single source can reach.
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
        if autocast not in (None, torch.bfloat16):
            raise SpclError(
                f"autocast must be None or torch.bfloat16, which needs no loss scaling, but it is {autocast}"
            )
        self.backbone = backbone
        self.scenario: Scenario = scenario
        self.has_joint_logits = joint_logits or scenario == "class"
        self._finished_weight = finished_weight
        self._finished: list[bool] = []
        self._offsets: Tensor | None = None
        self.tasks: dict[str, Task] = {}
        self.sources: dict[str, TaskSource] = {}
        self.feature_dim: int | None = getattr(backbone, "feature_dim", None)
        self._make_head = make_head
        self._seed = seed
        self.autocast = autocast
        self.device, self.dtype = _device_and_dtype(backbone)
        self._features_of: dict[Hashable, int] = {}
        self._known_heads: list[nn.Module] = []
        self.encoders: list[nn.Module] = []
        self.shared_encoder_parameters: list[nn.Parameter] = []
        self.own_encoder_parameters: list[nn.Parameter] = []
        self._head_parameters: list[nn.Parameter] = []

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

    def add_source(self, source: TaskSource) -> None:
        """Add a source to the model and to its task."""
        self.sources[source.name] = source
        source.task.sources[source.name] = source
        self.follow_encoders()

    def remove_source(self, source: TaskSource) -> None:
        """Remove a source from the model and from its task."""
        del self.sources[source.name], source.task.sources[source.name]
        self.follow_encoders()

    def answers(self, batch: str) -> list[TaskSource]:
        """Return the sources that a batch of this name is for: one for each task that it answers."""
        if batch in self.sources:
            return [self.sources[batch]]
        return [source for source in self.sources.values() if source.batch == batch]

    def follow_encoders(self) -> None:
        """Note which encoders there are, and which of their parameters several sources can reach."""
        encoders = [(source.batch, source.encoder) for source in self.sources.values() if source.encoder is not None]
        reached = {(batch, each) for batch, encoder in encoders for each in encoder.parameters() if each.requires_grad}
        counts = Counter(parameter for _, parameter in reached)
        self.encoders = list(dict.fromkeys(encoder for _, encoder in encoders))
        reach = {each: counts[each] for encoder in self.encoders for each in encoder.parameters() if each in counts}
        self.shared_encoder_parameters = [each for each, sources in reach.items() if sources > 1]
        self.own_encoder_parameters = [each for each, sources in reach.items() if sources == 1]

    def build_encoders(self, samples: Sequence[Samples]) -> list[TaskSource]:
        """Make the encoders that sources have by name, fitting their samples; return the sources that got one."""
        made = []
        for group in samples:
            source = group.source
            if source.encoder is None and source.encoder_name is not None:
                with self.source_errors(source, group.x):
                    encoder = ENCODERS.make(source.encoder_name, group.x).to(self.device, self.dtype)
                for each in self.answers(source.batch):
                    each.encoder = encoder
                    made.append(each)
        if made:
            self.follow_encoders()
        return made

    def larger_head(self, task: Task, count: int) -> nn.Module | None:
        """Return a head for ``count`` more classes, which has learned what the task's has; None without a head."""
        if task.head is None:
            return None
        before = task.head.state_dict()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._seed * 1_000_003 + (task.classes or 0))
            head = self._make_head(int(self.feature_dim or 0), (task.classes or 0) + count)
        after = head.to(self.device, self.dtype).state_dict()
        grows = {name for name, value in after.items() if name in before and value.shape != before[name].shape}
        if after.keys() != before.keys() or any(after[name].shape[1:] != before[name].shape[1:] for name in grows):
            raise TaskError(f"task {task.name!r}: its head, a {type(task.head).__name__}, cannot get more classes")
        for name, value in before.items():
            after[name] = torch.cat([value, after[name][len(value) :]]) if name in grows else value
        head.load_state_dict(after)
        for old, new in zip(task.head.parameters(), head.parameters(), strict=True):
            new.requires_grad_(old.requires_grad)
        return head

    def add_classes(self, task: Task, count: int, names: tuple[str, ...] | None, head: nn.Module | None) -> None:
        """Give a task more classes, and the head for all of them; the classes of later tasks move up."""
        task.classes = (task.classes or 0) + count
        task.class_names = None if names is None else (*(task.class_names or ()), *names)
        task.head = head
        ends = accumulate((each.classes or 0 for each in self.tasks.values()), initial=0)
        for each, first in zip(self.tasks.values(), ends, strict=False):
            each.offset = first if each.classes is not None else 0
        self._known_heads, self._finished = [], []

    def outputs(
        self,
        samples: Sequence[Samples],
        inputs: Sequence[Inputs] | None = None,
        backbone: Callable[[Inputs], Tensor] | None = None,
    ) -> list[Output]:
        """Return the outputs for samples of one or more sources, in their order.

        Samples of one structure, shape and type take one pass through the backbone (or a substitute) together, and
        before that through the encoder that they have in common.
        """
        inputs = self.encoded(samples, inputs if inputs is not None else [group.x for group in samples])
        return self.outputs_of_encoded(samples, inputs, backbone or self.backbone)

    def encoded(
        self, samples: Sequence[Samples], inputs: Sequence[Inputs], encode: Encode | None = None
    ) -> list[Inputs]:
        """Return inputs as they enter the backbone; one pass through an encoder for all of one kind that have it.

        Args:
            samples: of one or more sources.
            inputs: their inputs.
            encode: computes a pass, given the encoder, its joint inputs, and the indices of their samples.
        """
        results = list(inputs)
        if not self.encoders:
            return results
        alike: dict[tuple[nn.Module, Hashable], list[int]] = {}
        for index, (group, x) in enumerate(zip(samples, inputs, strict=True)):
            if group.source.encoder is not None:
                alike.setdefault((group.source.encoder, sample_kind(x)), []).append(index)
        for (encoder, _), indices in alike.items():
            joint = self.joined([inputs[index] for index in indices])
            with self.precision():
                values = encoder(joint) if encode is None else encode(encoder, joint, indices)
            start = 0
            for index in indices:
                rows = slice(start, start + samples[index].y.shape[0])
                results[index] = map_leaves(lambda leaf: leaf[rows], values)  # noqa: B023 (it is called at once)
                start = rows.stop
        return results

    def outputs_of_one_batch(self, samples: Sequence[Samples]) -> list[Output]:
        """Return the outputs for samples of a batch that answers several tasks, by one pass."""
        (x,) = self.encoded(samples[:1], [samples[0].x])
        with self.precision():
            features = self.backbone(self.on_device(x))
            return [output for group in samples for output in self.head_outputs([group], features)]

    def outputs_of_encoded(
        self, samples: Sequence[Samples], inputs: Sequence[Inputs], backbone: Callable[[Inputs], Tensor]
    ) -> list[Output]:
        """Return the outputs for samples whose inputs have passed their encoders."""
        alike: dict[Hashable, list[int]] = {}
        for index, x in enumerate(inputs):
            alike.setdefault(sample_kind(x), []).append(index)
        outputs: dict[int, Output] = {}
        for indices in alike.values():
            members, parts = [samples[index] for index in indices], [inputs[index] for index in indices]
            with self.precision():
                features = backbone(self.joined(parts))
                outputs |= zip(indices, self.head_outputs(members, features), strict=True)
        return [outputs[index] for index in range(len(samples))]

    def head_outputs(self, samples: Sequence[Samples], features: Tensor) -> list[Output]:
        """Return the outputs of the heads for samples with these features, in their order."""
        sizes = [group.y.shape[0] for group in samples]
        parts = torch.split_with_sizes(features, sizes)
        joints: Sequence[Tensor | None] = [None] * len(samples)
        if self._is_joint(samples):
            joints = torch.split_with_sizes(self._joint_logits(features), sizes)
        offsets = self.loss_offsets()
        return [self._output(*each, offsets) for each in zip(samples, parts, joints, strict=True)]

    def joined(self, inputs: Sequence[Inputs]) -> Inputs:
        """Return inputs of one kind as one batch on the model's device."""
        return concatenate([self.on_device(x) for x in inputs])

    def on_device(self, x: Inputs) -> Inputs:
        """Return inputs on the model's device."""
        if isinstance(x, Tensor):
            return x if x.device == self.device else x.to(self.device, non_blocking=True)
        return map_leaves(lambda leaf: leaf.to(self.device, non_blocking=True), x)

    def features(self, x: Inputs, encoder: nn.Module | None) -> Tensor:
        """Return the backbone's features of inputs that first pass an encoder, if there is one."""
        x = self.on_device(x)
        features: Tensor = self.backbone(x if encoder is None else encoder(x))
        return features

    def logits(self, x: Inputs, task: Task | None, encoder: nn.Module | None = None) -> Tensor:
        """Return logits (or a custom head's output) for evaluation, over all classes seen if ``task`` is None."""
        with self.precision():
            features = self.features(x, encoder)
            return self._joint_logits(features) if task is None else self._head_output(task, features)

    def probe(self, group: Samples) -> int | None:
        """Run the first samples of a source without training; return the number of features, for a classifier.

        An error names the source and leaves the model unchanged. Of classifiers with plain cross-entropy, one for every
        kind of samples and encoder tells enough.
        """
        kind, is_plain = (sample_kind(group.x), group.source.encoder), group.task.loss is cross_entropy
        if is_plain and group.task.classes is not None and kind in self._features_of:
            return self._features_of[kind]
        with self.source_errors(group.source, group.x, group.y), torch.no_grad(), self.evaluating(), self.precision():
            features = self.features(group.x, group.source.encoder)
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
                    f"{group.source.words}: a classifier needs features of shape (batch, features), but the "
                    f"backbone gives {tuple(features.shape)}; pass head= and loss= instead of classes="
                )
            self._check_classifier_loss(group, features)
        self._features_of[kind] = int(features.shape[1])
        return self._features_of[kind]

    def _check_classifier_loss(self, group: Samples, features: Tensor) -> None:
        """Refuse a loss that does not give one number for logits of zeros."""
        if group.task.loss is not cross_entropy:
            tasks = self.classifiers if self.has_joint_logits else [group.task]
            logits = features.new_zeros(len(features), sum(task.classes or 0 for task in tasks))
            logits = logits.float() if logits.dtype == self.autocast else logits
            checked_loss(self._classifier_output(group, logits))

    def forget_features(self) -> None:
        """Probe the first samples of new sources anew, because the backbone has changed."""
        self._features_of.clear()

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move backbone, encoders and heads to a device, and convert their floating-point numbers."""
        for module in self.modules():
            module.to(device, dtype)
        self.device, self.dtype = device, dtype
        self._finished = []  # the offsets are made again
        self.forget_features()

    def modules(self) -> list[nn.Module]:
        """Return the backbone, the encoders and the heads that exist."""
        return [self.backbone, *self.encoders, *self.heads()]

    def heads(self) -> list[nn.Module]:
        """Return the heads that exist."""
        return [task.head for task in self.tasks.values() if task.head is not None]

    def head(self, task: Task) -> nn.Module:
        """Return the head of a task; a classifier has none before its first batch."""
        if task.head is None:
            raise TaskError(f"task {task.name!r} has seen no data yet")
        return task.head

    def head_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all heads that exist."""
        heads = self.heads()
        if len(heads) != len(self._known_heads) or not all(map(is_, heads, self._known_heads)):
            self._known_heads = heads
            self._head_parameters = [parameter for head in heads for parameter in head.parameters()]
        return self._head_parameters

    def own_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that sources and tasks have beside the shared ones: of encoders and heads."""
        own = self.own_encoder_parameters
        return [*own, *self.head_parameters()] if own else self.head_parameters()

    def reached_parameters(self, samples: Sequence[Samples]) -> list[nn.Parameter]:
        """Return the parameters of encoders and heads, other than shared ones, that a loss on samples may reach."""
        shared = set(self.shared_encoder_parameters)
        encoders = [group.source.encoder for group in samples if group.source.encoder is not None]
        reached = [each for encoder in encoders for each in encoder.parameters() if each not in shared]
        if self._is_joint(samples):
            return [*reached, *self.head_parameters()]
        heads = [group.task.head for group in samples if group.task.head is not None]
        return list(dict.fromkeys([*reached, *(parameter for head in heads for parameter in head.parameters())]))

    @contextmanager
    def source_errors(self, owner: TaskSource | Task | None, x: Inputs, *targets: Tensor) -> Iterator[None]:
        """Turn errors raised inside the model into a :class:`TaskError` that names the source or task, and samples."""
        try:
            yield
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            if isinstance(error, TaskError) or is_out_of_memory(error):
                raise
            kind = " with targets ".join(describe(some, 1) for some in (x, *targets))
            whose = "" if owner is None else f"{owner.words}: "
            reason = f"KeyError: {error}" if isinstance(error, KeyError) else str(error)
            raise TaskError(
                f"{whose}the model raised an error on {number_of_samples(x)} samples of {kind}: {reason}"
            ) from error

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put backbone, encoders and heads into evaluation mode within the block."""
        modes = [(part, part.training) for module in self.modules() for part in module.modules()]
        for module in self.modules():
            module.eval()
        try:
            yield
        finally:
            for part, mode in modes:
                part.training = mode

    def _is_joint(self, samples: Sequence[Samples]) -> bool:
        return self.has_joint_logits and any(group.task.classes is not None for group in samples)

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
        """Return the output of a classifier, with targets that fit its logits: of its own classes or of all."""
        task, (y, stored) = group.task, self._targets(group)
        classes = task.classes or 0
        offset = task.offset if self.has_joint_logits else 0
        own = slice(offset, offset + classes)
        if y.is_floating_point():
            targets = y.to(logits.dtype)
            if self.has_joint_logits:
                targets = functional.pad(targets, (offset, logits.shape[1] - own.stop))
        else:
            targets = y + offset if self.has_joint_logits else y
        return Output(task, logits, targets, own, stored, None if group.replayed else offsets)

    def loss_offsets(self) -> Tensor | None:
        """Return what the cross-entropy of new samples adds to the logits of all classes; None for nothing.

        It is the logarithm of ``finished_weight`` for the classes of finished tasks.
        """
        if self.scenario != "class" or self._finished_weight == 1.0:
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
    """Return the device and type of a backbone's first trainable tensor, or of its first tensor if none is trained."""
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


ELEMENTWISE_LOSSES = (functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss)
"""Losses that broadcast different shapes, with a warning."""


class RefuseBroadcast(TorchFunctionMode):
    """Raises a TaskError, within the block, where a loss broadcasts an output against floating-point targets.

    Outputs of shape (N, 1) and targets of shape (N,) broadcast to (N, N): every output is compared with the targets of
    all samples. Refused are operations on the output and the targets themselves, if their numbers of dimensions differ,
    and PyTorch's elementwise losses of any two tensors, if their shapes differ.

    Args:
        task: the name of the task, for the error.
        output: of the task's head.
        targets: of the same samples.

    >>> output, targets = torch.zeros(4, 1), torch.ones(4)
    >>> with RefuseBroadcast("speed", output, targets):
    ...     functional.mse_loss(output.squeeze(1), targets)
    tensor(1.)
    >>> with RefuseBroadcast("speed", output, targets):
    ...     (output - targets).square().mean()
    Traceback (most recent call last):
    ...
    spcl.errors.TaskError: task 'speed': its loss broadcasts shapes (4, 1) and (4,) to (4, 4), so that outputs are
    compared with the targets of other samples; give targets of the output's shape (4, 1)
    """

    def __init__(self, task: str, output: Tensor, targets: Tensor) -> None:
        super().__init__()
        self._task = task
        self._output = output
        self._targets = targets

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call the function and look at the shapes of its first two tensors."""
        kwargs = kwargs or {}
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        pair = tensors[:2]
        if len(pair) == 2 and self._is_suspect(func, *pair):
            broadcast = _broadcast_shape(*pair)
            if broadcast is not None and func in ELEMENTWISE_LOSSES:
                raise self._error(pair, broadcast)  # before the function warns
            result = func(*args, **kwargs)
            if broadcast is not None and isinstance(result, Tensor) and result.shape in (broadcast, torch.Size()):
                raise self._error(pair, broadcast)
            return result
        return func(*args, **kwargs)

    def _is_suspect(self, func: Callable[..., Any], first: Tensor, second: Tensor) -> bool:
        if not (first.is_floating_point() and second.is_floating_point()):
            return False
        if func in ELEMENTWISE_LOSSES:
            return first.shape != second.shape
        return {id(first), id(second)} == {id(self._output), id(self._targets)} and first.ndim != second.ndim

    def _error(self, pair: Sequence[Tensor], broadcast: torch.Size) -> TaskError:
        first, second = (tuple(tensor.shape) for tensor in pair)
        return TaskError(
            f"task {self._task!r}: its loss broadcasts shapes {first} and {second} to {tuple(broadcast)}, so that "
            f"outputs are compared with the targets of other samples; give targets of the output's shape "
            f"{tuple(self._output.shape)}"
        )


def _broadcast_shape(first: Tensor, second: Tensor) -> torch.Size | None:
    try:
        return torch.Size(np.broadcast_shapes(first.shape, second.shape))
    except ValueError:
        return None


@contextmanager
def batch_statistics(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let batch-norm layers normalise by the statistics of the batch within the block, also in evaluation mode.

    Running averages remain as they are. They follow the training with a delay, so that outputs which training is to
    reproduce, such as the logits that memory stores, must not depend on them.

    >>> import torch
    >>> layer = nn.BatchNorm1d(1).eval()
    >>> with batch_statistics([layer]):
    ...     layer(torch.tensor([[1.0], [3.0]]))
    tensor([[-1.0000],
            [ 1.0000]], grad_fn=<NativeBatchNormBackward0>)
    >>> layer.running_mean
    tensor([0.])
    """
    layers = [part for module in modules for part in module.modules() if isinstance(part, _BatchNorm)]
    averages = [(layer.running_mean, layer.running_var) for layer in layers]
    try:
        for layer in layers:
            layer.running_mean = layer.running_var = None
        yield
    finally:
        for layer, (mean, variance) in zip(layers, averages, strict=True):
            layer.running_mean, layer.running_var = mean, variance


class BufferSnapshot:
    """The buffers of backbone, encoders and heads as they were before a step.

    A forward pass changes them in place, or puts other tensors in their place; both can be undone.

    Attributes:
        generation: incremented when buffers are replaced and their copies reallocated.
    """

    def __init__(self, model: SharedModel) -> None:
        self._model = model
        self._modules = 0
        self.generation = 0
        self._owners: list[dict[str, Tensor | None]] = []
        self._held: list[dict[str, Tensor | None]] = []
        self._copies: list[tuple[list[Tensor], list[Tensor]]] = []
        self._zero = torch.zeros((), device=model.device)

    def take(self, copy: Callable[[], object] | None = None) -> "BufferSnapshot":
        """Copy the buffers, by another function if one is given, and return this snapshot."""
        self._refresh()
        if self._copies:  # an empty graph cannot be captured
            (copy or self.copy)()
        return self

    def _refresh(self) -> None:
        """Reallocate the copies if the set of buffers has changed."""
        modules = self._model.modules()
        if len(modules) != self._modules:
            self._modules = len(modules)
            self._owners = [part._buffers for module in modules for part in module.modules() if part._buffers]
        buffers, before = _buffers(self._owners), _buffers(self._held)
        if len(buffers) == len(before) and all(map(is_, buffers, before)):
            return
        self.generation += 1
        self._held = [dict(owner.items()) for owner in self._owners]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in buffers:
            if buffer is not None:
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
        self._copies = [([buffer.clone() for buffer in some], some) for some in by_dtype.values()]

    @torch.no_grad()
    def copy(self) -> None:
        """Copy the buffers, with one kernel launch for each type."""
        for copies, buffers in self._copies:
            torch._foreach_copy_(copies, buffers)

    @torch.no_grad()
    def restore(self) -> None:
        """Set the buffers back to their copies."""
        for copies, buffers in self._copies:
            torch._foreach_copy_(buffers, copies)
        for owner, held in zip(self._owners, self._held, strict=True):
            for name, buffer in held.items():
                if owner[name] is not buffer:
                    owner[name] = buffer

    def norm(self) -> Tensor:
        """Return the summed norm of all floating-point buffers; non-finite if any buffer is."""
        if not self._owners:
            return self._zero
        with torch.no_grad():
            return total_norm(_floating_point(_buffers(self._owners)), self._zero)

    def was_finite(self) -> bool:
        """Return whether :meth:`norm` was finite before the step.

        Constant buffers whose squares overflow, such as masks of huge numbers, make it False in every step.
        """
        copies = [copy for copies, _ in self._copies for copy in copies]
        return bool(total_norm(_floating_point(copies), self._zero).isfinite())


def total_norm(tensors: list[Tensor], like: Tensor) -> Tensor:
    """Return the sum of the tensors' norms on the device of ``like``: finite exactly if all their squares are.

    >>> total_norm([torch.ones(4), torch.ones(9)], torch.zeros(()))
    tensor(5.)
    """
    if not tensors:
        return torch.zeros_like(like)
    norms = torch._foreach_norm(tensors)
    if any(norm.device != like.device for norm in norms):
        norms = tuple(norm.to(like.device) for norm in norms)
    return torch.stack(norms).sum()


def _buffers(owners: list[dict[str, Tensor | None]]) -> list[Tensor | None]:
    return [buffer for owner in owners for buffer in owner.values()]


def _floating_point(buffers: Iterable[Tensor | None]) -> list[Tensor]:
    return [buffer for buffer in buffers if buffer is not None and buffer.is_floating_point()]
