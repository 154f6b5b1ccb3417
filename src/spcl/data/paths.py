"""Where data files and the decoded cache live."""

import os
from pathlib import Path

from spcl.errors import DataError

__all__ = ["cache_dir", "data_dirs", "download_dir"]


def cache_dir() -> Path:
    """The folder for everything that can be made again: ``$SPCL_CACHE``, or ``spcl`` in ``$XDG_CACHE_HOME``.

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
    """The folders searched for data files, in order: `data_dir`, ``$SPCL_DATA``, the cache.

    A folder that was asked for but does not exist is an error, so that a misspelt path is not silently passed over.
    """
    asked = _asked(data_dir)
    for origin, folder in asked:
        if not folder.is_dir():
            raise DataError(f"{origin}: {folder} is not a folder; create it or name the one that holds the data files")
    return [*dict.fromkeys([folder for _, folder in asked] + [cache_dir()])]


def download_dir(data_dir: str | Path | None = None) -> Path:
    """The folder that downloads go to: the first of `data_dirs`, which need not exist yet."""
    return [*[folder for _, folder in _asked(data_dir)], cache_dir()][0]


def _asked(data_dir: str | Path | None) -> list[tuple[str, Path]]:
    asked = [("data folder", data_dir), ("SPCL_DATA", os.environ.get("SPCL_DATA"))]
    return [(origin, Path(folder).expanduser()) for origin, folder in asked if folder]
