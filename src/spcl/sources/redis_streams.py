"""A hub in Redis: every task has a stream."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from spcl.errors import SpclError, TaskError
from spcl.sources.base import Entry, HubError, ResetError
from spcl.sources.hub import HUBS, first_number

__all__ = ["RedisHub"]

FIELD = b"data"
MOST_DEAD_LETTERS = 10_000
FIRST_DELAY = 0.05
LONGEST_DELAY = 2.0
SOCKET_SECONDS = 10.0
NOT_THE_NEXT = "equal or smaller"  # in Redis' answer to a position that exists, or lies before the last

R = TypeVar("R")


@HUBS.register("redis")
class RedisHub:
    """A hub of Redis Streams: ``<prefix>:stream:<task>``, with dead letters in ``<prefix>:dead:<task>``.

    A message has one field, ``data``. Its position is the entry's ID: publishers of this class give successive ones, so
    that one that is sent again after a lost answer is stored once; others may let Redis choose, and add the task's name
    to the set ``<prefix>:tasks``. For a service that loses nothing when Redis crashes, switch Redis' append-only file
    on; when the power fails, with ``appendfsync always``.

    Args:
        url: e.g. ``redis://localhost:6379/0``.
        prefix: of all keys.
        patience: seconds for which publishing is tried again when Redis cannot be reached; ``math.inf`` without limit.
    """

    def __init__(self, url: str = "redis://localhost:6379/0", prefix: str = "spcl", patience: float = 60.0) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise SpclError('the package redis is not installed; run: pip install "spcl[redis]"') from None
        try:
            self._redis: Any = redis
            self._client: Any = redis.Redis.from_url(
                url,
                retry=Retry(NoBackoff(), 0),  # an entry that is sent again must be recognised here
                socket_timeout=SOCKET_SECONDS,
                socket_connect_timeout=SOCKET_SECONDS,
            )
        except ValueError as error:
            raise SpclError(f"url is no address of Redis ({error}); write redis://HOST:PORT/0") from None
        self._prefix = prefix
        self._patience = patience
        self._last: dict[str, int] = {}
        self._lock = threading.Lock()

    def tasks(self) -> list[str]:
        """Return the tasks that have not ended, sorted."""
        found = self._ask(lambda: self._client.sdiff(self._key("tasks"), self._key("ended")))
        return sorted(name.decode(errors="replace") for name in found)

    def read(
        self, after: Mapping[str, str | None], count: int, wait: float, max_bytes: int
    ) -> dict[str, Sequence[Entry]]:
        """Return the next entries of the tasks' streams."""
        keys = {self._key("stream", task).encode(): task for task in after}
        wanted = {key: after[task] or "0-0" for key, task in keys.items()}
        block = max(1, int(1000 * wait)) if wait else None
        answer = self._ask(lambda: self._client.xread(wanted, count=count, block=block))
        return {
            keys[key]: [(position.decode(), fields.get(FIELD, b"")) for position, fields in entries]
            for key, entries in answer
        }

    def append(self, task: str, data: bytes, keep: int | None = None) -> str:
        """Add an entry under the next number, once, also if Redis or the connection breaks down meanwhile."""
        with self._lock:
            if self._persist(lambda: self._client.sismember(self._key("ended"), task)):
                raise TaskError(f"task {task!r} has ended; publish under another name")
            if task not in self._last:
                self._last[task] = self._persist(lambda: self._last_number(task)) or first_number() - 1
            position = self._persist(_Attempt(self, task, data, keep))
        return str(position)

    def backlog(self, task: str, after: str | None) -> int:
        """Return the number of entries after a position; at most, where positions are not consecutive numbers."""
        stored = int(self._ask(lambda: self._client.xlen(self._key("stream", task))))
        return stored if after is None else min(stored, self._number_after(task, after))

    def trim(self, task: str, upto: str) -> None:
        """Delete entries before a position."""
        self._number_after(task, upto)
        self._ask(lambda: self._client.xtrim(self._key("stream", task), minid=upto, approximate=False))

    def end(self, task: str) -> None:
        """Delete the stream of a task and refuse further entries."""
        self._ask(lambda: self._client.sadd(self._key("ended"), task))
        self._ask(lambda: self._client.delete(self._key("stream", task)))

    def dead_letter(self, task: str, position: str, data: bytes, reason: str) -> None:
        """Add the message, with the reason, under its position to the stream of dead letters."""
        fields = {FIELD: data, b"reason": reason.encode()}
        key = self._key("dead", task)
        try:
            self._ask(lambda: self._client.xadd(key, fields, id=position, maxlen=MOST_DEAD_LETTERS))
        except OSError as error:
            if NOT_THE_NEXT not in str(error):
                raise

    def close(self) -> None:
        """Close the connections; the next call of another method opens one again."""
        self._client.close()

    def add(self, task: str, data: bytes, keep: int | None, again: bool) -> str:
        """Try to add an entry; ``again`` if an earlier attempt may have succeeded."""
        while True:
            position = f"{self._last[task] + 1}-0"
            try:
                with self._client.pipeline(transaction=False) as pipe:
                    pipe.sadd(self._key("tasks"), task)
                    pipe.xadd(self._key("stream", task), {FIELD: data}, id=position, maxlen=keep, approximate=False)
                    pipe.execute()
            except self._redis.ResponseError as error:
                if NOT_THE_NEXT not in str(error):
                    raise
                stored = self._client.xrange(self._key("stream", task), position, position) if again else []
                if not any(fields.get(FIELD) == data for _, fields in stored):
                    self._last[task], again = self._last_number(task), False
                    continue
            self._last[task] += 1
            return position

    def _last_number(self, task: str) -> int:
        """Return the number of the last entry ever added; 0 where there is none."""
        try:
            information = self._client.xinfo_stream(self._key("stream", task))
        except self._redis.ResponseError as error:
            if "no such key" in str(error):
                return 0
            raise
        return int(information["last-generated-id"].partition(b"-")[0])

    def _number_after(self, task: str, position: str) -> int:
        """Return how far the last entry, if there is one, is after a position; raise an error if it is before."""
        last, number = self._ask(lambda: self._last_number(task)), int(position.partition("-")[0])
        if 0 < last < number:
            raise ResetError(task, f"{last}-0", position)
        return max(0, last - number)

    def _key(self, *parts: str) -> str:
        return ":".join((self._prefix, *parts))

    def _ask(self, call: Callable[[], R]) -> R:
        """Call Redis; raise a :class:`HubError` if it cannot be reached, and another :class:`OSError` if it refuses."""
        try:
            return call()
        except self._redis.ResponseError as error:
            raise OSError(f"Redis refuses: {error}") from error
        except (self._redis.RedisError, OSError) as error:
            raise HubError(f"Redis cannot be used: {error}") from error

    def _persist(self, call: Callable[[], R]) -> R:
        """Call Redis, again and again while it cannot be used, until ``patience`` is over."""
        deadline, delay = time.monotonic() + self._patience, FIRST_DELAY
        while True:
            try:
                return self._ask(call)
            except OSError:  # also if it refuses: it may have memory or a disk again
                if time.monotonic() + delay > deadline:
                    raise
                time.sleep(delay)
                delay = min(2 * delay, LONGEST_DELAY)


class _Attempt:
    """Adds an entry, and knows whether it is not the first time."""

    def __init__(self, hub: RedisHub, task: str, data: bytes, keep: int | None) -> None:
        self._arguments = (task, data, keep)
        self._hub = hub
        self._again = False

    def __call__(self) -> str:
        again, self._again = self._again, True
        return self._hub.add(*self._arguments, again)
