"""The cache of decoded data: damage, changed sources and concurrent processes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from data_files import emnist_files, random_images, small_emnist, write_files
from spcl.data import ImageData, cache_dir, load_data
from spcl.data.cache import cached

FILES = ("train_x.npy", "train_y.npy", "test_x.npy", "test_y.npy", "class_names.json")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPCL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SPCL_DATA", raising=False)


class Maker:
    """A factory of the same small data set that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> ImageData:
        self.calls += 1
        images, labels = torch.from_numpy(random_images(12, 1, 5, 5)), torch.arange(12) % 3
        return ImageData("small", images, labels, images[:3], labels[:3], ("a", "b", "c"))


def the_file(name: str) -> Path:
    (path,) = cache_dir().rglob(name)
    return path


def assert_good(data: ImageData) -> None:
    good = Maker()()
    for array in ("train_x", "train_y", "test_x", "test_y"):
        assert getattr(data, array).equal(getattr(good, array))
    assert data.class_names == good.class_names


def test_data_is_made_once_per_identity() -> None:
    make = Maker()
    for _ in range(3):
        assert_good(cached("small", ["file", 1], make))
    assert make.calls == 1
    cached("small", ["file", 2], make)
    cached("other", ["file", 1], make)
    assert make.calls == 3
    assert_good(cached("small", ["file", 1], make, renew=True))
    assert make.calls == 4


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "garbage"])
def test_damaged_cache_is_rewritten(file: str, damage: str) -> None:
    make = Maker()
    cached("small", 0, make)
    path = the_file(file)
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes({"empty": b"", "cut": content[:-1], "garbage": b"\x93garbage" * 30}[damage])
    assert_good(cached("small", 0, make))
    assert make.calls == 2
    assert_good(cached("small", 0, make))
    assert make.calls == 2


def test_cached_labels_out_of_range_are_damage() -> None:
    make = Maker()
    cached("small", 0, make)
    np.save(the_file("train_y.npy"), np.full(12, 3))
    assert_good(cached("small", 0, make))


def test_pickled_arrays_are_not_loaded() -> None:
    make = Maker()
    cached("small", 0, make)
    np.save(the_file("train_y.npy"), np.array([print] * 12, dtype=object))
    assert_good(cached("small", 0, make))
    assert make.calls == 2


def test_writing_to_a_loaded_tensor_does_not_change_the_cache() -> None:
    make = Maker()
    cached("small", 0, make).train_x.zero_()
    assert_good(cached("small", 0, make))


@pytest.mark.parametrize("file", FILES)
def test_unwritable_file_leaves_no_partial_cache(file: str) -> None:
    make = Maker()
    cached("small", 0, make)
    path = the_file(file)
    path.unlink()
    path.mkdir()
    with pytest.warns(RuntimeWarning, match=r"cannot write the cache .*Is a directory") as warned:
        assert_good(cached("small", 0, make))
    assert len(warned) == 1
    assert not [path for path in cache_dir().rglob("*") if path.is_file()]
    for _ in range(2):
        assert_good(cached("small", 0, make))
    assert make.calls == 3


def test_full_disk_leaves_no_partial_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.warns(RuntimeWarning, match=r"No space left on device.*SPCL_CACHE"):
        assert_good(cached("small", 0, Maker()))
    assert not [path for path in cache_dir().rglob("*") if path.is_file()]


def test_changed_source_is_decoded_again(tmp_path: Path) -> None:
    files, train, test = small_emnist()
    write_files(tmp_path, files)
    assert len(load_data("ps-emnist", tmp_path).train_x) == 70
    write_files(tmp_path, emnist_files((train[0][:65], train[1][:65]), test))
    assert len(load_data("ps-emnist", tmp_path).train_x) == 65


def test_cached_data_is_not_decoded(tmp_path: Path) -> None:
    files, train, _ = small_emnist()
    write_files(tmp_path, files)
    load_data("ps-emnist", tmp_path)
    broken = tmp_path / "emnist-byclass-train-images-idx3-ubyte.gz"
    state = broken.stat()
    broken.write_bytes(bytes(state.st_size))  # same name, size and time: only the cache has the data
    os.utime(broken, ns=(state.st_atime_ns, state.st_mtime_ns))
    np.testing.assert_array_equal(load_data("ps-emnist", tmp_path).train_x[:, 0].numpy(), train[0])


TWO_AT_ONCE = """
import sys, time
from pathlib import Path
from spcl.data import load_data
folder = Path(sys.argv[1])
expected = load_data("ps-emnist", folder).train_x.clone()
(folder / f"ready-{sys.argv[2]}").touch()
while len(list(folder.glob("ready-*"))) < 2:
    time.sleep(0.01)
for i in range(20):
    if i % 10 == 9:
        for file in (folder / "cache").rglob("train_y.npy"):
            file.unlink(missing_ok=True)
    data = load_data("ps-emnist", folder, renew=i % 3 == 0)
    assert data.train_x.equal(expected) and data.train_y.tolist() == [n % 62 for n in range(70)]
"""


def test_concurrent_processes_share_the_cache(tmp_path: Path) -> None:
    files, _, _ = small_emnist()
    write_files(tmp_path, files)
    commands = [[sys.executable, "-W", "error", "-c", TWO_AT_ONCE, str(tmp_path), name] for name in ("first", "second")]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    assert {path.name for path in (tmp_path / "cache").rglob("*.*")} == set(FILES)


def test_cache_folder_is_set_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("SPCL_CACHE")
    assert cache_dir() == tmp_path / "xdg" / "spcl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "spcl"
