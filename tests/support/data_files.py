"""Small files in the publishers' formats, written from the formats' descriptions, for the data tests."""

import gzip
import io
import json
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Container
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
from PIL import Image

CIFAR100_NAMES = [f"fine{i}" for i in range(100)]
WNIDS = ("n02", "n01", "n03")
Split = tuple[np.ndarray, np.ndarray]


def random_images(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), np.uint8)


def write_pets(folder: Path, count: int) -> str:
    """Write small pictures of two classes, and return the path of their folder."""
    for kind in ("cat", "dog"):
        (folder / kind).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (9, 9), (number, 50, 7)).save(folder / kind / f"{number}.png")
    return str(folder)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def emnist_files(train: Split, test: Split) -> dict[str, bytes]:
    """The four files of EMNIST ByClass; NIST stores every image transposed."""
    files = {}
    for split, (images, labels) in (("train", train), ("test", test)):
        transposed = images.transpose(0, 2, 1)
        files[f"emnist-byclass-{split}-images-idx3-ubyte.gz"] = gzip.compress(idx(transposed))
        files[f"emnist-byclass-{split}-labels-idx1-ubyte.gz"] = gzip.compress(idx(labels.astype(np.uint8)))
    return files


def small_emnist() -> tuple[dict[str, bytes], Split, Split]:
    train = (random_images(70, 28, 28, seed=1), np.arange(70) % 62)
    test = (random_images(62, 28, 28, seed=2), np.arange(62)[::-1])
    return emnist_files(train, test), train, test


