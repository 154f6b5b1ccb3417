"""One running service per state folder."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from spcl.errors import SpclError
from spcl.files import read_json, user_errors, write_json

__all__ = ["StateInUseError", "held_state"]

RETRY_SECONDS = 0.2


class StateInUseError(SpclError):
    """A state folder that another service uses."""


@contextmanager
def held_state(folder: Path, wait: Callable[[], bool] | None = None) -> Iterator[bool]:
    """Hold the folder within the block; yield whether it is held.

    The operating system lets go of it when the process ends, in whatever way.

    Args:
        folder: made if it does not exist.
        wait: whether to go on waiting while another service holds the folder, asked again and again; None raises a
            :class:`StateInUseError` instead.
    """
    with user_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "lock", timeout=0, thread_local=False)
        held = _acquire(lock)
        if not held and wait is None:
            raise StateInUseError(
                f"the state {folder} is in use by {_owner(folder)}; stop that, or choose another state"
            )
        while not held and wait is not None and wait():
            time.sleep(RETRY_SECONDS)
            held = _acquire(lock)
        if held:
            write_json(folder / "owner.json", {"host": socket.gethostname(), "process": os.getpid()})
    try:
        yield held
    finally:
        lock.release()


def _acquire(lock: FileLock) -> bool:
    try:
        lock.acquire()
    except Timeout:
        return False
    return True


def _owner(folder: Path) -> str:
    known = read_json(folder / "owner.json")
    return f"process {known['process']} on {known['host']}" if isinstance(known, dict) else "another service"
