"""Downloads that resume, retry and verify a checksum."""

import hashlib
import http.client
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path

from spcl.data.progress import download_progress
from spcl.errors import DataError

__all__ = ["download", "file_sha256"]

PAUSES = (1.0, 2.0, 4.0)
"""Seconds to wait before each retry."""
TIMEOUT_SECONDS = 30
CHUNK = 1 << 20
RANGE_NOT_SATISFIABLE, TOO_MANY_REQUESTS = 416, 429
NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError)


def download(url: str, target: Path, sha256: str) -> None:
    """Download `url` to `target`, which is created only when the file is complete and its checksum correct.

    Until then the bytes are in ``<target>.part``; an interrupted download resumes there, in this call or a later one.
    """
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _fetch_with_retries(url, part, target)
        if (found := file_sha256(part)) != sha256:
            part.unlink()
            raise DataError(f"{url}: expected a file with SHA-256 {sha256}, found {found}; {_by_hand(target)}")
        part.replace(target)
    except OSError as error:
        raise DataError(f"cannot save {target} ({error}); choose another data folder") from error


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch_with_retries(url: str, part: Path, target: Path) -> None:
    for attempt, pause in enumerate((0.0, *PAUSES)):
        time.sleep(pause)
        try:
            return _fetch(url, part)
        except NETWORK_ERRORS as error:
            if _is_final(error) or attempt == len(PAUSES):
                raise DataError(f"could not download {url} ({error}); {_by_hand(target)}") from error


def _is_final(error: Exception) -> bool:
    """Return whether the server refused the request, so that retrying is useless."""
    return isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code != TOO_MANY_REQUESTS


def _fetch(url: str, part: Path) -> None:
    """Append the missing bytes to the part file, in one attempt."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-", "User-Agent": "spcl"})
    # A new opener, because the one that urlopen() keeps ignores later changes of the proxy settings.
    try:
        with urllib.request.build_opener().open(request, timeout=TIMEOUT_SECONDS) as response:
            resumed = response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
            _append(response, part, have if resumed else 0)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != RANGE_NOT_SATISFIABLE or have == 0:
            raise


def _append(response: http.client.HTTPResponse, part: Path, have: int) -> None:
    total = have + int(response.headers["Content-Length"]) if "Content-Length" in response.headers else None
    with download_progress() as progress, part.open("ab" if have else "wb") as file:
        bar = progress.add_task(part.stem, completed=have, total=total)
        while chunk := response.read(CHUNK):
            file.write(chunk)
            progress.advance(bar, len(chunk))
    size = part.stat().st_size
    if total is not None and size < total:
        raise ConnectionError(f"connection closed after {size} of {total} bytes")


def _by_hand(target: Path) -> str:
    return f"download that file on another machine and save it as {target}"
