"""Stratified splits of labelled data."""

from collections.abc import Callable
from dataclasses import replace
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spcl.batches import map_leaves
from spcl.data.image_data import ImageData
from spcl.data.source_data import Source, SourceData
from spcl.errors import SpclError

__all__ = ["hold_out", "stratified_mask"]

Indices = NDArray[np.int64]


@overload
def hold_out(data: ImageData, fraction: float) -> ImageData: ...


@overload
def hold_out(data: SourceData, fraction: float) -> SourceData: ...


def hold_out(data: ImageData | SourceData, fraction: float) -> ImageData | SourceData:
    """Replace the test data by a fraction of every class of the training data, chosen by a fixed permutation.

    Of a source without classes it is a fraction of all its samples.
    """
    if isinstance(data, SourceData):
        return SourceData(data.name, tuple(_held_out_source(source, fraction) for source in data.sources))
    held = _held_out(data.train_y, fraction)
    x, y = data.train_x, data.train_y
    return replace(data, train_x=x[~held], train_y=y[~held], test_x=x[held], test_y=y[held])


def _held_out_source(source: Source, fraction: float) -> Source:
    y = source.train_y
    labels = y.argmax(dim=1) if source.kind == "classification" and y.ndim == 2 else y
    held = _held_out(labels if source.kind == "classification" else torch.zeros(len(y), dtype=torch.int64), fraction)
    return replace(
        source,
        train_x=map_leaves(lambda part: part[~held], source.train_x),
        train_y=y[~held],
        test_x=map_leaves(lambda part: part[held], source.train_x),
        test_y=(labels if source.kind == "classification" else y)[held],
    )


def _held_out(labels: Tensor, fraction: float) -> Tensor:
    """Return a mask of the samples that are held out."""
    position = np.argsort(np.random.default_rng(0).permutation(len(labels)))
    mask = stratified_mask(labels.numpy(), fraction, lambda members: members[position[members].argsort()])
    if not mask.any():
        raise SpclError(
            f"validation = {fraction} of {len(labels)} samples leaves nothing to validate on; choose a larger fraction"
        )
    return torch.from_numpy(mask)


def stratified_mask(
    labels: NDArray[np.generic], fraction: float, shuffle: Callable[[Indices], Indices], *, nonempty: bool = False
) -> NDArray[np.bool_]:
    """Return a mask of a fraction of the samples of every class.

    Args:
        labels: The class of each sample.
        fraction: The fraction of each class, rounded to whole samples.
        shuffle: Permutes the indices of a class, of which the first are chosen.
        nonempty: Choose at least one sample of each class, and leave at least one.

    >>> stratified_mask(np.array([0, 0, 1, 1, 1, 1]), 0.5, lambda members: members)
    array([ True, False,  True,  True, False, False])
    """
    mask = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = shuffle(np.flatnonzero(labels == label))
        count = round(len(members) * fraction)
        mask[members[: min(max(1, count), len(members) - 1) if nonempty else count]] = True
    return mask