def cifar_records(images: np.ndarray, labels: np.ndarray, coarse: bool) -> bytes:
    """Binary CIFAR: one record after the other, [coarse label,] label, red, green, blue."""
    records = [
        (bytes([label // 5]) if coarse else b"") + bytes([label]) + image.tobytes()
        for image, label in zip(images, labels, strict=True)
    ]
    return b"".join(records)


def small_cifar100(count: int = 110) -> tuple[Split, Split]:
    train = (random_images(count, 3, 32, 32, seed=3), np.arange(count) % 100)
    test = (random_images(20, 3, 32, 32, seed=4), np.arange(20) * 5)
    return train, test


def cifar100_binary_files(train: Split, test: Split) -> dict[str, bytes]:
    return {
        "train.bin": cifar_records(*train, coarse=True),
        "test.bin": cifar_records(*test, coarse=True),
        "fine_label_names.txt": "\n".join([*CIFAR100_NAMES, ""]).encode(),
        "coarse_label_names.txt": b"not used\n",
    }


def python2_pickle(entries: dict[str, np.ndarray | list[int] | list[str]]) -> bytes:
    """Write a dictionary as Python 2 does, by opcodes: all text is bytes, numpy.core rebuilds the arrays."""
    items = b"".join(_short_string(key) + _python2_value(value) for key, value in entries.items())
    return b"\x80\x02}(" + items + b"u."


def _short_string(text: str) -> bytes:
    return b"U" + bytes([len(text)]) + text.encode()


def _python2_value(value: np.ndarray | list[int] | list[str]) -> bytes:
    if isinstance(value, np.ndarray):
        empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        shape = b"".join(b"J" + struct.pack("<i", extent) for extent in value.shape) + b"\x86"
        dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        return empty + b"(K\x01" + shape + dtype + b"\x89T" + struct.pack("<I", value.size) + value.tobytes() + b"tb"
    items = [_short_string(item) if isinstance(item, str) else b"K" + bytes([item]) for item in value]
    return b"](" + b"".join(items) + b"e"


def python3_pickle(entries: object) -> bytes:
    """Write the same dictionary as Python 3 does for Python 2."""
    return pickle.dumps(entries, protocol=2)


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def write_tar(path: Path, top: str, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def write_zip(path: Path, top: str, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(f"{top}/{name}", content)


def jpeg(colour: tuple[int, int, int] | int, side: int = 64) -> bytes:
    file = io.BytesIO()
    Image.new("L" if isinstance(colour, int) else "RGB", (side, side), colour).save(file, "JPEG", quality=95)
    return file.getvalue()


def tiny_imagenet_files() -> dict[str, bytes]:
    """Three classes, not in alphabetical order; two training images and one validation image each, one of them grey."""
    colours: dict[str, tuple[int, int, int] | int] = {"n01": (200, 10, 10), "n02": (10, 200, 10), "n03": 120}
    files = {
        "wnids.txt": "\n".join(WNIDS).encode() + b"\n",
        "words.txt": b"n01\tcat, feline\nn02\tdog, hound\nn99\tunused\n",
        "val/val_annotations.txt": b"".join(
            b"val_%d.JPEG\t%s\t0\t0\t63\t63\n" % line for line in enumerate((b"n03", b"n01", b"n02"))
        ),
        "test/images/test_0.JPEG": jpeg((0, 0, 0)),
    }
    for wnid, colour in colours.items():
        files[f"train/{wnid}/{wnid}_boxes.txt"] = b"unused"
        files |= {f"train/{wnid}/images/{wnid}_{i}.JPEG": jpeg(colour) for i in range(2)}
    for i, wnid in enumerate(("n03", "n01", "n02")):
        files[f"val/images/val_{i}.JPEG"] = jpeg(colours[wnid])
    return files


# -- real sources

ARFF_FEATURES = ("X0", "YAVG", "ZMFCC12", "RESULTANT")


def arff(person: int, letters: str, *, first: float = 0.0) -> str:
    """A file of WISDM with a window for each activity; its features count on from ``first``."""
    header = ["@relation person_activities_labeled", "", '@attribute "ACTIVITY" { A, B, C }']
    header += [f'@attribute "{feature}" numeric' for feature in ARFF_FEATURES]
    header += [f'@attribute "class" {{ {person} }}', "", "@data"]
    rows = [
        f"{letter},{first + number},-1.5e-3,0,{first + number / 8:.6g},{person}"
        for number, letter in enumerate(letters)
    ]
    return "\n".join([*header, *rows]) + "\n"


def wisdm_files(persons: dict[int, str], device: str = "watch", sensor: str = "accel") -> dict[str, bytes]:
    """Files of features for several persons, given the activities of their windows."""
    return {
        f"arff_files/{device}/{sensor}/data_{person}_{sensor}_{device}.arff": arff(
            person, letters, first=1000.0 * (person - 1599)
        ).encode()
        for person, letters in persons.items()
    }


def raw_samples(person: int, parts: list[tuple[str, int, int]]) -> str:
    """Raw samples of WISDM: (activity, time of the first in samples, number) of every part."""
    return "".join(
        f"{person},{letter},{50_000_000 * (start + number)},{number}.5,-{number},0.25;\n"
        for letter, start, count in parts
        for number in range(count)
    )


AIR_HEADER = (
    '"No","year","month","day","hour","PM2.5","PM10","SO2","NO2","CO","O3","TEMP","PRES","DEWP","RAIN","wd","WSPM",'
    '"station"'
)


def air_line(number: int, station: str, pm: object) -> str:
    """A line of the Beijing data: the hour of this number, whose PM10 is the number."""
    when = datetime(2013, 3, 1) + timedelta(hours=number)
    clock = f"{when.year},{when.month},{when.day},{when.hour}"
    return f'{number + 1},{clock},{pm},{number},7,7,300,77,-0.7,1023,-18.8,0,"NNW",4.4,"{station}"'


def air_lines(station: str, missing: Container[int] = (), count: int = 35_064) -> list[str]:
    """The lines of a station, header first; PM2.5 is the number of the hour modulo 500."""
    lines = [air_line(number, station, "NA" if number in missing else number % 500) for number in range(count)]
    return [AIR_HEADER, *lines]


def air_files(stations: dict[str, list[str]]) -> dict[str, bytes]:
    return {
        f"PRSA_Data_{station}_20130301-20170228.csv": "\n".join(lines).encode() for station, lines in stations.items()
    }


def clinc_files(queries: dict[str, object], domains: dict[str, object]) -> dict[str, bytes]:
    return {"data_full.json": json.dumps(queries, indent=1).encode(), "domains.json": json.dumps(domains).encode()}
