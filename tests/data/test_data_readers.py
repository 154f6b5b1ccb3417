"""Readers of the publishers' formats: round trips, and damaged files refused by name."""

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from data_files import (
    CIFAR100_NAMES,
    cifar100_binary_files,
    cifar_records,
    emnist_files,
    idx,
    jpeg,
    python2_pickle,
    python3_pickle,
    random_images,
    small_cifar100,
    small_emnist,
    tiny_imagenet_files,
    write_files,
    write_tar,
    write_zip,
)
from spcl.data import ImageData, load_data
from spcl.errors import DataError

PickleWriter = Callable[[dict[str, object]], bytes]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPCL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SPCL_DATA", raising=False)


def assert_split(x: torch.Tensor, y: torch.Tensor, images: np.ndarray, labels: np.ndarray) -> None:
    assert x.dtype == torch.uint8
    assert y.dtype == torch.int64
    np.testing.assert_array_equal(x.numpy(), images)
    np.testing.assert_array_equal(y.numpy(), labels)


def assert_refused(name: str, folder: Path, *words: str) -> None:
    with pytest.raises(DataError) as caught:
        load_data(name, folder)
    for word in words:
        assert word in str(caught.value)


# EMNIST


@pytest.mark.parametrize("where", [".", "emnist", "gzip", "emnist/gzip"])
def test_emnist_folder(tmp_path: Path, where: str) -> None:
    files, train, test = small_emnist()
    write_files(tmp_path / where, files)
    data = load_data("ps-emnist", tmp_path)
    assert_split(data.train_x, data.train_y, train[0][:, None], train[1])
    assert_split(data.test_x, data.test_y, test[0][:, None], test[1])
    assert "".join(data.class_names) == "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@pytest.mark.parametrize("where", ["gzip.zip", "emnist/gzip.zip"])
def test_emnist_zip(tmp_path: Path, where: str) -> None:
    files, train, _ = small_emnist()
    write_zip(tmp_path / where, "gzip", files | {"emnist-letters-train-images-idx3-ubyte.gz": b"another split"})
    data = load_data("ps-emnist", tmp_path)
    assert_split(data.train_x, data.train_y, train[0][:, None], train[1])


TRAIN_IMAGES, TRAIN_LABELS = (f"emnist-byclass-train-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1"))
TWO = (random_images(2, 28, 28), np.array([0, 61]))


def gzipped(content: bytes) -> bytes:
    """Compress without the time of day, which would make the names of tests differ between processes."""
    return gzip.compress(content, mtime=0)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (TRAIN_IMAGES, gzipped(idx(random_images(2, 28, 28)))[:-9], ["gzip", "damaged"]),
        (TRAIN_IMAGES, b"not gzip at all", ["gzip", "damaged"]),
        (TRAIN_IMAGES, gzipped(b"\x00\x00\x0d\x03" + bytes(2000)), ["00000803", "00000d03"]),
        (TRAIN_IMAGES, gzipped(b""), ["00000803"]),
        (TRAIN_IMAGES, gzipped(idx(random_images(2, 28, 28))[:-1]), ["1568", "1567"]),
        (TRAIN_IMAGES, gzipped(idx(random_images(2, 28, 28)) + b"x"), ["1568", "1569"]),
        (TRAIN_IMAGES, gzipped(idx(random_images(2, 32, 32))), ["28×28", "(32, 32)"]),
        (TRAIN_IMAGES, gzipped(struct.pack(">4I", 0x803, 2**31, 2**31, 2**31)), [str(2**93), "found 0"]),
        (TRAIN_LABELS, gzipped(idx(random_images(2, 28, 28))), ["00000801", "00000803"]),
        (TRAIN_LABELS, gzipped(idx(np.array([0, 62], np.uint8))), ["0..61", "62"]),
        (TRAIN_LABELS, gzipped(idx(np.array([0, 1, 2], np.uint8))), ["2 images", "3 in"]),
    ],
)
def test_damaged_emnist_is_refused(tmp_path: Path, file: str, content: bytes, words: list[str]) -> None:
    write_files(tmp_path, emnist_files(TWO, TWO) | {file: content})
    assert_refused("ps-emnist", tmp_path, file, *words)


def test_emnist_without_images_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path, emnist_files((random_images(0, 28, 28), np.zeros(0)), TWO))
    assert_refused("ps-emnist", tmp_path, "at least one image")


def test_emnist_missing_file_is_named(tmp_path: Path) -> None:
    files = emnist_files(TWO, TWO)
    missing = "emnist-byclass-test-labels-idx1-ubyte.gz"
    del files[missing]
    write_files(tmp_path, files)
    assert_refused("ps-emnist", tmp_path, missing)


