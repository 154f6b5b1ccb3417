"""Custom data from arrays, a torch Dataset, a folder of pictures, or an .npz file."""

import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from spcl._util.validation import check_seed
from spcl.batches import Inputs, map_leaves, number_of_samples
from spcl.data.cache import cached, track
from spcl.data.reading import Mode, decode_picture, eight_bit, file_states
from spcl.data.samples import ImageData, SourceData, SourceSamples, stratified_mask
from spcl.errors import DataError
from spcl.tasks import NO_LABEL, Kind


def from_arrays(
    x: Any,
    y: Any,
    test_x: Any = None,
    test_y: Any = None,
    *,
    test_fraction: float = 0.2,
    seed: int = 0,
    name: str = "custom",
) -> ImageData:
    """Make a data set of arrays or tensors.

    Samples are uint8 images N×C×H×W (or N×H×W, grey), floating-point features of any shape, or token sequences N×L of
    int32 or int64; a list of series of different lengths is padded, see `padded`. Labels are arbitrary integers or
    strings, which become 0..classes-1 in sorted order. Without test samples, `test_fraction` of every class is held
    out, chosen by `seed`.

    >>> features = np.random.default_rng(0).normal(size=(10, 4))
    >>> from_arrays(features, ["cat", "dog"] * 5, name="pets")
    ImageData('pets': 8 + 2 samples of 4, 2 classes)
    """
    _check_split(name, test_fraction, seed)
    if (test_x is None) != (test_y is None):
        found = "labels" if test_x is None else "samples"
        raise DataError(f"{name}: only test {found} are given; give test samples and test labels together, or neither")
    x, test_x = padded([x, test_x], name)
    samples, labels = as_samples(x, name), as_labels(y, name)
    if len(samples) != len(labels):
        raise DataError(f"{name}: {len(samples)} samples but {len(labels)} labels; give one label per sample")
    if test_x is None:
        test = held_out_mask(labels, test_fraction, seed, name)
        train = ~test
        return _data_set(
            name, samples[torch.from_numpy(train)], labels[train], samples[torch.from_numpy(test)], labels[test]
        )
    return _data_set(name, samples, labels, as_samples(test_x, name), as_labels(test_y, name))


def from_dataset(
    dataset: Dataset[Any],
    test: Dataset[Any] | None = None,
    *,
    test_fraction: float = 0.2,
    seed: int = 0,
    name: str = "custom",
) -> ImageData:
    """Make a data set of a torch Dataset whose items are (sample, label); samples may also be Pillow images.

    >>> numbers = torch.utils.data.TensorDataset(torch.rand(10, 3), torch.arange(10) % 2)
    >>> from_dataset(numbers, name="numbers")
    ImageData('numbers': 8 + 2 samples of 3, 2 classes)
    """
    for given in (dataset, test):
        if isinstance(given, DataLoader):
            raise DataError(f"{name}: found a DataLoader, whose items are batches; give its Dataset, loader.dataset")
    x, y = _stack(dataset, name)
    test_x, test_y = (None, None) if test is None else _stack(test, name)
    return from_arrays(x, y, test_x, test_y, test_fraction=test_fraction, seed=seed, name=name)


def as_samples(x: Any, name: str) -> Tensor:
    """Return an array of numbers as a tensor on the CPU: floats as float32, grey images with their channel."""
    try:
        tensor = x.detach().cpu() if isinstance(x, Tensor) else torch.from_numpy(np.require(x, requirements=("C", "W")))
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: samples must be an array of numbers, all of one shape ({error})") from error
    if tensor.is_floating_point():
        return _finite_floats(tensor, name)
    if tensor.ndim == 3:
        return tensor[:, None]
    if tensor.ndim == 4 and tensor.shape[1] > 4 >= tensor.shape[3]:
        raise DataError(f"{name}: images must be N×C×H×W, found {tuple(tensor.shape)}; use x.transpose(0, 3, 1, 2)")
    return tensor


