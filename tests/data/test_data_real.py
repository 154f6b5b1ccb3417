"""The readers on real data, where available."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spcl.data import load_beijing_air, load_clinc150, load_data, load_wisdm

UNPACK = Path(__file__).resolve().parents[3] / "shared" / "data" / "unpack.py"
pytestmark = pytest.mark.skipif(not UNPACK.is_file(), reason="the folder with real data is not here")


def unpack(path: Path, *names: str) -> Path:
    subprocess.run([sys.executable, str(UNPACK), str(path), *names], check=True, stdout=subprocess.DEVNULL)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("data"), "cifar100", "cifar10", "emnist", "tiny-imagenet-200")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("sources"), "wisdm", "beijing-air", "clinc150")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPCL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SPCL_DATA", raising=False)


def test_cifar100(folder: Path) -> None:
    data = load_data("ps-cifar100", folder)
    assert data.train_y.bincount().tolist() == [500] * 100
    assert data.test_y.bincount().tolist() == [100] * 100
    assert (data.class_names[0], data.class_names[99]) == ("apple", "worm")
    pixels = data.train_x.transpose(0, 1).flatten(1)[:, ::7].double() / 255
    torch.testing.assert_close(pixels.mean(1), torch.tensor([0.5071, 0.4865, 0.4409]).double(), atol=1e-3, rtol=0)
    torch.testing.assert_close(pixels.std(1), torch.tensor([0.2673, 0.2564, 0.2762]).double(), atol=1e-3, rtol=0)


def test_cifar10(folder: Path) -> None:
    data = load_data("toy-cifar10", folder)
    assert data.train_y.bincount().tolist() == [500] * 10
    assert data.test_y.bincount().tolist() == [100] * 10


def test_emnist(folder: Path) -> None:
    data = load_data("ps-emnist", folder)
    assert (len(data.train_x), len(data.test_x)) == (116_323, 15_820)
    assert data.train_y.bincount().min() == 317
    capital_l = data.train_x[data.train_y == data.class_names.index("L")].float().mean(0)[0]
    assert capital_l[14:].sum() > 1.2 * capital_l[:14].sum(), "the letter L stands on its bar"
    assert capital_l[:14, :14].sum() > 1.2 * capital_l[:14, 14:].sum(), "and its stem is on the left"


def test_tiny_imagenet(folder: Path) -> None:
    data = load_data("ps-tiny-imagenet", folder)
    assert data.train_y.bincount().tolist() == [60] * 200
    assert data.test_y.bincount().tolist() == [20] * 200
    assert data.shape == (3, 64, 64)
    assert data.class_names[0] == "Egyptian cat"


def test_wisdm(sources: Path) -> None:
    watch = load_wisdm(data_dir=sources)
    assert (len(watch.sources), watch.train_samples, watch.test_samples, watch.classes) == (39, 10_926, 3_213, 18)
    assert sum(source.unseen for source in watch.sources) == 11
    everything = load_wisdm(["phone", "watch"], ["accel", "gyro"], data_dir=sources)
    assert len(everything.sources) == 150
    assert everything.train_samples + everything.test_samples == 53_314
    raw = load_wisdm(raw=True, data_dir=sources)
    assert (len(raw.sources), raw.classes, raw.shape) == (40, 6, (200, 3))


def test_beijing_air(sources: Path) -> None:
    data = load_beijing_air(data_dir=sources)
    assert len(data.sources) == 10
    assert data.shape == (24, 15)
    errors = [source.test_x[:, -1, 0] / source.scale - source.test_y[:, 0] for source in data.sources]  # type: ignore[call-overload, index]
    persistence = torch.cat(errors).abs().mean().item() * 100
    assert persistence == pytest.approx(31.8, abs=0.3)


def test_clinc150(sources: Path) -> None:
    data = load_clinc150(data_dir=sources)
    assert [source.classes for source in data.sources] == [15] * 10
    assert (data.train_samples, data.test_samples) == (15_000, 4_500)
