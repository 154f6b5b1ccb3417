"""The gradients of several batches from one pass through the network, over a joint batch.

Where the layers of the network are known, one pass gives the gradients of all batches, each in its row of the gradient
matrix. Where they are not, but samples do not depend on each other, a pass gives the sum of the gradients that share a
row. Heads that are plain linear classifiers are computed all together.
"""

from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, nll_loss

from spcl.batches import Inputs, sample_kind
from spcl.engine.joining import Joining, JoiningRule, check_unused
from spcl.engine.model import BufferSnapshot, Samples, SharedModel, StepBatch, total_norm
from spcl.engine.rows import GradientMatrix
from spcl.engine.segments import SegmentGradients, Segments
from spcl.methods.base import Method


class OnePass:
    """Computes the gradients of tasks and memory by as few passes as the network allows.

    Attributes:
        computes_inputs_again: whether inputs that several batches have in common may be computed for each of them.
        rule: decides which batches share a pass.
        reason: why the latest batches could not all share one pass; None if they could.
    """

    computes_inputs_again: bool = False

    def __init__(self, model: SharedModel, method: Method, gradients: GradientMatrix, snapshot: BufferSnapshot) -> None:
        self._model = model
        self._method = method
        self._gradients = gradients
        self._snapshot = snapshot
        self.rule = JoiningRule(model, gradients.parameters, snapshot)
        self._kept = HeadGradients(), HeadGradients()
        self.reason: str | None = None

    def passes(self, batches: Sequence[StepBatch]) -> list[list[StepBatch]]:
        """Divide the batches into passes; an empty list says that each batch needs a pass of its own."""
        if len(batches) < 2:
            return []
        if self._gradients.plan.is_weighted and self._model.own_encoder_parameters:
            self.reason = "a pass scales the shared gradients, but a source's own encoder needs its gradient unscaled"
            return []
        if not self.computes_inputs_again and _share_inputs(batches):
            self.reason = "a batch that answers several tasks has a pass of its own"
            return []
        joining, self.reason = self.rule.decide([batch.samples for batch in batches])
        if joining is None:
            return []
        passes = self._divided(batches, joining)
        return passes if len(passes) < len(batches) else []

    def backward(self, passes: Sequence[Sequence[StepBatch]]) -> Iterable[Tensor]:
        """Compute the gradients of the batches' losses and note their health; return the logits of each batch."""
        done = []
        for together in passes:
            joint = self._make_pass(together)
            joint.forward(self._method)
            joint.backward()
            done.append(joint)
        own = [gradient for joint in done for gradient in joint.own_gradients()]
        losses = done[0].losses.detach() if len(done) == 1 else torch.cat([joint.losses.detach() for joint in done])
        self._note_health([batch for part in passes for batch in part], losses, own)
        return chain.from_iterable(joint.logits for joint in done)

    def _make_pass(self, batches: Sequence[StepBatch]) -> "JointPass":
        return JointPass(self._model, self._gradients, self.rule, batches, self._kept)

    def _divided(self, batches: Sequence[StepBatch], joining: Joining) -> list[list[StepBatch]]:
        """Return the batches of each pass: all batches, or the batches of each row."""
        if joining == "segments":
            return [list(batches)]
        rows: dict[int, list[StepBatch]] = {}
        for batch in batches:
            rows.setdefault(self._gradients.plan.targets[batch.gradient].row, []).append(batch)
        return list(rows.values())

    def _note_health(self, batches: Sequence[StepBatch], losses: Tensor, gradients: Sequence[Tensor]) -> None:
        """Note the loss of every gradient, and for each the norm of all gradients together.

        If that norm is not finite, separate passes show which gradient is not.
        """
        parts = [*gradients]
        if not self._gradients.plan.is_separate:  # else the Gramian holds the norm of the shared part
            last = max(self._gradients.plan.targets[batch.gradient].row for batch in batches)
            parts.append(self._gradients.rows[: last + 1])
        own = sum(batch.draw is None for batch in batches)
        if len(batches) > own + 1:  # memory's loss is the sum of the losses of its replay batches
            losses = torch.cat([losses[:own], losses[own:].sum(dim=0, keepdim=True)])
        health, buffers = self._gradients.health[: len(losses)], self._snapshot.norm()
        if losses.is_cpu:  # a few numbers: faster without tensors
            norm = sum(map(float, torch._foreach_norm(parts))) if parts else 0.0
            rows = health.numpy()
            rows[:, 0], rows[:, 1:] = losses.tolist(), (norm, float(buffers))
        else:
            norms = (norm.expand_as(losses) for norm in (total_norm(parts, losses[0]), buffers))
            health.copy_(torch.stack([losses, *norms], dim=1))