def padded(collections: Sequence[Any], name: str) -> list[Any]:
    """Return collections of samples with series of different lengths padded by zeros at the end, to the longest of all.

    A collection of series is a list of arrays or tensors of numbers or tokens, whose first dimension is time. A list of
    arrays of one shape, and what is no list of arrays, stays as it is.

    >>> short, long = torch.ones(2, 3), torch.ones(4, 3)
    >>> (x, test_x) = padded([[short, long], [short]], "steps")
    >>> x.shape, test_x.shape, test_x[0, :, 0]
    (torch.Size([2, 4, 3]), torch.Size([1, 4, 3]), tensor([1., 1., 0., 0.]))
    """
    series = [
        [torch.as_tensor(each).detach().cpu() for each in x]
        for x in collections
        if isinstance(x, list) and all(map(_is_numeric, x))
    ]
    shapes = {tuple(each.shape) for x in series for each in x}
    if len(shapes) < 2:
        return list(collections)
    bytes_found = any(each.dtype == torch.uint8 for x in series for each in x)
    if bytes_found or () in shapes or len({shape[1:] for shape in shapes}) > 1:
        found = ", ".join("×".join(map(str, shape)) for shape in sorted(shapes)[:3])
        raise DataError(
            f"{name}: samples have several shapes ({found}, …); give all one shape, except for series of numbers or "
            f"tokens, which may differ in length, their first dimension"
        )
    if len(series) < sum(x is not None for x in collections):
        raise DataError(f"{name}: some samples are a list of series, others an array; give lists of series for both")
    longest = max(shape[0] for shape in shapes)
    made = iter([torch.stack([_lengthened(each, longest) for each in x]) for x in series])
    return [None if x is None else next(made) for x in collections]


def _is_numeric(array: Any) -> bool:
    return isinstance(array, Tensor) or (isinstance(array, np.ndarray) and array.dtype.kind in "biuf")


def _lengthened(series: Tensor, length: int) -> Tensor:
    return torch.cat([series, series.new_zeros(length - len(series), *series.shape[1:])])


def _finite_floats(tensor: Tensor, name: str) -> Tensor:
    floats = tensor.float()
    if bool(torch.isfinite(floats).all()):
        return floats
    if bool(torch.isfinite(tensor).all()):
        raise DataError(
            f"{name}: samples reach {tensor.abs().max().item():.3g} in magnitude, "
            f"but float32 ends at {torch.finfo(torch.float32).max:.3g}; scale them down first"
        )
    raise DataError(f"{name}: samples hold NaN or infinite values; replace them first")


def as_labels(y: Any, name: str) -> np.ndarray:
    """Return labels as a vector of integers or text."""
    labels = _array(y, name)
    if labels.ndim != 1 or labels.dtype.kind not in "biuU":
        raise DataError(
            f"{name}: labels must be a vector of integers or text, found {labels.dtype} of shape {labels.shape}"
        )
    if labels.dtype.kind == "i" and (unlabelled := int((labels == NO_LABEL).sum())):
        raise DataError(
            f"{name}: {unlabelled} of {len(labels)} labels are {NO_LABEL}, which stands for no label; leave these "
            f"samples out"
        )
    return labels


def held_out_mask(labels: np.ndarray, fraction: float, seed: int, name: str, *, hint: str = "") -> np.ndarray:
    """Return a mask of the test samples: the same fraction of every class, at least one sample and never all.

    The hint is added to the error for a class of one sample.
    """
    values, counts = np.unique(labels, return_counts=True)
    if len(single := values[counts < 2]):
        raise DataError(f"{name}: class {single[0]!s} has one sample; splitting into training and test needs two{hint}")
    return stratified_mask(labels, fraction, np.random.default_rng(seed).permutation, nonempty=True)


def _check_split(name: str, fraction: float, seed: int) -> None:
    if not isinstance(name, str):
        raise DataError(f"the name of the data is {_short(name)}; give a text")
    if not (isinstance(fraction, Real) and 0 < fraction < 1):
        raise DataError(f"{name}: test_fraction is {_short(fraction)}; give a number between 0 and 1")
    check_seed(seed, DataError)


def _short(value: Any) -> str:
    """Describe a value for an error: arrays by their shape, collections by their length."""
    if isinstance(value, str | int | float | None):
        return f"{value!r:.60}"
    kind, shape = type(value).__name__, getattr(value, "shape", None)
    return f"a {kind}" + (f" of shape {tuple(shape)}" if shape is not None else "")


def _data_set(name: str, x: Tensor, y: np.ndarray, test_x: Tensor, test_y: np.ndarray) -> ImageData:
    (train_labels, test_labels), class_names = _numbered(name, y, test_y)
    return ImageData(name, x, torch.from_numpy(train_labels), test_x, torch.from_numpy(test_labels), class_names)


