"""Decoding of picture files (JPEG, PNG, …) to uint8 arrays."""

import io
import warnings
from typing import Literal

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import BITSPERSAMPLE, TiffImageFile

from spcl.errors import DataError

__all__ = ["Mode", "decode_picture", "eight_bit"]

Mode = Literal["L", "RGB"]

SIXTEEN_BIT_IN_32 = ("PNG", "PPM")
"""Formats without 32-bit pictures, whose 16-bit values Pillow opens as 32-bit integers."""


def decode_picture(content: bytes, origin: str, mode: Mode, size: int | tuple[int, int] | None = None) -> np.ndarray:
    """Decode one picture to uint8 C×H×W in grey (``"L"``) or colour (``"RGB"``), resized if `size` is given.

    The size is width and height, or one number for both.
    Of 16-bit pictures the upper 8 bits are kept (``value >> 8``); 32-bit pictures are an error.

    >>> file = io.BytesIO()
    >>> Image.new("L", (4, 2), 7).save(file, "PNG")
    >>> decode_picture(file.getvalue(), "grey.png", "RGB").shape
    (3, 2, 4)
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            picture = eight_bit(Image.open(io.BytesIO(content)), origin).convert(mode)
    except DataError:
        raise
    except Exception as error:  # Pillow's decoders raise many types on damaged files
        unknown = isinstance(error, UnidentifiedImageError)  # its message shows a memory address
        reason = "no known format" if unknown else error
        raise DataError(f"{origin}: expected a picture, found something that does not decode ({reason})") from error
    if size is not None:
        width, height = (size, size) if isinstance(size, int) else size
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(picture)
    return pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)


def eight_bit(picture: Image.Image, origin: str) -> Image.Image:
    """Return the picture with 8 bits per channel.

    Of 16-bit grey the upper 8 bits are kept (``value >> 8``), as Pillow does for 16-bit colour; its conversion of grey
    would clip at 255. Integers and floats of 32 bits are an error, as their range is unknown.

    >>> ramp = np.array([[0, 255, 256, 65535]], np.uint16)
    >>> np.asarray(eight_bit(Image.fromarray(ramp), "ramp.png")).tolist()
    [[0, 0, 1, 255]]
    """
    if picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format in SIXTEEN_BIT_IN_32):
        # TIFF has 12-bit grey as well, which Pillow opens as 16-bit without rescaling it.
        bits = picture.tag_v2[BITSPERSAMPLE][0] if isinstance(picture, TiffImageFile) else 16
        return Image.fromarray((np.asarray(picture) >> (bits - 8)).astype(np.uint8))
    if picture.mode in ("I", "F"):
        kind = "32-bit integers" if picture.mode == "I" else "floats"
        raise DataError(
            f"{origin}: its pixels are {kind} of unknown range (mode {picture.mode}); "
            "convert it to 8 or 16 bits, or give the values as floats in an .npz file"
        )
    return picture