def _share_inputs(batches: Sequence[StepBatch]) -> bool:
    """Return whether several batches are of the same inputs, which are to be computed once."""
    own = [batch.samples[0].source.batch for batch in batches if batch.draw is None]
    return len(set(own)) < len(own)


class Layout(NamedTuple):
    """How the samples of one kind lie in a joint batch, and the coefficient of every batch's gradient."""

    segments: Segments
    coefficients: Sequence[float]


class JointPass:
    """A forward and a backward pass over several batches, which adds each gradient to its row of the gradient matrix.

    Gradients that share a row are added up by autograd; gradients of several rows are computed by segments. The
    coefficient of a gradient scales the gradient of the features, so that heads are trained without it.

    Attributes:
        losses: the losses of the batches, after the forward pass.
        logits: the logits of the batches, after the forward pass.
    """

    losses: Tensor
    logits: Iterable[Tensor]

    def __init__(
        self,
        model: SharedModel,
        gradients: GradientMatrix,
        rule: JoiningRule,
        batches: Sequence[StepBatch],
        kept: "tuple[HeadGradients, HeadGradients]",
    ) -> None:
        self._kept = kept
        self._model = model
        self._gradients = gradients
        self._rule = rule
        self._batches = batches
        self._targets = [gradients.plan.targets[batch.gradient] for batch in batches]
        self._rows = sorted({target.row for target in self._targets})
        self._by_segments: list[SegmentGradients] = []
        self._samples = [group for batch in batches for group in batch.samples]
        self._places = [place for place, batch in enumerate(batches) for _ in batch.samples]
        self._stack: ClassifierStack | None = None
        self._stack_features: Tensor
        self._is_fresh = True

    def forward(self, method: Method) -> None:
        """Compute the method's losses, each times the share of its batch."""
        inputs = self._model.encoded(self._samples, [group.x for group in self._samples], self._encode)
        layouts = self._layouts(inputs)
        own = [batch.samples[0] for batch in self._batches if batch.draw is None]
        is_plain = len(layouts) == 1 and not self._model.has_joint_logits and method.has_plain_task_loss()
        if not (is_plain and ClassifierStack.supports(own)):
            self._compute_losses(method, inputs, layouts)
        else:
            stack = self._stack = ClassifierStack(own, self._model.device, self._kept)
            with self._model.precision():
                features = self._features(self._model.joined(inputs), layouts[0])
                rest = layouts[0].segments.samples - stack.samples
                first, *others = torch.split_with_sizes(features, [stack.samples, rest]) if rest else [features]
                self.losses = stack.forward(first)
            self.logits, self._stack_features = stack.logits, first
            if others:
                self._add_replay_losses(method, others[0])
        shares = [batch.samples[0].share for batch in self._batches]
        if set(shares) != {1.0}:
            self.losses = self.losses * self.losses.new_tensor(shares)

    def _compute_losses(self, method: Method, inputs: Sequence[Inputs], layouts: Sequence[Layout]) -> None:
        """Compute losses of any kind, with one pass for each kind of samples."""
        layout = iter(layouts)
        outputs = iter(self._model.outputs_of_encoded(self._samples, inputs, lambda x: self._features(x, next(layout))))
        by_batch = [[next(outputs) for _ in batch.samples] for batch in self._batches]
        losses = [batch.loss(method, some) for batch, some in zip(self._batches, by_batch, strict=True)]
        self.losses, self.logits = torch.stack(losses), [some[0].value.detach() for some in by_batch]

    def _add_replay_losses(self, method: Method, features: Tensor) -> None:
        """Add the losses of the replay batches to the losses of the stacked classifiers."""
        batches = self._batches[len(self.losses) :]
        samples = [group for batch in batches for group in batch.samples]
        with self._model.precision():
            outputs = iter(self._model.head_outputs(samples, features))
        losses = [batch.loss(method, [next(outputs) for _ in batch.samples]) for batch in batches]
        self.losses = torch.cat([self.losses, torch.stack(losses)])

    def backward(self) -> None:
        """Compute the gradients of the losses."""
        if self._by_segments:
            for parameter in self._gradients.parameters:
                parameter.grad = None
            if not self._is_fresh:
                self._gradients.clear(self._rows)
        else:
            self._gradients.open(self._rows[0])
        self._differentiate_losses()
        if self._by_segments:
            check_unused(self._rule.segmented_names())
            for target in self._by_segments:
                target.finish()
            self._gradients.mark_filled(self._rows)

    def _differentiate_losses(self) -> None:
        roots: list[tuple[Tensor, Tensor | None]] = []
        if self.losses.requires_grad:
            roots.append((self.losses.sum(), None))
        if self._stack is not None:
            gradient = self._stack.backward([batch.samples[0].share for batch in self._batches[: len(self._stack)]])
            if self._stack_features.requires_grad:
                roots.append((self._stack_features, gradient))
        if roots:
            tensors, gradients = zip(*roots, strict=True)
            torch.autograd.backward(tensors, gradients)
        if self._stack is not None:
            self._stack.assign_grads()

    def own_gradients(self) -> list[Tensor]:
        """Return the gradients of encoders of a source's own and of heads; of stacked classifiers, in two tensors."""
        if self._stack is not None and len(self.losses) == len(self._stack):
            own = self._model.own_encoder_parameters
            return [*self._stack.gradients, *(each.grad for each in own if each.grad is not None)]
        return [parameter.grad for parameter in self._model.own_parameters() if parameter.grad is not None]

    def _features(self, x: Inputs, layout: Layout) -> Tensor:
        """Run the backbone on samples of one kind."""
        segments, coefficients = layout
        target = None
        if len(self._rows) > 1 and self._gradients.parameters:
            target = self._new_target(segments, self._is_fresh)
        if target is None and not self._rule.has_batch_norm:
            features = self._model.backbone(x)
        else:
            features = self._rule.mode(segments, target).run(self._model.backbone, x)
        if set(coefficients) == {1.0} or not features.requires_grad:
            return features  # type: ignore[no-any-return]
        factors = torch.tensor(coefficients, dtype=features.dtype).repeat_interleave(torch.tensor(segments.sizes))
        return _ScaledGradient.apply(features, factors.to(features.device, non_blocking=True))  # type: ignore[no-any-return, no-untyped-call]

    def _encode(self, encoder: nn.Module, x: Inputs, indices: Sequence[int]) -> Inputs:
        """Run an encoder on the samples, of one kind, that have it."""
        segments = self._layout([(self._places[index], self._samples[index]) for index in indices]).segments
        target = None
        if len(self._rows) > 1 and self._rule.is_shared(encoder):
            target = self._new_target(segments, fresh=False)
        return self._rule.mode(segments, target, encoder).run(encoder, x)

    def _new_target(self, segments: Segments, fresh: bool) -> SegmentGradients:
        target = SegmentGradients(self._gradients, segments, fresh=fresh)
        self._by_segments.append(target)
        return target

    def _layouts(self, inputs: Sequence[Inputs]) -> list[Layout]:
        """Return the layout of the samples of every kind, in the order of appearance."""
        kinds: dict[Hashable, list[tuple[int, Samples]]] = {}
        for place, group, x in zip(self._places, self._samples, inputs, strict=True):
            kinds.setdefault(sample_kind(x), []).append((place, group))
        self._is_fresh = len(kinds) == 1 and not self._model.shared_encoder_parameters
        return [self._layout(members) for members in kinds.values()]

    def _layout(self, members: Sequence[tuple[int, Samples]]) -> Layout:
        """Return the layout of samples, each with the place of its batch."""
        sizes: dict[int, int] = {}
        for place, group in members:
            sizes[place] = sizes.get(place, 0) + group.y.shape[0]
        rows, coefficients = zip(*(self._targets[place] for place in sizes), strict=True)
        return Layout(Segments.of(tuple(sizes.values()), rows), list(coefficients))