def _numbered(name: str, y: np.ndarray, test_y: np.ndarray) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Return labels as indices into the sorted names of the classes, and these names."""
    values = np.unique(y)
    if len(unknown := np.setdiff1d(test_y, values)):
        raise DataError(
            f"{name}: test labels without training samples: {', '.join(map(str, unknown[:5]))}; "
            "remove them or add training samples"
        )
    return [np.searchsorted(values, labels) for labels in (y, test_y)], tuple(map(str, values))


def _stack(dataset: Any, name: str) -> tuple[np.ndarray, list[Any]]:
    # Index where possible: iterating over a Dataset relies on an IndexError that not every Dataset raises.
    items: Iterable[Any] = (dataset[i] for i in range(len(dataset))) if hasattr(dataset, "__len__") else dataset
    samples: list[np.ndarray] = []
    labels = []
    for i, item in enumerate(items):
        if not (isinstance(item, tuple | list) and len(item) == 2):
            raise DataError(f"{name}: expected item {i} to be a pair (sample, label), found {type(item).__name__}")
        sample = _sample_array(item[0], f"{name}, sample {i}")
        if samples and sample.shape != samples[0].shape:
            raise DataError(f"{name}: sample {i} has shape {sample.shape}, the first {samples[0].shape}; resize them")
        samples.append(sample)
        labels.append(item[1].item() if isinstance(item[1], Tensor) else item[1])
    if not samples:
        raise DataError(f"{name}: the dataset is empty; give at least one sample")
    return np.stack(samples), labels


def _sample_array(sample: Any, origin: str) -> np.ndarray:
    if isinstance(sample, Image.Image):
        picture = eight_bit(sample, origin)
        pixels = np.asarray(picture if picture.mode in ("L", "RGB") else picture.convert("RGB"))
        return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return np.asarray(sample)


# -- several sources

MOST_NAMES = 8
"""The most names of sources that an error lists."""

IN_A_FILE = "(for an .npz file, the option kind, or an array kind or NAME_kind in it)"


def from_sources(
    sources: Mapping[str, Sequence[Any]],
    kinds: Mapping[str, Kind] | None = None,
    *,
    tasks: Mapping[str, str] | None = None,
    unseen: Iterable[str] = (),
    test_fraction: float = 0.2,
    seed: int = 0,
    name: str = "custom",
) -> SourceData:
    """Make a data set of sources from arrays or tensors; each is a task of its own, or shares one with others.

    Args:
        sources: For every source, by name, ``(x, y)`` or ``(x, y, test_x, test_y)``. Samples x may be what
            `from_arrays` takes, also series of different lengths, or a dict or tuple of these; `SourceSamples` says
            what targets y may be; classes may be arbitrary integers or strings. Without test samples, `test_fraction`
            of the samples (of every class) is held out.
        kinds: The kinds of sources, or of all sources of a task, whose targets do not show it. By default
            floating-point targets make a regression (but whole numbers that repeat, and columns of zeros and ones, are
            an error: they may be classes), a vector of integers or text makes a classification, and other targets are
            multi-label.
        tasks: For sources that share a task, by name, its name. The task has every class that one of its
            trained sources has. By default a source is a task of its own.
        unseen: The names of sources that are never trained, only evaluated on their test samples.
        test_fraction: The part that is held out.
        seed: Chooses what is held out.
        name: The name of the data set.

    >>> x = np.random.default_rng(0).normal(size=(10, 4))
    >>> data = from_sources({"speed": (x, x[:, 0]), "sign": (x, ["stop", "yield"] * 5)}, name="car")
    >>> data.sources[1]
    SourceSamples('sign': classification of 2 classes, 8 + 2 samples of 4)

    Two persons are asked one question, and a third is asked it without having been trained:

    >>> y = ["sitting", "walking"] * 5
    >>> persons = {person: (x, y) for person in ("anna", "ben", "eve")}
    >>> data = from_sources(persons, tasks=dict.fromkeys(persons, "activity"), unseen=["eve"])
    >>> [source.name for source in data.trained], data.classes
    (['anna', 'ben'], 2)
    """
    _check_split(name, test_fraction, seed)
    kinds, tasks = {} if kinds is None else kinds, {} if tasks is None else tasks
    for given, what in ((sources, "sources are"), (kinds, "kinds are"), (tasks, "tasks are")):
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise DataError(f"{name}: {what} {_short(given)}; give a dict by the names of the sources")
    task_of = {source: source for source in sources} | _checked_tasks(name, sources, tasks)
    held = _checked_unseen(name, sources, unseen)
    for source, kind in kinds.items():
        if source not in sources and source not in task_of.values():
            raise DataError(f"{name}: a kind is given for {source!r}, which is none of {_listed(sources)}")
        if not (isinstance(kind, str) and kind in get_args(Kind)):
            raise DataError(f"{source}: there is no kind {_short(kind)}; choose one of {', '.join(get_args(Kind))}")
    split: dict[str, _Arrays] = {}
    for source, arrays in sources.items():
        if not isinstance(arrays, tuple | list) or len(arrays) not in (2, 4):
            raise DataError(
                f"{name}: source {source!r} must be (x, y) or (x, y, test_x, test_y); give two or four arrays"
            )
        known = kinds.get(source, kinds.get(task_of[source]))
        split[source] = _split(source, known or _kind_of(source, arrays[1]), arrays, test_fraction, seed)
    made: dict[str, SourceSamples] = {}
    for task in dict.fromkeys(task_of.values()):
        made |= _sources_of_task(task, {each: split[each] for each in sources if task_of[each] == task}, held)
    return SourceData(name, tuple(made[source] for source in sources))


class _Arrays(NamedTuple):
    """Training and test samples of a source, with targets as they were given."""

    kind: Kind
    x: list[Inputs]
    y: list[np.ndarray]


def _checked_tasks(name: str, sources: Iterable[str], tasks: Mapping[str, str]) -> dict[str, str]:
    for source, task in tasks.items():
        if source not in sources:
            raise DataError(f"{name}: a task is given for {source!r}, which is none of {_listed(sources)}")
        if not (isinstance(task, str) and task):
            raise DataError(f"{name}: the task of source {source!r} is {_short(task)}; give the name of a task")
    return dict(tasks)


def _checked_unseen(name: str, sources: Iterable[str], unseen: Iterable[str]) -> set[str]:
    if isinstance(unseen, str) or not isinstance(unseen, Iterable):
        raise DataError(f"{name}: unseen is {_short(unseen)}; give a list of the names of sources")
    for source in (held := list(unseen)):
        if not (isinstance(source, str) and source in sources):
            raise DataError(f"{name}: unseen names {_short(source)}, which is none of {_listed(sources)}")
    return set(held)


def _listed(sources: Iterable[str]) -> str:
    first, more = [*map(repr, sources)][:MOST_NAMES], len([*sources]) - MOST_NAMES
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")


def _split(name: str, kind: Kind, arrays: Sequence[Any], fraction: float, seed: int) -> _Arrays:
    """Return the training and test samples of a source; the part of the samples is held out where no tests are."""
    inputs, targets = _inputs(arrays[::2], name), [_targets(y, kind, name) for y in arrays[1::2]]
    for x, y in zip(inputs, targets, strict=True):
        if number_of_samples(x) != len(y):
            raise DataError(f"{name}: {number_of_samples(x)} samples but {len(y)} targets; give one target per sample")
    if len(arrays) == 2:
        test = torch.from_numpy(_held_out(targets[0], fraction, seed, name))
        inputs = [_chosen(inputs[0], ~test), _chosen(inputs[0], test)]
        targets = [targets[0][~test.numpy()], targets[0][test.numpy()]]
    return _Arrays(kind, inputs, targets)


def _sources_of_task(task: str, parts: Mapping[str, _Arrays], unseen: set[str]) -> dict[str, SourceSamples]:
    """Return the sources that answer a task, by name, with labels as indices into the classes of all of them."""
    targets = {source: part.y for source, part in parts.items()}
    names: tuple[str, ...] = ()
    if all(part.kind == "classification" for part in parts.values()):
        are_soft = [y.dtype.kind == "f" for y, _ in targets.values()]
        if any(are_soft) and not all(are_soft):
            raise DataError(f"{task}: some sources have probabilities, others labels; give all sources the same")
        if all(are_soft):
            soft = {source: _numbered_soft(source, *y) for source, y in targets.items()}
            targets, names = {source: y for source, (y, _) in soft.items()}, next(iter(soft.values()))[1]
        else:
            targets, names = _numbered_together(task, targets, unseen)
    made = {}
    for source, (kind, x, _) in parts.items():
        train_y, test_y = (torch.from_numpy(np.ascontiguousarray(y)) for y in targets[source])
        shared = None if task == source else task
        held = source in unseen
        made[source] = SourceSamples(source, kind, x[0], train_y, x[1], test_y, names, task=shared, unseen=held)
    return made


def _numbered_together(
    task: str, targets: Mapping[str, list[np.ndarray]], unseen: set[str]
) -> tuple[dict[str, list[np.ndarray]], tuple[str, ...]]:
    """Return the labels of the sources of a task as indices into the sorted names of its classes, and these names."""
    trained = [y for source, (y, _) in targets.items() if source not in unseen] or [y for y, _ in targets.values()]
    every = [y for each in targets.values() for y in each]
    together = np.concatenate(every)
    (_, numbers), names = _numbered(task, np.concatenate(trained).astype(together.dtype), together)
    rest = iter(np.split(numbers, np.cumsum([len(y) for y in every])[:-1]))
    return {source: [next(rest), next(rest)] for source in targets}, names


def _kind_of(name: str, y: Any) -> Kind:
    targets = _array(y, name)
    if targets.dtype.kind == "f":
        if targets.ndim == 2 and targets.shape[1] > 1 and np.isin(targets, (0.0, 1.0)).all():
            raise DataError(
                f"{name}: targets are {targets.shape[1]} columns of floating-point zeros and ones, which may be labels "
                f'or numbers; give kinds={{"{name}": "multilabel"}}, or "regression", or "classification" if they are '
                f"one-hot {IN_A_FILE}"
            )
        if _is_vector(targets) and 1 < len(values := np.unique(targets)) <= len(targets) / 2 and _are_whole(values):
            shown = ", ".join(f"{value:g}" for value in values[:5]) + (", …" if len(values) > 5 else "")
            raise DataError(
                f"{name}: targets are whole numbers as {targets.dtype} ({shown}), which may be classes or numbers to "
                f'predict; give classes as integers, or give kinds={{"{name}": "classification"}} or "regression" '
                f"{IN_A_FILE}"
            )
        return "regression"
    return "classification" if targets.ndim == 1 else "multilabel"


def _is_vector(targets: np.ndarray) -> bool:
    return targets.ndim > 0 and targets.size == len(targets)


def _are_whole(values: np.ndarray) -> bool:
    return bool(np.isfinite(values).all() and (values == np.round(values)).all())


def _array(values: Any, name: str) -> np.ndarray:
    try:
        return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except ValueError as error:
        raise DataError(f"{name}: expected an array, found rows of different lengths; give one shape to all") from error


def _inputs(given: Sequence[Any], name: str) -> list[Inputs]:
    """Return the training samples, and the test samples if they are given, as tensors."""
    first = given[0]
    if isinstance(first, dict) and all(isinstance(x, dict) and x.keys() == first.keys() for x in given):
        named = {key: _tensors([x[key] for x in given], f"{name}, {key}") for key in first}
        return [{key: named[key][i] for key in first} for i in range(len(given))]
    if isinstance(first, tuple) and all(isinstance(x, tuple) and len(x) == len(first) for x in given):
        return [*zip(*(_tensors(part, name) for part in zip(*given, strict=True)), strict=True)]
    return [*_tensors(given, name)]


def _tensors(given: Sequence[Any], name: str) -> list[Tensor]:
    return [as_samples(x, name) for x in padded(given, name)]


def _targets(y: Any, kind: Kind, name: str) -> np.ndarray:
    array = _array(y, name)
    if kind == "classification" and array.dtype.kind == "f" and _is_vector(array):
        if not _are_whole(array):
            raise DataError(f"{name}: labels hold fractions, NaN or infinite values; give whole numbers or text")
        array = array.reshape(-1).astype(np.int64)
    if kind == "classification" and array.dtype.kind != "f":
        return as_labels(array, name)
    if array.dtype.kind not in "biuf" or not array.ndim:
        raise DataError(f"{name}: targets must be an array of numbers, found {array.dtype} of shape {array.shape}")
    return array.astype(np.float32)


def _held_out(targets: np.ndarray, fraction: float, seed: int, name: str) -> np.ndarray:
    """Return a mask of the test samples: of every class the same fraction, at least one sample and never all."""
    if targets.dtype.kind != "f":
        numbers = f'; if these are numbers to predict, give kinds={{"{name}": "regression"}} {IN_A_FILE}'
        return held_out_mask(targets, fraction, seed, name, hint=numbers if targets.dtype.kind in "iu" else "")
    if len(targets) < 2:
        raise DataError(f"{name} has one sample; splitting into training and test needs two")
    return held_out_mask(np.zeros(len(targets), np.int64), fraction, seed, name)


def _chosen(x: Inputs, mask: Tensor) -> Inputs:
    return map_leaves(lambda part: part[mask], x)


def _numbered_soft(name: str, y: np.ndarray, test_y: np.ndarray) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Return soft labels and the labels of their test samples; the classes are named by their numbers."""
    classes = y.shape[1] if y.ndim == 2 else 0
    labels = test_y.argmax(axis=1) if test_y.ndim == 2 else test_y
    if labels.dtype.kind not in "biu":
        raise DataError(f"{name}: test labels beside soft labels must be integers, found {labels.dtype}")
    return [y, labels.astype(np.int64)], tuple(map(str, range(classes)))


