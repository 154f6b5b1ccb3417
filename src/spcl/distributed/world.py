"""The processes that train one model together, and what they say to each other.

The mesh is made from the groups, because ``init_device_mesh`` takes neither a timeout nor a part of the processes.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spcl.distributed.mesh import mesh_shape
from spcl.errors import LostRankError, OtherRankError, SpclError

__all__ = ["Group", "World", "join_world", "leave_world"]

T = TypeVar("T")

TIMEOUT = timedelta(seconds=300)
"""How long a rank waits for one that hangs; one that has died is noticed at once."""


def join_world(split: str = "tasks", timeout: timedelta = TIMEOUT) -> "World | None":
    """Return the ranks that ``torchrun`` started this process with, or None where it is the only one.

    They talk by NCCL where every rank of this machine has a GPU, that of its local rank, and else by gloo.

    Args:
        split: what is split over the ranks, see :class:`World`.
        timeout: how long a rank waits for another one that hangs.
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
    """Wait for the other ranks and end the connections to them."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name up to PyTorch 2.12
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # likewise


class Group:
    """The ranks of a process group of :mod:`torch.distributed`.

    Args:
        group: by default all processes.

    Attributes:
        rank: the number of this process.
        size: how many there are.
        group: the process group; None for that of all processes.
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
        self._place = f"{dist.get_rank()} of {dist.get_world_size()}"  # among all processes, for errors

    @property
    def members(self) -> list[int]:
        """The ranks of the group among all processes."""
        return dist.get_process_group_ranks(self.group or dist.group.WORLD)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and shows progress."""
        return self.rank == 0

    def check_device(self, device: torch.device) -> None:
        """Raise an error if the ranks cannot exchange tensors of this device."""
        if device.type == "cuda" and "cuda:gloo" in dist.get_backend_config():
            raise SpclError(
                f"the {self.size} ranks are to train on device = {device.type}, but there is no GPU for each of them; "
                f"start fewer, or train on device = cpu"
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
        """Send consecutive parts of a vector, of these lengths, one to every rank; write what the ranks sent here."""
        with self._errors():
            dist.all_to_all_single(into, parts, list(received), list(sent), group=self.group)

    def reduce_scatter(self, into: Tensor, parts: Tensor) -> None:
        """Sum vectors of as many equally long parts as there are ranks; write this rank's part of the sum."""
        if parts.is_cuda:
            with self._errors():
                _REDUCE_SCATTER(into, parts, group=self.group)
            return
        received, lengths = torch.empty_like(parts), [len(into)] * self.size  # gloo's own sends all of the sum
        self.exchange(received, parts, lengths, lengths)
        torch.sum(received.view(self.size, -1), dim=0, out=into)

    def gather(self, part: Tensor, into: Tensor | None = None) -> Tensor:
        """Return the equally long vectors of all ranks, one after the other."""
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
        """Return what this rank computes, and a number of every rank; an error of any rank is raised on all of them."""
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
        """Raise the error of this rank, or else that of another one; all ranks make this call once any has failed."""
        texts = self.gather_objects(None if error is None else _first_line(error))
        if error is None:
            rank, text = next((rank, text) for rank, text in enumerate(texts) if text is not None)
            error = OtherRankError(f"rank {rank} stopped: {text}")
        self._raised = error
        raise error

    def has_raised(self, error: Exception) -> bool:
        """Return whether all ranks have raised an error together with this one."""
        return error is self._raised

    def from_first(self, compute: Callable[[], T]) -> T:
        """Return what the first rank computes; its error is raised on all ranks."""
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
        """The device of numbers that are exchanged on their own: the host, unless the ranks talk by NCCL alone."""
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
    """All ranks that train one model: groups of them have different tasks, the ranks of a group different samples.

    Rank r is the (r mod D)-th of the D ranks of task group r div D, as in :attr:`mesh`. All ranks construct their
    worlds at the same time.

    Args:
        group: by default all processes; only these can be split both by tasks and by samples.
        split: ``"tasks"``: every rank computes the gradients of some tasks on whole batches; ``"data"``: every rank
            computes those of all tasks on a share of their batches; ``"2x4"``: 2 groups of ranks have different tasks,
            the 4 ranks of a group different shares.
        timeout: how long a rank waits for another one that hangs.

    Attributes:
        split: the number of task groups and of the ranks in each, ``"4x1"`` for 4 ranks with different tasks.
        tasks: the ranks with the same shares as this one, of other tasks.
        data: the ranks with the same tasks as this one, and other shares.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, split: str = "tasks", timeout: timedelta = TIMEOUT
    ) -> None:
        super().__init__(group)
        groups, shares = mesh_shape(split, self.size)
        self.split = f"{groups}x{shares}"
        if groups > 1 and shares > 1 and group is not None:
            raise SpclError(f"the split {split} is over all processes, but a process group is given; leave that out")
        self.tasks = self._part([range(share, self.size, shares) for share in range(shares)], timeout)
        self.data = self._part([range(first, first + shares) for first in range(0, self.size, shares)], timeout)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The ranks by task group and share, for ``fully_shard(backbone, mesh=world.mesh["data"])``."""
        groups: list[Any] = [part.group or dist.group.WORLD for part in (self.tasks, self.data)]
        return DeviceMesh.from_group(
            groups,
            "cuda" if "nccl" in dist.get_backend_config(self.group) else "cpu",
            mesh=torch.tensor(self.members).view(self.tasks.size, self.data.size),
            mesh_dim_names=("task", "data"),
        )

    def _part(self, parts: Sequence[range], timeout: timedelta) -> Group:
        """Return the part of the ranks that this one is in; every rank makes all of them, in the same order."""
        if len(parts) == 1:
            return Group(self.group)
        if len(parts) == self.size:
            return Group(dist.new_group([dist.get_rank()], timeout=timeout, use_local_synchronization=True))
        made = [dist.new_group(list(ranks), timeout=timeout) for ranks in parts]
        return Group(next(each for each, ranks in zip(made, parts, strict=True) if self.rank in ranks))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _short(value: Any, other: Any) -> str:
    """Return a value as text; of two dicts what differs."""
    if isinstance(value, dict) and isinstance(other, dict):
        value = {key: each for key, each in value.items() if key not in other or other[key] != each}
    return f"{value!r:.200}"
