"""State of a module outside its ``state_dict``, as plain data."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["read_state", "write_state"]

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def read_state(module: nn.Module) -> dict[str, Any]:
    """Return copies of all buffers, numbers and arrays among the attributes of the module and its submodules.

    TorchJD's aggregators have buffers that are None at first, and counters that are plain attributes: ``state_dict()``
    does not contain them and ``load_state_dict()`` does not accept them.

    >>> layer = nn.BatchNorm1d(2, affine=False)
    >>> state = read_state(layer)
    >>> state["running_mean"], state["momentum"]
    (tensor([0., 0.]), 0.1)
    >>> _ = layer(torch.randn(8, 2))
    >>> write_state(layer, state)
    >>> layer.running_mean
    tensor([0., 0.])
    """
    return {path: value for path, _, _, value in _entries(module)}


def write_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Restore the state from :func:`read_state` in a module with the same attributes."""
    for path, owner, name, present in list(_entries(module)):
        value = state[path]
        if isinstance(present, Tensor) and isinstance(value, Tensor):
            value = value.to(present.device, copy=True)
        if isinstance(getattr(owner, name), np.ndarray):
            value = value.cpu().numpy().copy()
        setattr(owner, name, value)


def _entries(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield path, owner, name and a plain copy of every buffer, number and array."""
    for prefix, part in module.named_modules():
        attributes = {name: value for name, value in vars(part).items() if name not in MODULE_ATTRIBUTES}
        for name, value in [*part._buffers.items(), *attributes.items()]:
            if value is None or isinstance(value, (bool, int, float, Tensor)):
                copy = value.clone() if isinstance(value, Tensor) else value
            elif isinstance(value, np.ndarray):
                copy = torch.from_numpy(value.copy())
            else:
                continue
            yield f"{prefix}.{name}" if prefix else name, part, name, copy