# -- a folder of pictures


def from_folder(
    path: str | Path,
    *,
    size: int | Sequence[int] = 32,
    mode: Mode = "RGB",
    test_fraction: float = 0.2,
    seed: int = 0,
    name: str | None = None,
) -> ImageData:
    """Make a data set of a folder with one sub-folder of pictures per class.

    A folder with ``train`` and ``test`` (or ``val``, where there is no ``test``) is split as these folders say; of any
    other, `test_fraction` of every class is held out.

    Pictures are converted to colour (or grey, mode ``"L"``), resized to the width and height `size` (one number for
    both), and cached. Of 16-bit pictures the upper 8 bits are kept (``value >> 8``); pictures of 32-bit
    integers or floats are an error.
    """
    root = Path(path).expanduser()
    name = name or root.name
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; give a folder with one sub-folder of pictures per class")
    sides = _width_and_height(size, name)
    if mode not in get_args(Mode):
        raise DataError(f"{name}: mode is {mode!r}; choose one of {', '.join(get_args(Mode))}")
    folders = _split_folders(root) or [root]
    with _unreadable_files_reported(root):
        splits = {folder: _picture_files(folder) for folder in folders}
        states = [file_states(root, files) for files in splits.values()]

    def make() -> ImageData:
        with _unreadable_files_reported(root):
            arrays = [part for folder, files in splits.items() for part in _pictures(folder, files, sides, mode)]
        return from_arrays(*arrays, test_fraction=test_fraction, seed=seed, name=name)

    return cached(
        name,
        [str(root.resolve()), size, mode, test_fraction, seed, states],
        make,
    )


