"""Downloads from a local server: complete, interrupted, resumed, damaged, refused."""

import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from spcl.data.cache import download
from spcl.errors import DataError

CONTENT = bytes(range(256)) * 4000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """A server of CONTENT with configurable failures."""

    breaks: int = 0
    """Number of responses that are cut off."""
    errors: int = 0
    """Number of requests answered with 503 first."""
    ranges: bool = True
    """Whether byte ranges are supported."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requested: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/file"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-")) if self.server.ranges else 0
        self.server.requested.append(f"{self.path} from {start}")
        if self.server.errors:
            self.server.errors -= 1
            self.send_error(503)
        elif self.path != "/file":
            self.send_error(404)
        elif start >= len(CONTENT):
            self.send_error(416)
        else:
            self._send(start)

    def _send(self, start: int) -> None:
        body = CONTENT[start:]
        self.send_response(206 if self.server.ranges else 200)
        self.send_header("Content-Length", str(len(body)))
        if self.server.ranges:
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        self.end_headers()
        if self.server.breaks:
            self.server.breaks -= 1
            body = body[: len(body) // 2]
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("spcl.data.cache.PAUSES", (0.0, 0.0, 0.0))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "file.zip"


def part_of(target: Path) -> Path:
    return target.with_name("file.zip.part")


def assert_complete(target: Path) -> None:
    assert target.read_bytes() == CONTENT
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("ranges", [True, False])
def test_whole_file_is_downloaded(server: Server, target: Path, ranges: bool) -> None:
    server.ranges = ranges
    download(server.url, target, SHA256)
    assert_complete(target)
    assert server.requested == ["/file from 0"]


def test_file_without_a_known_checksum_is_downloaded(server: Server, target: Path) -> None:
    download(server.url, target, None)
    assert_complete(target)


def test_interrupted_download_resumes(server: Server, target: Path) -> None:
    server.breaks = 2
    download(server.url, target, SHA256)
    assert_complete(target)
    half, three_quarters = len(CONTENT) // 2, len(CONTENT) * 3 // 4
    assert server.requested == ["/file from 0", f"/file from {half}", f"/file from {three_quarters}"]


def test_server_without_ranges_restarts_the_download(server: Server, target: Path) -> None:
    server.breaks, server.ranges = 1, False
    download(server.url, target, SHA256)
    assert_complete(target)


def test_part_file_of_an_earlier_call_is_resumed(server: Server, target: Path) -> None:
    server.breaks = 4
    with pytest.raises(DataError, match="connection closed after"):
        download(server.url, target, SHA256)
    left = part_of(target).stat().st_size
    assert 0 < left < len(CONTENT)
    assert not target.exists()
    download(server.url, target, SHA256)
    assert_complete(target)
    assert server.requested[-1] == f"/file from {left}"


def test_complete_part_file_needs_no_more_bytes(server: Server, target: Path) -> None:
    target.parent.mkdir()
    part_of(target).write_bytes(CONTENT)
    download(server.url, target, SHA256)
    assert_complete(target)


def test_busy_server_is_retried(server: Server, target: Path) -> None:
    server.errors = 2
    download(server.url, target, SHA256)
    assert_complete(target)


def test_wrong_checksum_leaves_no_file(server: Server, target: Path) -> None:
    with pytest.raises(DataError, match=f"expected a file with SHA-256 {'0' * 64}, found {SHA256}"):
        download(server.url, target, "0" * 64)
    assert list(target.parent.iterdir()) == []


def test_damaged_part_file_is_removed(server: Server, target: Path) -> None:
    target.parent.mkdir()
    part_of(target).write_bytes(b"x" * 1000)
    with pytest.raises(DataError, match="SHA-256"):
        download(server.url, target, SHA256)
    download(server.url, target, SHA256)
    assert_complete(target)


def test_not_found_is_not_retried_and_gives_instructions(server: Server, target: Path) -> None:
    with pytest.raises(DataError) as caught:
        download(server.url + "s", target, SHA256)
    assert "404" in str(caught.value)
    assert f"save it as {target}" in str(caught.value)
    assert len(server.requested) == 1


def test_missing_network_gives_instructions(server: Server, target: Path) -> None:
    url = server.url
    server.server_close()
    with pytest.raises(DataError) as caught:
        download(url, target, SHA256)
    assert url in str(caught.value)
    assert f"save it as {target}" in str(caught.value)


def test_unwritable_folder_is_reported(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match="cannot save"):
        download(server.url, tmp_path / "file" / "archive.zip", SHA256)
