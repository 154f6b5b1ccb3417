"""The processes that train one model together (ranks): how they communicate and how they split the work of a step."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spcl.errors import LostRankError, OtherRankError, SpclError

T = TypeVar("T")

TIMEOUT = timedelta(seconds=300)
"""How long a rank waits for a hanging rank; a dead rank is noticed at once."""


def join_world(split: str = "tasks", timeout: timedelta = TIMEOUT) -> "World | None":
    """Join the other ranks started by ``torchrun``; return None if this process is the only one.

    Ranks communicate by NCCL if every rank of this machine has its own GPU, else by gloo.

    Args:
        split: how the work is split over the ranks, see :class:`World`.
        timeout: how long a rank waits for a hanging rank.
    """
    if not dist.is_available() or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    if not dist.is_initialized():
        has_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if has_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        try:
            dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo", timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise SpclError(f"the ranks do not find each other: {_first_line(error)}; start all by torchrun") from error
    return World(split=split, timeout=timeout)


def leave_world() -> None:
    """Wait for the other ranks, then end the connections to them."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


# the second names are for PyTorch up to 2.12
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Group:
    """The ranks of a process group of :mod:`torch.distributed`.

    Args:
        group: the process group; None for the group of all processes.

    Attributes:
        rank: the number of this process in the group.
        size: the number of processes in the group.
        group: the process group; None for the group of all processes.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise SpclError(
                "training is to be distributed, but there is no process group; start the program by torchrun and call "
                "torch.distributed.init_process_group(), or leave distributed out"
            )
        self.group = group
        self._first = 0 if group is None else dist.get_global_rank(group, 0)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._raised: Exception | None = None
        self._place = f"{dist.get_rank()} of {dist.get_world_size()}"  # counted in all processes, for errors

    @property
    def members(self) -> list[int]:
        """The ranks of the group among all processes."""
        return dist.get_process_group_ranks(self.group or dist.group.WORLD)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and shows progress."""
        return self.rank == 0

    def check_device(self, device: torch.device) -> None:
        """Raise an error if the ranks cannot exchange tensors of this device."""
        if device.type == "cuda" and "cuda:gloo" in dist.get_backend_config():
            raise SpclError(
                f"the {self.size} ranks are to train on device = {device.type}, but there is no GPU for each of them; "
                f"start fewer ranks, or train on device = cpu"
            )

    # -- tensors

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place; every rank gets the same bits."""
        with self._errors():
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def sum_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums of any number of tensors over the ranks, by one all-reduce."""
        if not tensors:
            return []
        total = self.sum(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        parts = torch.split_with_sizes(total, [tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def exchange(self, into: Tensor, parts: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        """All-to-all: send ``sent[r]`` numbers of ``parts`` to rank r; write ``received[r]`` numbers from rank r."""
        with self._errors():
            dist.all_to_all_single(into, parts, list(received), list(sent), group=self.group)

    def reduce_scatter(self, into: Tensor, parts: Tensor) -> None:
        """Sum vectors over the ranks; write this rank's part of the sum, one of ``size`` equally long parts."""
        if parts.is_cuda:
            with self._errors():
                _REDUCE_SCATTER(into, parts, group=self.group)
            return
        received, lengths = (
            torch.empty_like(parts),
            [len(into)] * self.size,
        )  # gloo's reduce-scatter sends the whole sum
        self.exchange(received, parts, lengths, lengths)
        torch.sum(received.view(self.size, -1), dim=0, out=into)

    def gather(self, part: Tensor, into: Tensor | None = None) -> Tensor:
        """Return the equally long vectors of all ranks as one vector."""
        result = part.new_empty(self.size * len(part)) if into is None else into
        with self._errors():
            _ALL_GATHER(result, part, group=self.group)
        return result

    # -- plain data

    def gather_objects(self, value: T) -> list[T]:
        """Return the values of all ranks."""
        values: list[Any] = [None] * self.size
        with self._errors():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def any(self, condition: bool) -> bool:
        """Return whether the condition holds on any rank."""
        return bool(self.sum(torch.tensor(float(condition), device=self._meeting_device)))

    def attempted(self, compute: Callable[[], tuple[T, float]]) -> tuple[T, list[float]]:
        """Return this rank's result and all ranks' numbers; raise on all ranks if any rank's ``compute`` raises."""
        failure, result = None, None
        try:
            result = compute()
        except Exception as error:
            failure = error
        numbers = [float(result is None), 0.0 if result is None else result[1]]
        found = self.gather(torch.tensor(numbers, dtype=torch.float64, device=self._meeting_device)).view(-1, 2).cpu()
        if result is None or bool(found[:, 0].any()):
            self.raise_errors(failure)
        return result[0], found[:, 1].tolist()

    def raise_errors(self, error: Exception | None) -> NoReturn:
        """Raise this rank's error, or else another rank's; all ranks call this when any has failed."""
        texts = self.gather_objects(None if error is None else _first_line(error))
        if error is None:
            rank, text = next((rank, text) for rank, text in enumerate(texts) if text is not None)
            error = OtherRankError(f"rank {rank} stopped: {text}")
        self._raised = error
        raise error

    def has_raised(self, error: Exception) -> bool:
        """Return whether :meth:`raise_errors` raised this error, so that all ranks have raised."""
        return error is self._raised

    def from_first(self, compute: Callable[[], T]) -> T:
        """Let the first rank compute; return its result, or raise its error, on all ranks."""
        answer: list[Any] = [None, None]
        failure: Exception | None = None
        if self.is_first:
            try:
                answer[0] = compute()
            except Exception as error:
                failure, answer[1] = error, _first_line(error)
        with self._errors():
            dist.broadcast_object_list(answer, self._first, group=self.group)
        if failure is not None:
            raise failure
        if answer[1] is not None:
            raise OtherRankError(f"rank 0 stopped: {answer[1]}")
        value: T = answer[0]
        return value

    def check_same(self, what: str, value: Any) -> None:
        """Raise an error on all ranks unless all have the same value."""
        values = self.gather_objects(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise SpclError(
                    f"the ranks have different {what}: rank 0 has {_short(values[0], other)}, rank {rank} has "
                    f"{_short(other, values[0])}; start all of them with the same"
                )

    @property
    def _meeting_device(self) -> str:
        """The device for exchanging single numbers: the CPU, unless the ranks communicate only by NCCL."""
        return "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise LostRankError(
                f"rank {self._place} has lost another rank, which has ended or hangs "
                f"({_first_line(error)}); start all ranks again to continue from the last checkpoint"
            ) from error


class World(Group):
    """All ranks that train one model, in task groups: groups have different tasks, ranks of a group different samples.

    With D ranks per task group, rank r is number r mod D of task group r div D, as in :attr:`mesh`. All ranks must
    construct their worlds at the same time.

    Args:
        group: the process group; None for all processes. Only all processes can be split both by tasks and by samples.
        split: ``"tasks"``: every rank computes the gradients of some tasks on whole batches; ``"data"``: every rank
            computes the gradients of all tasks on a share of their batches; ``"2x4"``: 2 task groups of 4 ranks, each
            with a different share.
        timeout: how long a rank waits for a hanging rank.

    Attributes:
        split: the number of task groups and the number of ranks in each, ``"4x1"`` for 4 ranks with different tasks.
        tasks: the ranks with the same share of batches as this rank, but different tasks.
        data: the ranks of this rank's task group, with the same tasks but different shares.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, split: str = "tasks", timeout: timedelta = TIMEOUT
    ) -> None:
        super().__init__(group)
        groups, shares = mesh_shape(split, self.size)
        self.split = f"{groups}x{shares}"
        if groups > 1 and shares > 1 and group is not None:
            raise SpclError(f"the split {split} is over all processes, but a process group is given; leave group out")
        self.tasks = self._part([range(share, self.size, shares) for share in range(shares)], timeout)
        self.data = self._part([range(first, first + shares) for first in range(0, self.size, shares)], timeout)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The ranks by task group and share, for ``fully_shard(backbone, mesh=world.mesh["data"])``.

        It is made from the groups, because ``init_device_mesh`` takes neither a timeout nor a subset of the processes.
        """
        groups: list[Any] = [part.group or dist.group.WORLD for part in (self.tasks, self.data)]
        return DeviceMesh.from_group(
            groups,
            "cuda" if "nccl" in dist.get_backend_config(self.group) else "cpu",
            mesh=torch.tensor(self.members).view(self.tasks.size, self.data.size),
            mesh_dim_names=("task", "data"),
        )

    def _part(self, parts: Sequence[range], timeout: timedelta) -> Group:
        """Return the group of this rank's part; every rank creates the groups of all parts, in the same order."""
        if len(parts) == 1:
            return Group(self.group)
        if len(parts) == self.size:
            return Group(dist.new_group([dist.get_rank()], timeout=timeout, use_local_synchronization=True))
        made = [dist.new_group(list(ranks), timeout=timeout) for ranks in parts]
        return Group(next(each for each, ranks in zip(made, parts, strict=True) if self.rank in ranks))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _short(value: Any, other: Any) -> str:
    """Return a value as text; for a dict, only the items missing from the other dict."""
    if isinstance(value, dict) and isinstance(other, dict):
        value = {key: each for key, each in value.items() if key not in other or other[key] != each}
    return f"{value!r:.200}"


# -- how ranks split the work of a step


def mesh_shape(split: str, ranks: int) -> tuple[int, int]:
    """Return the number of task groups, and the number of ranks in each.

    >>> mesh_shape("tasks", 4), mesh_shape("data", 4), mesh_shape("2x2", 4)
    ((4, 1), (1, 4), (2, 2))
    >>> mesh_shape("2x2", 3)
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: the split 2x2 is for 4 ranks, but there are 3; start 4, or choose 'tasks' or 'data'
    """
    if split in ("tasks", "data"):
        return (ranks, 1) if split == "tasks" else (1, ranks)
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", split)
    if found is None:
        raise SpclError(
            f"the split is {split!r}; give 'tasks', 'data', or the number of task groups and the number of ranks in "
            f"each, such as '2x4'"
        )
    groups, shares = int(found[1]), int(found[2])
    if groups * shares != ranks:
        raise SpclError(
            f"the split {split} is for {groups * shares} ranks, but there are {ranks}; start {groups * shares}, or "
            f"choose 'tasks' or 'data'"
        )
    return groups, shares


def deal(costs: Sequence[float], ranks: int) -> list[range]:
    """Split gradients into consecutive blocks, one per rank, so that the most expensive block is as cheap as possible.

    Consecutive blocks keep the order of gradients in one process, on which batch-norm's running averages depend. With
    more ranks than gradients, some blocks are empty.

    >>> deal([1, 1, 1, 3], 2)
    [range(0, 3), range(3, 4)]
    >>> deal([1], 2)
    [range(0, 1), range(1, 1)]
    """
    bounds = _bounds(tuple(costs), ranks)
    return [range(first, last) for first, last in pairwise(bounds)]


@lru_cache(maxsize=64)
def _bounds(costs: tuple[float, ...], ranks: int) -> tuple[int, ...]:
    """Return the ends of the blocks for the smallest cost limit that ``ranks`` blocks can keep."""
    sums = [0.0, *accumulate(costs)]
    limits = sorted({sums[j] - sums[i] for i in range(len(sums)) for j in range(i + 1, len(sums))})
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_filled(costs, limits[middle])) <= ranks else (middle + 1, high)
    ends = _filled(costs, limits[low]) if costs else []
    return (0, *ends, *[len(costs)] * (ranks - len(ends)))


def _filled(costs: Sequence[float], limit: float) -> list[int]:
    """Return the ends of blocks that are as long as possible at a cost of at most ``limit`` each."""
    ends, spent = [], 0.0
    for index, cost in enumerate(costs):
        if spent + cost > limit and spent:
            ends.append(index)
            spent = 0.0
        spent += cost
    return [*ends, len(costs)]