def _width_and_height(size: int | Sequence[int], name: str) -> tuple[int, int]:
    sides = (size, size) if isinstance(size, int) else size
    match sides:
        case [int(width), int(height)] if width >= 1 and height >= 1:
            return width, height
    raise DataError(
        f"{name}: size is {size!r}; give one number for width and height, such as 32, or both, such as [32, 24], each "
        "at least 1"
    )


def _split_folders(root: Path) -> list[Path]:
    """Return the folders of training and test pictures, if there are two."""
    tests = [root / name for name in ("test", "val") if (root / name).is_dir()]
    return [root / "train", tests[0]] if tests and (root / "train").is_dir() else []


def _pictures(folder: Path, files: list[Path], size: tuple[int, int], mode: Mode) -> tuple[np.ndarray, list[str]]:
    """Return the pictures, and the names of their class folders as labels."""
    progress = track(files, f"decoding {folder}", len(files))
    pixels = [decode_picture(file.read_bytes(), str(file), mode, size) for file in progress]
    return np.stack(pixels), [file.parent.name for file in files]


@contextmanager
def _unreadable_files_reported(root: Path) -> Iterator[None]:
    """Turn an OSError into a DataError that names the file, or the folder where the file is unknown."""
    try:
        yield
    except OSError as error:
        unreadable = error.filename or root
        raise DataError(f"{unreadable} cannot be read: {error.strerror}; make it readable or remove it") from error


