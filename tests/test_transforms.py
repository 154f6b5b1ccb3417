"""Transforms against a loop over the samples, and what they refuse."""

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from spcl._util.registry import Named
from spcl.errors import SpclError
from spcl.transforms import TRANSFORMS, Crop, Flip, compose

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and this machine has none")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
dtypes = pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])


def images(count: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (count, 3, 5, 4), generator=generator).to(device, dtype)


@devices
@dtypes
def test_every_image_is_cropped_at_a_place_of_its_own(dtype: torch.dtype, device: str) -> None:
    x = images(600, dtype, device)
    torch.manual_seed(0)
    found, places = Crop(padding=2)(x), Counter[tuple[int, int]]()
    assert (found.dtype, found.shape, found.device) == (x.dtype, x.shape, x.device)
    for before, after in zip(x.cpu(), found.cpu(), strict=True):
        padded = pad(before, [2, 2, 2, 2])
        matches = [
            (top, left)
            for top in range(5)
            for left in range(5)
            if torch.equal(after, padded[:, top : top + 5, left : left + 4])
        ]
        assert len(matches) == 1
        places.update(matches)
    assert len(places) == 25
    assert max(places.values()) < 60  # 24 expected


@devices
@dtypes
def test_every_image_is_flipped_or_not(dtype: torch.dtype, device: str) -> None:
    x = images(400, dtype, device)
    torch.manual_seed(0)
    found = Flip(p=0.25)(x)
    assert (found.dtype, found.device) == (x.dtype, x.device)
    flipped = 0
    for before, after in zip(x, found, strict=True):
        mirrored = torch.stack([before[..., column] for column in (3, 2, 1, 0)], dim=-1)
        is_flipped = torch.equal(after, mirrored)
        assert is_flipped or torch.equal(after, before)
        flipped += is_flipped
    assert 60 < flipped < 140
    assert torch.equal(Flip(p=0.0)(x), x)
    assert torch.equal(Flip(p=1.0)(x), x.flip(-1))


@devices
def test_random_numbers_come_from_the_generator_of_the_device(device: str) -> None:
    transform, x = compose(["crop", "flip"]), images(50, torch.uint8, device)
    torch.manual_seed(1)
    first, second = transform(x), transform(x)
    torch.manual_seed(1)
    assert torch.equal(transform(x), first)
    assert not torch.equal(first, second)


def test_transforms_are_composed_in_order() -> None:
    x = images(3, torch.float32, "cpu")
    flip = {"name": "flip", "p": 1.0}
    assert torch.equal(compose([flip, flip])(x), x)
    assert torch.equal(compose([flip])(x), x.flip(-1))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"name": "flip", "p": 2.0}, r"p is 2.0; give the probability of a flip, from 0 to 1"),
        ({"name": "crop", "padding": 0}, r"padding is 0; give a positive whole number of pixels"),
        ({"name": "crop", "pading": 2}, r"transform 'crop' has no option 'pading'; did you mean 'padding'\?"),
        ("flop", r"there is no transform 'flop'; did you mean 'flip'\?"),
    ],
)
def test_wrong_settings_are_refused(setting: Named, words: str) -> None:
    with pytest.raises(SpclError, match=words):
        TRANSFORMS.make(setting)


@pytest.mark.parametrize("name", ["flip", "crop"])
def test_samples_that_are_no_images_are_refused(name: str) -> None:
    with pytest.raises(
        SpclError, match=rf"the transform '{name}' is for images .* but the samples are of shape \(7,\)"
    ):
        TRANSFORMS.make(name)(torch.zeros(3, 7))