# CIFAR, binary


def assert_is_cifar100(data: ImageData) -> None:
    train, test = small_cifar100()
    assert_split(data.train_x, data.train_y, *train)
    assert_split(data.test_x, data.test_y, *test)
    assert list(data.class_names) == CIFAR100_NAMES


def test_cifar100_binary_folder(tmp_path: Path) -> None:
    write_files(tmp_path / "cifar-100-binary", cifar100_binary_files(*small_cifar100()))
    assert_is_cifar100(load_data("ps-cifar100", tmp_path))


def test_cifar100_binary_archive(tmp_path: Path) -> None:
    write_tar(tmp_path / "cifar-100-binary.tar.gz", "cifar-100-binary", cifar100_binary_files(*small_cifar100()))
    assert_is_cifar100(load_data("ps-cifar100", tmp_path))


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("train.bin", bytes(3074 * 2 - 1), ["3074", "6147", "1 records"]),
        ("train.bin", b"", ["at least one image"]),
        ("test.bin", cifar_records(random_images(2, 3, 32, 32), np.array([0, 100]), coarse=True), ["0..99", "100"]),
        ("fine_label_names.txt", b"apple\nbear\n", ["100 class names", "found 2"]),
    ],
)
def test_damaged_cifar100_binary_is_refused(tmp_path: Path, file: str, content: bytes, words: list[str]) -> None:
    write_files(tmp_path / "cifar-100-binary", cifar100_binary_files(*small_cifar100()) | {file: content})
    assert_refused("ps-cifar100", tmp_path, "cifar-100-binary", *words)


def test_cifar10_binary_reads_the_batches_present(tmp_path: Path) -> None:
    batches = {i: (random_images(10, 3, 32, 32, seed=i), np.arange(10)) for i in (1, 3)}
    files = {f"data_batch_{i}.bin": cifar_records(*batch, coarse=False) for i, batch in batches.items()}
    write_files(tmp_path / "cifar-10-batches-bin", files | {"test_batch.bin": files["data_batch_1.bin"]})
    data = load_data("toy-cifar10", tmp_path)
    assert_split(data.train_x, data.train_y, np.concatenate([batches[1][0], batches[3][0]]), np.tile(np.arange(10), 2))
    assert data.class_names == tuple("0123456789")


def test_cifar10_label_out_of_range_is_refused(tmp_path: Path) -> None:
    good = cifar_records(random_images(1, 3, 32, 32), np.array([9]), coarse=False)
    bad = cifar_records(random_images(1, 3, 32, 32), np.array([10]), coarse=False)
    write_files(
        tmp_path / "cifar-10-batches-bin", {"data_batch_1.bin": good, "data_batch_2.bin": bad, "test_batch.bin": good}
    )
    assert_refused("toy-cifar10", tmp_path, "data_batch_2.bin", "0..9", "found 10")


def test_cifar10_without_training_batches_is_refused(tmp_path: Path) -> None:
    good = cifar_records(random_images(1, 3, 32, 32), np.array([9]), coarse=False)
    write_files(tmp_path / "cifar-10-batches-bin", {"test_batch.bin": good})
    assert_refused("toy-cifar10", tmp_path, "data_batch_1.bin", "found test_batch.bin")


# CIFAR, python


def cifar100_python_files(write: PickleWriter) -> dict[str, bytes]:
    def batch(images: np.ndarray, labels: np.ndarray) -> bytes:
        names = [f"{i}.png" for i in range(len(labels))]
        fine = [int(label) for label in labels]
        entries = {"filenames": names, "data": images.reshape(-1, 3072), "fine_labels": fine, "coarse_labels": fine}
        return write(entries)

    train, test = small_cifar100()
    return {"train": batch(*train), "test": batch(*test), "meta": write({"fine_label_names": CIFAR100_NAMES})}


@pytest.mark.parametrize("write", [python2_pickle, python3_pickle])
@pytest.mark.parametrize("archive", [False, True])
def test_cifar100_python(tmp_path: Path, write: PickleWriter, archive: bool) -> None:
    files = cifar100_python_files(write)
    if archive:
        write_tar(tmp_path / "cifar-100-python.tar.gz", "cifar-100-python", files)
    else:
        write_files(tmp_path / "cifar-100-python", files)
    assert_is_cifar100(load_data("ps-cifar100", tmp_path))


