"""Your own data: arrays, a torch Dataset or a folder of pictures."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from spcl.benchmarks.cache import cached
from spcl.benchmarks.image_data import ImageData
from spcl.benchmarks.pictures import Mode, decode_picture
from spcl.benchmarks.progress import track
from spcl.benchmarks.sources import fingerprint
from spcl.errors import DataError

__all__ = ["from_arrays", "from_dataset", "from_folder"]


def from_arrays(
    x: Any,
    y: Any,
    test_x: Any = None,
    test_y: Any = None,
    *,
    test_fraction: float = 0.2,
    seed: int = 0,
    name: str = "own",
) -> ImageData:
    """Make a data set of arrays or tensors.

    Samples are uint8 images N×C×H×W (or N×H×W, grey), or floating-point features of any shape; labels are integers or
    text of any values, which become 0..classes-1 in sorted order. Without test samples, `test_fraction` of every class
    is set aside, chosen by `seed`.

    >>> features = np.random.default_rng(0).normal(size=(10, 4))
    >>> from_arrays(features, ["cat", "dog"] * 5, name="pets")
    ImageData('pets': 8 + 2 samples of 4, 2 classes)
    """
    if (test_x is None) != (test_y is None):
        raise DataError(f"{name}: give test samples and test labels together, or neither")
    samples, labels = _samples(x, name), _labels(y, name)
    _check_counts(samples, labels, name)
    if test_x is None:
        test = _held_out(labels, test_fraction, seed, name)
        return _data_set(name, samples[~test], labels[~test.numpy()], samples[test], labels[test.numpy()])
    return _data_set(name, samples, labels, _samples(test_x, name), _labels(test_y, name))


def from_dataset(
    dataset: Dataset[Any],
    test: Dataset[Any] | None = None,
    *,
    test_fraction: float = 0.2,
    seed: int = 0,
    name: str = "own",
) -> ImageData:
    """Make a data set of a torch Dataset whose items are (sample, label); samples may also be Pillow images.

    >>> numbers = torch.utils.data.TensorDataset(torch.rand(10, 3), torch.arange(10) % 2)
    >>> from_dataset(numbers, name="numbers")
    ImageData('numbers': 8 + 2 samples of 3, 2 classes)
    """
    x, y = _stack(dataset, name)
    test_x, test_y = (None, None) if test is None else _stack(test, name)
    return from_arrays(x, y, test_x, test_y, test_fraction=test_fraction, seed=seed, name=name)


def from_folder(
    path: str | Path,
    *,
    size: int = 32,
    mode: Mode = "RGB",
    test_fraction: float = 0.2,
    seed: int = 0,
    name: str | None = None,
) -> ImageData:
    """Make a data set of a folder with one sub-folder of pictures per class, or of its ``train`` and ``test`` folders.

    Pictures are converted to colour (or grey, mode ``"L"``), resized to `size`×`size`, and kept in the cache for the
    next time.
    """
    root = Path(path).expanduser()
    name = name or root.name
    if not root.is_dir():
        raise DataError(f"{root} is not a folder")

    def make() -> ImageData:
        if (root / "train").is_dir() and (root / "test").is_dir():
            train, test = (_pictures(root / split, size, mode) for split in ("train", "test"))
            return from_arrays(*train, *test, name=name)
        return from_arrays(*_pictures(root, size, mode), test_fraction=test_fraction, seed=seed, name=name)

    return cached(name, [size, mode, test_fraction, seed, fingerprint(root)], make)
