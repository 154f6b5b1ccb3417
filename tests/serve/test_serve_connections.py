"""Clients without a token, many, slow or malformed, keep a service from nothing."""

import http.client
import json
import logging
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
import torch
from starlette.datastructures import Headers

from serving import JSON, MAX_BYTES, TOKEN, Client, http_settings, task, until
from spcl.errors import SpclError
from spcl.serve.server import CONNECTIONS, FewerRecords, Server, _is_local
from spcl.sources import FolderHub, Publisher

HALF = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"


WHOLE = HALF + b"\r\n"


@pytest.fixture
def connect(server: tuple[Server, str]) -> Iterator[Callable[..., socket.socket]]:
    """Opens connections from an address of this machine and sends some bytes over them."""
    to = urlsplit(server[1])
    with ExitStack() as stack:

        def connected(data: bytes = HALF, host: str = "127.0.0.1") -> socket.socket:
            opened = socket.create_connection((to.hostname or "", to.port or 0), 20.0, (host, 0))
            stack.enter_context(opened).sendall(data)
            return opened

        yield connected


def answer(connection: socket.socket) -> bytes:
    """Return what comes until the service closes the connection."""
    found = b""
    try:
        while part := connection.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


def is_healthy(address: str) -> bool:
    with urlopen(f"{address}healthz", timeout=20) as found:
        return bool(found.status == 200)


# -- who may ask


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x", TOKEN[:-1]])
@pytest.mark.parametrize("path", ["tasks", "metrics", "events", "page", "nothing"])
def test_requests_need_the_token(client: Client, token: str | None, path: str) -> None:
    answer = Client(client.address, token).get(path)
    assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert Client(client.address, token).post("predict", {}).status == 401


def test_health_page_and_description_need_no_token(client: Client) -> None:
    stranger = Client(client.address)
    assert stranger.get("healthz").content == {"status": "ok", "ready": True, "faults": []}
    assert (stranger.get("readyz").status, stranger.get("readyz").content) == (200, {"ready": True, "faults": []})
    page = stranger.get("")
    assert "default-src 'self'" in page.headers["Content-Security-Policy"]
    for part in re.findall(r'(?:href|src)="(page/.*?)"', page.content):
        assert stranger.get(part).status == 200, part
    assert stranger.get("page/secret.js").status == 404
    described = stranger.get("openapi.json").content
    assert {"/predict", "/tasks", "/tasks/{name}/finish", "/healthz", "/readyz", "/metrics", "/events"} == set(
        described["paths"]
    )
    assert described["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
    references = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(described)))
    assert references <= set(described["components"]["schemas"])


def test_only_loopback_is_bound_without_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpclError, match=r"host is '0\.0\.0\.0', which other machines can reach, but there is no token"):
        Server(http_settings(tmp_path, host="0.0.0.0"))
    monkeypatch.setenv("SPCL_TEST_TOKEN", "secret")
    Server(http_settings(tmp_path, host="0.0.0.0", token_variable="SPCL_TEST_TOKEN"))


@pytest.mark.parametrize(
    ("headers", "is_local"),
    [
        ({"host": "127.0.0.1:8800"}, True),
        ({"host": "[::1]:8800", "origin": "http://[::1]:8800"}, True),
        ({"host": "127.0.0.1:8800", "origin": "http://other.example"}, False),
        ({"host": "[::1"}, False),
        ({"host": "127.0.0.1", "origin": "http://[::1"}, False),
        ({"host": "127.0.0.1:8800", "sec-fetch-site": "none"}, True),
        ({"host": "127.0.0.1:8800", "sec-fetch-site": "same-origin"}, True),
        ({"host": "127.0.0.1:8800", "sec-fetch-site": "same-site"}, False),
        ({"host": "127.0.0.1:8800", "sec-fetch-site": "cross-site"}, False),
        ({}, False),
    ],
)
def test_only_well_formed_requests_of_this_machine_are_local(headers: dict[str, str], is_local: bool) -> None:
    assert _is_local(Headers(headers)) is is_local