class _ScaledGradient(torch.autograd.Function):
    """The identity, whose backward pass scales the gradient of every sample."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, factors: Tensor) -> Tensor:
        ctx.factors = factors
        return features.view_as(features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factors.view(-1, *[1] * (gradient.ndim - 1)), None


# -- heads

MANY = 8
"""From this number of tasks on, sums over samples are computed for all tasks together, in another order."""


class HeadGradients:
    """One tensor for the gradients of parameters of one shape, in which steps with the same parameters write them.

    Making a view for each parameter anew takes longer than computing the gradients of small heads.

    >>> parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    >>> gradients = HeadGradients()
    >>> gradients.of(parameters).shape
    torch.Size([2, 3])
    >>> gradients.of(parameters) is gradients.of(parameters)
    True
    """

    def __init__(self) -> None:
        self._parameters: Sequence[nn.Parameter] = []
        self._stacked = torch.empty(0)
        self._views: Sequence[Tensor] = []

    def of(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return the tensor, with one row for each of these parameters."""
        first = parameters[0]
        is_known = len(parameters) == len(self._parameters) and all(map(is_, parameters, self._parameters))
        if not is_known or self._stacked.dtype != first.dtype or self._stacked.device != first.device:
            self._parameters = parameters
            self._stacked = torch.empty(len(parameters), *first.shape, dtype=first.dtype, device=first.device)
            self._views = self._stacked.unbind()
        return self._stacked

    def assign(self) -> None:
        """Add the gradients to the ``.grad`` of the parameters."""
        for parameter, gradient in zip(self._parameters, self._views, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)


