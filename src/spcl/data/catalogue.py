"""The benchmarks: their publishers' files, readers and presets, and their status on this machine."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from spcl._util.registry import Named, Registry
from spcl._util.validation import setting
from spcl.batches import Inputs, leaves
from spcl.data.beijing_air import read_beijing_air
from spcl.data.cache import cache_dir, cached, data_dirs, download, download_dir, file_sha256
from spcl.data.clinc150 import read_clinc150
from spcl.data.glyphs import load_glyphs
from spcl.data.readers import (
    read_cifar10_binary,
    read_cifar10_python,
    read_cifar100_binary,
    read_cifar100_python,
    read_emnist,
    read_tiny_imagenet,
)
from spcl.data.reading import Archive, file_stamps, open_archive
from spcl.data.samples import DATA, TOKEN_TYPES, ImageData, SourceData
from spcl.data.wisdm import read_wisdm
from spcl.errors import DataError, MissingDataError, did_you_mean
from spcl.options import CHANGEABLE, LAYOUT, LEARNER

EMBEDDED = "ps-glyphs"
CIFAR_SITE = "https://www.cs.toronto.edu/~kriz"
UCI_SITE = "https://archive.ics.uci.edu/ml/machine-learning-databases"
CLINC_SITE = "https://raw.githubusercontent.com/clinc/oos-eval/828f8093932c8fe6ca7936c3d2e52903b1c523de/data"
EMNIST_MARKER = "emnist-byclass-train-images-idx3-ubyte.gz"


# -- published data sets


@dataclass(frozen=True)
class Download:
    """The address and checksum of a publisher's file; None where no checksum is known."""

    url: str
    sha256: str | None


