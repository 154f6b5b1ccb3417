"""A hub of one's own, batches for it, and bytes that are no batches."""

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spcl.errors import TaskError
from spcl.sources import (
    Entry,
    Hub,
    HubError,
    HubSource,
    Message,
    Publisher,
    Rejected,
    announce,
    encode_batch,
    encode_end,
    encode_start,
)


class ListHub:
    """A hub of one's own, in memory."""

    def __init__(self) -> None:
        self.streams: dict[str, list[tuple[int, bytes]]] = {}
        self.dead: dict[str, dict[str, str]] = {}
        self.ended: set[str] = set()
        self.last: dict[str, int] = {}
        self.is_down = False
        self.furthest: dict[str, int] = {}
        self.closed = 0

    def tasks(self) -> list[str]:
        return sorted(self.streams.keys() - self.ended)

    def read(
        self, after: Mapping[str, str | None], count: int, wait: float, max_bytes: int = 0
    ) -> dict[str, Sequence[Entry]]:
        if self.is_down:
            raise HubError("it is down")
        found = {
            task: [(str(number), data) for number, data in self.streams.get(task, []) if number > int(position or 0)]
            for task, position in after.items()
        }
        if not any(found.values()):
            time.sleep(min(wait, 0.01))
        self.furthest |= {task: int(entries[:count][-1][0]) for task, entries in found.items() if entries}
        return {task: entries[:count] for task, entries in found.items()}

    def append(self, task: str, data: bytes, keep: int | None = None) -> str:
        if task in self.ended:
            raise TaskError(f"{task} has ended")
        stream = self.streams.setdefault(task, [])
        self.last[task] = self.last.get(task, 0) + 1
        stream.append((self.last[task], data))
        del stream[: -keep if keep else 0]
        return str(stream[-1][0])

    def backlog(self, task: str, after: str | None) -> int:
        return sum(number > int(after or 0) for number, _ in self.streams.get(task, []))

    def trim(self, task: str, upto: str) -> None:
        self.streams[task] = [entry for entry in self.streams[task] if entry[0] >= int(upto)]

    def end(self, task: str, after: str | None = None) -> bool:
        if after is not None and self.backlog(task, after):
            return False
        self.ended.add(task)
        self.streams[task] = []
        return True

    def reopen(self, task: str) -> None:
        self.ended.discard(task)

    def dead_letter(self, task: str, position: str, data: bytes, reason: str) -> None:
        self.dead.setdefault(task, {})[position] = reason

    def close(self) -> None:
        self.closed += 1


def batch(number: float, size: int = 2) -> tuple[Tensor, Tensor]:
    return torch.full((size, 3), float(number)), torch.arange(size) % 2


def source_of(hub: Hub, task: str = "a", **options: Any) -> HubSource:
    return HubSource(hub, task, "float32[3]", **options)


def outcomes(found: Iterable[Any]) -> list[str]:
    """Return for each of what a source has read why it is refused, or "learned"."""
    return [each.reason if isinstance(each, Rejected) else "learned" for each in found]


def values(messages: Any) -> list[float]:
    return [float(message.batch[0][0, 0]) for message in messages if isinstance(message, Message)]


def filled(hub: Hub, tasks: dict[str, int]) -> None:
    publisher = Publisher(hub)
    for task, count in tasks.items():
        publisher.start(task, classes=2)
        for number in range(count):
            publisher.publish(task, *batch(number))
        publisher.end(task)


def damaged(count: int, seed: int, ends: bool = True) -> Iterator[bytes]:
    """Valid messages, damaged at random places."""
    chance = random.Random(seed)
    schema = announce("a", classes=2)
    valid = [encode_batch(batch(1), schema), encode_batch(batch(1)), encode_start(schema)]
    valid += [encode_end()] if ends else []
    valid += [
        encode_batch(((torch.ones(2), torch.zeros(2)), torch.zeros(2))),
        encode_batch(({"a": torch.ones(2)}, torch.ones(2))),
    ]
    for _ in range(count):
        data = bytearray(chance.choice(valid))
        for _ in range(chance.choice((1, 1, 1, 4))):
            place = chance.randrange(len(data)) if data else 0
            kind = chance.choice((0, 0, 0, 0, 0, 1, 2, 3))
            if kind == 0 and data:
                data[place] = chance.randrange(256)
            elif kind == 1:
                data[place:place] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 9)))
            elif kind == 2:
                del data[place : place + chance.randint(1, 30)]
            else:
                data = data[:place] if chance.random() < 0.3 else data + data[place:]
        yield bytes(data)