def test_cifar10_python(tmp_path: Path) -> None:
    images = random_images(10, 3, 32, 32)
    batch = python2_pickle({"data": images.reshape(-1, 3072), "labels": list(range(10))})
    meta = python2_pickle({"label_names": list("abcdefghij")})
    write_files(tmp_path / "cifar-10-batches-py", {"data_batch_2": batch, "test_batch": batch, "batches.meta": meta})
    data = load_data("toy-cifar10", tmp_path)
    assert_split(data.train_x, data.train_y, images, np.arange(10))
    assert data.class_names == tuple("abcdefghij")


GOOD = {"data": random_images(3, 3072), "fine_labels": [0, 1, 99]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (python2_pickle(GOOD | {"fine_labels": [0, 1, 100]}), ["0..99", "100"]),
        (python2_pickle(GOOD | {"fine_labels": [0, 1]}), ["3 images", "2 labels"]),
        (python3_pickle(GOOD | {"fine_labels": [0, 1, -1]}), ["0..99", "-1"]),
        (python3_pickle(GOOD | {"fine_labels": [0, 1, 1.5]}), ["list of integers"]),
        (python3_pickle({"data": GOOD["data"]}), ["fine_labels", "found data"]),
        (python3_pickle(GOOD | {"data": random_images(3, 784)}), ["N×3072", "(3, 784)"]),
        (python3_pickle(GOOD | {"data": "text"}), ["N×3072", "str"]),
        (python3_pickle(GOOD | {"data": np.zeros((3, 3072), np.float32)}), ["'f4'"]),
        (python3_pickle([1, 2]), ["dictionary", "list"]),
        (python2_pickle(GOOD)[:-100], ["pickle"]),
        (b"no pickle", ["pickle"]),
        (b"", ["pickle"]),
    ],
)
def test_damaged_cifar100_python_is_refused(tmp_path: Path, content: bytes, words: list[str]) -> None:
    write_files(tmp_path / "cifar-100-python", cifar100_python_files(python2_pickle) | {"train": content})
    assert_refused("ps-cifar100", tmp_path, "cifar-100-python, train", *words)


# Tiny-ImageNet


@pytest.mark.parametrize("archive", [False, True])
def test_tiny_imagenet(tmp_path: Path, archive: bool) -> None:
    if archive:
        write_zip(tmp_path / "tiny-imagenet-200.zip", "tiny-imagenet-200", tiny_imagenet_files())
    else:
        write_files(tmp_path / "tiny-imagenet-200", tiny_imagenet_files())
    data = load_data("ps-tiny-imagenet", tmp_path)
    assert data.class_names == ("dog", "cat", "n03")
    assert data.train_x.shape == (6, 3, 64, 64)
    assert data.train_y.tolist() == [1, 1, 0, 0, 2, 2]
    assert data.test_y.tolist() == [2, 1, 0]
    channels = data.train_x.float().mean(dim=(2, 3))
    torch.testing.assert_close(
        channels[[0, 2, 4]], torch.tensor([[200.0, 10, 10], [10, 200, 10], [120, 120, 120]]), atol=4, rtol=0
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train/n01/images/n01_0.JPEG": b"no picture"}, ["train/n01/images/n01_0.JPEG", "picture"]),
        ({"train/n01/images/n01_0.JPEG": jpeg(5)[:300]}, ["train/n01/images/n01_0.JPEG", "picture"]),
        ({"train/n01/images/n01_0.JPEG": jpeg(5, side=32)}, ["n01_0.JPEG", "64×64", "32×32"]),
        ({"train/n77/images/n77_0.JPEG": jpeg(5)}, ["n77_0.JPEG", "wnids.txt", "'n77'"]),
        ({"val/val_annotations.txt": b"val_0.JPEG\tn55\t0\n"}, ["val_0.JPEG", "wnids.txt", "'n55'"]),
        ({"val/images/val_9.JPEG": jpeg(5)}, ["1 images without", "val/images/val_9.JPEG"]),
        ({"val/images/val_1.JPEG": None}, ["expected a file val/images/val_1.JPEG"]),
        ({"wnids.txt": None}, ["wnids.txt"]),
        ({"val/val_annotations.txt": b""}, ["without a line in val/val_annotations.txt"]),
    ],
)
def test_damaged_tiny_imagenet_is_refused(tmp_path: Path, changes: dict[str, bytes | None], words: list[str]) -> None:
    files = {name: content for name, content in (tiny_imagenet_files() | changes).items() if content is not None}
    write_zip(tmp_path / "tiny-imagenet-200.zip", "tiny-imagenet-200", files)
    assert_refused("ps-tiny-imagenet", tmp_path, "tiny-imagenet-200.zip", *words)
