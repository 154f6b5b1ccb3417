"""PS-Glyphs: reproducible, balanced, and hard enough to distinguish models."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from spcl.data import cache_dir, load_data
from spcl.data.glyphs import make_glyphs
from spcl.errors import DataError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPCL_CACHE", str(tmp_path / "cache"))


def test_same_seed_gives_same_images() -> None:
    images, labels = make_glyphs(2, seed=3)
    again, labels_again = make_glyphs(2, seed=3)
    other, _ = make_glyphs(2, seed=4)
    assert images.equal(again)
    assert labels.equal(labels_again)
    assert not images.equal(other)


def test_images_have_the_right_shape_and_balanced_labels() -> None:
    images, labels = make_glyphs(3, seed=0)
    assert images.shape == (186, 1, 28, 28)
    assert images.dtype == torch.uint8
    assert labels.bincount().tolist() == [3] * 62
    assert len(images.flatten(1).unique(dim=0)) == len(images)
    contrast = images.flatten(1).float().amax(1) - images.flatten(1).float().median(1).values
    assert contrast.min() > 60, "a character can hardly be seen"


def test_characters_are_upright_and_different() -> None:
    images, labels = make_glyphs(30, seed=0)
    means = torch.stack([images[labels == label].float().mean(0)[0] for label in range(62)])
    capital_l = means[21]
    assert capital_l[14:].sum() > 1.2 * capital_l[:14].sum()
    assert capital_l[:14, :14].sum() > 1.2 * capital_l[:14, 14:].sum()
    assert torch.pdist(means.flatten(1)).min() > 50


def test_glyphs_are_generated_once_and_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spcl.data.glyphs.TRAIN_PER_CLASS", 2)
    monkeypatch.setattr("spcl.data.glyphs.TEST_PER_CLASS", 1)
    data = load_data("ps-glyphs")
    assert repr(data) == "ImageData('ps-glyphs': 124 + 62 samples of 1×28×28, 62 classes)"
    assert "".join(data.class_names[8:12]) == "89AB"
    times = {path: path.stat().st_mtime_ns for path in cache_dir().rglob("*")}
    assert load_data("ps-glyphs").train_x.equal(data.train_x)
    assert {path: path.stat().st_mtime_ns for path in cache_dir().rglob("*")} == times


def test_pillow_without_freetype_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.features.check", lambda feature: False)
    with pytest.raises(DataError, match="FreeType"):
        make_glyphs(1, seed=0)


def standardised(images: Tensor) -> Tensor:
    pixels = images.float() / 255
    return (pixels - pixels.mean()) / pixels.std()


def logistic_regression(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Train with an L2 penalty of 0.1; ten times less gives about the same accuracy and converges more slowly."""
    weights = torch.zeros(x.shape[1], 12, requires_grad=True)
    bias = torch.zeros(12, requires_grad=True)
    optimiser = torch.optim.LBFGS([weights, bias], max_iter=60, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = nn.functional.cross_entropy(x @ weights + bias, y) + 0.1 * weights.square().sum()
        value.backward()
        return value

    optimiser.step(loss)
    return weights.detach(), bias.detach()


def small_cnn(x: Tensor, y: Tensor) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(576, 12))
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(3):
        for batch in torch.randperm(len(x)).split(32):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimiser.step()
    return model


def test_linear_model_is_well_under_80_percent_and_a_cnn_well_above() -> None:
    """Use one task of twelve random characters, 200 + 40 images of each."""
    characters = torch.randperm(62, generator=torch.Generator().manual_seed(0))[:12]

    def task(per_class: int, seed: int) -> tuple[Tensor, Tensor]:
        images, labels = make_glyphs(per_class, seed)
        chosen = torch.isin(labels, characters)
        local = (labels[chosen, None] == characters).int().argmax(1)
        return standardised(images[chosen]), local

    train_x, train_y = task(200, 0)
    test_x, test_y = task(40, 1)
    weights, bias = logistic_regression(train_x.flatten(1), train_y)
    linear = ((test_x.flatten(1) @ weights + bias).argmax(1) == test_y).float().mean().item()
    model = small_cnn(train_x, train_y)
    with torch.no_grad():
        cnn = (model(test_x).argmax(1) == test_y).float().mean().item()
    assert 0.3 < linear < 0.7
    assert cnn > linear + 0.15