def test_bodies_that_are_too_large_are_not_read(client: Client) -> None:
    content = {"inputs": [[0.5] * 4] * 2000}
    assert client.post("predict?task=camera", content).status == 413
    connection = http.client.HTTPConnection(urlsplit(client.address).netloc)
    headers = JSON | {"Authorization": f"Bearer {TOKEN}"}
    pieces = (b" " * 1000 for _ in range(MAX_BYTES // 1000 + 1))
    connection.request("POST", "/predict?task=camera", pieces, headers, encode_chunked=True)
    answer = connection.getresponse()
    assert (answer.status, "at most 20,000 bytes" in answer.read().decode()) == (413, True)
    connection.close()


def test_a_request_of_two_lengths_is_refused_and_its_connection_closed(connect: Callable[..., socket.socket]) -> None:
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    found = answer(connect(head + WHOLE))
    assert found.startswith(b"HTTP/1.1 400")
    assert b"both Content-Length and Transfer-Encoding" in found
    assert found.count(b"HTTP/1.1") == 1


# -- connections


def test_half_sent_requests_shut_nobody_out(server: tuple[Server, str], connect: Callable[..., socket.socket]) -> None:
    for number in range(2 * CONNECTIONS):
        connect(host=f"127.0.0.{1 + number % 5}")
        if number % 50 == 0:
            assert is_healthy(server[1])
    assert is_healthy(server[1])


FLOOD = """
import resource, socket, sys
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (count + 50, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
opened = []
for number in range(count):
    opened.append(socket.create_connection((host, port), 20.0, (f"127.0.0.{1 + number % 20}", 0)))
    try:
        opened[-1].sendall(b"nonsense\\r\\n\\r\\n" if number % 2 else b"GET / HTTP/1.1\\r\\n")
    except OSError:  # it was ended
        pass
print("open", flush=True)
sys.stdin.read()
"""


@contextmanager
def flood(address: str, count: int) -> Iterator[None]:
    """Hold connections of another process, whose descriptors are not ours."""
    to = urlsplit(address)
    command = [sys.executable, "-S", "-c", FLOOD, str(to.hostname), str(to.port), str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        yield


@contextmanager
def spare_descriptors(count: int) -> Iterator[None]:
    """Limit the descriptors of this process to those that it has and some more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + count, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_flood_leaves_descriptors_and_the_log_alone(
    server: tuple[Server, str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service, address = server[0].service, server[1]
    publisher = Publisher(FolderHub(folder / "hub"))
    publisher.start("flooded", classes=2)
    with spare_descriptors(CONNECTIONS + 30), flood(address, 700):
        publisher.publish("flooded", torch.randn(4, 4), torch.randint(2, (4,)))
        until(lambda: task(service, "flooded").samples == 4)
        until(lambda: service.snapshot.step == service.status().steps)
        assert is_healthy(address)
    assert len(caplog.records) < 20


def test_slow_requests_are_ended(
    server: tuple[Server, str], connect: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spcl.serve.server.SECONDS", {"request": 0.5, "body": 0.5, "reader": 0.5})
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer correct horse\r\nContent-Length: 9\r\n\r\n"
    begin = time.monotonic()
    slow = [connect(data) for data in (b"", HALF, WHOLE + HALF, head + b"1234")]
    found = [answer(each) for each in slow]
    assert time.monotonic() - begin < 10.0
    assert [b"200 OK" in each for each in found] == [False, False, True, False]


def test_streams_of_events_are_not_ended(
    server: tuple[Server, str], connect: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spcl.serve.server.SECONDS", {"request": 0.3, "body": 0.3, "reader": 0.3})
    stream = connect(b"GET /events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer correct horse\r\n\r\n")
    found = b""
    while found.count(b"event: update") < 3:
        part = stream.recv(65536)
        assert part
        found += part


def test_one_address_has_half_of_the_connections(
    server: tuple[Server, str], connect: Callable[..., socket.socket]
) -> None:
    """Those that are being answered are not ended for others."""
    ask = b"GET /events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer correct horse\r\n\r\n"
    streams = [connect(ask, "127.0.0.9") for _ in range(CONNECTIONS // 2)]
    for each in streams:
        assert each.recv(12) == b"HTTP/1.1 200"
    refused = connect(b"", "127.0.0.9")
    assert refused.recv(12) in (b"HTTP/1.1 503", b"")
    assert is_healthy(server[1])


def test_the_log_says_how_many_records_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer, kept = FewerRecords(), []

    def record() -> Any:
        return logging.LogRecord("name", logging.WARNING, "path", 7, "from %s", ("x",), None)

    for _ in range(100):
        each = record()
        if fewer.filter(each):
            kept.append(each.getMessage())
    monkeypatch.setattr("spcl.serve.server.LOG_SECONDS", -1.0)
    assert fewer.filter(last := record())
    assert kept == ["from x"] * 5
    assert last.getMessage() == "from x (and 95 more since the last one)"
