"""Downloads that resume, retry and count only when their checksum fits."""

import hashlib
import http.client
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from spcl.errors import DataError

__all__ = ["download", "file_sha256"]

PAUSES = (1.0, 2.0, 4.0)
"""Seconds to wait before each further attempt."""
TIMEOUT_SECONDS = 30
CHUNK = 1 << 20
NOTHING_LEFT, TOO_MANY_REQUESTS = 416, 429
TROUBLE = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError)


def download(url: str, target: Path, sha256: str) -> None:
    """Fetch `url` into `target`, which appears only when it is complete and its checksum right.

    Until then the bytes are in ``<target>.part``; a broken connection is taken up again where it ended, in this call or
    a later one.
    """
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _fetch_persistently(url, part, target)
        if (found := file_sha256(part)) != sha256:
            part.unlink()
            raise DataError(f"{url}: expected a file with SHA-256 {sha256}, found {found}; {_by_hand(target)}")
        part.replace(target)
    except OSError as error:
        raise DataError(f"cannot save {target} ({error}); choose another folder with --data-dir") from error


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch_persistently(url: str, part: Path, target: Path) -> None:
    for attempt, pause in enumerate((0.0, *PAUSES)):
        time.sleep(pause)
        try:
            return _fetch(url, part)
        except TROUBLE as error:
            if _is_final(error) or attempt == len(PAUSES):
                raise DataError(f"could not download {url} ({error}); {_by_hand(target)}") from error


def _is_final(error: Exception) -> bool:
    """Whether the server refused, so that asking again is useless."""
    return isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code != TOO_MANY_REQUESTS


def _fetch(url: str, part: Path) -> None:
    """One attempt: add to the part file what is missing."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-", "User-Agent": "spcl"})
    # A fresh opener, because the one urlopen() keeps would not notice changed proxy settings.
    try:
        with urllib.request.build_opener().open(request, timeout=TIMEOUT_SECONDS) as response:
            resumed = response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
            _append(response, part, have if resumed else 0)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != NOTHING_LEFT or have == 0:
            raise


def _append(response: http.client.HTTPResponse, part: Path, have: int) -> None:
    total = have + int(response.headers["Content-Length"]) if "Content-Length" in response.headers else None
    with _bar() as progress, part.open("ab" if have else "wb") as file:
        bar = progress.add_task(part.stem, completed=have, total=total)
        while chunk := response.read(CHUNK):
            file.write(chunk)
            progress.advance(bar, len(chunk))
    size = part.stat().st_size
    if total is not None and size < total:
        raise ConnectionError(f"connection closed after {size} of {total} bytes")


def _bar() -> Progress:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _by_hand(target: Path) -> str:
    return f"fetch that file with another computer and save it as {target}"