DOWNLOADS = {
    "gzip.zip": Download(
        "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
        "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
    ),
    "cifar-100-binary.tar.gz": Download(
        f"{CIFAR_SITE}/cifar-100-binary.tar.gz",
        "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    ),
    "cifar-100-python.tar.gz": Download(
        f"{CIFAR_SITE}/cifar-100-python.tar.gz",
        "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
    ),
    "cifar-10-binary.tar.gz": Download(
        f"{CIFAR_SITE}/cifar-10-binary.tar.gz",
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ),
    "cifar-10-python.tar.gz": Download(
        f"{CIFAR_SITE}/cifar-10-python.tar.gz",
        "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
    ),
    "tiny-imagenet-200.zip": Download(
        "https://cs231n.stanford.edu/tiny-imagenet-200.zip",
        "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
    ),
    "wisdm-dataset.zip": Download(f"{UCI_SITE}/00507/wisdm-dataset.zip", None),
    "PRSA2017_Data_20130301-20170228.zip": Download(f"{UCI_SITE}/00501/PRSA2017_Data_20130301-20170228.zip", None),
    "data_full.json": Download(
        f"{CLINC_SITE}/data_full.json",
        "36923c3705a59e08fe9c3883d8bc2dd966ef93e22cb78ac41171782a698d56e0",
    ),
    "domains.json": Download(
        f"{CLINC_SITE}/domains.json",
        "b947b579d3b8e74b06f93b01083d8efaff2888b43a3e362533bd88a6e1211b3a",
    ),
}
"""The publishers' files by name."""

Data = TypeVar("Data", ImageData, SourceData)


@dataclass(frozen=True)
class Layout(Generic[Data]):
    """One arrangement of a data set's files in a data folder.

    Attributes:
        path: An archive, or a folder recognised by its file `marker`.
        read: The reader of the files.
        top: The folder inside the archive.
        marker: A file that the folder must contain; empty for a folder that must contain any file of the pattern.
        pattern: Selects the set's files in a folder that may hold others.
    """

    path: str
    read: Callable[[Archive, str], Data]
    top: str = ""
    marker: str = ""
    pattern: str = "**/*"

    def is_in(self, folder: Path) -> bool:
        """Return whether the data folder holds the set in this layout."""
        path = folder / self.path
        return (path / self.marker).is_file() or (not self.marker and any(path.glob(self.pattern)))


@dataclass(frozen=True)
class DataSet(Generic[Data]):
    """A published data set.

    Attributes:
        title: Its name.
        train: The number of training images when complete; 0 for a set of several sources.
        test: Likewise the number of test images.
        files: The files to download.
        layouts: The arrangements of its files that can be read.
        sources: The number of sources when complete; 0 for a set of images.
        terms: Its licence, and what to cite.
    """

    title: str
    train: int
    test: int
    files: tuple[str, ...]
    layouts: tuple[Layout[Data], ...]
    sources: int = 0
    terms: str = ""


DATA_SETS: dict[str, DataSet[ImageData]] = {
    "ps-emnist": DataSet(
        "EMNIST ByClass",
        697_932,
        116_323,
        ("emnist/gzip.zip",),
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
        ("cifar-100-binary.tar.gz",),
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
        ("cifar-10-binary.tar.gz",),
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
        ("tiny-imagenet-200.zip",),
        (
            Layout("tiny-imagenet-200", read_tiny_imagenet, marker="wnids.txt"),
            Layout("tiny-imagenet-200.zip", read_tiny_imagenet, top="tiny-imagenet-200"),
        ),
    ),
}
"""The published data sets of images by name."""

SOURCE_SETS: dict[str, DataSet[SourceData]] = {
    "wisdm": DataSet(
        "WISDM (UCI 507)",
        0,
        0,
        ("wisdm-dataset.zip",),
        (
            Layout("wisdm-dataset", read_wisdm, pattern="**/data_*_*_*.*"),
            Layout("wisdm-dataset.zip", read_wisdm, top="wisdm-dataset"),
        ),
        sources=51,
        terms="CC BY 4.0; cite Weiss, Yoneda, Hayajneh: Smartphone and Smartwatch-Based Biometrics Using Activities of "
        "Daily Living, IEEE Access 7, 2019",
    ),
    "beijing-air": DataSet(
        "Beijing multi-site air quality (UCI 501)",
        0,
        0,
        ("PRSA2017_Data_20130301-20170228.zip",),
        (
            Layout("PRSA_Data_20130301-20170228", read_beijing_air, pattern="PRSA_Data_*.csv"),
            Layout("PRSA2017_Data_20130301-20170228.zip", read_beijing_air, top="PRSA_Data_20130301-20170228"),
        ),
        sources=12,
        terms="CC BY 4.0; cite Zhang, Guo, Dong, He, Xu, Chen: Cautionary tales on air-quality improvement in Beijing, "
        "Proceedings of the Royal Society A 473, 2017",
    ),
    "clinc150": DataSet(
        "CLINC150",
        0,
        0,
        ("clinc150/data_full.json", "clinc150/domains.json"),
        (Layout("clinc150", read_clinc150, marker="data_full.json", pattern="*.json"),),
        sources=10,
        terms="CC BY 3.0; cite Larson et al.: An Evaluation Dataset for Intent Classification and Out-of-Scope "
        "Prediction, EMNLP-IJCNLP 2019",
    ),
}
"""The published data sets of several sources by name."""

DATA_NAMES = (EMBEDDED, *DATA_SETS, *SOURCE_SETS)
"""The names of our data sets."""


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
    if name in SOURCE_SETS:
        raise DataError(f"{name} has several sources; load it with load_{name.replace('-', '_')}")
    layout, path = _located(name, _find(name, DATA_SETS), data_dir)
    identity = [layout.path, file_stamps(path, layout.pattern)]
    return cached(
        name, identity, lambda: layout.read(open_archive(path, layout.top, layout.pattern), name), renew=renew
    )


@DATA.register("wisdm")
def load_wisdm(
    devices: Sequence[str] = ("watch",),
    sensors: Sequence[str] = ("accel",),
    raw: bool = False,
    unseen: float = 0.28,
    seed: int = 0,
    data_dir: str | Path | None = None,
) -> SourceData:
    """Load WISDM: persons who wear a phone and a watch, and one task, which of 18 activities they are doing.

    A source is what one sensor of one device recorded of one person, such as ``watch-accel-1600``. Its samples are
    windows of ten seconds; of every activity the last quarter is the test, because neighbouring windows are alike.
    Repeated windows are left out, also the published files of the phone's accelerometer that repeat another person's.

    Args:
        devices: ``"phone"``, ``"watch"`` or both.
        sensors: ``"accel"``, ``"gyro"`` or both.
        raw: 200 samples × 3 axes instead of the publisher's 91 features.
        unseen: The fraction of persons that are held out, never trained.
        seed: Chooses these persons.
        data_dir: A folder with ``wisdm-dataset`` or ``wisdm-dataset.zip``.
    """
    read = partial(read_wisdm, devices=devices, sensors=sensors, raw=raw, unseen=unseen, seed=seed)
    return _load_sources("wisdm", read, data_dir)


@DATA.register("beijing-air")
def load_beijing_air(every: int = 1, data_dir: str | Path | None = None) -> SourceData:
    """Load air quality of stations in Beijing and one task, to forecast PM2.5 six hours ahead.

    A sample is the last 24 hours × 15 columns: six pollutants and the weather in the publisher's units, and the time of
    the day. Targets are in units of 100 µg/m³. Missing values are the last ones known, but after six hours without
    PM2.5 a station counts as out, and has no samples: a gap in its times, which are hours since March 1, 2013. The last
    fifth of the clock is the test.

    Args:
        every: Hours from a forecast to the next.
        data_dir: A folder with ``PRSA_Data_20130301-20170228`` or ``PRSA2017_Data_20130301-20170228.zip``.
    """
    return _load_sources("beijing-air", partial(read_beijing_air, every=every), data_dir)


@DATA.register("clinc150")
def load_clinc150(vocabulary: int = 8192, length: int = 24, data_dir: str | Path | None = None) -> SourceData:
    """Load CLINC150: what people ask an assistant, of ten domains, each a task of 15 intents.

    A sample is a token for each of the first words, a checksum of the word, so that words need not be known beforehand;
    zeros fill up. The published queries for validation and those out of scope are not used.

    Args:
        vocabulary: One more than the largest token.
        length: Number of tokens.
        data_dir: A folder with ``clinc150/data_full.json`` and ``clinc150/domains.json``.
    """
    return _load_sources("clinc150", partial(read_clinc150, vocabulary=vocabulary, length=length), data_dir)


def _load_sources(name: str, read: Callable[[Archive, str], SourceData], data_dir: str | Path | None) -> SourceData:
    layout, path = _located(name, SOURCE_SETS[name], data_dir)
    return read(open_archive(path, layout.top, layout.pattern), name)


def find_data_set(name: str) -> DataSet[ImageData] | DataSet[SourceData]:
    """Return the published data set of that name."""
    return SOURCE_SETS[name] if name in SOURCE_SETS else _find(name, DATA_SETS)


def _find(name: str, sets: Mapping[str, DataSet[ImageData]]) -> DataSet[ImageData]:
    if name in sets:
        return sets[name]
    raise DataError(f"unknown data set {name!r}; {did_you_mean(name, DATA_NAMES)}")


def locate(name: str, data_dir: str | Path | None = None) -> Path | None:
    """Return the path of the set's files in the first folder that has them, or None."""
    folders = data_dirs(data_dir)
    if name in SOURCE_SETS:
        found = _layout_in(SOURCE_SETS[name], folders)
        return None if found is None else found[1]
    images = _layout_in(_find(name, DATA_SETS), folders)
    return None if images is None else images[1]


def _located(name: str, data_set: DataSet[Data], data_dir: str | Path | None) -> tuple[Layout[Data], Path]:
    """Return the layout and path of the set's files, or raise an error that tells how to get them."""
    folders = data_dirs(data_dir)
    found = _layout_in(data_set, folders)
    if found is None:
        searched = ", ".join(map(str, folders))
        raise MissingDataError(f"{data_set.title} is in none of {searched}; {how_to_get(name, data_dir)}")
    return found


def _layout_in(data_set: DataSet[Data], folders: Iterable[Path]) -> tuple[Layout[Data], Path] | None:
    for folder in folders:
        for layout in data_set.layouts:
            if layout.is_in(folder):
                return layout, folder / layout.path
    return None


def addresses(name: str) -> list[str]:
    """Return the addresses of the set's files."""
    return [DOWNLOADS[Path(file).name].url for file in find_data_set(name).files]


def how_to_get(name: str, data_dir: str | Path | None = None) -> str:
    """Return instructions for getting the set's files, with and without network."""
    targets = (download_dir(data_dir) / file for file in find_data_set(name).files)
    saved = (
        f"{address} on another machine and save it as {target}"
        for address, target in zip(addresses(name), targets, strict=True)
    )
    return f"run `spcl data get {name}`, or download {', and '.join(saved)}"


# -- the data sets on this machine


@dataclass(frozen=True)
class DatasetStatus:
    """The status of one data set on this machine.

    Attributes:
        name: The data set's name.
        path: Its folder or archive, None if it is missing.
        train: Number of training samples.
        test: Number of test samples.
        classes: Number of classes.
        complete: Whether the number of images, or of sources, is the published one.
        original: Whether the archive has the publisher's checksum; None if not compared or none is published.
        problem: How to get a missing data set, or what is wrong with it; None if it can be used.
        sources: Number of sources; 0 for a set of images.
    """

    name: str
    path: Path | None
    train: int = 0
    test: int = 0
    classes: int = 0
    complete: bool = False
    original: bool | None = None
    problem: str | None = None
    sources: int = 0


def list_data(data_dir: str | Path | None = None) -> list[DatasetStatus]:
    """Return the status of every data set; decodes the data sets that are not cached."""
    return [_status(name, data_dir, verify=False) for name in DATA_NAMES]


def check_data(names: Iterable[str] = DATA_NAMES, data_dir: str | Path | None = None) -> list[DatasetStatus]:
    """Verify data sets: compare archives with the publisher's checksum, and decode and cache them again."""
    return [_status(name, data_dir, verify=True) for name in names]


def get_data(name: str, data_dir: str | Path | None = None) -> Path:
    """Download a set's files unless they are there, and return the path of the file, or of the folder of several.

    An unpacked archive in the folder of downloads counts as well.

    >>> get_data("ps-glyphs")
    Traceback (most recent call last):
    spcl.errors.DataError: ps-glyphs is generated on this machine; there is nothing to download
    """
    if name == EMBEDDED:
        raise DataError(f"{EMBEDDED} is generated on this machine; there is nothing to download")
    folder, data_set = download_dir(data_dir), find_data_set(name)
    targets = [folder / file for file in data_set.files]
    unpacked = [folder / layout.path for layout in data_set.layouts if layout.is_in(folder)]
    if unpacked and not any(target.exists() for target in targets):
        return unpacked[0]
    for target in targets:
        published = DOWNLOADS[target.name]
        if not target.exists():
            download(published.url, target, published.sha256)
        elif _is_original(target) is False:
            raise DataError(f"{target} is not the publisher's file (its SHA-256 differs); move it away and try again")
    return targets[0] if len(targets) == 1 else targets[0].parent


def _status(name: str, data_dir: str | Path | None, verify: bool) -> DatasetStatus:
    path = _path(name, data_dir)
    if path is None:
        return DatasetStatus(name, None, problem=how_to_get(name, data_dir))
    original = _is_original(path) if verify else None
    try:
        data = DATA.make(name, data_dir=data_dir) if name in SOURCE_SETS else load_data(name, data_dir, renew=verify)
    except DataError as error:
        return DatasetStatus(name, path, original=original, problem=str(error))
    complete = _is_complete(name, data)
    altered = (
        "as many images as published, but the archive's checksum differs" if complete and original is False else None
    )
    counts = data.train_samples, data.test_samples, data.classes
    return DatasetStatus(name, path, *counts, complete, original, altered, _number_of_sources(data))


def _path(name: str, data_dir: str | Path | None) -> Path | None:
    if name == EMBEDDED:
        return cache_dir()
    return locate(name, data_dir)


def _is_complete(name: str, data: ImageData | SourceData) -> bool:
    if name == EMBEDDED:
        return True
    published = find_data_set(name)
    if isinstance(data, SourceData):
        return _number_of_sources(data) == published.sources
    return (data.train_samples, data.test_samples) == (published.train, published.test)


def _number_of_sources(data: ImageData | SourceData) -> int:
    return len(data.sources) if isinstance(data, SourceData) else 0


def _is_original(path: Path) -> bool | None:
    """Return whether the file has the publisher's checksum; None for folders and files without a published one."""
    expected = DOWNLOADS[path.name].sha256 if path.is_file() and path.name in DOWNLOADS else None
    return None if expected is None else file_sha256(path) == expected


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

    tasks: int | None = setting(
        5,
        "number of tasks that the classes are split into; None for data of several sources: as they are",
        LAYOUT,
        ge=1,
    )
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
    "ps-wisdm": Preset(
        tasks=None, batch_size=10, memory_budget=500, backbone={"name": "mlp", "standardise": True}, learning_rate=3e-3
    ),
    "ps-air": Preset(
        tasks=None, batch_size=128, memory_budget=500, backbone={"name": "mlp", "standardise": True}, learning_rate=3e-3
    ),
    "ps-intents": Preset(tasks=None, batch_size=32, memory_budget=500, backbone="ngrams", learning_rate=3e-3),
}
"""The presets of the known benchmarks."""


