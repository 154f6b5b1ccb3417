"""PS-Glyphs: generated images of the characters 0-9A-Za-z in Pillow's font, distorted; needs no download."""

import numpy as np
import PIL
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont, features
from torch import Tensor

from spcl.data.cache import cached, track
from spcl.data.readers import CHARACTERS
from spcl.data.samples import ImageData
from spcl.errors import DataError

VERSION = 1
"""Part of the cache key; increase it with every change of the images."""

SIDE = 28
TRAIN_PER_CLASS, TEST_PER_CLASS = 400, 80
OVERSAMPLING = 2  # drawn and distorted at twice the final size, then averaged down
TEMPLATE, FONT_SIZE, BASELINE = 80, 48, 54  # of the undistorted image, in oversampled pixels

# With these distortions a linear classifier stays under 60 % on tasks of twelve characters, and a small convolutional
# network reaches 97 %. A single number v is the range ±v; lengths are in pixels of the final image.
STROKE_WIDTHS = range(4)
ROTATION = np.pi / 6
SHEAR = 0.3
SCALE = (0.75, 1.2)
STRETCH = 0.2  # logarithm of height over width, beyond the common scale
SHIFT = 3.0
BLUR = (0.0, 1.0)
CONTRAST = (0.6, 1.0)
NOISE = (5.0, 45.0)  # standard deviation in grey levels


def load_glyphs(name: str = "ps-glyphs", *, renew: bool = False) -> ImageData:
    """Load the data set, 400 + 80 images of each of 62 characters, generated at the first call and cached."""
    identity = [VERSION, PIL.__version__, features.version("freetype2")]
    return cached(name, identity, lambda: _make_both(name), renew=renew)


def make_glyphs(per_class: int, seed: int) -> tuple[Tensor, Tensor]:
    """Generate `per_class` images of every character, uint8 N×1×28×28, and their labels; seeded.

    >>> images, labels = make_glyphs(2, seed=0)
    >>> images.shape, labels[:5]
    (torch.Size([124, 1, 28, 28]), tensor([0, 0, 1, 1, 2]))
    """
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(CHARACTERS)), per_class)
    templates = _templates()
    strokes = rng.integers(len(STROKE_WIDTHS), size=len(labels))
    blurs = rng.uniform(*BLUR, len(labels)) * OVERSAMPLING
    maps = _affine_maps(rng, len(labels))
    images = np.empty((len(labels), SIDE, SIDE), np.float32)
    for label in track(range(len(CHARACTERS)), "drawing ps-glyphs", len(CHARACTERS)):
        for i in range(label * per_class, (label + 1) * per_class):
            images[i] = _distort(templates[label][strokes[i]], maps[i], blurs[i])
    return torch.from_numpy(_expose(rng, images)[:, None]), torch.from_numpy(labels)


def _make_both(name: str) -> ImageData:
    train_x, train_y = make_glyphs(TRAIN_PER_CLASS, seed=0)
    test_x, test_y = make_glyphs(TEST_PER_CLASS, seed=1)
    return ImageData(name, train_x, train_y, test_x, test_y, tuple(CHARACTERS))


def _templates() -> list[list[Image.Image]]:
    """Draw every character in every stroke width, undistorted, on a common baseline."""
    if not features.check("freetype2"):
        raise DataError("ps-glyphs needs Pillow with FreeType, which this installation lacks; reinstall Pillow")
    font = ImageFont.load_default(size=FONT_SIZE)
    return [[_draw(character, font, width) for width in STROKE_WIDTHS] for character in CHARACTERS]


def _draw(character: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, stroke_width: int) -> Image.Image:
    image = Image.new("L", (TEMPLATE, TEMPLATE))
    anchor = (TEMPLATE / 2, BASELINE)
    ImageDraw.Draw(image).text(anchor, character, fill=255, font=font, anchor="ms", stroke_width=stroke_width)
    return image


def _affine_maps(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draw random maps from the distorted image's pixels to the template's, as count×6 coefficients for Pillow."""
    angle = rng.uniform(-ROTATION, ROTATION, count)
    shear = rng.uniform(-SHEAR, SHEAR, count)
    low, high = np.log(SCALE)
    width = np.exp(rng.uniform(low, high, count))
    height = width * np.exp(rng.uniform(-STRETCH, STRETCH, count))
    shift = rng.uniform(-SHIFT, SHIFT, (count, 2)) * OVERSAMPLING
    zero, one = np.zeros(count), np.ones(count)
    rotate = _matrices(np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle))
    forward = rotate @ _matrices(one, shear, zero, one) @ _matrices(width, zero, zero, height)
    inverse = np.linalg.inv(forward)
    centre = shift + SIDE * OVERSAMPLING / 2
    offset = TEMPLATE / 2 - np.einsum("nij,nj->ni", inverse, centre)
    return np.concatenate([inverse, offset[:, :, None]], axis=2).reshape(count, 6)


def _matrices(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Stack 2×2 matrices [[a, b], [c, d]]."""
    return np.stack([a, b, c, d], axis=1).reshape(-1, 2, 2)


def _distort(template: Image.Image, coefficients: np.ndarray, blur: float) -> np.ndarray:
    size = (SIDE * OVERSAMPLING, SIDE * OVERSAMPLING)
    moved = template.transform(size, Image.Transform.AFFINE, coefficients.tolist(), Image.Resampling.BILINEAR)
    return np.asarray(moved.filter(ImageFilter.GaussianBlur(float(blur))).reduce(OVERSAMPLING))


def _expose(rng: np.random.Generator, images: np.ndarray) -> np.ndarray:
    """Apply random contrast and noise to every image."""
    images *= rng.uniform(*CONTRAST, (len(images), 1, 1)).astype(np.float32)
    deviation = rng.uniform(*NOISE, (len(images), 1, 1)).astype(np.float32)
    images += deviation * rng.standard_normal(images.shape, dtype=np.float32)
    exposed: np.ndarray = np.clip(images, 0, 255).astype(np.uint8)
    return exposed
