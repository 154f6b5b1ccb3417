"""Custom data from arrays, tensors or a torch Dataset."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from spcl.data.image_data import ImageData
from spcl.data.pictures import eight_bit
from spcl.data.splits import stratified_mask
from spcl.errors import DataError

__all__ = ["as_labels", "as_samples", "from_arrays", "from_dataset", "held_out_mask"]


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
    values = np.unique(y)
    if len(unknown := np.setdiff1d(test_y, values)):
        raise DataError(
            f"{name}: test labels without training samples: {', '.join(map(str, unknown[:5]))}; "
            "remove them or add training samples"
        )
    train_labels, test_labels = (torch.from_numpy(np.searchsorted(values, labels)) for labels in (y, test_y))
    return ImageData(name, x, train_labels, test_x, test_labels, tuple(map(str, values)))


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