def _picture_files(folder: Path) -> list[Path]:
    return [file for kind in _class_folders(folder) for file in _pictures_of_class(kind)]


def _class_folders(folder: Path) -> list[Path]:
    folders = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not folders:
        raise DataError(f"{folder}: expected one sub-folder of pictures per class, found none")
    return folders


def _pictures_of_class(folder: Path) -> list[Path]:
    readable = Image.registered_extensions()
    visible = (entry for entry in folder.iterdir() if not entry.name.startswith("."))  # macOS adds ._NAME.jpg to copies
    named = sorted(entry for entry in visible if entry.suffix.lower() in readable)
    for entry in named:
        if entry.is_symlink() and not entry.exists():
            raise DataError(
                f"{entry} is a link to {entry.readlink()}, which does not exist; restore it or remove the link"
            )
    files = [entry for entry in named if entry.is_file()]
    if not files:
        raise DataError(f"{folder}: expected pictures of this class, found none")
    return files


# -- an .npz file

PARTS = ("x", "y", "test_x", "test_y")
OTHERS = ("kind", "lengths", "task", "unseen")
HOW_TO_WRITE = "write it with np.savez(path, x=…, y=…)"


def from_npz(path: str | Path, *, kind: Kind | Mapping[str, Kind] | None = None) -> ImageData | SourceData:
    """Make a data set of an .npz file with samples ``x`` and targets ``y``, and perhaps ``test_x`` and ``test_y``.

    A vector of integers or text holds labels, whose classes are split into tasks (see `from_arrays`). Other targets
    make a regression or multi-label source with the name of the file. A file without ``x`` may hold several sources:
    ``NAME_x`` and ``NAME_y``, and perhaps ``NAME_test_x`` and ``NAME_test_y``. Each is a task of its own, or answers
    the task that a text ``NAME_task`` names; ``NAME_unseen`` is true for a source that is only evaluated, never
    trained.

    Series of different lengths are stored one after the other in ``x``, with their lengths in an array ``lengths``;
    those in ``NAME_test_x`` have ``NAME_test_lengths``, and so on. They are padded with zeros at the end.

    `from_sources` says which samples, targets and kinds there are. A kind that the targets do not show is a text in the
    file, ``kind`` or ``NAME_kind``, or the argument `kind`, for all sources or by their names, which precedes the file.
    Other arrays in the file are ignored.
    """
    file = Path(path).expanduser()
    arrays = _with_series(file, _read_arrays(file))
    if not {"x", "y"} <= arrays.keys():
        prefixes = {name: f"{name}_" for name in _source_names(file, arrays)}
    elif kind is None and _holds_classes(arrays):
        return from_arrays(arrays["x"], arrays["y"], arrays.get("test_x"), arrays.get("test_y"), name=file.stem)
    else:
        prefixes = {file.stem: ""}
    sources = {name: _parts(file, prefix, arrays) for name, prefix in prefixes.items()}
    named = {name: f"{prefix}kind" for name, prefix in prefixes.items()}
    kinds = {name: _kind(file, array, arrays[array]) for name, array in named.items() if array in arrays}
    given = kind if isinstance(kind, Mapping) else {} if kind is None else dict.fromkeys(sources, kind)
    tasks = {name: _task(file, f"{prefix}task", arrays) for name, prefix in prefixes.items()}
    unseen = [name for name, prefix in prefixes.items() if _is_unseen(file, f"{prefix}unseen", arrays)]
    shared = {name: task for name, task in tasks.items() if task is not None}
    return from_sources(sources, {**kinds, **given}, tasks=shared, unseen=unseen, name=file.stem)


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays that may be samples, targets, or what is said of them, by their names."""
    try:
        with path.open("rb") as file:
            loaded = np.load(file)
            names = ["one array without a name"] if isinstance(loaded, np.ndarray) else list(loaded)
            known = PARTS if {"x", "y"} <= set(names) else names
            known = [*known, "kind", "lengths", "test_lengths"]
            read = [name for name in names if name in known and name.rpartition("_")[2] in ("x", "y", *OTHERS)]
            arrays = {name: loaded[name] for name in read}
    except Exception as error:  # numpy's readers raise many kinds on damaged files
        raise DataError(f"cannot read {path}: {_reason(error, path)}; {HOW_TO_WRITE}") from error
    if not {"x", "y"} <= arrays.keys() and not _pairs(arrays) - {"test"}:
        raise DataError(
            f"{path} must hold arrays x and y (and perhaps test_x and test_y) or NAME_x and NAME_y of every source, "
            f"found {', '.join(names) or 'nothing'}; {HOW_TO_WRITE}"
        )
    return arrays


def _with_series(path: Path, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Split the samples that have lengths into a list of series."""
    split: dict[str, Any] = {name: array for name, array in arrays.items() if not name.endswith("lengths")}
    for name, lengths in arrays.items():
        x = f"{name.removesuffix('lengths')}x"
        if name in split or x not in split:
            continue
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or not (lengths > 0).all():
            raise DataError(f"{path}: {name} must be whole numbers of at least 1, the lengths of the series in {x}")
        if split[x].ndim == 0 or lengths.sum() != len(split[x]):
            raise DataError(
                f"{path}: {name} add up to {lengths.sum()}, but {x} has the shape {split[x].shape}; store the series "
                f"one after the other, as np.concatenate does"
            )
        split[x] = np.split(split[x], np.cumsum(lengths)[:-1])
    return split


