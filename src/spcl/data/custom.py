"""Custom data from arrays, tensors or a torch Dataset."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from spcl._util.validation import check_seed
from spcl.batches import Inputs, map_leaves, number_of_samples
from spcl.data.reading import eight_bit
from spcl.data.samples import ImageData, SourceData, SourceSamples, stratified_mask
from spcl.errors import DataError
from spcl.tasks import Kind


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
    int32 or int64; labels are arbitrary integers or strings, which become 0..classes-1 in sorted order. Without test
    samples, `test_fraction` of every class is held out, chosen by `seed`.

    >>> features = np.random.default_rng(0).normal(size=(10, 4))
    >>> from_arrays(features, ["cat", "dog"] * 5, name="pets")
    ImageData('pets': 8 + 2 samples of 4, 2 classes)
    """
    check_seed(seed)
    if (test_x is None) != (test_y is None):
        found = "labels" if test_x is None else "samples"
        raise DataError(f"{name}: only test {found} are given; give test samples and test labels together, or neither")
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
    labels = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if labels.ndim != 1 or labels.dtype.kind not in "biuU":
        raise DataError(
            f"{name}: labels must be a vector of integers or text, found {labels.dtype} of shape {labels.shape}"
        )
    return labels


def held_out_mask(labels: np.ndarray, fraction: float, seed: int, name: str, *, hint: str = "") -> np.ndarray:
    """Return a mask of the test samples: the same fraction of every class, at least one sample and never all.

    The hint is added to the error for a class of one sample.
    """
    if not 0 < fraction < 1:
        raise DataError(f"{name}: test_fraction is {fraction}; give a number between 0 and 1")
    values, counts = np.unique(labels, return_counts=True)
    if len(single := values[counts < 2]):
        raise DataError(f"{name}: class {single[0]!s} has one sample; splitting into training and test needs two{hint}")
    return stratified_mask(labels, fraction, np.random.default_rng(seed).permutation, nonempty=True)


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

IN_A_FILE = "(in an .npz file, an array kind or NAME_kind)"


def from_sources(
    sources: Mapping[str, Sequence[Any]],
    kinds: Mapping[str, Kind] | None = None,
    *,
    test_fraction: float = 0.2,
    seed: int = 0,
    name: str = "custom",
) -> SourceData:
    """Make a data set of sources, each a task of its own, from arrays or tensors.

    Args:
        sources: For every source, by name, ``(x, y)`` or ``(x, y, test_x, test_y)``. Samples x may be what
            `from_arrays` takes, or a dict or tuple of such arrays; `SourceSamples` says what targets y may be; classes
            may be arbitrary integers or strings. Without test samples, `test_fraction` of the samples (of every class)
            is held out.
        kinds: The kinds of sources whose targets do not show it. By default floating-point targets make a regression
            (but columns of zeros and ones are an error), a vector of integers or text makes a classification, and other
            targets are multi-label.
        test_fraction: The part that is held out.
        seed: Chooses what is held out.
        name: The name of the data set.

    >>> x = np.random.default_rng(0).normal(size=(10, 4))
    >>> data = from_sources({"speed": (x, x[:, 0]), "sign": (x, ["stop", "yield"] * 5)}, name="car")
    >>> data.sources[1]
    SourceSamples('sign': classification of 2 classes, 8 + 2 samples of 4)
    """
    check_seed(seed)
    for source in kinds or {}:
        if source not in sources:
            raise DataError(f"{name}: a kind is given for {source!r}, which is none of {', '.join(map(repr, sources))}")
    if not 0 < test_fraction < 1:
        raise DataError(f"{name}: test_fraction is {test_fraction}; give a number between 0 and 1")
    made = []
    for source, arrays in sources.items():
        if not isinstance(arrays, tuple | list) or len(arrays) not in (2, 4):
            raise DataError(
                f"{name}: source {source!r} must be (x, y) or (x, y, test_x, test_y); give two or four arrays"
            )
        kind = (kinds or {}).get(source) or _kind_of(source, arrays[1])
        made.append(_source(source, kind, arrays, test_fraction, seed))
    return SourceData(name, tuple(made))


def _source(name: str, kind: Kind, arrays: Sequence[Any], fraction: float, seed: int) -> SourceSamples:
    inputs, targets = [_inputs(x, name) for x in arrays[::2]], [_targets(y, kind, name) for y in arrays[1::2]]
    for x, y in zip(inputs, targets, strict=True):
        if number_of_samples(x) != len(y):
            raise DataError(f"{name}: {number_of_samples(x)} samples but {len(y)} targets; give one target per sample")
    if len(arrays) == 2:
        test = torch.from_numpy(_held_out(targets[0], fraction, seed, name))
        inputs = [_chosen(inputs[0], ~test), _chosen(inputs[0], test)]
        targets = [targets[0][~test.numpy()], targets[0][test.numpy()]]
    names: tuple[str, ...] = ()
    if kind == "classification":
        number = _numbered_soft if targets[0].dtype.kind == "f" else _numbered
        targets, names = number(name, *targets)
    train_y, test_y = (torch.from_numpy(np.ascontiguousarray(y)) for y in targets)
    return SourceSamples(name, kind, inputs[0], train_y, inputs[1], test_y, names)


def _kind_of(name: str, y: Any) -> Kind:
    targets = _array(y)
    if targets.dtype.kind == "f":
        if targets.ndim == 2 and targets.shape[1] > 1 and np.isin(targets, (0.0, 1.0)).all():
            raise DataError(
                f"{name}: targets are {targets.shape[1]} columns of floating-point zeros and ones, which may be labels "
                f'or numbers; give kinds={{"{name}": "multilabel"}}, or "regression", or "classification" if they are '
                f"one-hot {IN_A_FILE}"
            )
        return "regression"
    return "classification" if targets.ndim == 1 else "multilabel"


def _array(y: Any) -> np.ndarray:
    return y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)


def _inputs(x: Any, name: str) -> Inputs:
    if isinstance(x, dict):
        return {key: as_samples(part, f"{name}, {key}") for key, part in x.items()}
    return tuple(as_samples(part, name) for part in x) if isinstance(x, tuple) else as_samples(x, name)


def _targets(y: Any, kind: Kind, name: str) -> np.ndarray:
    array = _array(y)
    if kind == "classification" and array.dtype.kind != "f":
        return as_labels(y, name)
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