@dataclass(frozen=True)
class SourceBenchmark:
    """A benchmark of real sources.

    Attributes:
        data: The name of its data set in :data:`DATA`.
        settings: What the benchmark sets beside its preset, by name; the user's settings win.
    """

    data: str
    settings: Mapping[str, Any]


SOURCE_BENCHMARKS = {
    "ps-wisdm": SourceBenchmark("wisdm", {"scenario": "domain", "at_once": 6, "memory": "reservoir"}),
    "ps-air": SourceBenchmark("beijing-air", {"scenario": "domain", "memory": "reservoir", "regression_loss": "l1"}),
    "ps-intents": SourceBenchmark("clinc150", {}),
}
"""The benchmarks of real sources by name."""

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
    fifty samples to the memory. Where sources share tasks, memory has 500 samples.

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
    tasks = {source.task_name for source in data.sources}
    shares = len(tasks) < len(data.trained)
    of_tasks = sum(MEMORY_OF_CLASS * (source.classes or CLASSES_OF_OTHERS) for source in data.trained)
    return Preset(
        tasks=len(data.trained),
        batch_size=_fitting_batch_size(min(len(source.train_y) for source in data.trained)),
        memory_budget=MEMORY_OF_SHARED_TASKS if shares else of_tasks,
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


MEMORY_OF_SHARED_TASKS = 500
"""Samples of memory where sources share tasks."""
