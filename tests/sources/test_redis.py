"""Redis may be killed, and its password is printed nowhere."""

import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from list_hub import batch, source_of, values
from redis_process import RedisProcess, needs_redis
from spcl.errors import SpclError
from spcl.sources import (
    HUBS,
    Hub,
    HubError,
    Publisher,
    RedisHub,
)
from spcl.tasks import TaskDescription

TWO = TaskDescription.of("a", classes=2)


@needs_redis
def test_what_is_published_while_redis_is_killed_arrives_once(tmp_path: Path) -> None:
    with RedisProcess(tmp_path) as server, server.hubs() as reopen:
        seen, outages = read_while_it_is_killed(server, reopen)
    assert seen == list(range(400))
    assert [type(each) for each in outages] == [HubError, type(None)]


def read_while_it_is_killed(
    server: RedisProcess, reopen: Callable[[], Hub]
) -> tuple[list[float], list[Exception | None]]:
    """Return what is read of 400 batches, and the outages."""
    killed = threading.Event()

    def publish() -> None:
        publisher = Publisher(reopen())
        for number in range(400):
            publisher.publish("a", *batch(number))
            if number == 100:
                killed.wait()

    thread = threading.Thread(target=publish)
    thread.start()
    outages: list[Exception | None] = []
    source = source_of(reopen(), first_sight=TWO, on_outage=lambda _, e: outages.append(e))
    reader = source.read(None)
    seen = values(islice(reader, 20))

    def kill_for_a_moment() -> None:
        killed.set()
        server.kill()
        time.sleep(0.2)
        server.start()

    killing = threading.Thread(target=kill_for_a_moment)
    killing.start()
    seen += values(islice(reader, 380))
    for each in (thread, killing):
        each.join()
    return seen, outages


SECRET = "s3cret"


PASSWORD = f"{SECRET}/with:odd@characters#?"


@needs_redis
@pytest.mark.parametrize("place", ["variable", "file", "url"])
def test_the_password_of_redis_may_stand_in_a_variable_or_a_file(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_PASSWORD", PASSWORD)
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    with RedisProcess(tmp_path) as server:
        server.protect(PASSWORD)
        options: dict[str, Any] = {
            "variable": {"url": server.url, "password_variable": "REDIS_PASSWORD"},
            "file": {"url": server.url, "password_file": str(tmp_path / "password")},
            "url": {"url": server.url.replace("//", f"//:{quote(PASSWORD, safe='')}@")},
        }[place]
        with closing(HUBS.make({"name": "redis", **options})) as hub:
            Publisher(hub).publish("a", *batch(0))
            assert hub.backlog("a", None) == 1
        for wrong in ("wrong-password-1", "wrong-password-2"):
            with closing(RedisHub(server.url.replace("//", f"//:{wrong}@"), patience=0.0)) as hub:
                with pytest.raises(HubError) as raised:
                    hub.tasks()
                assert wrong not in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize(
    "url",
    [
        "redis://:{}@[bad",
        "redis://user:pa/{}@localhost:6379/0",
        "redis://:12/{}@localhost",
        "redis://:pa#{}@localhost",
        "redis://:pa?{}@localhost",
        "redis://:{}@localhost:port/0",
        "http://:{}@localhost",
        "{}",
    ],
)
def test_an_impossible_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(SpclError, match="url is no address of Redis") as raised:
        HUBS.make({"name": "redis", "url": url.format(SECRET)})
    assert SECRET not in "".join(traceback.format_exception(raised.value))
    assert raised.value.__cause__ is None


@pytest.mark.parametrize("repeats", [True, False])
def test_a_password_that_redis_repeats_is_not_printed(repeats: bool) -> None:
    """As Redis does for a command that it does not know: the beginning of its arguments."""

    def answer(listener: socket.socket) -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                said = connection.recv(10_000).split(b"\r\n")[-2] if repeats else PASSWORD.encode()
                connection.sendall(b"-ERR unknown command 'AUTH', with args beginning with: '%s'\r\n" % said)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=answer, args=(listener,))
        answering.start()
        url = f"redis://:{quote(PASSWORD, safe='')}@127.0.0.1:{listener.getsockname()[1]}/0"
        for _ in range(2):
            with closing(RedisHub(url, patience=0.0)) as hub, pytest.raises(OSError, match="Redis") as raised:
                hub.tasks()
            text = "".join(traceback.format_exception(raised.value))
            assert SECRET not in text
            assert quote(PASSWORD, safe="") not in text
        answering.join()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"password_variable": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE holds no password"),
        ({"password_file": "/no/such/file"}, "cannot be read from /no/such/file"),
        ({"password_variable": "A", "password_file": "B"}, "are both given"),
        ({"password_variable": "HOME", "url": "redis://:s3cret@localhost"}, "the url has a password, and another"),
    ],
)
def test_a_password_that_cannot_be_found_is_an_error(options: dict[str, str], reason: str) -> None:
    with pytest.raises(SpclError, match=reason):
        RedisHub(**options)
