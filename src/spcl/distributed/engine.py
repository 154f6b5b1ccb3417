"""Engine of which every rank computes the gradients of some tasks, or of shares of their batches."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from spcl.aggregation.gramians import packed_gramian, unpacked_gramian
from spcl.batches import Inputs
from spcl.distributed.dealing import deal
from spcl.distributed.heads import HeadGradients
from spcl.distributed.idle import IdleRanks
from spcl.distributed.logits import shared_logits
from spcl.distributed.random_numbers import RankRandomness
from spcl.distributed.report import RankReport
from spcl.distributed.running_averages import RunningAverages
from spcl.distributed.shares import Shares
from spcl.distributed.slices import Slices
from spcl.distributed.sync_batch_norm import synchronise_batch_norm
from spcl.distributed.world import World
from spcl.engine.base import Engine, JointPassError
from spcl.engine.eager import EagerEngine
from spcl.engine.gradients import HEALTH, GradientMatrix
from spcl.engine.model import Samples, SharedModel
from spcl.engine.reduction import ReductionPlan
from spcl.engine.snapshot import BufferSnapshot
from spcl.engine.update import Update
from spcl.errors import SpclError, is_out_of_memory
from spcl.methods.base import MEMORY, Method
from spcl.transforms import Transform

__all__ = ["DistributedEngine"]

Array = NDArray[np.float64]


class DistributedEngine(Engine):
    r"""Computes what :class:`~spcl.engine.eager.EagerEngine` computes, every rank a part of the gradients.

    All ranks have the same model, memory and batches. The T gradients of a step are dealt to the P task groups by the
    sizes of their batches. With one rank in each, it computes its own on whole batches, so that any loss and batch-norm
    stay as they are; with several, each computes them on its :class:`~spcl.distributed.shares.Shares`. Then the R ranks
    sum up and exchange rows for slices, so that each holds n/R columns of all T rows, sum up the Gramians of the
    slices, weigh all the same T×T matrix, combine their slices and gather the update. A rank sends
    :math:`\frac{R-1}{R} \left(\frac TP + 1\right) n` numbers, and few others.

    Args:
        model: the shared model.
        method: how gradients become an update.
        world: the ranks.
    """

    def __init__(self, model: SharedModel, method: Method, world: World) -> None:
        self.model = model
        self.method = method
        self.world = world
        self.local = self._make_local()
        self._shares = Shares(world.data, model, method)
        self._idle = IdleRanks(world)
        self._averages = RunningAverages(world)
        self._heads = HeadGradients(model, self.local.gradients)
        self._random = RankRandomness(world, model.device)
        self._use_slices()

    def _use_slices(self) -> None:
        own = self.local.gradients
        self._slices = self._make_slices(own.length)
        columns = nn.Parameter(own.buffer.new_empty(self._slices.width))
        self.gradients = GradientMatrix([columns] * bool(self._slices.width), like=own.buffer)

    # -- hooks for subclasses

    def _make_local(self) -> EagerEngine:
        """Return the engine of this rank's gradients."""
        return EagerEngine(self.model, self.method)

    def _make_slices(self, length: int) -> Slices:
        """Return the columns that every rank holds, given how many this rank's gradients have."""
        return Slices(self.world, length, whole=self.method.elementwise)

    # -- a step

    @override
    def begin(self, plan: ReductionPlan) -> None:
        self._plan = plan
        self._error: Exception | None = None
        self._averages.begin(self.model.modules())
        self._shares.must_be_everywhere = synchronise_batch_norm(self.model.modules(), self.world.data)

    @override
    def augment(self, transform: Transform, inputs: Sequence[Inputs]) -> list[Inputs]:
        try:
            return self.local.augment(transform, inputs)
        except Exception as error:
            self._defer(error)
            return list(inputs)

    # -- the gradients of this rank

    @property
    @override
    def joins_batches(self) -> bool:
        return self.local.joins_batches

    @override
    def backward_jointly(
        self, batches: Sequence[Samples], replays: Sequence[Sequence[Samples]]
    ) -> dict[str, Tensor] | None:
        if not self.joins_batches:
            return None
        own, logits = self._begin_passes(batches), None
        with self._deferred_errors():
            self._check_losses(batches, replays)
            shares = [self._shares.own(samples) for samples in replays] if self._has_memory else []
            shares = shares if all(shares) else []
            logits = self.local.backward_jointly(own, shares)
            if logits is None:
                logits = self.local.backward(own)
                for draw, samples in enumerate(shares):
                    self.local.backward_replay(samples, [group.x for group in samples], draw)
        self.fallback_reason = self.local.fallback_reason
        if self._error is not None and not isinstance(self._error, JointPassError):
            self._error = JointPassError(str(self._error))  # passes of their own show which batch it is
        return self._shared(batches, logits or {})

    @override
    def backward(self, batches: Sequence[Samples]) -> dict[str, Tensor]:
        own, logits = self._begin_passes(batches), dict[str, Tensor]()
        with self._deferred_errors():
            self._check_losses(batches, [])
            logits = self.local.backward(own)
        return self._shared(batches, logits)

    @override
    def backward_replay(self, samples: Sequence[Samples], inputs: Sequence[Inputs], draw: int) -> None:
        if not self._has_memory or self._error is not None:
            return
        samples = [replace(group, x=x) for group, x in zip(samples, inputs, strict=True)]
        with self._deferred_errors():
            self._shares.check_memory(samples, draw)
            try:
                if own := self._shares.own(samples):
                    self.local.backward_replay(own, [group.x for group in own], draw)
            except (RuntimeError, ValueError) as error:
                if isinstance(error, SpclError) or is_out_of_memory(error):
                    raise
                self.local.gradients.health[len(self._own) - 1, 0] = torch.nan  # the step is repeated without memory

    def _begin_passes(self, batches: Sequence[Samples]) -> list[Samples]:
        """Deal the gradients to the task groups and begin with the own ones; return the shares of their batches."""
        for group in batches:
            self._shares.check_sizes([group])
        self._idle.note(len(self._plan.names))
        self._blocks = self._dealt(batches)
        shares = {index: self._shares.own([batches[index]]) for index in self._block if index < len(batches)}
        self._has_memory = len(batches) in self._block
        self._own = [index for index in self._block if index == len(batches) or shares[index]]
        self._begin_rows()
        return [samples for share in shares.values() for samples in share]

    def _dealt(self, batches: Sequence[Samples]) -> list[range]:
        """Return the gradients of every task group, by the sizes of their batches; that of memory is the last one."""
        sizes = [len(group.y) for group in batches]
        memory = [self.method.draws * max(sizes)] * (MEMORY in self._plan.names)
        return deal([*sizes, *memory], self.world.tasks.size)

    def _begin_rows(self) -> None:
        """Hold the rows of this rank's gradients, and its slices of all rows."""
        rows, own = self._rows_of(self._block), self.local.gradients
        self.local.begin(self._local_plan(rows))
        own.keeps_factors = False  # rows are sent
        own.health.zero_()
        trained = {self._plan.target(index)[0] for index in self._own if self._plan.names[index] != MEMORY}
        own.clear([place for place, row in enumerate(rows) if row not in trained])  # there may be no samples
        if own.length != self._slices.length:
            self._use_slices()
        self.gradients.begin(self._plan, penalty=self.method.settings.alpha > 0.0)

    def _check_losses(self, batches: Sequence[Samples], replays: Sequence[Sequence[Samples]]) -> None:
        """Raise an error unless the losses can be computed by shares, where batches are split."""
        self._shares.check_tasks([batches[index] for index in self._block if index < len(batches)])
        for draw, samples in enumerate(replays if self._has_memory else []):
            self._shares.check_memory(samples, draw)

    @property
    def _block(self) -> range:
        """The gradients of this rank's task group."""
        return self._blocks[self.world.tasks.rank]

    def _rows_of(self, block: range) -> list[int]:
        """Return the rows to which the gradients of a task group are added."""
        return sorted({self._plan.target(index)[0] for index in block})

    def _local_plan(self, rows: list[int]) -> ReductionPlan:
        """Return the plan of this rank's gradients alone; a rank without gradients holds a row for the update."""
        plan, names, rows = self._plan, tuple(self._plan.names[index] for index in self._own), rows or [0]
        accumulation = plan.accumulation[np.ix_(rows, self._own)]
        kept = tuple(f"row {row}" for row in rows)
        return ReductionPlan(names, kept, accumulation, np.eye(len(rows)), plan.is_separate, plan.is_weighted)

    @contextmanager
    def _deferred_errors(self) -> Iterator[None]:
        """Keep an error until the ranks meet, since the others wait for this one; passes have their random numbers."""
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
    def mean_of_tasks(self) -> dict[nn.Parameter, Tensor]:
        self._synchronise()
        own, tasks = self.local.gradients, len(self._plan.names) - 1
        total = own.buffer.new_zeros(own.length)
        for place, row in enumerate(self._rows_of(self._block)):
            if row != self._plan.rows - 1:  # that of memory
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
    def gramian(self, needed: bool) -> tuple[Array | None, Array]:
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

    def _report(self) -> RankReport:
        health = torch.zeros(len(self._plan.names), HEALTH, dtype=torch.float64, device=self.model.device)
        if self._error is None:
            health[self._own] = self.local.gradients.health[: len(self._own)]
        failed, drew = torch.tensor([self._error is not None, self._random.was_used], dtype=torch.float64)
        return RankReport(health, failed, drew, self._averages.passes(), self._heads.present())

    def _receive(self, summed: RankReport) -> Array:
        """Return the health of all gradients, given the sum of the reports of all ranks, or raise the error of any."""
        if summed.failed:
            self._raise()
        self._averages.note(summed.passes)
        self._heads.note(summed.heads)
        self._random.advance(bool(summed.drew))
        health: Array = summed.health.numpy()
        return health

    def _raise(self) -> None:
        """Raise the error of this rank, or that of another one."""
        error = self._error
        if not self.world.any(error is not None and not isinstance(error, JointPassError)):
            raise JointPassError("a pass over several batches failed" if error is None else str(error))
        self.world.raise_errors(None if isinstance(error, JointPassError) else error)

    # -- the update

    @override
    def combine(self, weights: Array) -> None:
        self.gradients.combine(weights)
        self._join()

    @override
    def apply(self, rule: Callable[[Tensor], Tensor], coupled: bool) -> None:
        self.gradients.apply(rule, coupled)
        self._join()

    @override
    def add_penalty(self, relative: float | None) -> None:
        self.local.add_penalty(relative)

    def _join(self) -> None:
        self.local.gradients.rows[0].copy_(self._slices.join(self.gradients.rows[0]))

    @override
    def is_update_finite(self) -> bool:
        return self.local.is_update_finite()

    @override
    def assign_grads(self) -> None:
        heads = self._heads.parts()
        sums = self.world.sum_all([*heads, *self._averages.parts()])
        self._heads.assign(sums[: len(heads)])
        self._averages.assign(sums[len(heads) :])
        self.local.assign_grads()

    @override
    def update(self, update: Update) -> None:
        self.local.update(update)

    @override
    def snapshot(self) -> BufferSnapshot:
        return self.local.snapshot()
