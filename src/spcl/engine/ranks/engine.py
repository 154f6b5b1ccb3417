"""Engine of several ranks: each computes the gradients of some tasks, or on its shares of their batches."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from spcl.aggregation.gramians import packed_gramian, unpacked_gramian
from spcl.engine.base import Engine, Passes, Rule
from spcl.engine.eager import EagerEngine
from spcl.engine.model import BufferSnapshot, Samples, SharedModel, StepBatch
from spcl.engine.ranks.shares import Shares, Slices, shared_logits
from spcl.engine.ranks.world import Group, World, deal
from spcl.engine.rows import HEALTH, GradientMatrix, ReductionPlan
from spcl.engine.segments import UnsupportedError
from spcl.engine.update import Update
from spcl.methods.base import MEMORY, Method
from spcl.transforms import Transform

Array = NDArray[np.float64]

IDLE_STEPS = 50
"""After this many steps in a row without gradients, idle ranks are warned of; before, tasks may still start."""


class DistributedEngine(Engine):
    r"""Computes the same results as :class:`~spcl.engine.eager.EagerEngine`, on several ranks.

    All ranks have the same model, memory and batches. The T gradients of a step are divided among the P task groups by
    the sizes of their batches. A task group of one rank computes its gradients on whole batches, with any loss and any
    batch-norm; in a larger group each rank computes on :class:`~spcl.engine.ranks.shares.Shares` of the batches.

    Then the R ranks meet. They add up shares; exchange rows for slices, so that each holds n/R columns of all T rows;
    add up the Gramians of the slices; weigh the same T×T matrix; combine their slices; and gather the update. A rank
    sends :math:`\frac{R-1}{R} \left(\frac TP + 1\right) n` numbers and few others.

    Args:
        model: the shared model.
        method: how gradients become an update.
        world: the ranks.
    """

    local_engine: type[EagerEngine] = EagerEngine
    """The class of the engine that computes this rank's gradients."""

    def __init__(self, model: SharedModel, method: Method, world: World) -> None:
        self.model = model
        self.method = method
        self.world = world
        self.local = self.local_engine(model, method)
        self._shares = Shares(world.data, model, method)
        self._idle_steps = 0
        self._averages = RunningAverages(world)
        self._own_sums = OwnSums(model, self.local.gradients)
        self._random = RankRandomness(world, model.device)
        self._use_slices()

    def _use_slices(self) -> None:
        own = self.local.gradients
        self._slices = self._make_slices(own.length)
        columns = nn.Parameter(own.buffer.new_empty(self._slices.width))
        self.gradients = GradientMatrix([columns] * bool(self._slices.width), like=own.buffer)

    def _make_slices(self, length: int) -> Slices:
        """Return how ``length`` columns are split over the ranks; a hook for subclasses."""
        return Slices(self.world, length, whole=self.method.elementwise)

    # -- a step

    @override
    def begin(self, plan: ReductionPlan) -> None:
        self._plan = plan
        self._error: Exception | None = None
        self._averages.begin(self.model.modules())
        self._shares.must_be_everywhere = synchronise_batch_norm(self.model.modules(), self.world.data)

    # -- the gradients of this rank

    @override
    def backward(self, batches: Sequence[StepBatch], transform: Transform | None, *, apart: bool = False) -> Passes:
        joins = self.local.one_pass is not None
        count = sum(batch.draw is None for batch in batches)
        if transform is not None:
            batches = self._augmented(batches, transform, replays_too=joins)
        given, replays = [batch.samples[0] for batch in batches[:count]], list(batches[count:])
        logits = dict[str, Tensor]()
        if given and joins and not apart:
            return Passes(self._shared(given, self._backward_jointly(given, replays)), is_joint=True)
        if given:
            own = self._begin_passes(given)
            with self._deferred_errors():
                self._check_losses(given, [])
                logits = self.local.backward(own, None, apart=True).logits
        for batch in replays:
            if transform is not None and not joins:
                (batch,) = self._augmented([batch], transform, replays_too=True)
            self._backward_replay(batch)
        return Passes(self._shared(given, logits) if given else {})

    def _augmented(self, batches: Sequence[StepBatch], transform: Transform, replays_too: bool) -> Sequence[StepBatch]:
        try:
            return self.local.augmented(batches, transform, replays_too)
        except Exception as error:
            self._defer(error)
            return batches

    def _backward_jointly(self, tasks: Sequence[Samples], replays: Sequence[StepBatch]) -> dict[str, Tensor]:
        """Compute this rank's gradients, by passes over several batches if they can share one; return the logits."""
        own, logits = self._begin_passes(tasks), dict[str, Tensor]()
        with self._deferred_errors():
            self._check_losses(tasks, replays)
            shares = [self._share_of(batch) for batch in replays] if self._has_memory else []
            passes = self.local.backward([*own, *shares] if all(each.samples for each in shares) else own, None)
            logits = passes.logits
            if passes.memory_fault is not None:
                raise UnsupportedError(passes.memory_fault)
        self.fallback_reason = self.local.fallback_reason
        if self._error is not None and not isinstance(self._error, UnsupportedError):
            self._error = UnsupportedError(str(self._error))  # separate passes will show which batch raised
        return logits

    def _backward_replay(self, batch: StepBatch) -> None:
        """Add the gradient of memory's loss on this rank's share of a replay batch."""
        if not self._has_memory or self._error is not None:
            return
        with self._deferred_errors():
            self._shares.check_memory(batch.samples, batch.draw or 0)
            own = self._share_of(batch)
            if own.samples and self.local.backward([own], None, apart=True).memory_fault is not None:
                self.local.gradients.health[own.gradient, 0] = torch.nan  # the step is repeated without memory

    def _share_of(self, replay: StepBatch) -> StepBatch:
        """Return this rank's share of a replay batch, with the index of memory's gradient among the rank's own."""
        return StepBatch(len(self._own) - 1, self._shares.own(replay.samples), replay.draw)

    def _begin_passes(self, batches: Sequence[Samples]) -> list[StepBatch]:
        """Divide the gradients among the task groups; return this rank's shares of its group's batches."""
        for group in batches:
            self._shares.check_sizes([group])
        self._warn_of_idle_ranks(len(self._plan.names))
        self._blocks = self._dealt(batches)
        shares = {index: self._shares.own([batches[index]]) for index in self._block if index < len(batches)}
        self._has_memory = len(batches) in self._block
        self._own = [index for index in self._block if index == len(batches) or shares[index]]
        self._begin_rows()
        own = [samples for share in shares.values() for samples in share]
        return [StepBatch(index, [samples]) for index, samples in enumerate(own)]

    def _warn_of_idle_ranks(self, gradients: int) -> None:
        """Warn once, on the first rank, if task groups had no gradients to compute in many steps."""
        groups = self.world.tasks.size
        self._idle_steps = self._idle_steps + 1 if gradients < groups else 0
        if self._idle_steps == IDLE_STEPS and self.world.is_first:
            warnings.warn(
                f"{groups - gradients} of {groups} task groups of ranks had no gradient to compute in {IDLE_STEPS} "
                f"steps in a row; split the batches of tasks over the ranks, with the split 'data'",
                RuntimeWarning,
                stacklevel=2,
            )

    def _dealt(self, batches: Sequence[Samples]) -> list[range]:
        """Divide the gradients among the task groups by the sizes of the batches; memory's gradient is the last one."""
        sizes = [len(group.y) for group in batches]
        memory = [self.method.draws * max(sizes)] * (MEMORY in self._plan.names)
        return deal([*sizes, *memory], self.world.tasks.size)

    def _begin_rows(self) -> None:
        """Allocate the rows of this rank's gradients, and its slices of all rows."""
        rows, own = self._rows_of(self._block), self.local.gradients
        self.local.begin(self._local_plan(rows))
        own.keeps_factors = False  # rows are sent
        own.health.zero_()
        trained = {self._plan.targets[index].row for index in self._own if self._plan.names[index] != MEMORY}
        own.clear([place for place, row in enumerate(rows) if row not in trained])  # rows without samples
        if own.length != self._slices.length:
            self._use_slices()
        self.gradients.begin(self._plan, penalty=self.method.settings.alpha > 0.0)

    def _check_losses(self, batches: Sequence[Samples], replays: Sequence[StepBatch]) -> None:
        """Raise if batches are split, but losses cannot be computed on shares."""
        self._shares.check_tasks([batches[index] for index in self._block if index < len(batches)])
        for batch in replays if self._has_memory else []:
            self._shares.check_memory(batch.samples, batch.draw or 0)

    @property
    def _block(self) -> range:
        """The gradients of this rank's task group."""
        return self._blocks[self.world.tasks.rank]

    def _rows_of(self, block: range) -> list[int]:
        """Return the rows to which the gradients of a task group are added."""
        return sorted({self._plan.targets[index].row for index in block})

    def _local_plan(self, rows: list[int]) -> ReductionPlan:
        """Return the plan of this rank's own gradients; a rank without gradients has one row, for the update."""
        plan, names, rows = self._plan, tuple(self._plan.names[index] for index in self._own), rows or [0]
        accumulation = plan.accumulation[np.ix_(rows, self._own)]
        kept = tuple(f"row {row}" for row in rows)
        return ReductionPlan(names, kept, accumulation, np.eye(len(rows)), plan.is_separate, plan.is_weighted)

    @contextmanager
    def _deferred_errors(self) -> Iterator[None]:
        """Keep an error until the ranks meet, where others wait; give passes this rank's random numbers."""
        try:
            with self._random.of_rank():
                yield
        except Exception as error:
            self._defer(error)

    def _defer(self, error: Exception) -> None:
        self._error = self._error or error

    def _shared(self, batches: Sequence[Samples], own: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self.method.stores_logits:
            return {}
        return shared_logits(self.world, self._shares, self.model, batches, own)

    @override
    def mean_of_sources(self) -> dict[nn.Parameter, Tensor]:
        self._synchronise()
        own, tasks = self.local.gradients, len(self._plan.names) - 1
        total = own.buffer.new_zeros(own.length)
        for place, row in enumerate(self._rows_of(self._block)):
            if row != self._plan.rows - 1:  # the last row is memory's
                total += own.rows[place]
        total, *changes = self.world.sum_all([total, *self._averages.parts()])
        self._averages.assign(changes)
        return dict(zip(own.parameters, own.views(total / tasks), strict=True))

    @override
    def penalty_gradient(self) -> None:
        self.local.penalty_gradient()
        mine = self._slices.columns
        self.gradients.penalty_row.zero_()[: mine.stop - mine.start] = self.local.gradients.penalty_row[mine]

    # -- where the ranks meet

    @override
    def gramian(self, needed: bool) -> Callable[[], tuple[Array | None, Array]]:
        return lambda: self._met(needed)

    def _met(self, needed: bool) -> tuple[Array | None, Array]:
        """Let the ranks meet: return the Gramian of all gradients, if needed, and their health."""
        if self.gradients.length:
            self._collect_rows()
        if not needed:
            return None, self._synchronise()
        report, rows = self._report(), self.gradients.rows_with_penalty
        packed = self.world.sum(packed_gramian(rows, report.packed()))
        products, numbers = unpacked_gramian(packed, rows, self.world.sum)
        return products, self._receive(report.unpacked(torch.from_numpy(numbers)))

    def _collect_rows(self) -> None:
        rows_of = [self._rows_of(block) for block in self._blocks]
        sent = self.local.gradients.rows[: len(self._rows_of(self._block))]
        mine, filled = self.gradients.rows, set[int]()
        for rows, part in zip(rows_of, self._slices.collect(sent, [len(rows) for rows in rows_of]), strict=True):
            mine[:, part.shape[1] :].zero_()  # the slice of the last rank may be shorter
            for row, values in zip(rows, part, strict=True):
                target = mine[row, : len(values)]
                (target.add_ if row in filled else target.copy_)(values)
            filled.update(rows)

    def _synchronise(self) -> Array:
        report = self._report()
        return self._receive(report.unpacked(self.world.sum(report.packed()).cpu()))

    def _report(self) -> "RankReport":
        health = torch.zeros(len(self._plan.names), HEALTH, dtype=torch.float64, device=self.model.device)
        if self._error is None:
            health[self._own] = self.local.gradients.health[: len(self._own)]
        failed, drew = torch.tensor([self._error is not None, self._random.was_used], dtype=torch.float64)
        return RankReport(health, failed, drew, self._averages.passes(), self._own_sums.present())

    def _receive(self, summed: "RankReport") -> Array:
        """Return the health of all gradients, given the sum of the ranks' reports; raise if any rank has an error."""
        if summed.failed:
            self._raise()
        self._averages.note(summed.passes)
        self._own_sums.note(summed.heads)
        self._random.advance(bool(summed.drew))
        health: Array = summed.health.numpy()
        return health

    def _raise(self) -> None:
        """Raise this rank's error, or else another rank's."""
        error = self._error
        if not self.world.any(error is not None and not isinstance(error, UnsupportedError)):
            raise UnsupportedError("a pass over several batches failed" if error is None else str(error))
        self.world.raise_errors(None if isinstance(error, UnsupportedError) else error)

    # -- the update

    @override
    def combine(self, rule: Rule, *, check: bool) -> bool:
        if callable(rule):
            self.gradients.apply(rule, self.method.settings.coupled)
        else:
            self.gradients.combine(rule)
        self.local.gradients.rows[0].copy_(self._slices.join(self.gradients.rows[0]))
        return self.local.finish_update(check)

    @override
    def update(self, update: Update) -> None:
        self._assign_grads()
        self.local.update(update)

    def _assign_grads(self) -> None:
        """Add up the gradients of heads and the running averages over the ranks, and assign all gradients."""
        heads = self._own_sums.parts()
        sums = self.world.sum_all([*heads, *self._averages.parts()])
        self._own_sums.assign(sums[: len(heads)])
        self._averages.assign(sums[len(heads) :])
        self.local.gradients.assign_grads(0)

    @override
    def snapshot(self) -> BufferSnapshot:
        return self.local.snapshot()


class RankReport(NamedTuple):
    """What a rank reports about its part of a step; the sum over the ranks reports about the whole step.

    Attributes:
        health: the health of every gradient, see :class:`~spcl.engine.rows.GradientMatrix`; zeros for gradients that
            other ranks compute.
        failed: whether the rank has an error.
        drew: whether the rank's passes have drawn random numbers.
        passes: how often the rank has updated every batch-norm layer, in the rank's row; other ranks' rows are zero.
        heads: for every parameter of a head, whether it has a gradient.

    >>> flag, none = torch.ones((), dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
    >>> report = RankReport(flag.new_zeros(1, 3), failed=flag, drew=0 * flag, passes=none.view(2, 0), heads=none)
    >>> report.packed()
    tensor([0., 0., 0., 1., 0.], dtype=torch.float64)
    >>> report.unpacked(2 * report.packed()).failed
    tensor(2., dtype=torch.float64)
    """

    health: Tensor
    failed: Tensor
    drew: Tensor
    passes: Tensor
    heads: Tensor

    def packed(self) -> Tensor:
        """Return the report as a vector on the device of the health."""
        on_host = torch.cat([part.reshape(-1) for part in self[1:]])
        return torch.cat([self.health.reshape(-1), on_host.to(self.health.device)])

    def unpacked(self, numbers: Tensor) -> "RankReport":
        """Return the report that a vector of :meth:`packed` holds."""
        parts = torch.split_with_sizes(numbers, [part.numel() for part in self])
        return RankReport(*(part.view(each.shape) for part, each in zip(parts, self, strict=True)))


class RankRandomness:
    """Gives the passes of every rank their own random numbers, while the generators of all ranks stay equal.

    If no pass draws random numbers, the generators stay equal to one process's generator, too.

    Args:
        world: the ranks.
        device: the device of the passes.

    Attributes:
        was_used: whether passes of this rank have drawn random numbers since the last :meth:`advance`.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self._world = world
        self._device = device
        self.was_used = False

    @contextmanager
    def of_rank(self) -> Iterator[None]:
        """Give passes within the block random numbers that other ranks do not draw."""
        source = torch.Generator()
        source.set_state(torch.get_rng_state())
        seed = int(torch.randint(2**62, (), generator=source)) + self._world.rank
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            before = self._states()
            try:
                yield
            finally:
                self.was_used |= any(map(lambda a, b: not torch.equal(a, b), before, self._states()))

    def _states(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        return [*states, torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else states

    def advance(self, was_used: bool) -> None:
        """Advance all ranks' generators equally if passes of any rank have drawn random numbers."""
        if was_used:
            torch.rand(())
        self.was_used = False


class OwnSums:
    """The gradients of heads and of encoders that one source has, to be added up over the ranks.

    What no rank has trained has no gradient.

    Args:
        model: the shared model.
        gradients: the gradient matrix; what has columns in it is none of this class's concern.
    """

    def __init__(self, model: SharedModel, gradients: GradientMatrix) -> None:
        self._model = model
        self._gradients = gradients
        self._trained: list[nn.Parameter] = []

    def _parameters(self) -> list[nn.Parameter]:
        weighed = set(self._gradients.parameters)
        return [parameter for parameter in self._model.own_parameters() if parameter not in weighed]

    def present(self) -> Tensor:
        """Return for every parameter whether it has a gradient on this rank."""
        return torch.tensor([parameter.grad is not None for parameter in self._parameters()], dtype=torch.float64)

    def note(self, counts: Tensor) -> None:
        """Note which parameters have gradients, given the sum of :meth:`present` over the ranks."""
        pairs = zip(self._parameters(), counts.tolist(), strict=True)
        self._trained = [parameter for parameter, count in pairs if count]

    def parts(self) -> list[Tensor]:
        """Return this rank's part of every gradient, to be added up over the ranks."""
        for parameter in self._trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return self._gradients_of_trained()

    def assign(self, sums: Sequence[Tensor]) -> None:
        """Assign the sums of :meth:`parts` over the ranks."""
        for gradient, total in zip(self._gradients_of_trained(), sums, strict=True):
            gradient.copy_(total)

    def _gradients_of_trained(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._trained if parameter.grad is not None]


# -- batch-norm


class RunningAverages:
    r"""The running averages of batch-norm layers; every rank updates them with its own batches.

    An update with statistics s and momentum m is :math:`r \leftarrow (1 - m)\, r + m\, s`. In one process the result
    would be, with the averages r of each rank and the number :math:`k'` of updates by ranks with later tasks,

    .. math:: r_0 + \sum_\text{ranks} (1 - m)^{k'} \left(r - r_0\right).

    Without momentum the average is over all batches. If ranks split batches, each has the statistics of its share, and
    the mean of their changes is used.

    Args:
        world: the ranks, with task groups in the order in which one process would make their passes.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._layers: list[_BatchNorm] = []
        self._before: list[tuple[Tensor, int]] = []

    def begin(self, modules: Iterable[nn.Module]) -> None:
        """Remember the averages before the passes."""
        layers = [layer for module in modules for layer in module.modules() if isinstance(layer, _BatchNorm)]
        self._layers = [layer for layer in layers if layer.running_mean is not None and layer.training]
        self._remember()

    @torch.no_grad()
    def _remember(self) -> None:
        self._before = [(_averages(layer), _count(layer)) for layer in self._layers]
        self._passes = torch.zeros(self._world.tasks.size, self._world.data.size, len(self._layers))

    def passes(self) -> Tensor:
        """Return how often this rank has updated every layer, in the rank's row; other ranks' rows are zero."""
        passes = torch.zeros(self._world.size, len(self._layers), dtype=torch.float64)
        for column, (layer, (_, count)) in enumerate(zip(self._layers, self._before, strict=True)):
            passes[self._world.rank, column] = _count(layer) - count
        return passes

    def note(self, passes: Tensor) -> None:
        """Remember the sum of :meth:`passes` over the ranks."""
        self._passes = passes.view(self._world.tasks.size, self._world.data.size, -1)

    def parts(self) -> list[Tensor]:
        """Return this rank's part of the change of every layer's averages, to be added up over the ranks."""
        if not bool(self._passes.any()):
            return []
        return [
            (self._part(self._passes[:, :, column], layer, count) * (_averages(layer) - before)).to(_running(layer)[0])
            for column, (layer, (before, count)) in enumerate(zip(self._layers, self._before, strict=True))
        ]

    @torch.no_grad()
    def assign(self, changes: Sequence[Tensor]) -> None:
        """Assign the averages that one process would have, given the sums of :meth:`parts` over the ranks."""
        passes = self._passes.amax(dim=1).sum(dim=0).tolist()
        for layer, (before, count), change, added in zip(self._layers, self._before, changes, passes, strict=False):
            mean, variance = _running(layer)
            mean.copy_((before + change)[0])
            variance.copy_((before + change)[1])
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.fill_(count + int(added))
        self._remember()

    def _part(self, counts: Tensor, layer: _BatchNorm, count: int) -> float:
        """Return the factor of this rank's change, given the number of updates by task group and rank."""
        group, rank = self._world.tasks.rank, self._world.data.rank
        passes, own, together = counts.amax(dim=1), float(counts[group, rank]), float(counts[group].sum())
        if not own:
            return 0.0
        if layer.momentum is None:
            return (count + own) / (count + float(passes.sum())) * float(passes[group]) / together
        return float((1.0 - layer.momentum) ** float(passes[group + 1 :].sum())) * own / together


def _running(layer: _BatchNorm) -> tuple[Tensor, Tensor]:
    mean, variance = layer.running_mean, layer.running_var
    assert mean is not None and variance is not None  # noqa: PT018
    return mean, variance


def _averages(layer: _BatchNorm) -> Tensor:
    return torch.stack(_running(layer)).double()


def _count(layer: _BatchNorm) -> int:
    return 0 if layer.num_batches_tracked is None else int(layer.num_batches_tracked)


def synchronise_batch_norm(modules: Iterable[nn.Module], group: Group) -> bool:
    """Let ``nn.SyncBatchNorm`` layers take statistics over a group of ranks; return whether there are any."""
    layers = [layer for module in modules for layer in module.modules() if isinstance(layer, nn.SyncBatchNorm)]
    for layer in layers:
        layer.process_group = group.group
    return bool(layers)
