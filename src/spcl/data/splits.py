"""Splitting labelled data class by class."""

from dataclasses import replace

import numpy as np
import torch

from spcl.data.image_data import ImageData
from spcl.errors import SpclError

__all__ = ["hold_out"]


def hold_out(data: ImageData, fraction: float) -> ImageData:
    """The training data alone, split: of every class a part, by a fixed shuffle, takes the test data's place."""
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(data.train_y)))
    held = torch.zeros(len(order), dtype=torch.bool)
    for label in range(data.classes):
        members = order[data.train_y[order] == label]
        held[members[: round(len(members) * fraction)]] = True
    if not held.any():
        raise SpclError(f"validation = {fraction} of {len(order)} samples leaves nothing to validate on")
    x, y = data.train_x, data.train_y
    return replace(data, train_x=x[~held], train_y=y[~held], test_x=x[held], test_y=y[held])
