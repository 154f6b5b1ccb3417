"""Malicious and damaged files: no path escapes, no code runs, and every error is a DataError."""

import io
import os
import pickle
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_files import (
    cifar100_binary_files,
    python2_pickle,
    random_images,
    small_cifar100,
    small_emnist,
    tiny_imagenet_files,
    write_files,
    write_tar,
    write_zip,
)
from spcl.data import ImageData, load_data
from spcl.data import reading as archives_module
from spcl.data.readers import read_cifar100_binary, read_emnist, read_tiny_imagenet
from spcl.data.reading import load_plain_pickle, open_archive
from spcl.errors import DataError

T = TypeVar("T")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPCL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SPCL_DATA", raising=False)


def tar_with(path: Path, member: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        member.size = 4 if member.isfile() else 0
        tar.addfile(member, io.BytesIO(b"data"))
    return path


# Archives


@pytest.mark.parametrize(
    "name", ["../evil.bin", "top/../../evil.bin", "/etc/evil.bin", "top\\..\\..\\evil", "C:/evil", "\\evil"]
)
def test_paths_outside_the_archive_are_refused(tmp_path: Path, name: str) -> None:
    tar = tar_with(tmp_path / "a.tar.gz", tarfile.TarInfo(name))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(name, b"data")
    before = sorted(tmp_path.parent.rglob("*"))
    for path in (tar, tmp_path / "a.zip"):
        with pytest.raises(DataError, match="points outside the archive"):
            open_archive(path, "top")
    assert sorted(tmp_path.parent.rglob("*")) == before


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_tar_links_and_devices_are_refused(tmp_path: Path, kind: bytes) -> None:
    member = tarfile.TarInfo("cifar-100-binary/train.bin")
    member.type, member.linkname = kind, "/etc/passwd"
    tar_with(tmp_path / "cifar-100-binary.tar.gz", member)
    with pytest.raises(DataError, match=r"'cifar-100-binary/train.bin' is a link or a device"):
        load_data("ps-cifar100", tmp_path)


def test_zip_links_are_refused(tmp_path: Path) -> None:
    member = zipfile.ZipInfo("tiny-imagenet-200/wnids.txt")
    member.create_system, member.external_attr = 3, 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "tiny-imagenet-200.zip", "w") as archive:
        archive.writestr(member, "/etc/passwd")
    with pytest.raises(DataError, match=r"'tiny-imagenet-200/wnids.txt' is a link"):
        load_data("ps-tiny-imagenet", tmp_path)


def test_archives_are_not_unpacked_to_disk(tmp_path: Path) -> None:
    write_tar(tmp_path / "cifar-100-binary.tar.gz", "cifar-100-binary", cifar100_binary_files(*small_cifar100()))
    load_data("ps-cifar100", tmp_path)
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    arrays = {"train_x.npy", "train_y.npy", "test_x.npy", "test_y.npy"}
    assert names == {"cifar-100-binary.tar.gz", "class_names.json", *arrays}


def test_archives_that_unpack_too_large_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives_module, "MAX_BYTES", 1000)
    write_tar(tmp_path / "a.tar.gz", "top", {"one": bytes(600), "two": bytes(600)})
    write_zip(tmp_path / "a.zip", "top", {"big": bytes(1001)})
    with pytest.raises(DataError, match="would unpack to 1200 bytes"):
        open_archive(tmp_path / "a.tar.gz", "top")
    with pytest.raises(DataError, match="would unpack to 1001 bytes"):
        open_archive(tmp_path / "a.zip", "top").read("big")


