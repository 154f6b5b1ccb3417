"""The processes that train one model together, and what they say to each other."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from spcl.errors import LostRankError, OtherRankError, SpclError

__all__ = ["World", "join_world", "leave_world"]

T = TypeVar("T")

TIMEOUT = timedelta(seconds=300)
"""How long a rank waits for one that hangs; one that has died is noticed at once."""


def join_world(timeout: timedelta = TIMEOUT) -> "World | None":
    """Return the ranks that ``torchrun`` started this process with, or None where it is the only one.

    They talk by NCCL where every rank of this machine has a GPU, that of its local rank, and else by gloo.
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
    return World()


def leave_world() -> None:
    """Wait for the other ranks and end the connections to them."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name up to PyTorch 2.12


class World:
    """The ranks of a process group of :mod:`torch.distributed`.

    Args:
        group: by default all processes.

    Attributes:
        rank: the number of this process.
        size: how many there are.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise SpclError(
                "training is to be distributed, but there is no process group; start the program by torchrun and call "
                "torch.distributed.init_process_group(), or leave distributed out"
            )
        self._group = group
        self._first = 0 if group is None else dist.get_global_rank(group, 0)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

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
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def exchange(self, into: Tensor, parts: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        """Send consecutive parts of a vector, of these lengths, one to every rank; write what the ranks sent here."""
        with self._errors():
            dist.all_to_all_single(into, parts, list(received), list(sent), group=self._group)

    def gather(self, part: Tensor, into: Tensor | None = None) -> Tensor:
        """Return the equally long vectors of all ranks, one after the other."""
        result = part.new_empty(self.size * len(part)) if into is None else into
        with self._errors():
            _ALL_GATHER(result, part, group=self._group)
        return result

    # -- plain data

    def gather_objects(self, value: T) -> list[T]:
        """Return the values of all ranks."""
        values: list[Any] = [None] * self.size
        with self._errors():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def any(self, condition: bool) -> bool:
        """Return whether the condition holds on any rank."""
        return bool(self.sum(torch.tensor(float(condition))))

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
            dist.broadcast_object_list(answer, self._first, group=self._group)
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

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise LostRankError(
                f"rank {self.rank} of {self.size} has lost another rank, which has ended or hangs "
                f"({_first_line(error)}); start all ranks again to continue from the last checkpoint"
            ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _short(value: Any, other: Any) -> str:
    """Return a value as text; of two dicts what differs."""
    if isinstance(value, dict) and isinstance(other, dict):
        value = {key: each for key, each in value.items() if key not in other or other[key] != each}
    return f"{value!r:.200}"
