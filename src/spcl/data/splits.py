"""Stratified splits of labelled data."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from spcl.data.image_data import ImageData
from spcl.errors import SpclError

__all__ = ["hold_out", "stratified_mask"]

Indices = NDArray[np.int64]


def hold_out(data: ImageData, fraction: float) -> ImageData:
    """Replace the test data by a fraction of every class of the training data, chosen by a fixed permutation."""
    x, y = data.train_x, data.train_y
    position = np.argsort(np.random.default_rng(0).permutation(len(y)))
    held = torch.from_numpy(stratified_mask(y.numpy(), fraction, lambda members: members[position[members].argsort()]))
    if not held.any():
        raise SpclError(
            f"validation = {fraction} of {len(y)} samples leaves nothing to validate on; choose a larger fraction"
        )
    return replace(data, train_x=x[~held], train_y=y[~held], test_x=x[held], test_y=y[held])


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
