"""Engine that holds no gradient matrix.

One forward pass over all batches, then two backward passes: the first one gathers the Gramian of the gradients layer by
layer, the second one gives their weighted sum.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from spcl.aggregation.factors import FactoredGradients
from spcl.aggregation.gramians import double_products
from spcl.batches import Inputs
from spcl.engine.base import Passes, Rule
from spcl.engine.eager import EagerEngine
from spcl.engine.joining import Joining, JoiningRule, check_unused
from spcl.engine.joint import HeadGradients, JointPass, Layout, OnePass
from spcl.engine.model import BufferSnapshot, SharedModel, StepBatch
from spcl.engine.rows import GradientMatrix, ReductionPlan
from spcl.engine.segments import SegmentGradients, Segments, SideStreams, UnsupportedError, Work
from spcl.methods.base import Method
from spcl.transforms import Transform

Array = NDArray[np.float64]


class LowMemoryEngine(EagerEngine):
    """Computes what :class:`~spcl.engine.eager.EagerEngine` computes, in the memory of plain training.

    The T×n gradient matrix is held only in a step whose batches cannot share a pass; a warning says why.
    """

    def __init__(self, model: SharedModel, method: Method) -> None:
        super().__init__(model, method)
        is_penalised = method.settings.alpha > 0.0 and self.gradients.length > 0
        penalty = super().penalty_gradient if is_penalised else None
        self._two_passes = TwoPasses(model, method, self.gradients, self._snapshot, penalty)
        self.one_pass = self._two_passes
        self._has_warned = False

    @override
    def _backward_apart(self, batches: Sequence[StepBatch], transform: Transform | None) -> Passes:
        if not self.gradients.holds_rows:
            self._warn()
            super()._hold_rows(self.gradients.plan)
        return super()._backward_apart(batches, transform)

    @override
    def penalty_gradient(self) -> None:
        if self._two_passes.latest is None:  # else the joint pass has computed it, for the Gramian
            super().penalty_gradient()

    @override
    def _measured(self, needed: bool) -> tuple[Array | None, Array]:
        latest = self._two_passes.latest
        if latest is None or not needed:
            return super()._measured(needed)
        products, health = latest.gramian.products, self.gradients.health[: len(self.gradients.plan.names)]
        values: Array = torch.cat([products.view(-1), health.view(-1)]).cpu().numpy()
        found = values[: products.numel()].reshape(products.shape)
        return found, values[products.numel() :].reshape(health.shape)

    @override
    def combine(self, rule: Rule, *, check: bool) -> bool:
        latest = self._two_passes.latest
        if latest is None or callable(rule):
            return super().combine(rule, check=check)
        latest.combine(rule)
        self._two_passes.latest = None
        return self.finish_update(check)

    @override
    def _hold_rows(self, plan: ReductionPlan) -> None:
        self._two_passes.latest = None  # frees the graph of a step that was not finished
        if self.one_pass is None or not plan.is_separate or plan.rows < 2 or not self.gradients.length:
            super()._hold_rows(plan)
        else:
            penalty = self.method.settings.alpha > 0.0
            self.gradients.begin(plan, penalty=penalty, rows=int(penalty))  # the update gets its row in :meth:`combine`

    def _warn(self) -> None:
        if self.fallback_reason is not None and not self._has_warned:
            self._has_warned = True
            rows, gradients = self.gradients.plan.rows, self.gradients
            mebibytes = rows * gradients.length * gradients.dtype.itemsize / 2**20
            warnings.warn(
                f"low_memory is not possible here, so the {rows} gradients of a step are held ({mebibytes:,.0f} MiB): "
                f"{self.fallback_reason}",
                RuntimeWarning,
                stacklevel=7,
            )


class TwoPasses(OnePass):
    """Computes the Gramian and the weighted sum of the gradients of tasks and memory without holding the gradients.

    Args:
        model: the shared model.
        method: gives the losses.
        gradients: the gradient matrix.
        snapshot: the copies of the model's buffers.
        penalty: computes the orthogonality gradient; None if there is none.

    Attributes:
        latest: the pass whose gradients have not been combined yet, or None.
    """

    computes_inputs_again = True  # else the gradients would be held

    def __init__(
        self,
        model: SharedModel,
        method: Method,
        gradients: GradientMatrix,
        snapshot: BufferSnapshot,
        penalty: Callable[[], None] | None,
    ) -> None:
        super().__init__(model, method, gradients, snapshot)
        self.rule = JoiningRule(model, gradients.parameters, snapshot, for_speed=False)
        self._penalty = penalty
        self.latest: RetainedPass | None = None

    @override
    def _divided(self, batches: Sequence[StepBatch], joining: Joining) -> list[list[StepBatch]]:
        if joining != "segments" and not self._gradients.holds_rows:
            return []
        return super()._divided(batches, joining)

    @override
    def _make_pass(self, batches: Sequence[StepBatch]) -> JointPass:
        if self._gradients.holds_rows:
            return super()._make_pass(batches)
        if self._penalty is not None:
            self._penalty()
        self.latest = RetainedPass(self._model, self._gradients, self.rule, batches, self._kept)
        return self.latest


class RetainedPass(JointPass):
    """A forward pass over all batches of a step, and two backward passes through its graph.

    The first backward pass gathers the Gramian of the gradients, and gives heads their gradients. The second one starts
    from the gradient of the features, with the samples of every batch scaled by the weight of the batch, and gives the
    weighted sum.

    Args:
        model: the shared model.
        gradients: a gradient matrix without rows, except for the orthogonality gradient if there is one.
        rule: decides how the batches share the pass.
        batches: all batches of the step.

    Attributes:
        gramian: the Gramian of the gradients, after the first backward pass.
    """

    gramian: "LayerGramian"

    def __init__(
        self,
        model: SharedModel,
        gradients: GradientMatrix,
        rule: JoiningRule,
        batches: Sequence[StepBatch],
        kept: tuple[HeadGradients, HeadGradients],
    ) -> None:
        super().__init__(model, gradients, rule, batches, kept)
        self.gramian = LayerGramian(gradients)
        self._parts: list[tuple[Tensor, Tensor, Segments]] = []
        self._targets_of_passes: list[SegmentGramian] = []

    @override
    def _new_target(self, segments: Segments, fresh: bool) -> SegmentGradients:
        target = SegmentGramian(self._gradients, segments, self.gramian)
        self._targets_of_passes.append(target)
        return target

    @override
    def _features(self, x: Inputs, layout: Layout) -> Tensor:
        segments = layout.segments
        features = self._rule.mode(segments, self._new_target(segments, fresh=False)).run(self._model.backbone, x)
        top = features.detach()
        if features.requires_grad:
            self._parts.append((features, top.requires_grad_(), segments))
        return top

    @override
    def backward(self) -> None:
        for parameter in self._gradients.parameters:
            parameter.grad = None
        self._differentiate_losses()
        self.losses = self.losses.detach()
        for features, top, _ in self._parts:
            if top.grad is not None:
                torch.autograd.backward(features, top.grad, retain_graph=True)
        self.gramian.finish()
        check_unused(self._rule.segmented_names())

    def combine(self, weights: Array) -> None:
        """Compute the weighted sum of the gradients in row 0, and free the graph."""
        self._gradients.hold(1)
        update = self._gradients.rows[0].zero_()
        for target in self._targets_of_passes:
            target.sum_up()
        own = {each: each.grad for each in self._model.own_encoder_parameters}
        for parameter in own:
            parameter.grad = None  # else this pass would add to what the first one gave
        while self._parts:
            features, top, segments = self._parts.pop()
            if top.grad is not None:
                last = not self._parts
                torch.autograd.backward(features, self._weighted(top.grad, segments, weights), retain_graph=not last)
        for parameter, gradient in own.items():
            parameter.grad = gradient
        if self._gradients.has_penalty:
            update.add_(self._gradients.penalty_row, alpha=float(weights[-1]))

    def _weighted(self, gradient: Tensor, segments: Segments, weights: Array) -> Tensor:
        """Scale the gradient of the features, sample by sample, by the weights of the batches."""
        by_batch = torch.from_numpy(weights[list(segments.targets)]).to(self._gradients.dtype)
        multiple = segments.multiple(gradient)
        factors = by_batch.repeat_interleave(multiple * torch.tensor(segments.sizes))
        factors = factors.to(gradient.device, non_blocking=True).view(-1, *[1] * (gradient.ndim - 1))
        return (gradient * factors).to(gradient.dtype)


LEAST_NUMBERS = 1 << 22
"""Up to this number of entries, the gradients of a parameter are never computed in slices."""

COLUMNS = 1 << 16
"""The most columns that are converted to float64 at a time."""

ALL = slice(None)


class LayerGramian:
    r"""The Gramian :math:`C_{st} = \sum_p \langle g_s^p, g_t^p \rangle` of T gradients, summed over the parameters p.

    The T gradients of a parameter are held only until their products are added, in float64. The gradients of a large
    parameter are computed in slices, which take no more memory than one gradient of the network. A parameter that a
    pass uses more than once keeps its T gradients until the last use.

    Args:
        gradients: the gradient matrix; the orthogonality gradient in it, if any, becomes the last row of the Gramian.

    Attributes:
        products: the T×T products so far, on the device.
    """

    def __init__(self, gradients: GradientMatrix) -> None:
        penalty = gradients.views(gradients.penalty_row) if gradients.has_penalty else []
        self._penalty = dict(zip(gradients.parameters, penalty, strict=bool(penalty)))
        self._rows = gradients.plan.rows + bool(penalty)
        self._length = max(gradients.length, LEAST_NUMBERS) // self._rows
        self._columns = min(COLUMNS, 1 + self._length // 4)
        self._uses: Counter[nn.Parameter] = Counter()
        self._kept: dict[nn.Parameter, Tensor] = {}
        self.products = torch.zeros(self._rows, self._rows, dtype=torch.float64, device=gradients.device)

    def expect(self, parameter: nn.Parameter) -> None:
        """Note that the backward pass will add to the gradients of a parameter once more."""
        self._uses[parameter] += 1

    def accepts_factors(self, parameter: nn.Parameter) -> bool:
        """Return whether the gradients of a parameter may be given as factors, see :meth:`add_factors`."""
        return not self._penalty and self._uses[parameter] == 1 and parameter not in self._kept

    def add_factors(self, parameter: nn.Parameter, rows: Sequence[int], factors: FactoredGradients) -> None:
        """Add the products of the factored gradients of a parameter to these rows of the Gramian."""
        self._count_down(parameter)
        places = torch.tensor(rows, device=self.products.device)
        self.products[places.unsqueeze(1), places] += double_products(factors)

    def add(self, parameter: nn.Parameter, rows: Sequence[int], works: Sequence[Work], separable: bool = True) -> None:
        """Add what each piece of work computes to the gradient in its row; after the last use, add their products."""
        is_last = self._count_down(parameter)
        if is_last and parameter not in self._kept:
            self._add_products(parameter, rows, works, separable)
            return
        if parameter not in self._kept:
            self._kept[parameter] = parameter.new_zeros(self._rows, *parameter.shape)
        for row, work in zip(rows, works, strict=True):
            self._kept[parameter][row] += work()
        if is_last:
            self._release(parameter)

    def finish(self) -> None:
        """Add the products of parameters whose uses the backward pass has not all reached."""
        for parameter in list(self._kept):
            self._release(parameter)

    def _count_down(self, parameter: nn.Parameter) -> bool:
        """Count a use of a parameter; return whether it is the last one."""
        if not self._uses[parameter]:
            raise UnsupportedError("the backward pass reaches a parameter more often than the forward pass has used it")
        self._uses[parameter] -= 1
        return not self._uses[parameter]

    def _release(self, parameter: nn.Parameter) -> None:
        kept = self._kept.pop(parameter)
        self._add_products(parameter, range(len(kept)), [partial(_part, each) for each in kept])

    def _add_products(
        self, parameter: nn.Parameter, rows: Sequence[int], works: Sequence[Work], separable: bool = True
    ) -> None:
        for part in self._parts(parameter) if separable else [ALL]:
            self.products += double_products(self._block(parameter, rows, works, part, separable), self._columns)

    def _block(
        self, parameter: nn.Parameter, rows: Sequence[int], works: Sequence[Work], part: slice, separable: bool
    ) -> Tensor:
        """Return the gradients of a slice of a parameter as rows, then the orthogonality gradient if there is one."""
        like = _part(parameter.detach(), part)
        block = like.new_zeros(self._rows, *like.shape)
        for row, work in zip(rows, works, strict=True):
            block[row] = work(part) if separable else work()
        if self._penalty:
            block[-1] = _part(self._penalty[parameter], part)
        return block.view(self._rows, -1)

    def _parts(self, parameter: nn.Parameter) -> list[slice]:
        """Return slices of a parameter's first dimension, as large as memory for all gradients allows."""
        if parameter.numel() <= self._length:
            return [ALL]
        count = max(1, len(parameter) * self._length // parameter.numel())
        return [slice(start, start + count) for start in range(0, len(parameter), count)]


class SegmentGramian(SegmentGradients):
    """Receives the gradients of the segments of one pass: first for the Gramian, then for their sum.

    Args:
        gradients: the gradient matrix, whose first row receives the sum.
        segments: the segments of the joint batch.
        gramian: gathers the products.
    """

    def __init__(self, gradients: GradientMatrix, segments: Segments, gramian: LayerGramian) -> None:
        super().__init__(gradients, segments, fresh=False)
        self._gramian: LayerGramian | None = gramian

    def sum_up(self) -> None:
        """Add the gradients of all segments to the first row from now on."""
        self._gramian = None
        self._use(Segments.of(self.segments.sizes, (0,) * len(self.segments.sizes)))

    @override
    def follow(self, *parameters: Tensor | None) -> Tensor:
        for parameter in parameters:
            if self._gramian is not None and isinstance(parameter, nn.Parameter) and parameter in self:
                self._gramian.expect(parameter)
        return super().follow(*parameters)

    @override
    def add_products(self, parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
        if self._gramian is None:
            super().add_products(parameter, left, right)
        elif parameter in self:
            lefts, rights = self.segments.split(left), self.segments.split(right)
            if self._gramian.accepts_factors(parameter) and FactoredGradients.are_faster(left, right, len(lefts)):
                factors = FactoredGradients(left, right, [len(part) for part in lefts])
                self._gramian.add_factors(parameter, self.segments.rows, factors)
            else:
                works = [partial(_product, one, other) for one, other in zip(lefts, rights, strict=True)]
                self._gramian.add(parameter, self.segments.rows, works)

    @override
    def add(self, parameter: nn.Parameter, values: Tensor | Iterable[Tensor]) -> None:
        if self._gramian is None:
            super().add(parameter, values)
        elif parameter in self:
            self._gramian.add(parameter, self.segments.rows, [partial(_part, value) for value in values])

    @override
    def add_from(
        self, parameter: nn.Parameter, works: Iterable[Work], streams: SideStreams, separable: bool = True
    ) -> None:
        if self._gramian is None:  # without streams: work that runs side by side needs memory at the same time
            super().add(parameter, (work() for work in works))
        else:
            self._gramian.add(parameter, self.segments.rows, list(works), separable)

    @override
    def add_at(self, parameter: nn.Parameter, entries: Tensor, values: Tensor) -> None:
        if self._gramian is None:
            super().add_at(parameter, entries, values)
        elif parameter in self:
            parts = zip(self.segments.split(entries), self.segments.split(values), strict=True)
            works = [partial(_sums_at, parameter.detach(), some, value) for some, value in parts]
            self._gramian.add(parameter, self.segments.rows, works)

    @override
    def finish(self) -> None:
        if self._gramian is not None:
            self._gramian.finish()


def _part(value: Tensor, part: slice = ALL) -> Tensor:
    return value[part] if value.ndim else value


def _sums_at(like: Tensor, entries: Tensor, values: Tensor, part: slice = ALL) -> Tensor:
    first, last, _ = part.indices(len(like))
    inside = (entries >= first) & (entries < last)
    return torch.zeros_like(like[part]).index_add_(0, entries[inside] - first, values[inside].to(like.dtype))


def _product(left: Tensor, right: Tensor, part: slice = ALL) -> Tensor:
    return left[:, part].T @ right


# -- memory of a device


def free_memory(device: torch.device) -> int | None:
    """Return how many bytes are free for tensors on a device, or None if the system does not say.

    On a GPU, memory that PyTorch has reserved but does not use counts as free; on a CPU, memory that the system can
    reclaim, up to the limit of the process's control group.

    >>> free = free_memory(torch.device("cpu"))
    >>> free is None or free > 0
    True
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    return min((each for each in (_available(), _left_in_group()) if each is not None), default=None)


def _available() -> int | None:
    """Return Linux's estimate of the available memory."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return None


def _left_in_group() -> int | None:
    """Return how much of the memory limit of the control group is left, as in a container."""
    with suppress(OSError, ValueError):
        folder = Path("/sys/fs/cgroup")
        limit, used = (int((folder / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        return limit - used + int(statistics["inactive_file"])
    return None