def test_checksum_of_a_tar_is_verified(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    write_tar(path, "top", {"one": random_images(1, 50_000).tobytes()})
    good = path.read_bytes()
    path.write_bytes(good[:-8] + bytes([good[-8] ^ 1]) + good[-7:])
    with pytest.raises(DataError, match="CRC check failed"):
        open_archive(path, "top")


def attempt(function: Callable[[], T]) -> tuple[T | None, str]:
    """Return the result, or None and the message of the DataError; any other exception fails the test."""
    try:
        return function(), ""
    except DataError as error:
        return None, str(error)


def same(data: ImageData, other: ImageData) -> bool:
    arrays = ("train_x", "train_y", "test_x", "test_y")
    return all(getattr(data, array).equal(getattr(other, array)) for array in arrays)


FORMATS = {
    "gzip.zip": ("gzip", lambda: small_emnist()[0], read_emnist),
    "tiny-imagenet-200.zip": ("tiny-imagenet-200", tiny_imagenet_files, read_tiny_imagenet),
    "cifar-100-binary.tar.gz": (
        "cifar-100-binary",
        lambda: cifar100_binary_files(*small_cifar100(5)),
        read_cifar100_binary,
    ),
}


@pytest.mark.parametrize("file", FORMATS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choice=st.data())
def test_damage_is_a_data_error_or_harmless(tmp_path: Path, file: str, choice: st.DataObject) -> None:
    top, make_files, read = FORMATS[file]
    path = tmp_path / file
    if not path.exists():
        (write_zip if path.suffix == ".zip" else write_tar)(path, top, make_files())
    good = path.read_bytes()
    expected = read(open_archive(path, top), "good")
    cut = choice.draw(st.integers(0, len(good) - 1), label="position")
    flip = choice.draw(st.integers(0, 255), label="flip")
    damaged = tmp_path / f"damaged-{file}"
    damaged.write_bytes(good[:cut] + (bytes([good[cut] ^ flip]) + good[cut + 1 :] if flip else b""))
    found, message = attempt(lambda: read(open_archive(damaged, top), "damaged"))
    if found is None:
        assert str(damaged) in message
    else:
        assert flip, "a truncated archive was accepted"
        lost_a_name = len(found.train_x) < len(expected.train_x)  # file names have no checksum; the set is then a part
        assert same(found, expected) or lost_a_name


# Pickles


class Malicious:
    def __init__(self, function: object, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_malicious_pickle_does_not_run(tmp_path: Path, protocol: int) -> None:
    trace = tmp_path / "trace"
    attacks = {
        "posix.mkdir": Malicious(os.mkdir, str(trace)),
        "eval": Malicious(eval, f"__import__('os').mkdir({str(trace)!r})"),
        "exec": Malicious(exec, f"__import__('os').mkdir({str(trace)!r})"),
        "getattr": Malicious(getattr, "text", "upper"),
    }
    for refused, attack in attacks.items():
        content = pickle.dumps({"data": attack}, protocol)
        write_files(tmp_path / "cifar-100-python", {"train": content, "test": content})
        with pytest.raises(DataError, match=rf"train: refused, because the pickle asks for \S*{refused}\b"):
            load_data("ps-cifar100", tmp_path)
        assert not trace.exists()
        pickle.loads(content)  # an ordinary unpickler runs the code
        assert trace.exists() or refused == "getattr"
        if trace.exists():
            trace.rmdir()


@pytest.mark.parametrize(
    "name",
    [
        "numpy.core.multiarray\n_reconstruct.__globals__",
        "numpy\nload",
        "numpy\nndarray.tofile",
        "_codecs\ndecode",
        "builtins\nopen",
    ],
)
def test_only_plain_data_is_unpickled(name: str) -> None:
    with pytest.raises(DataError, match="refused"):
        load_plain_pickle(b"\x80\x04c" + name.encode() + b"\n.", "batch")


def test_other_codecs_are_refused() -> None:
    with pytest.raises(DataError, match="'zlib_codec'"):
        load_plain_pickle(b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x0a\x00\x00\x00zlib_codec\x86R.", "batch")


def test_python2_pickles_are_read_as_by_numpy() -> None:
    content = python2_pickle({"data": random_images(4, 7), "labels": [3, 1], "names": ["a", "b"]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = pickle.loads(content, encoding="bytes")
    found = load_plain_pickle(content, "batch")
    assert found.keys() == expected.keys() == {b"data", b"labels", b"names"}
    assert found[b"labels"] == expected[b"labels"] == [3, 1]
    assert found[b"names"] == expected[b"names"] == [b"a", b"b"]
    np.testing.assert_array_equal(found[b"data"], expected[b"data"])


@settings(max_examples=150, deadline=None)
@given(position=st.integers(0, 200), byte=st.integers(0, 255))
def test_damaged_pickle_gives_data_or_a_data_error(position: int, byte: int) -> None:
    content = bytearray(python2_pickle({"data": random_images(1, 4), "labels": [3]}))
    content[position % len(content)] = byte
    found, message = attempt(lambda: load_plain_pickle(bytes(content), "batch"))
    assert found is not None or message.startswith("batch: ")
