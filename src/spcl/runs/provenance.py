"""The settings and the data that an unfinished run was started with, compared when it is resumed."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spcl.batches import Inputs, leaves
from spcl.data import ImageData, Source, SourceData
from spcl.runs.folder import FolderError
from spcl.runs.identity import first_difference
from spcl.runs.settings import RunSettings, with_defaults

__all__ = ["Provenance", "fingerprint"]

MAX_BYTES = 8 << 20


class Provenance:
    """Settings and data fingerprint of the run in the folder ``out``, saved as a source of the learner's checkpoint.

    Attributes:
        fingerprint: the checksum of the data.
    """

    def __init__(self, out: Path, settings: RunSettings, data: ImageData | SourceData) -> None:
        self._out = out
        self._settings = settings.model_dump(mode="json")
        self.fingerprint = fingerprint(data)

    def state_dict(self) -> dict[str, Any]:
        """Return settings and fingerprint."""
        return {"settings": self._settings, "data": self.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise :class:`FolderError` if the run was saved with other settings or other data."""
        if found := first_difference(with_defaults(state["settings"]), self._settings):
            name, saved, now = found
            raise FolderError(
                f"the run in {self._out} was saved with {name} = {saved}, but its settings.json now says {now}; "
                f"set it back to resume, or start another run in another folder"
            )
        if state["data"] != self.fingerprint:
            raise FolderError(
                f"the data of {self._settings['benchmark']} has changed since the run in {self._out} was saved "
                f"(its fingerprint is {self.fingerprint}, and was {state['data']}); put the data back to resume, "
                f"or start again in another folder"
            )


def fingerprint(data: ImageData | SourceData) -> str:
    """Compute a checksum of all labels and of evenly spaced samples, a few megabytes of them for data of any size.

    >>> x, y = torch.arange(8.0).reshape(4, 2), torch.tensor([0, 1, 0, 1])
    >>> one, other = (ImageData("some", x, labels, x, y, ("a", "b")) for labels in (y, 1 - y))
    >>> fingerprint(one) == fingerprint(one), fingerprint(one) == fingerprint(other)
    (True, False)
    """
    checksum = 0
    for part in data.sources if isinstance(data, SourceData) else [data]:
        if isinstance(part, Source):
            checksum = zlib.crc32(f"{part.name} {part.kind} {part.class_names}".encode(), checksum)
        for x, y in ((part.train_x, part.train_y), (part.test_x, part.test_y)):
            checksum = _samples_checksum(x, y, checksum)
    return f"{checksum:08x}"


def _samples_checksum(x: Inputs, y: Tensor, checksum: int) -> int:
    if isinstance(x, dict):
        checksum = zlib.crc32(" ".join(x).encode(), checksum)
    for inputs in leaves(x).values():
        for tensor in (y, inputs[:: 1 + inputs.nbytes // MAX_BYTES]):
            checksum = zlib.crc32(f"{inputs.dtype} {list(inputs.shape)}".encode(), checksum)
            checksum = zlib.crc32(_bytes(tensor), checksum)
    return checksum


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().data
