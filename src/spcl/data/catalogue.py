"""The benchmarks: their publishers' files, readers and presets, and their status on this machine."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from spcl._util.registry import Named, Registry
from spcl._util.validation import setting
from spcl.batches import Inputs, leaves
from spcl.data.cache import cache_dir, cached, data_dirs, download, download_dir, file_sha256
from spcl.data.glyphs import load_glyphs
from spcl.data.readers import (
    read_cifar10_binary,
    read_cifar10_python,
    read_cifar100_binary,
    read_cifar100_python,
    read_emnist,
    read_tiny_imagenet,
)
from spcl.data.reading import Archive, fingerprint, open_archive
from spcl.data.samples import TOKEN_TYPES, ImageData, SourceData
from spcl.errors import DataError, MissingDataError, did_you_mean
from spcl.options import CHANGEABLE, LAYOUT, LEARNER

EMBEDDED = "ps-glyphs"
CIFAR_SITE = "https://www.cs.toronto.edu/~kriz"
EMNIST_MARKER = "emnist-byclass-train-images-idx3-ubyte.gz"


# -- published data sets


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


# -- the data sets on this machine


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
    """Return the status of every data set; decodes the data sets that are not cached."""
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


# -- presets

MIN_STEPS = 20
MIN_BATCH = 4
MAX_BATCH = 128
MIN_SIDE_OF_CNN = 18
MEMORY_OF_CLASS = 10
CLASSES_OF_OTHERS = 5
"""Number of classes that a source without classes counts for in memory."""


class Preset(BaseModel):
    """Network, batches and memory; the defaults depend on the benchmark.

    Backbones and memory budgets are the paper's (§5.2); learning rates and batch sizes are taken from its code and
    protocols. :data:`PRESET_SETTINGS` holds what presets such as ``plus`` set in addition.

    >>> PRESETS["ps-cifar100"].tasks
    10
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tasks: int = setting(5, "number of tasks that the classes are split into", LAYOUT, ge=1)
    batch_size: int = setting(128, "samples of a task per step", LAYOUT, ge=1)
    memory_budget: int = setting(0, "samples kept for replay in all; 0 disables replay", LEARNER, CHANGEABLE, ge=0)
    backbone: Named = setting("cnn", "shared network: its name, and its own options", LEARNER)
    learning_rate: float = setting(1e-3, "learning rate of the optimiser", LEARNER, CHANGEABLE, gt=0.0)
    batch_norm_momentum: float = setting(
        0.1, "momentum of batch-norm's running averages, in PyTorch's convention", LEARNER, gt=0.0, le=1.0
    )


PRESETS: dict[str, Preset] = {
    "ps-glyphs": Preset(tasks=5, memory_budget=5 * 62, backbone="mlp", learning_rate=3e-3),
    "ps-emnist": Preset(tasks=5, memory_budget=5 * 62, backbone="mlp", learning_rate=3e-3),
    "ps-cifar100": Preset(tasks=10, memory_budget=30 * 100, backbone="resnet18", learning_rate=4e-4),
    "ps-tiny-imagenet": Preset(
        tasks=10, batch_size=32, memory_budget=15 * 200, backbone="resnet18", learning_rate=5e-4
    ),
    "toy-cifar10": Preset(tasks=2, batch_size=32, memory_budget=30 * 10, backbone="cnn", learning_rate=2e-3),
}
"""The presets of the known benchmarks."""

PRESET_SETTINGS: Registry[Callable[[Mapping[str, Any]], dict[str, Any]]] = Registry("preset", positional=1)
"""By name: a function of the settings so far to what the preset adds to the benchmark's; the user's settings win."""


@PRESET_SETTINGS.register("default")
def _default(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Add nothing to the benchmark's preset."""
    return {}


def preset_for(benchmark: str, data: ImageData | SourceData | None = None, *, tasks: int | None = None) -> Preset:
    """Return the preset of a known benchmark, or one for custom data that is split into ``tasks`` tasks.

    Custom data gets at most five tasks of at least two classes unless `tasks` is given, a memory of ten samples per
    class, and a batch size at which a task of average size has at least twenty steps, from 4 to 128. The tasks of data
    of several sources are the sources; the smallest source decides the batch size, and a source without classes adds
    fifty samples to the memory.

    >>> preset_for("ps-emnist").memory_budget
    310
    """
    if benchmark in PRESETS or data is None:
        return PRESETS[benchmark]
    if isinstance(data, SourceData):
        return _preset_of_sources(data)
    tasks = tasks or max(1, min(5, data.classes // 2))
    return Preset(
        tasks=tasks,
        batch_size=_fitting_batch_size(len(data.train_y) // tasks),
        memory_budget=MEMORY_OF_CLASS * data.classes,
        backbone=_fitting_backbone(data.train_x),
    )


def _preset_of_sources(data: SourceData) -> Preset:
    return Preset(
        tasks=len(data.sources),
        batch_size=_fitting_batch_size(min(len(source.train_y) for source in data.sources)),
        memory_budget=sum(MEMORY_OF_CLASS * (source.classes or CLASSES_OF_OTHERS) for source in data.sources),
        backbone=_fitting_backbone(data.sources[0].train_x),
    )


def _fitting_backbone(x: Inputs) -> str:
    """Return the backbone that suits samples: tokens, images large enough for convolutions, or other features."""
    first = next(iter(leaves(x).values()))
    if first.dtype in TOKEN_TYPES:
        return "text"
    return "cnn" if first.ndim == 4 and min(first.shape[2:]) >= MIN_SIDE_OF_CNN else "mlp"


def _fitting_batch_size(samples: int) -> int:
    """Return the largest power of two that divides ``samples`` into enough steps, within the bounds of a batch.

    >>> [_fitting_batch_size(samples) for samples in (5, 80, 400, 2559, 2560, 100_000)]
    [4, 4, 16, 64, 128, 128]
    """
    return min(MAX_BATCH, max(MIN_BATCH, 1 << (samples // MIN_STEPS).bit_length() >> 1))
