"""Status, verification and download of data sets."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from spcl.data.catalogue import DATA_NAMES, EMBEDDED, PUBLISHED, find_data_set, how_to_get, load_data, locate
from spcl.data.download import download, file_sha256
from spcl.data.image_data import ImageData
from spcl.data.paths import cache_dir, download_dir
from spcl.errors import DataError

__all__ = ["DatasetStatus", "check_data", "get_data", "list_data"]


@dataclass(frozen=True)
class DatasetStatus:
    """The status of one data set on this machine.

    Attributes:
        name: The data set's name.
        path: Its folder or archive, None if it is missing.
        train: Number of training images.
        test: Number of test images.
        classes: Number of classes.
        complete: Whether the numbers of images are those published.
        original: Whether the archive has the publisher's checksum; None if not compared or none is published.
        problem: How to get a missing data set, or what is wrong with it; None if it can be used.
    """

    name: str
    path: Path | None
    train: int = 0
    test: int = 0
    classes: int = 0
    complete: bool = False
    original: bool | None = None
    problem: str | None = None


def list_data(data_dir: str | Path | None = None) -> list[DatasetStatus]:
    """Return the status of every data set; decodes those that are not cached."""
    return [_status(name, data_dir, verify=False) for name in DATA_NAMES]


def check_data(names: Iterable[str] = DATA_NAMES, data_dir: str | Path | None = None) -> list[DatasetStatus]:
    """Verify data sets: compare archives with the publisher's checksum, and decode and cache them again."""
    return [_status(name, data_dir, verify=True) for name in names]


def get_data(name: str, data_dir: str | Path | None = None) -> Path:
    """Download a set's archive unless it exists, and return its path.

    >>> get_data("ps-glyphs")
    Traceback (most recent call last):
    spcl.errors.DataError: ps-glyphs is generated on this machine; there is nothing to download
    """
    if name == EMBEDDED:
        raise DataError(f"{EMBEDDED} is generated on this machine; there is nothing to download")
    archive = find_data_set(name).archive
    published = PUBLISHED[Path(archive).name]
    target = download_dir(data_dir) / archive
    if not target.exists():
        download(published.url, target, published.sha256)
    elif not _is_original(target):
        raise DataError(f"{target} is not the publisher's file (its SHA-256 differs); move it away and try again")
    return target


def _status(name: str, data_dir: str | Path | None, verify: bool) -> DatasetStatus:
    path = _path(name, data_dir)
    if path is None:
        return DatasetStatus(name, None, problem=how_to_get(name, data_dir))
    original = _is_original(path) if verify else None
    try:
        data = load_data(name, data_dir, renew=verify)
    except DataError as error:
        return DatasetStatus(name, path, original=original, problem=str(error))
    complete = _is_complete(name, data)
    altered = (
        "as many images as published, but the archive's checksum differs" if complete and original is False else None
    )
    return DatasetStatus(name, path, len(data.train_x), len(data.test_x), data.classes, complete, original, altered)


def _path(name: str, data_dir: str | Path | None) -> Path | None:
    if name == EMBEDDED:
        return cache_dir()
    located = locate(name, data_dir)
    return None if located is None else located[0]


def _is_complete(name: str, data: ImageData) -> bool:
    if name == EMBEDDED:
        return True
    published = find_data_set(name)
    return (len(data.train_x), len(data.test_x)) == (published.train, published.test)


def _is_original(path: Path) -> bool | None:
    """Return whether the file has the publisher's checksum; None for folders and files without a published one."""
    if not path.is_file() or path.name not in PUBLISHED:
        return None
    return file_sha256(path) == PUBLISHED[path.name].sha256