class ClassifierStack:
    """The cross-entropies of several tasks with linear heads of one shape and batches of one size, and their gradients.

    They are computed without autograd, with a fraction of the calls that autograd makes. For fewer than ``MANY`` tasks
    the results equal autograd's to the last bit.

    Args:
        samples: the tasks' batches, for which :meth:`supports` holds.
        device: the device of the model.
        kept: holds the gradients of weights and biases from step to step.

    Attributes:
        logits: the logits of shape (tasks, batch, classes), after the forward pass.
        gradients: the stacked gradients of all trained weights and biases, after the backward pass.
    """

    logits: Tensor
    gradients: list[Tensor]

    def __init__(
        self,
        samples: Sequence[Samples],
        device: torch.device,
        kept: tuple[HeadGradients, HeadGradients],
    ) -> None:
        heads: list[Any] = [group.task.head for group in samples]
        self._parameters = [[head._parameters[name] for head in heads] for name in ("weight", "bias")]
        self._kept = kept
        labels = torch.cat([group.y for group in samples]).to(device, non_blocking=True)
        self._labels = labels.view(len(samples), -1)

    @staticmethod
    def supports(samples: Sequence[Samples]) -> bool:
        """Return whether these are at least two plain classifiers with heads and batches of one shape."""
        if len(samples) < 2 or (shape := _shape(samples[0])) is None:
            return False
        return all(_shape(group) == shape for group in samples[1:])

    def __len__(self) -> int:
        return len(self._parameters[0])

    @property
    def samples(self) -> int:
        """The number of samples of all tasks."""
        return self._labels.numel()

    def forward(self, features: Tensor) -> Tensor:
        """Return the mean cross-entropy of every task."""
        with torch.no_grad():
            self._weight, bias = map(torch.stack, self._parameters)
        self._features = features.detach().view(len(self), -1, features.shape[1])
        logits = torch.baddbmm(bias.unsqueeze(1), self._features, self._weight.transpose(1, 2))
        self.logits = logits.to(bias.dtype)  # losses are computed in full precision
        self._log_softmax = torch.log_softmax(self.logits, dim=2)
        if len(self) < MANY:
            pairs = zip(self._log_softmax.unbind(), self._labels.unbind(), strict=True)
            return torch.stack([nll_loss(each, labels) for each, labels in pairs])
        return self._log_softmax.gather(2, self._labels.unsqueeze(2)).mean(dim=(1, 2)).neg_()

    def backward(self, shares: Sequence[float]) -> Tensor:
        """Compute the gradients of the losses, each times its share; return the gradient of the features."""
        of_losses = torch.zeros_like(self.logits).scatter_(2, self._labels.unsqueeze(2), -1.0 / self._labels.shape[1])
        if set(shares) != {1.0}:
            of_losses *= of_losses.new_tensor(shares).view(-1, 1, 1)
        gradient = torch._log_softmax_backward_data(of_losses, self._log_softmax, 2, self.logits.dtype)
        lower = gradient.to(self._features.dtype)
        (weights, biases), (of_weights, of_biases) = self._parameters, self._kept
        self.gradients = []
        if weights[0].requires_grad:
            self.gradients.append(self._weight_gradients(lower, of_weights.of(weights)))
        if biases[0].requires_grad:
            self.gradients.append(torch.sum(gradient, dim=1, out=of_biases.of(biases)))
        return torch.bmm(lower, self._weight.to(lower.dtype)).flatten(0, 1)

    def _weight_gradients(self, gradient: Tensor, out: Tensor) -> Tensor:
        left, right = gradient.transpose(1, 2), self._features
        if left.dtype != out.dtype:
            return out.copy_(torch.bmm(left, right))
        if len(self) >= MANY:
            return torch.bmm(left, right, out=out)
        for one, other, product in zip(left.unbind(), right.unbind(), out.unbind(), strict=True):
            torch.mm(one, other, out=product)
        return out

    def assign_grads(self) -> None:
        """Add the gradients to the ``.grad`` of the heads' parameters."""
        for parameters, kept in zip(self._parameters, self._kept, strict=True):
            if parameters[0].requires_grad:
                kept.assign()


def _shape(group: Samples) -> tuple[object, ...] | None:
    """Return what must be equal for all tasks; None for a task that is not a plain classifier."""
    task, head, y = group.task, group.task.head, group.y
    if task.loss is not cross_entropy or type(head) is not nn.Linear or y.ndim != 1:
        return None
    if head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks:
        return None
    weight, bias = head._parameters.get("weight"), head._parameters.get("bias")
    if weight is None or bias is None or _is_hooked(weight) or _is_hooked(bias):
        return None
    return y.shape, y.device, weight.shape, weight.requires_grad, bias.shape, bias.requires_grad


def _is_hooked(parameter: Any) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
