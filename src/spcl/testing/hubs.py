"""The conformance suite of hubs."""

import threading
import time
from collections.abc import Callable
from functools import partial

from spcl.errors import DataError, TaskError
from spcl.sources import Hub, ResetError
from spcl.testing.claims import Claims

WAIT, LONG_WAIT = 0.2, 10.0


def check_hub(
    make: Callable[[], Hub],
    *,
    concurrent: bool = True,
    lose: Callable[[Hub], None] | None = None,
    patience: float = 30.0,
) -> None:
    """Check a hub: ``make()`` opens an empty one, each time another.

    Messages come in order, once, from any position; positions do not change; trimmed and ended messages are gone, and
    lost ones are reported; a read waits only as long as it may and must; concurrent publishers lose nothing; and a
    closed hub can be used again.

    Args:
        make: opens a hub without tasks; the check closes it.
        concurrent: whether several threads may append at once.
        lose: loses some of the newest messages of every task, like a broker restored from an older copy; None leaves
            unchecked whether the hub notices.
        patience: seconds to wait for the messages of several publishers.
    """
    claims = Claims("hub", make)
    checks: list[Callable[[Claims, Hub], None]]
    checks = [_check_order, _check_limits, _check_backlog, _check_trimming, _check_end, _check_letters, _check_closing]
    checks += [partial(_check_publishers, patience=patience)] if concurrent else []
    checks += [partial(_check_loss, lose=lose)] if lose is not None else []
    for check in checks:
        with claims.law("it can be opened"):
            hub = make()
        claims.that(isinstance(hub, Hub), "it is a hub", repr(hub), "the methods of spcl.sources.Hub")
        claims.same("a new hub has no tasks", hub.tasks(), [])
        try:
            check(claims, hub)
        finally:
            hub.close()


def _read(hub: Hub, task: str, after: str | None = None, count: int = 100) -> list[tuple[str, bytes]]:
    entries = hub.read({task: after}, count, WAIT, 1000).get(task, ())
    return [(position, bytes(data)) for position, data in entries if not isinstance(data, DataError)]


def _check_order(claims: Claims, hub: Hub) -> None:
    law = "messages come in order, once, from any position"
    sent = [b"message %d" % number for number in range(6)] + [b""]
    with claims.law(law):
        positions = [hub.append("b", data) for data in sent]
        hub.append("a", b"other")
        claims.same("tasks are listed, sorted", hub.tasks(), ["a", "b"])
        claims.that(len(set(positions)) == 7, "every message has a position of its own", positions, "seven positions")
        found = _read(hub, "b")
        claims.same(law, [data for _, data in found], sent)
        claims.same("append returns the position that read gives", [each for each, _ in found], positions)
        for index, position in enumerate(positions):
            claims.same(law, [data for _, data in _read(hub, "b", position)], sent[index + 1 :])
        claims.same("tasks are read apart", [data for _, data in _read(hub, "a")], [b"other"])
        both = hub.read({"a": None, "b": positions[5]}, 100, WAIT, 1000)
        claims.same(
            "several tasks are read at once", {name: len(each) for name, each in both.items()}, {"a": 1, "b": 1}
        )


def _check_limits(claims: Claims, hub: Hub) -> None:
    with claims.law("a read has at most `count` messages"):
        for number in range(5):
            hub.append("a", b"%d" % number)
        claims.same("a read has at most `count` messages", len(_read(hub, "a", count=3)), 3)
    law = "a message longer than `max_bytes` is read, or replaced by an error, and the next message is read"
    with claims.law(law):
        hub.append("big", bytes(2000))
        hub.append("big", b"small")
        read = hub.read({"big": None}, 10, WAIT, 1000)["big"]
        found = [data if isinstance(data, DataError) else bytes(data) for _, data in read]
    claims.that(found[1:] == [b"small"], law, found[1:], [b"small"])
    claims.that(found[0] == bytes(2000) or isinstance(found[0], DataError), law, found[0], "it, or a DataError")
    law = "a read that finds messages does not wait for more"
    with claims.law(law):
        begin = time.monotonic()
        hub.read({"a": None, "nothing": None}, 100, LONG_WAIT, 1000)
        seconds = time.monotonic() - begin
        claims.that(seconds < LONG_WAIT / 2.0, law, f"{seconds:.1f} s", "an answer at once")
    law = "a read waits no longer than it may"
    with claims.law(law):
        begin = time.monotonic()
        claims.same("a task without messages is empty", _read(hub, "nothing"), [])
        seconds = time.monotonic() - begin
        claims.that(seconds < WAIT + 5.0, law, f"{seconds:.1f} s", f"about {WAIT:g} s")


def _check_backlog(claims: Claims, hub: Hub) -> None:
    law = "the backlog is the number of messages after a position"
    with claims.law(law):
        claims.same("a task without messages has no backlog", hub.backlog("a", None), 0)
        positions = [hub.append("a", b"%d" % number) for number in range(5)]
        claims.same(law, [hub.backlog("a", each) for each in (None, positions[1], positions[4])], [5, 3, 0])


