"""The readers on real data, where available."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spcl.data import load_data

UNPACK = Path(__file__).resolve().parents[3] / "shared" / "data" / "unpack.py"
pytestmark = pytest.mark.skipif(not UNPACK.is_file(), reason="the folder with real data is not here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    names = ["cifar100", "cifar10", "emnist", "tiny-imagenet-200"]
    subprocess.run([sys.executable, str(UNPACK), str(path), *names], check=True, stdout=subprocess.DEVNULL)
    return path


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
