"""Engine that runs every operation eagerly."""

from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from spcl.aggregation.gramians import gramian_and_numbers
from spcl.batches import Inputs, concatenate, describe, map_leaves, number_of_samples, sample_kind
from spcl.engine.base import Engine, Passes, Rule
from spcl.engine.joint import OnePass
from spcl.engine.model import BufferSnapshot, Samples, SharedModel, StepBatch, total_norm, with_inputs
from spcl.engine.rows import GradientMatrix, ReductionPlan
from spcl.engine.segments import UnsupportedError
from spcl.engine.update import Update
from spcl.errors import SpclError, is_out_of_memory
from spcl.methods.base import Method, Output
from spcl.orthogonality import LayerChoice, add_orthogonality_gradient, is_convolution
from spcl.orthogonality.layers import CONVOLUTIONS, Layer, find_layers
from spcl.orthogonality.penalty import layers_penalty
from spcl.transforms import Transform


def augmented(transform: Transform, inputs: Sequence[Inputs], device: torch.device) -> list[Inputs]:
    """Return the inputs on the device, transformed in one call for all that have the same shape and type.

    >>> calls = []
    >>> def double(x):
    ...     calls.append(len(x))
    ...     return 2 * x
    >>> augmented(double, [torch.ones(1, 2), torch.ones(1, 3), torch.zeros(2, 2)], torch.device("cpu"))
    [tensor([[2., 2.]]), tensor([[2., 2., 2.]]), tensor([[0., 0.],
            [0., 0.]])]
    >>> calls
    [3, 1]
    """
    kinds: dict[Hashable, list[int]] = {}
    for index, x in enumerate(inputs):
        kinds.setdefault(sample_kind(x), []).append(index)
    results = list(inputs)
    for indices in kinds.values():
        parts = [map_leaves(lambda leaf: leaf.to(device, non_blocking=True), inputs[index]) for index in indices]
        whole = _transformed(transform, concatenate(parts))
        start = 0
        for index, part in zip(indices, parts, strict=True):
            rows = slice(start, start + number_of_samples(part))
            results[index] = map_leaves(lambda leaf: leaf[rows], whole)  # noqa: B023 (it is called at once)
            start = rows.stop
    return results


def _transformed(transform: Transform, x: Inputs) -> Inputs:
    try:
        with torch.no_grad():
            result: Any = transform(x)
    except Exception as error:  # a transform of the user's may fail in any way
        if isinstance(error, SpclError) or is_out_of_memory(error):
            raise
        kind = f"{number_of_samples(x)} samples of {describe(x, 1)}"
        raise SpclError(f"augment raised {type(error).__name__} on {kind}: {error}") from error
    if type(result) is not type(x):
        raise SpclError(f"augment must give a {type(x).__name__} as it gets, but it gives a {type(result).__name__}")
    count, given = number_of_samples(result), number_of_samples(x)
    if count != given:
        raise SpclError(f"augment must give as many samples as it gets, {given}, but it gives {count}")
    return result


Array = NDArray[np.float64]