def _check_trimming(claims: Claims, hub: Hub) -> None:
    law = "trimming deletes a task's messages before a position, and perhaps the message at the position"
    with claims.law(law):
        hub.append("b", b"other")
        positions = [hub.append("a", b"%d" % number) for number in range(6)]
        hub.trim("a", positions[3])
        claims.same(law, [data for _, data in _read(hub, "a", positions[3])], [b"4", b"5"])
        left = hub.backlog("a", None)
        claims.that(left in (2, 3), law, f"{left} messages", "2 or 3 of 6")
        hub.trim("a", positions[5])
        later = hub.append("a", b"6")
        claims.same("a trimmed stream continues", _read(hub, "a", positions[5]), [(later, b"6")])
        claims.same("trimming a task does not change other tasks", [data for _, data in _read(hub, "b")], [b"other"])
    law = "append keeps only the newest `keep`"
    with claims.law(law):
        for number in range(6):
            hub.append("kept", b"%d" % number, keep=2)
        claims.same(law, [data for _, data in _read(hub, "kept")], [b"4", b"5"])


def _check_end(claims: Claims, hub: Hub) -> None:
    law = "a task that has ended is gone and takes no messages"
    with claims.law(law):
        hub.append("a", b"0")
        hub.append("b", b"0")
        for _ in range(2):  # repeating it changes nothing
            hub.end("a")
        claims.same(law, hub.tasks(), ["b"])
        claims.same(law, hub.backlog("a", None), 0)
    with claims.law(law):
        try:
            hub.append("a", b"1")
        except TaskError:
            pass
        else:
            claims.that(False, law, "no error from append", "a TaskError")
    law = "a task with messages after a position does not end there"
    with claims.law(law):
        positions = [hub.append("b", b"%d" % number) for number in (1, 2)]
        claims.same(law, hub.end("b", positions[0]), False)
        claims.same(law, [data for _, data in _read(hub, "b")], [b"0", b"1", b"2"])
        claims.same(law, hub.end("b", positions[1]), True)
        claims.same(law, hub.tasks(), [])
    law = "a task that is opened again takes messages after its old positions"
    with claims.law(law):
        for _ in range(2):
            hub.reopen("b")
        hub.append("b", b"3")
        found = hub.read({"b": positions[1]}, 10, 0.0, 10_000).get("b", ())
        claims.same(law, [data for _, data in found], [b"3"])
        claims.same(law, hub.tasks(), ["b"])


def _check_loss(claims: Claims, hub: Hub, lose: Callable[[Hub], None]) -> None:
    law = "a position whose message was lost is a ResetError"
    with claims.law(law):
        positions = [hub.append("a", b"%d" % number) for number in range(5)]
        lose(hub)
        left = hub.backlog("a", None)
    claims.that(0 < left < 5, "lose() loses the newest messages and no others", f"{left} of 5 left", "1 to 4")
    calls: dict[str, Callable[[str, str], object]] = {"backlog": hub.backlog, "trim": hub.trim}
    for name, call in calls.items():
        try:
            call("a", positions[4])
        except ResetError:
            continue
        claims.that(False, f"{law} ({name})", "no error", "a ResetError")
    claims.same("a trim that is refused deletes nothing", hub.backlog("a", None), left)


def _check_letters(claims: Claims, hub: Hub) -> None:
    law = "a dead letter may be repeated"
    with claims.law(law):
        position = hub.append("a", b"junk")
        for _ in range(2):
            hub.dead_letter("a", position, b"junk", "it is no batch")
        claims.same("a dead letter does not change the stream", [data for _, data in _read(hub, "a")], [b"junk"])
        claims.same("a dead letter does not add a task", hub.tasks(), ["a"])


def _check_closing(claims: Claims, hub: Hub) -> None:
    law = "a closed hub can be used again"
    with claims.law(law):
        hub.append("a", b"0")
        hub.close()
        hub.close()
        hub.append("a", b"1")
        claims.same(law, [data for _, data in _read(hub, "a")], [b"0", b"1"])


def _check_publishers(claims: Claims, hub: Hub, patience: float) -> None:
    law = "several publishers lose nothing, and each keeps its order"
    errors: list[Exception] = []

    def publish(letter: str) -> None:
        try:
            for number in range(15):
                hub.append("a", f"{letter}{number}".encode())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=publish, args=(letter,)) for letter in "xyz"]
    for thread in threads:
        thread.start()
    with claims.law(law):
        seen: list[str] = []
        position: str | None = None
        deadline = time.monotonic() + patience
        while len(seen) < 45 and time.monotonic() < deadline and not errors:
            entries = _read(hub, "a", position, count=10)
            seen += [data.decode() for _, data in entries]
            position = entries[-1][0] if entries else position
    for thread in threads:
        thread.join()
    claims.that(not errors, law, f"{errors[:1]}", "no error")
    for letter in "xyz":
        own = [each for each in seen if each[0] == letter]
        claims.same(law, own, [f"{letter}{number}" for number in range(15)])
