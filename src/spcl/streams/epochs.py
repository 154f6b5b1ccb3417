"""A source that is read several times, from its beginning."""

import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler

from spcl.errors import SpclError
from spcl.sources import Message, Source, as_source


class EpochSource:
    """Reads an iterable of batches several times; positions say the epoch and the number of the batch in it.

    After a position, the batches before it are read again and skipped. A DataLoader that shuffles gives every epoch an
    order of its own, which depends on the first seed of its generator alone, so that this order is found again.

    Args:
        name: the source's name, for errors.
        iterable: gives the same batches whenever it is iterated, e.g. a list or a DataLoader.
        epochs: how often it is read.

    >>> source = EpochSource("camera", ["x", "y"], epochs=2)
    >>> [(message.position, message.batch) for message in source.read(after="0/1")]
    [('0/2', 'y'), ('1/1', 'x'), ('1/2', 'y')]
    """

    def __init__(self, name: str, iterable: Iterable[Any] | Source, epochs: int) -> None:
        if isinstance(iterable, Source):
            raise SpclError(
                f"source {name!r} is a {type(iterable).__name__}, whose messages are read once, but epochs is "
                f"{epochs}; add it to a stream of its own, with epochs=1"
            )
        as_source(iterable)  # raises an error unless it can be iterated
        if isinstance(iterable, Iterator):
            raise SpclError(
                f"source {name!r} is a {type(iterable).__name__}, which cannot be read again, but epochs is {epochs}; "
                f"give a list, a DataLoader, or an object whose __iter__ starts anew"
            )
        self._iterable = iterable
        self._epochs = epochs
        self._beginning = threading.Lock()  # a reader that was stopped may still be beginning
        self._generator: torch.Generator | None = None
        if isinstance(iterable, DataLoader) and isinstance(iterable.sampler, RandomSampler):
            if iterable.generator is None:
                raise SpclError(
                    f"source {name!r} is a DataLoader that shuffles without a generator, so that its epochs cannot be "
                    f"resumed; give it generator=torch.Generator().manual_seed(0)"
                )
            self._generator = iterable.generator
        self._seed = 0 if self._generator is None else self._generator.initial_seed()

    def read(self, after: str | None) -> Iterator[Message]:
        """Yield the batches after a position."""
        first, done = map(int, after.split("/")) if after else (0, 0)
        for epoch in range(first, self._epochs):
            for number, batch in enumerate(self._batches(epoch), 1):
                if number > done:
                    yield Message(f"{epoch}/{number}", batch)
            done = 0

    def _batches(self, epoch: int) -> Iterator[Any]:
        with self._beginning:
            if self._generator is not None:
                self._generator.manual_seed((self._seed + epoch) % 2**63)
            batches = iter(self._iterable)
            begun = list(islice(batches, 1))  # draws the order
        yield from begun
        yield from batches

    def commit(self, upto: str) -> None:
        """Do nothing: an iterable forgets nothing."""

    def close(self) -> None:
        """Do nothing: an iterator cannot be interrupted."""
