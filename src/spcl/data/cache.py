"""What lies on this machine: folders of data files, downloads, the cache of decoded data sets, progress bars."""

import hashlib
import http.client
import json
import os
import re
import shutil
import ssl
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from spcl._util.files import atomic_write, read_json, write_text
from spcl.data.samples import ImageData
from spcl.errors import DataError

# -- folders of data files and of the cache


def cache_dir() -> Path:
    """Return the cache folder: ``$SPCL_CACHE``, or ``spcl`` in ``$XDG_CACHE_HOME``.

    >>> from unittest.mock import patch
    >>> with patch.dict(os.environ, {"SPCL_CACHE": "/scratch/spcl"}):
    ...     print(cache_dir())
    /scratch/spcl
    """
    if chosen := os.environ.get("SPCL_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "spcl"


def data_dirs(data_dir: str | Path | None = None) -> list[Path]:
    """Return the folders searched for data files, in order: `data_dir`, ``$SPCL_DATA``, the cache.

    A configured folder that does not exist is an error, so that a misspelt path is not ignored silently.
    """
    configured = _configured(data_dir)
    for origin, folder in configured:
        if not folder.is_dir():
            raise DataError(f"{origin}: {folder} is not a folder; create it or name the one that holds the data files")
    return [*dict.fromkeys([folder for _, folder in configured] + [cache_dir()])]


def download_dir(data_dir: str | Path | None = None) -> Path:
    """Return the folder for downloads: the first of `data_dirs`, which need not exist yet."""
    return [*[folder for _, folder in _configured(data_dir)], cache_dir()][0]


def _configured(data_dir: str | Path | None) -> list[tuple[str, Path]]:
    folders = [("data folder", data_dir), ("SPCL_DATA", os.environ.get("SPCL_DATA"))]
    return [(origin, Path(folder).expanduser()) for origin, folder in folders if folder]


# -- downloads, which resume, retry and verify a checksum

PAUSES = (1.0, 2.0, 4.0)
"""Seconds to wait before each retry."""
TIMEOUT_SECONDS = 30
CHUNK = 1 << 20
RANGE_NOT_SATISFIABLE, TOO_MANY_REQUESTS = 416, 429
NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError)


def download(url: str, target: Path, sha256: str | None) -> None:
    """Download `url` to `target`, which is created only when the file is complete and its checksum, if known, correct.

    Until then the bytes are in ``<target>.part``; an interrupted download resumes there, in this call or a later one.
    """
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _fetch_with_retries(url, part, target)
        if sha256 is not None and (found := file_sha256(part)) != sha256:
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


# -- decoded data sets, opened as memory maps

FORMAT = 1
ARRAYS = ("train_x", "train_y", "test_x", "test_y")


def cached(name: str, identity: object, make: Callable[[], ImageData], *, renew: bool = False) -> ImageData:
    """Return the data set cached for this `identity` (any JSON value), or cache and return the one from `make`.

    A cache that is missing or damaged is written again, as with `renew`. Several processes may do so concurrently:
    they write the same bytes, and every file is replaced atomically. Where the cache cannot be written, a
    :class:`RuntimeWarning` is given and the data set returned uncached.
    """
    safe_name = re.sub(r"[^\w.-]", "_", name)
    folder = cache_dir() / "decoded" / f"{safe_name}-{_digest(identity)}"
    if not renew and (data := _open(folder, name)) is not None:
        return data
    made = make()
    try:
        _write(folder, made)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        warnings.warn(
            f"cannot write the cache {folder} ({error.strerror or error}), so {name} will be decoded again next time; "
            "set SPCL_CACHE to a writable folder with enough space",
            RuntimeWarning,
            stacklevel=2,
        )
        return made
    opened = _open(folder, name)
    return made if opened is None else opened


def _digest(identity: object) -> str:
    return sha256(json.dumps([FORMAT, identity]).encode()).hexdigest()[:16]


def _open(folder: Path, name: str) -> ImageData | None:
    try:
        class_names = read_json(folder / "class_names.json")
        # Copy-on-write maps: pages are read when used, and writing to a tensor neither changes the file nor crashes.
        arrays = {array: np.load(folder / f"{array}.npy", mmap_mode="c") for array in ARRAYS}
        tensors = {array: torch.from_numpy(values) for array, values in arrays.items()}
        return ImageData(name, **tensors, class_names=tuple(class_names))
    except (OSError, EOFError, ValueError, TypeError):  # missing, truncated or altered; DataError is a ValueError
        return None


def _write(folder: Path, data: ImageData) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for array in ARRAYS:
        with atomic_write(folder / f"{array}.npy") as file:
            np.save(file, getattr(data, array).numpy())
    write_text(folder / "class_names.json", json.dumps(data.class_names))


# -- progress bars on the terminal

T = TypeVar("T")
DELAY_SECONDS = 2.0


def track(items: Iterable[T], description: str, total: int) -> Iterator[T]:
    """Yield the items and show a progress bar on the terminal once they have taken two seconds.

    >>> list(track("abc", "reading", 3))
    ['a', 'b', 'c']
    """
    console = Console(stderr=True)
    progress = Progress(console=console, transient=True, disable=not console.is_terminal)
    bar = progress.add_task(description, total=total)
    started = time.monotonic()
    try:
        for item in items:
            yield item
            progress.advance(bar)
            if not progress.live.is_started and time.monotonic() - started > DELAY_SECONDS:
                progress.start()
    finally:
        progress.stop()


def download_progress() -> Progress:
    """Return a progress display with bytes and speed, which shows nothing unless on a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)
