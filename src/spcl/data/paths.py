"""Folders of data files and of the cache."""

import os
from pathlib import Path

from spcl.errors import DataError

__all__ = ["cache_dir", "data_dirs", "download_dir"]


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
