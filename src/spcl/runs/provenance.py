"""What an unfinished run was made from: saved with it, and compared before it goes on."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spcl.data import ImageData
from spcl.errors import SpclError
from spcl.runs.folders import first_difference
from spcl.runs.settings import RunSettings

__all__ = ["Provenance", "fingerprint"]

MOST_BYTES = 8 << 20


class Provenance:
    """The settings and the data of the run in the folder ``out``; a source of a learner's checkpoint.

    Attributes:
        data: the fingerprint of the data.
    """

    def __init__(self, out: Path, settings: RunSettings, data: ImageData) -> None:
        self._out = out
        self._settings = settings.model_dump(mode="json")
        self.data = fingerprint(data)

    def state_dict(self) -> dict[str, Any]:
        """Both, as plain data."""
        return {"settings": self._settings, "data": self.data}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise an error if this is the state of other settings, or of other data."""
        if found := first_difference(state["settings"], self._settings):
            name, saved, now = found
            raise SpclError(
                f"the run in {self._out} was saved with {name} = {saved}, but its settings.json now says {now}; "
                f"set it back to go on, or begin a run of its own with another --out"
            )
        if state["data"] != self.data:
            raise SpclError(
                f"the data of {self._settings['benchmark']} has changed since the run in {self._out} was saved "
                f"(its fingerprint is {self.data}, and was {state['data']}); put the data back to go on, "
                f"or begin again with another --out"
            )


def fingerprint(data: ImageData) -> str:
    """A checksum of all labels and of evenly spaced samples, some megabytes of them however large the data is.

    >>> x, y = torch.arange(8.0).reshape(4, 2), torch.tensor([0, 1, 0, 1])
    >>> one, other = (ImageData("some", x, labels, x, y, ("a", "b")) for labels in (y, 1 - y))
    >>> fingerprint(one) == fingerprint(one), fingerprint(one) == fingerprint(other)
    (True, False)
    """
    checksum = 0
    for x, y in ((data.train_x, data.train_y), (data.test_x, data.test_y)):
        for part in (y, x[:: 1 + x.nbytes // MOST_BYTES]):
            checksum = zlib.crc32(f"{x.dtype} {list(x.shape)}".encode(), checksum)
            checksum = zlib.crc32(_bytes(part), checksum)
    return f"{checksum:08x}"


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().data
