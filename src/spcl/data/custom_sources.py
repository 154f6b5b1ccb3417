"""Custom data of several sources from arrays or tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spcl.batches import Inputs, map_leaves, number_of_samples
from spcl.data.custom import as_labels, as_samples, held_out_mask
from spcl.data.source_data import Kind, Source, SourceData
from spcl.errors import DataError

__all__ = ["from_sources"]

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
        sources: For every source, by name, ``(x, y)`` or ``(x, y, test_x, test_y)``. Samples x are those of
            `from_arrays`, or a dict or tuple of arrays; what targets y may be, `Source` says; classes may be arbitrary
            integers or strings. Without test samples, `test_fraction` of the samples (of every class) is held out.
        kinds: The kinds of sources whose targets do not show it. By default floating-point targets are those of a
            regression (but columns of zeros and ones an error), a vector of integers or text those of a
            classification, and other targets multi-label.
        test_fraction: The part that is held out.
        seed: Chooses what is held out.
        name: The name of the data set.

    >>> x = np.random.default_rng(0).normal(size=(10, 4))
    >>> data = from_sources({"speed": (x, x[:, 0]), "sign": (x, ["stop", "yield"] * 5)}, name="car")
    >>> data.sources
    (Source('speed': regression of 1 output, 8 + 2 samples of 4), Source('sign': classification of 2 classes, 8 + 2 ...
    """
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


def _source(name: str, kind: Kind, arrays: Sequence[Any], fraction: float, seed: int) -> Source:
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
        targets, names = _numbered(name, *targets)
    train_y, test_y = (torch.from_numpy(np.ascontiguousarray(y)) for y in targets)
    return Source(name, kind, inputs[0], train_y, inputs[1], test_y, names)


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


def _numbered(name: str, y: np.ndarray, test_y: np.ndarray) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Return labels as indices into the sorted names of the classes; columns of soft labels are numbered."""
    if y.dtype.kind == "f":
        classes = y.shape[1] if y.ndim == 2 else 0
        labels = test_y.argmax(axis=1) if test_y.ndim == 2 else test_y
        if labels.dtype.kind not in "biu":
            raise DataError(f"{name}: test labels beside soft labels must be integers, found {labels.dtype}")
        return [y, labels.astype(np.int64)], tuple(map(str, range(classes)))
    values = np.unique(y)
    if len(unknown := np.setdiff1d(test_y, values)):
        raise DataError(
            f"{name}: test labels without training samples: {', '.join(map(str, unknown[:5]))}; "
            "remove them or add training samples"
        )
    return [np.searchsorted(values, labels) for labels in (y, test_y)], tuple(map(str, values))