class EagerEngine(Engine):
    """Engine that runs every operation eagerly, on any device; on a CPU by a joint pass, where batches can share it."""

    matrix: type[GradientMatrix] = GradientMatrix
    """The class of :attr:`gradients`."""

    def __init__(self, model: SharedModel, method: Method) -> None:
        self.model = model
        self.method = method
        shared = [parameter for parameter in model.backbone.parameters() if parameter.requires_grad]
        self.gradients = self.matrix(shared, like=torch.empty(0, dtype=model.dtype, device=model.device))
        self._snapshot = BufferSnapshot(model)
        on_cpu = model.device.type == "cpu"  # on a GPU a joint pass launches more kernels, and is slower
        joins = on_cpu and not method.settings.weigh_heads  # a joint pass cannot tell the heads' gradients apart
        self.one_pass = OnePass(model, method, self.gradients, self._snapshot) if joins else None

    @override
    def begin(self, plan: ReductionPlan) -> None:
        weighed = self._weighed_heads() if self.method.settings.weigh_heads else []
        self.gradients.set_others([*self.model.shared_encoder_parameters, *weighed])
        self._hold_rows(plan)
        for parameter in self.model.own_parameters():
            parameter.grad = None  # a head, or a source's own encoder, without samples in this step must not move

    @override
    def backward(self, batches: Sequence[StepBatch], transform: Transform | None, *, apart: bool = False) -> Passes:
        one_pass = self.one_pass
        if transform is not None:
            batches = self.augmented(batches, transform, replays_too=one_pass is not None)
        if one_pass is not None and not apart:
            try:
                passes = one_pass.passes(batches)
                logits = one_pass.backward(passes) if passes else ()
            except Exception as error:
                if is_out_of_memory(error):  # separate passes need less
                    self.one_pass, self.fallback_reason = None, "a pass over all batches ran out of memory"
                elif isinstance(error, UnsupportedError):
                    one_pass.rule.refuse(str(error))
                raise UnsupportedError(str(error)) from error  # which batch it is, separate passes show
            self.fallback_reason = one_pass.reason
            if passes:
                pairs = zip(batches, logits, strict=False) if self.method.stores_logits else ()
                return Passes({b.samples[0].name: each for b, each in pairs if b.draw is None}, is_joint=True)
        return self._backward_apart(batches, transform if one_pass is None else None)

    def augmented(self, batches: Sequence[StepBatch], transform: Transform, replays_too: bool) -> list[StepBatch]:
        """Return the batches with augmented inputs: the tasks' together, every replay batch by itself."""
        tasks = [batch for batch in batches if batch.draw is None]
        distinct = {_inputs_of(batch): batch.samples[0].x for batch in tasks}
        made = dict(zip(distinct, self._augment(transform, list(distinct.values())), strict=True)) if tasks else {}
        inputs = [made[_inputs_of(batch)] for batch in tasks]
        done = [replace(batch, samples=with_inputs(batch.samples, [x])) for batch, x in zip(tasks, inputs, strict=True)]
        replays = batches[len(tasks) :]
        return done + [self._augmented_replay(each, transform) if replays_too else each for each in replays]

    def _augmented_replay(self, batch: StepBatch, transform: Transform) -> StepBatch:
        inputs = self._augment(transform, [group.x for group in batch.samples])
        return replace(batch, samples=with_inputs(batch.samples, inputs))

    def _backward_apart(self, batches: Sequence[StepBatch], transform: Transform | None) -> Passes:
        """Compute the gradients with one pass for each batch; ``transform`` augments the replay batches, if given.

        A replay batch on which the model raises marks memory as faulty: a head with batch-norm, for example, cannot be
        trained on a single sample. The next step draws others.
        """
        logits = {}
        for _, alike in groupby(batches, lambda batch: (batch.draw, _inputs_of(batch))):
            batch, *others = together = list(alike)
            if batch.draw is None:
                groups = [each.samples[0] for each in together]
                with self.model.source_errors(groups[0].source, groups[0].x, groups[0].y):
                    if others:
                        values = self._backward_together([each.gradient for each in together], groups)
                    else:
                        values = [self._backward_task(batch.gradient, groups[0])]
                for group, value in zip(groups, values, strict=True):
                    if self.method.stores_logits and value is not None:
                        logits[group.name] = value
                continue
            try:
                self._backward_replay(batch if transform is None else self._augmented_replay(batch, transform))
            except (RuntimeError, ValueError) as error:
                if isinstance(error, SpclError) or is_out_of_memory(error):
                    raise
                return Passes(logits, memory_fault=f"the model raised an error on the replay batch: {error}")
        return Passes(logits)

    @override
    def mean_of_sources(self) -> dict[nn.Parameter, Tensor]:
        direction = self.gradients.mean_of_sources(len(self.gradients.plan.names) - 1)
        return dict(zip(self.gradients.parameters, self.gradients.views(direction), strict=True))

    @override
    def penalty_gradient(self) -> None:
        row = self.gradients.penalty_row.zero_()
        views = dict(zip(self.gradients.parameters, self.gradients.views(row), strict=True))
        factor, layers = penalty_factor(self.method), penalised_layers(self.method)
        add_orthogonality_gradient(self.model.backbone, views, factor, layers)
        self.add_encoder_penalty(views, factor)

    def add_encoder_penalty(self, views: Mapping[nn.Parameter, Tensor], factor: float) -> None:
        """Add the orthogonality gradients of encoders' layers whose weights have views."""
        for encoder in self.model.encoders:
            if chosen := penalised_among(encoder, self.method, views):
                layers_penalty(chosen, [views[cast(nn.Parameter, layer.weight)] for layer in chosen], factor)

    @override
    def gramian(self, needed: bool) -> Callable[[], tuple[Array | None, Array]]:
        return lambda: self._measured(needed)

    def _measured(self, needed: bool) -> tuple[Array | None, Array]:
        health = self._known_health()
        if not needed:
            return None, health.cpu().numpy()
        products, numbers = gramian_and_numbers(self.gradients.columns(), health.view(-1))
        return products, numbers.reshape(health.shape)

    @override
    def combine(self, rule: Rule, *, check: bool) -> bool:
        if callable(rule):
            self.gradients.apply(rule, self.method.settings.coupled)
        else:
            self.gradients.combine(rule)
        return self.finish_update(check)

    def finish_update(self, check: bool) -> bool:
        """Add the orthogonality gradient to the update in row 0, if it belongs there; return whether that is finite."""
        settings, gradients = self.method.settings, self.gradients
        if gradients.has_penalty and not settings.coupled:
            gradients.add_penalty(settings.alpha if settings.adaptive else None)
        return not check or bool(gradients.rows[0].norm().isfinite())

    @override
    def update(self, update: Update) -> None:
        self.gradients.assign_grads(0)
        self.penalise_own_encoders()
        update.set_learning_rates()
        update.apply()

    @override
    def snapshot(self) -> BufferSnapshot:
        return self._snapshot.take()

    def penalise_own_encoders(self) -> None:
        r"""Add α times the orthogonality gradient, or one of relative length, to encoders that only one source has.

        An encoder without samples in this step has no gradient, and stays as it is.
        """
        settings = self.method.settings
        if settings.alpha == 0.0 or not self.model.own_encoder_parameters:
            return
        own = {each: each.grad for each in self.model.own_encoder_parameters if each.grad is not None}
        if not settings.adaptive:
            self.add_encoder_penalty(own, settings.alpha)
            return
        penalties = {each: torch.zeros_like(each) for each in own}
        self.add_encoder_penalty(penalties, 1.0)
        for parameter, slope in penalties.items():
            size = torch.maximum(slope.norm(), parameter.detach().norm()).clamp(min=torch.finfo(slope.dtype).tiny)
            own[parameter].add_(settings.alpha * own[parameter].norm() / size * slope)

    # -- hooks for subclasses

    def _augment(self, transform: Transform, inputs: Sequence[Inputs]) -> list[Inputs]:
        """Return inputs on the device, transformed."""
        return augmented(transform, inputs, self.model.device)

    def _weighed_heads(self) -> list[nn.Parameter]:
        """Return the parameters of heads whose gradients are weighed with the backbone's."""
        return [parameter for parameter in self.model.head_parameters() if parameter.requires_grad]

    def _hold_rows(self, plan: ReductionPlan) -> None:
        """Hold the rows in which the gradients are accumulated."""
        factored = not (self.method.elementwise or self.method.edits_memory)
        self.gradients.begin(plan, penalty=self.method.settings.alpha > 0.0, factored=factored)

    def _backward_task(self, index: int, samples: Samples) -> Tensor | None:
        """Compute the gradient of one task's loss; return its logits."""
        (output,) = self._forward([samples], [samples.x])
        loss = _counted(self.method.task_loss(output), samples)
        with self._gradient(index, loss, [samples]):
            loss.backward()  # type: ignore[no-untyped-call]
        return output.value.detach()

    def _backward_together(self, indices: Sequence[int], samples: Sequence[Samples]) -> list[Tensor | None]:
        """Compute the gradients of several tasks' losses on the same inputs, by one forward pass; return the logits."""
        outputs = self.model.outputs_of_one_batch(samples)
        for place, (index, output, group) in enumerate(zip(indices, outputs, samples, strict=True), 1):
            loss = _counted(self.method.task_loss(output), group)
            with self._gradient(index, loss, [group]):
                loss.backward(retain_graph=place < len(samples))  # type: ignore[no-untyped-call]
        return [output.value.detach() for output in outputs]

    def _backward_replay(self, batch: StepBatch) -> None:
        """Add the gradient of memory's loss on a replay batch."""
        outputs = self._forward(batch.samples, [group.x for group in batch.samples])
        loss = _counted(batch.loss(self.method, outputs), batch.samples[0])
        with self._gradient(batch.gradient, loss, batch.samples, add=bool(batch.draw)):
            loss.backward()  # type: ignore[no-untyped-call]

    def _forward(self, samples: Sequence[Samples], inputs: Sequence[Inputs]) -> list[Output]:
        return self.model.outputs(samples, inputs)

    @contextmanager
    def _gradient(self, index: int, loss: Tensor, samples: Sequence[Samples], add: bool = False) -> Iterator[None]:
        """Accumulate the block's backward pass in a gradient, and note the gradient's health."""
        with self.gradients.accumulate(index):
            yield
        parts = [p.grad for p in self.model.reached_parameters(samples) if p.grad is not None]
        if not self.gradients.plan.is_separate:  # else the Gramian holds the norm of the shared part
            parts.append(self.gradients.open_row)
        health = torch.stack([loss.detach(), total_norm(parts, loss.detach()), self._snapshot.norm()])
        self._note_health(index, health, add)

    def _note_health(self, index: int, health: Tensor, add: bool) -> None:
        row = self.gradients.health[index]
        (row.add_ if add else row.copy_)(health)

    def _known_health(self) -> Tensor:
        """Return loss, norms and buffers' norm of every gradient of the step."""
        return self.gradients.health[: len(self.gradients.plan.names)]


def _inputs_of(batch: StepBatch) -> Hashable:
    """Return what batches have in common that answer several tasks for the same inputs."""
    first = batch.samples[0]
    return first.source.batch, id(first.x)


def _counted(loss: Tensor, samples: Samples) -> Tensor:
    return loss if samples.share == 1.0 else samples.share * loss


def penalty_factor(method: Method) -> float:
    """Return the factor of the orthogonality gradient, as long as no update is known."""
    return 1.0 if method.settings.adaptive else method.settings.alpha


def penalised_among(module: nn.Module, method: Method, weights: Container[nn.Parameter]) -> list[Layer]:
    """Return the layers with these weights that the method's orthogonality penalty is on."""
    choice = penalised_layers(method)

    def is_chosen(name: str, layer: nn.Module) -> bool:
        return layer.weight in weights and (choice is None or (callable(choice) and choice(name, layer)))

    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, (*CONVOLUTIONS, nn.Linear))]
    return find_layers(module, is_chosen) if any(is_chosen(*each) for each in layers) else []


def penalised_layers(method: Method) -> LayerChoice:
    """Return the layers that the method's orthogonality penalty is on."""
    return is_convolution if method.settings.layers == "convolutions" else None