def _holds_classes(arrays: dict[str, np.ndarray]) -> bool:
    """Return whether y are labels of classes that are to be split into tasks."""
    y = arrays["y"]
    return "kind" not in arrays and y.dtype.kind != "f" and (y.ndim == 1 or y.dtype.kind not in "biu")


def _pairs(arrays: Iterable[str]) -> set[str]:
    """Return the names that have both samples and targets."""
    ends = {end: {name.removesuffix(end) for name in arrays if name.endswith(end)} for end in ("_x", "_y")}
    return ends["_x"] & ends["_y"]


def _source_names(path: Path, arrays: dict[str, np.ndarray]) -> list[str]:
    pairs = _pairs(arrays)
    for name in arrays:
        stem, _, part = name.rpartition("_")
        if part in ("x", "y") and stem not in pairs:
            missing = name[:-1] + {"x": "y", "y": "x"}[part]
            raise DataError(f"{path} holds {name}, but no {missing}; give samples and targets together")
    first = [name.removesuffix("_x") for name in arrays if name.removesuffix("_x") in pairs]
    return [name for name in first if not (name.endswith("_test") and name.removesuffix("_test") in pairs)]


def _parts(path: Path, prefix: str, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    tests = [f"{prefix}{part}" for part in PARTS[2:]]
    found = [name for name in tests if name in arrays]
    if len(found) == 1:
        raise DataError(f"{path} holds {found[0]}; give {tests[0]} and {tests[1]} together, or neither")
    return tuple(arrays[name] for name in (f"{prefix}x", f"{prefix}y", *found))


def _kind(path: Path, name: str, text: np.ndarray) -> Kind:
    kind = text.item() if text.size == 1 else text.tolist()
    for known in get_args(Kind):
        if kind == known:
            return known  # type: ignore[no-any-return]
    raise DataError(f"{path}: {name} is {kind!r}; choose one of {', '.join(get_args(Kind))}")


def _task(path: Path, name: str, arrays: Mapping[str, np.ndarray]) -> str | None:
    """Return the text in this array, or None where there is none of this name."""
    if name not in arrays:
        return None
    task = arrays[name].item() if arrays[name].size == 1 else arrays[name].tolist()
    if not isinstance(task, str) or not task:
        raise DataError(f"{path}: {name} is {_short(task)}; give the name of a task as text")
    return task


def _is_unseen(path: Path, name: str, arrays: Mapping[str, np.ndarray]) -> bool:
    if name not in arrays:
        return False
    if arrays[name].size != 1 or arrays[name].dtype != np.bool_:
        raise DataError(f"{path}: {name} is {_short(arrays[name])} of {arrays[name].dtype}; give True or False")
    return bool(arrays[name].item())


def _reason(error: Exception, path: Path) -> str:
    """Return why reading failed, without numpy's advice to load pickles, which can execute code."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "pickle" not in str(error):
        return str(error)
    return "its arrays hold Python objects" if zipfile.is_zipfile(path) else "it is damaged, or not an .npz file"
