"""Picture files (JPEG, PNG, …) to arrays of bytes."""

import io
import warnings
from typing import Literal

import numpy as np
from PIL import Image

from spcl.errors import DataError

__all__ = ["Mode", "decode_picture"]

Mode = Literal["L", "RGB"]


def decode_picture(content: bytes, origin: str, mode: Mode, size: int | None = None) -> np.ndarray:
    """Decode one picture to uint8 C×H×W, converted to grey (``"L"``) or colour (``"RGB"``), resized if `size` is given.

    >>> file = io.BytesIO()
    >>> Image.new("L", (4, 2), 7).save(file, "PNG")
    >>> decode_picture(file.getvalue(), "grey.png", "RGB").shape
    (3, 2, 4)
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(content)).convert(mode)
    except Exception as error:  # Pillow's decoders raise many kinds on damaged files
        raise DataError(f"{origin}: expected a picture, found something that does not decode ({error})") from error
    if size is not None:
        picture = picture.resize((size, size), Image.Resampling.BILINEAR)
    pixels = np.asarray(picture)
    return pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)
