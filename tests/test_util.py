"""Signal handlers and locks."""

import signal
import threading
from contextlib import ExitStack
from pathlib import Path

from spcl._util.files import locked
from spcl._util.signals import handling


def test_a_handler_is_replaced_within_the_block_alone() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    seen: list[int] = []
    with handling([signal.SIGUSR1], lambda number, frame: seen.append(number)):
        signal.raise_signal(signal.SIGUSR1)
    assert seen == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is before


def test_other_threads_leave_handlers_as_they_are() -> None:
    found = []

    def look() -> None:
        with handling([signal.SIGUSR1], signal.default_int_handler):
            found.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGUSR1)]


def test_a_lock_is_held_once_and_waited_for(tmp_path: Path) -> None:
    file, asked = tmp_path / "lock", []
    with ExitStack() as first:
        assert first.enter_context(locked(file))
        with locked(file) as second:
            assert not second

        def wait() -> bool:
            asked.append(True)
            if len(asked) == 2:
                first.close()
            return True

        with locked(file, wait) as third:
            assert third
            assert len(asked) == 2
    with locked(file) as again:
        assert again
