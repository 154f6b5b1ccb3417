"""A hub in Redis: every task has a stream."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from secrets import token_hex
from threading import Lock
from typing import Any, TypeVar
from urllib.parse import parse_qs, quote, unquote, urlsplit

from spcl._util.files import read_secret
from spcl.errors import SpclError, TaskError, install_command
from spcl.sources.base import HUBS, Entry, HubError, ResetError, checked, first_number, split_position
from spcl.sources.wire import sequence_of

FIELD = b"data"
MOST_DEAD_LETTERS = 10_000
FIRST_DELAY = 0.05
LONGEST_DELAY = 2.0
SOCKET_SECONDS = 10.0
SEQUENCE_SECONDS = 30 * 24 * 3600  # for which the last number of a publisher is remembered
NOT_THE_NEXT = "equal or smaller"  # in Redis' answer to a position that exists, or lies before the last

APPEND = """
local tasks, ended, stream, sequence = unpack(KEYS)
local task, data, check, number, first, keep, seconds = unpack(ARGV)
if redis.call('SISMEMBER', ended, task) == 1 then return {'ended', ''} end
local position = first .. '-0'
if redis.call('EXISTS', stream) == 1 then
  local stored = redis.call('GET', sequence)
  if stored and number <= string.sub(stored, 1, #number) then return {'known', string.sub(stored, #number + 1)} end
  local information, last = redis.call('XINFO', 'STREAM', stream), nil
  for index = 1, #information, 2 do
    if information[index] == 'last-generated-id' then last = information[index + 1] end
  end
  local major, minor = string.match(last, '(%d+)-(%d+)')
  if #major < 16 then position = string.format('%.0f-0', tonumber(major) + 1)
  else position = string.format('%s-%.0f', major, tonumber(minor) + 1) end  -- larger ones are not exact in Lua
end
redis.call('SADD', tasks, task)
if keep == '' then redis.call('XADD', stream, position, 'data', data)
else redis.call('XADD', stream, 'MAXLEN', keep, position, 'data', data) end
redis.call('SET', sequence, number .. position .. check, 'EX', seconds)
return {'added', position .. check}
"""
"""Add an entry under the next number, unless its publisher has added an entry with the same or a later number."""

END = """
local ended, stream = unpack(KEYS)
local task, last = unpack(ARGV)
if last ~= '' and #redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', 1) > 0 then return 0 end
redis.call('SADD', ended, task)
redis.call('XTRIM', stream, 'MAXLEN', 0)  -- so that it knows its last number when it is opened again
return 1
"""
"""Empty a stream and refuse further entries, unless there are entries after a position."""

NO_ADDRESS = (
    "url is no address of Redis; write redis://HOST:PORT/0, and put a password into an environment variable "
    "(password_variable) or a file (password_file)"
)

R = TypeVar("R")


@HUBS.register("redis")
class RedisHub:
    """A hub of Redis Streams: ``<prefix>:stream:<task>``, with dead letters in ``<prefix>:dead:<task>``.

    A message has one field, ``data``. Its position is the entry's ID. Publishers of this class give successive IDs, by
    a script in Redis that stores a message once though it is sent again after a lost answer; others may let Redis
    choose, and add the task's name to the set ``<prefix>:tasks``. So that Redis loses nothing that it acknowledged
    when it is killed or the power fails, it needs ``appendonly yes`` and ``appendfsync always``.

    Args:
        url: e.g. ``redis://localhost:6379/0``.
        prefix: of all keys.
        patience: seconds for which publishing is tried again when Redis cannot be reached; ``math.inf`` without limit.
        password_variable: the environment variable that holds the password.
        password_file: the file that holds the password.
    """

    def __init__(
        self,
        url: str = "redis://localhost:6379/0",
        prefix: str = "spcl",
        patience: float = 60.0,
        *,
        password_variable: str | None = None,
        password_file: str | os.PathLike[str] | None = None,
    ) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise SpclError(f"the package redis is not installed; run: {install_command('redis')}") from None
        if password_variable is not None and password_file is not None:
            raise SpclError("password_variable and password_file are both given; give one of them")
        password, self._secrets = _passwords(url, read_secret("password", password_variable, password_file))
        self._redis: Any = redis
        try:
            self._client: Any = redis.Redis.from_url(
                url,
                **({} if password is None else {"password": password}),
                retry=Retry(NoBackoff(), 0),
                socket_timeout=SOCKET_SECONDS,
                socket_connect_timeout=SOCKET_SECONDS,
            )
        except ValueError:
            raise SpclError(NO_ADDRESS) from None
        self._append = self._client.register_script(APPEND)
        self._end = self._client.register_script(END)
        self._prefix = prefix
        self._patience = patience
        self._name, self._numbers = token_hex(8), count(1)  # of messages that their publisher does not number
        self._appending = Lock()

    def tasks(self) -> list[str]:
        """Return the tasks that have not ended, sorted."""
        found = self._ask(lambda: self._client.sdiff(self._key("tasks"), self._key("ended")))
        return sorted(name.decode(errors="replace") for name in found)

    def read(
        self, after: Mapping[str, str | None], count: int, wait: float, max_bytes: int
    ) -> dict[str, Sequence[Entry]]:
        """Return the next entries of the tasks' streams."""
        keys = {self._key("stream", task).encode(): task for task in after}
        wanted = {key: split_position(after[task] or "0-0")[0] for key, task in keys.items()}
        block = max(1, int(1000 * wait)) if wait else None
        answer = {
            keys[key]: entries
            for key, entries in self._ask(lambda: self._client.xread(wanted, count=count, block=block))
        }
        self._check_messages({task: after[task] or "" for task in answer})  # no stream was reset before it was read
        return {task: [_entry(*each) for each in entries] for task, entries in answer.items()}

    def append(self, task: str, data: bytes, keep: int | None = None) -> str:
        """Add an entry under the next number, once, also if Redis or the connection breaks down meanwhile.

        A message that its publisher has appended before is dropped; the position of its last message is returned.
        """
        if (sequence := sequence_of(data)) is not None:
            return self._append_numbered(task, data, keep, *sequence)
        with self._appending:  # what arrives after a later number would be taken for a repetition
            return self._append_numbered(task, data, keep, self._name, next(self._numbers))

    def _append_numbered(self, task: str, data: bytes, keep: int | None, publisher: str, number: int) -> str:
        keys = [self._key("tasks"), self._key("ended"), self._key("stream", task)]
        keys.append(self._key("sequence", task, publisher))
        values: list[str | int | bytes] = [
            task,
            data,
            checked("", data),
            f"{number:020}",
            first_number(),
            "" if keep is None else keep,
            SEQUENCE_SECONDS,
        ]
        outcome, position = self._persist(lambda: self._append(keys, values))
        if outcome == b"ended":
            raise TaskError(f"task {task!r} has ended; start it again, or publish under another name")
        return str(position.decode())

    def backlog(self, task: str, after: str | None) -> int:
        """Return the number of entries after a position; at most, where positions are not consecutive numbers."""
        stored = int(self._ask(lambda: self._client.xlen(self._key("stream", task))))
        return stored if after is None else min(stored, self._number_after(task, after))

    def trim(self, task: str, upto: str) -> None:
        """Delete entries before a position."""
        self._number_after(task, upto)
        last, _ = split_position(upto)
        self._ask(lambda: self._client.xtrim(self._key("stream", task), minid=last, approximate=False))

    def end(self, task: str, after: str | None = None) -> bool:
        """Delete the stream of a task and refuse further entries; with a position, only if no entry is after it."""
        last = "" if after is None else split_position(after)[0]
        keys = [self._key("ended"), self._key("stream", task)]
        return bool(self._ask(lambda: self._end(keys, [task, last])))

    def reopen(self, task: str) -> None:
        """Take entries of a task again that has ended."""
        self._persist(lambda: self._client.srem(self._key("ended"), task))

    def dead_letter(self, task: str, position: str, data: bytes, reason: str) -> None:
        """Add the message, with the reason, under its position to the stream of dead letters."""
        fields = {FIELD: data, b"reason": reason.encode()}
        key = self._key("dead", task)
        try:
            name, _ = split_position(position)
            self._ask(lambda: self._client.xadd(key, fields, id=name, maxlen=MOST_DEAD_LETTERS))
        except OSError as error:
            if NOT_THE_NEXT not in str(error):
                raise

    def close(self) -> None:
        """Close the connections; the next call of another method opens one again."""
        self._client.close()

    def _last_number(self, task: str) -> int:
        """Return the number of the last entry that was ever added, or 0 before the first."""
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
        self._check_messages({task: position})
        return max(0, last - number)

    def _check_messages(self, positions: Mapping[str, str]) -> None:
        """Raise an error if the entry at a position is another one, or is missing although older entries are stored."""
        wanted = [(task, *split_position(each)) for task, each in positions.items() if split_position(each)[1]]
        if not wanted:
            return
        with self._client.pipeline(transaction=False) as pipe:
            for task, name, _ in wanted:
                pipe.xrevrange(self._key("stream", task), name, "-", count=1)
            answers = self._ask(pipe.execute)
        for (task, name, check), found in zip(wanted, answers, strict=True):
            if found and _entry(*found[0])[0] != f"{name}/{check}":
                raise ResetError(task, None, name)

    def _key(self, *parts: str) -> str:
        return ":".join((self._prefix, *parts))

    def _ask(self, call: Callable[[], R]) -> R:
        """Call Redis; raise a :class:`HubError` if it cannot be reached, and another :class:`OSError` if it refuses."""
        try:
            return call()
        except self._redis.ResponseError as error:
            raise OSError(f"Redis refuses: {self._redacted(error)}") from None
        except (self._redis.RedisError, OSError) as error:
            raise HubError(f"Redis cannot be used: {self._redacted(error)}") from None

    def _redacted(self, error: Exception) -> str:
        """Return what an error says, without the password, which Redis may repeat."""
        text, _, _ = str(error).partition("with args beginning with")
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

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


def _entry(position: bytes, fields: Mapping[bytes, bytes]) -> tuple[str, bytes]:
    data = fields.get(FIELD, b"")
    return checked(position.decode(), data), data


def _passwords(url: str, given: str | None) -> tuple[str | None, list[str]]:
    """Return the password to use besides the URL's own, and all texts that must not appear in a message.

    A URL whose password has unquoted special characters is refused: its parts could appear as host or port.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise SpclError(NO_ADDRESS) from None
    if "@" in f"{parts.path}{parts.query}{parts.fragment}" or (port is None and parts.netloc.endswith(":")):
        raise SpclError(NO_ADDRESS)
    if parts.password and given is not None:
        raise SpclError("the url has a password, and another one is given; give one of them")
    own = [parts.password, unquote(parts.password)] if parts.password else []
    queried = parse_qs(parts.query).get("password", [])
    secrets = {each for each in (*own, *queried, given) if each}
    return given, sorted(secrets | {quote(each, safe="") for each in secrets}, key=len, reverse=True)
