"""The catalogue of published data sets: their files, readers and download addresses."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spcl.data.archives import Archive, fingerprint, open_archive
from spcl.data.cache import cached
from spcl.data.cifar_binary import read_cifar10_binary, read_cifar100_binary
from spcl.data.cifar_python import read_cifar10_python, read_cifar100_python
from spcl.data.emnist import read_emnist
from spcl.data.glyphs import load_glyphs
from spcl.data.image_data import ImageData
from spcl.data.paths import data_dirs, download_dir
from spcl.data.tiny_imagenet import read_tiny_imagenet
from spcl.errors import DataError, MissingDataError
from spcl.suggestions import did_you_mean

__all__ = [
    "DATA_NAMES",
    "DATA_SETS",
    "EMBEDDED",
    "PUBLISHED",
    "DataSet",
    "Layout",
    "Published",
    "find_data_set",
    "how_to_get",
    "load_data",
    "locate",
]

EMBEDDED = "ps-glyphs"
CIFAR_SITE = "https://www.cs.toronto.edu/~kriz"
EMNIST_MARKER = "emnist-byclass-train-images-idx3-ubyte.gz"


@dataclass(frozen=True)
class Published:
    """The address and checksum of a publisher's file."""

    url: str
    sha256: str


PUBLISHED = {
    "gzip.zip": Published(
        "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
        "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
    ),
    "cifar-100-binary.tar.gz": Published(
        f"{CIFAR_SITE}/cifar-100-binary.tar.gz",
        "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    ),
    "cifar-100-python.tar.gz": Published(
        f"{CIFAR_SITE}/cifar-100-python.tar.gz",
        "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
    ),
    "cifar-10-binary.tar.gz": Published(
        f"{CIFAR_SITE}/cifar-10-binary.tar.gz",
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ),
    "cifar-10-python.tar.gz": Published(
        f"{CIFAR_SITE}/cifar-10-python.tar.gz",
        "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
    ),
    "tiny-imagenet-200.zip": Published(
        "https://cs231n.stanford.edu/tiny-imagenet-200.zip",
        "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
    ),
}
"""The publishers' archives by file name."""


@dataclass(frozen=True)
class Layout:
    """One arrangement of a data set's files in a data folder.

    Attributes:
        path: An archive, or a folder recognised by its file `marker`.
        read: The reader of the files.
        top: The folder inside the archive.
        marker: A file that the folder must contain.
        pattern: Selects the set's files in a folder that may hold others.
    """

    path: str
    read: Callable[[Archive, str], ImageData]
    top: str = ""
    marker: str = ""
    pattern: str = "**/*"

    def is_in(self, folder: Path) -> bool:
        """Return whether the data folder holds the set in this layout."""
        return (folder / self.path / self.marker).is_file()


@dataclass(frozen=True)
class DataSet:
    """A published data set: its layouts, the archive to download, and the number of images when complete."""

    title: str
    train: int
    test: int
    archive: str
    layouts: tuple[Layout, ...]


DATA_SETS = {
    "ps-emnist": DataSet(
        "EMNIST ByClass",
        697_932,
        116_323,
        "emnist/gzip.zip",
        (
            *(
                Layout(path, read_emnist, marker=EMNIST_MARKER, pattern="emnist-byclass-*.gz")
                for path in (".", "emnist", "gzip", "emnist/gzip")
            ),
            *(Layout(path, read_emnist, top="gzip") for path in ("gzip.zip", "emnist/gzip.zip")),
        ),
    ),
    "ps-cifar100": DataSet(
        "CIFAR-100",
        50_000,
        10_000,
        "cifar-100-binary.tar.gz",
        (
            Layout("cifar-100-binary", read_cifar100_binary, marker="train.bin"),
            Layout("cifar-100-binary.tar.gz", read_cifar100_binary, top="cifar-100-binary"),
            Layout("cifar-100-python", read_cifar100_python, marker="train"),
            Layout("cifar-100-python.tar.gz", read_cifar100_python, top="cifar-100-python"),
        ),
    ),
    "toy-cifar10": DataSet(
        "CIFAR-10",
        50_000,
        10_000,
        "cifar-10-binary.tar.gz",
        (
            Layout("cifar-10-batches-bin", read_cifar10_binary, marker="test_batch.bin"),
            Layout("cifar-10-binary.tar.gz", read_cifar10_binary, top="cifar-10-batches-bin"),
            Layout("cifar-10-batches-py", read_cifar10_python, marker="test_batch"),
            Layout("cifar-10-python.tar.gz", read_cifar10_python, top="cifar-10-batches-py"),
        ),
    ),
    "ps-tiny-imagenet": DataSet(
        "Tiny-ImageNet-200",
        100_000,
        10_000,
        "tiny-imagenet-200.zip",
        (
            Layout("tiny-imagenet-200", read_tiny_imagenet, marker="wnids.txt"),
            Layout("tiny-imagenet-200.zip", read_tiny_imagenet, top="tiny-imagenet-200"),
        ),
    ),
}
"""The published data sets by name."""

DATA_NAMES = (EMBEDDED, *DATA_SETS)
"""All names that `load_data` accepts."""


def load_data(name: str, data_dir: str | Path | None = None, *, renew: bool = False) -> ImageData:
    """Load a data set by name; its files are searched in `data_dir`, ``$SPCL_DATA`` and the cache folder.

    The first call decodes the publisher's files (or generates ``ps-glyphs``), later ones open the cached result as a
    memory map; `renew` decodes again.

    >>> load_data("ps-glyph")
    Traceback (most recent call last):
    spcl.errors.DataError: unknown data set 'ps-glyph'; did you mean 'ps-glyphs'?
    """
    if name == EMBEDDED:
        return load_glyphs(name, renew=renew)
    data_set = find_data_set(name)
    located = locate(name, data_dir)
    if located is None:
        folders = ", ".join(str(folder) for folder in data_dirs(data_dir))
        raise MissingDataError(f"{data_set.title} is in none of {folders}; {how_to_get(name, data_dir)}")
    path, layout = located
    identity = [layout.path, fingerprint(path, layout.pattern)]
    return cached(
        name, identity, lambda: layout.read(open_archive(path, layout.top, layout.pattern), name), renew=renew
    )


def find_data_set(name: str) -> DataSet:
    """Return the published data set of that name."""
    if name in DATA_SETS:
        return DATA_SETS[name]
    raise DataError(f"unknown data set {name!r}; {did_you_mean(name, DATA_NAMES)}")


def locate(name: str, data_dir: str | Path | None = None) -> tuple[Path, Layout] | None:
    """Return the path and layout of the set's files in the first folder that has them, or None."""
    for folder in data_dirs(data_dir):
        for layout in find_data_set(name).layouts:
            if layout.is_in(folder):
                return folder / layout.path, layout
    return None


def how_to_get(name: str, data_dir: str | Path | None = None) -> str:
    """Return instructions for getting the set's files, with and without network."""
    archive = find_data_set(name).archive
    published = PUBLISHED[Path(archive).name]
    target = download_dir(data_dir) / archive
    return f"run `spcl data get {name}`, or download {published.url} on another machine and save it as {target}"
