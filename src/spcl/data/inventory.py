"""What data is there, whether it is sound, and how to get more."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from spcl.data.catalogue import DATA_NAMES, EMBEDDED, PUBLISHED, how_to_get, known, load_data, locate
from spcl.data.download import download, file_sha256
from spcl.data.image_data import ImageData
from spcl.data.paths import cache_dir, download_dir
from spcl.errors import DataError

__all__ = ["DatasetStatus", "check_data", "get_data", "list_data"]


@dataclass(frozen=True)
class DatasetStatus:
    """What is there of one data set.

    `path` is None when there is nothing, and `problem` then says how to get it; otherwise it says what is wrong.
    `original` tells whether the archive has the publisher's checksum, None where none is published or none was asked.
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
    """What there is of every known data set; decodes what was not decoded before."""
    return [_stock(name, data_dir, verify=False) for name in DATA_NAMES]


def check_data(names: Iterable[str] = DATA_NAMES, data_dir: str | Path | None = None) -> list[DatasetStatus]:
    """Verify data sets: compare archives with the publisher's checksum, decode everything afresh, renew the cache."""
    return [_stock(name, data_dir, verify=True) for name in names]


def get_data(name: str, data_dir: str | Path | None = None) -> Path:
    """Download a set's archive, unless it is already there, and return its path.

    >>> get_data("ps-glyphs")
    Traceback (most recent call last):
    spcl.errors.DataError: ps-glyphs is drawn on this computer; there is nothing to download
    """
    if name == EMBEDDED:
        raise DataError(f"{EMBEDDED} is drawn on this computer; there is nothing to download")
    archive = known(name).archive
    published = PUBLISHED[Path(archive).name]
    target = download_dir(data_dir) / archive
    if not target.exists():
        download(published.url, target, published.sha256)
    elif not _is_original(target):
        raise DataError(f"{target} is not the publisher's file (its SHA-256 differs); move it away and try again")
    return target


def _stock(name: str, data_dir: str | Path | None, verify: bool) -> DatasetStatus:
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
    place = locate(name, data_dir)
    return None if place is None else place[0]


def _is_complete(name: str, data: ImageData) -> bool:
    return name == EMBEDDED or (len(data.train_x), len(data.test_x)) == (known(name).train, known(name).test)


def _is_original(path: Path) -> bool | None:
    """Whether the file has the publisher's checksum; None for folders and files that no publisher offers."""
    if not path.is_file() or path.name not in PUBLISHED:
        return None
    return file_sha256(path) == PUBLISHED[path.name].sha256
