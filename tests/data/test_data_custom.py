"""Custom data: arrays, datasets and folders of pictures."""

import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from data_files import random_images
from spcl.data import ImageData, from_arrays, from_dataset, from_folder
from spcl.data.reading import decode_picture
from spcl.errors import DataError
from spcl.runs import load_benchmark, make_problem, resolve_settings
from spcl.runs.build import make_backbone


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPCL_CACHE", str(tmp_path / "cache"))


IMAGES = random_images(20, 3, 8, 8)
LABELS = np.arange(20) % 4


# ImageData


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_x": torch.zeros(4, 8, 8, dtype=torch.uint8)}, "must be N×C×H×W"),
        ({"train_x": torch.zeros(4, 3, 2, dtype=torch.int64)}, "token sequences N×L, and images must be uint8"),
        ({"train_x": torch.zeros(4, 3, dtype=torch.int64) - 1}, "token sequences hold -1"),
        ({"train_x": torch.zeros(4, 3, dtype=torch.int16)}, "uint8 images, floating-point features or integer"),
        ({"train_x": torch.zeros(4)}, "uint8 images, floating-point features or integer"),
        ({"train_x": torch.zeros(0, 3)}, "no samples"),
        ({"train_y": torch.tensor([0, 1, 2, 0])}, "must be 0..1, found 2"),
        ({"train_y": torch.tensor([0, 1, -1, 0])}, "must be 0..1, found -1"),
        ({"train_y": torch.tensor([0, 1, 0])}, "4 samples but 3 labels"),
        ({"train_y": torch.tensor([0, 1, 1, 0], dtype=torch.int32)}, "vector of int64, found torch.int32"),
        ({"test_x": torch.zeros(2, 5)}, "the same type and shape"),
        ({"test_x": torch.zeros(2, 3, dtype=torch.float64)}, "the same type and shape"),
    ],
)
def test_invalid_image_data_is_refused(change: dict[str, torch.Tensor], message: str) -> None:
    y = torch.tensor([0, 1, 0, 1])
    good: dict[str, Any] = {"train_x": torch.zeros(4, 3), "train_y": y, "test_x": torch.zeros(2, 3), "test_y": y[:2]}
    ImageData("data", **good, class_names=("a", "b"))
    with pytest.raises(DataError, match=message):
        ImageData("data", **(good | change), class_names=("a", "b"))


# from_arrays


def test_arrays_with_given_test_samples() -> None:
    data = from_arrays(IMAGES, LABELS, IMAGES[:5], LABELS[:5], name="mine")
    np.testing.assert_array_equal(data.train_x.numpy(), IMAGES)
    np.testing.assert_array_equal(data.test_x.numpy(), IMAGES[:5])
    assert data.train_y.tolist() == LABELS.tolist()
    assert (data.name, data.class_names, data.shape) == ("mine", ("0", "1", "2", "3"), (3, 8, 8))


def test_labels_of_any_value_become_indices() -> None:
    assert from_arrays(IMAGES, LABELS * 10 - 5).class_names == ("-5", "5", "15", "25")
    words = np.array(["pear", "apple"])[LABELS % 2]
    data = from_arrays(IMAGES, words.tolist(), IMAGES[:2], ["apple", "pear"])
    assert data.class_names == ("apple", "pear")
    assert data.train_y.tolist() == [1, 0] * 10
    assert data.test_y.tolist() == [0, 1]


def test_tensors_lists_and_grey_images() -> None:
    assert from_arrays(torch.from_numpy(IMAGES), torch.from_numpy(LABELS)).train_x.dtype == torch.uint8
    assert from_arrays(IMAGES[:, 0], LABELS).shape == (1, 8, 8)
    features = from_arrays([[1.0, 2.0], [3.0, 4.0]] * 4, [0, 1] * 4)
    assert features.train_x.dtype == torch.float32
    assert features.shape == (2,)
    read_only = IMAGES.copy()
    read_only.setflags(write=False)
    assert from_arrays(read_only, LABELS).classes == 4


@given(
    counts=st.lists(st.integers(2, 30), min_size=1, max_size=6),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 1000),
)
def test_split_is_disjoint_complete_stratified_and_seeded(counts: list[int], fraction: float, seed: int) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    x = np.arange(len(labels), dtype=np.float32)[:, None]
    data = from_arrays(x, labels, test_fraction=fraction, seed=seed)
    train, test = data.train_x[:, 0].int().tolist(), data.test_x[:, 0].int().tolist()
    assert sorted(train + test) == list(range(len(labels)))
    assert [labels[i] for i in train] == data.train_y.tolist()
    assert [labels[i] for i in test] == data.test_y.tolist()
    for label, count in enumerate(counts):
        held_out = data.test_y.tolist().count(label)
        assert 1 <= held_out <= count - 1
        assert abs(held_out - fraction * count) <= 1
    assert from_arrays(x, labels, test_fraction=fraction, seed=seed).test_x.equal(data.test_x)


def test_floats_up_to_the_float32_maximum_are_kept() -> None:
    largest = float(np.finfo(np.float32).max)
    data = from_arrays(np.full((20, 2), [-largest, largest]), LABELS)
    assert data.train_x.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": IMAGES.transpose(0, 2, 3, 1)}, "N×C×H×W.*transpose"),
        ({"x": IMAGES[:3]}, "3 samples but 20 labels"),
        ({"x": IMAGES.astype(np.int32)}, "token sequences N×L, and images must be uint8"),
        ({"x": np.full((20, 2), np.nan)}, "NaN"),
        ({"x": np.full((20, 2), np.inf)}, "infinite"),
        ({"x": np.linspace(-2.5e300, 1e300, 40).reshape(20, 2)}, r"reach 2\.5e\+300 .*float32 ends at 3\.4e\+38"),
        ({"test_x": np.full((20, 2), 1e39), "test_y": LABELS}, r"reach 1e\+39"),
        ({"x": [[1.0], [2.0, 3.0]] * 10}, "one shape"),
        ({"x": ["a"] * 20}, "array of numbers"),
        ({"y": LABELS.astype(float)}, "integers or text, found float64"),
        ({"y": LABELS[:, None]}, r"shape \(20, 1\)"),
        ({"y": [0] * 19 + [1]}, "class 1 has one sample"),
        ({"test_x": IMAGES}, "together"),
        ({"test_x": IMAGES, "test_y": LABELS + 1}, "without training samples: 4"),
        ({"test_x": IMAGES[:, :1], "test_y": LABELS}, "same type and shape"),
        ({"test_fraction": 0.0}, "between 0 and 1"),
        ({"test_fraction": 1.0}, "between 0 and 1"),
        ({"x": IMAGES[:0], "y": LABELS[:0]}, "no samples"),
    ],
)
def test_invalid_arrays_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_arrays(**({"x": IMAGES, "y": LABELS} | arguments))


# from_dataset


class Pictures(Dataset[tuple[Image.Image, int]]):
    """A dataset that raises no IndexError, as many do."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.new("RGB", (6, 4), (index, 100, 200)).convert(self.mode), index % 2


class Endless(IterableDataset[tuple[torch.Tensor, int]]):
    def __iter__(self) -> Any:
        return ((torch.full((3,), float(i)), i % 2) for i in range(6))


def test_dataset_of_tensors() -> None:
    dataset = TensorDataset(torch.from_numpy(IMAGES), torch.from_numpy(LABELS))
    data = from_dataset(dataset, dataset, name="mine")
    np.testing.assert_array_equal(data.train_x.numpy(), IMAGES)
    assert data.test_y.tolist() == LABELS.tolist()
    assert from_dataset(dataset).shape == (3, 8, 8)


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1), ("P", 3)])
def test_dataset_of_pictures(mode: str, channels: int) -> None:
    data = from_dataset(Pictures(mode), Pictures(mode))
    assert data.shape == (channels, 4, 6)
    assert data.train_x.dtype == torch.uint8
    if mode == "RGB":
        assert data.train_x[5, :, 0, 0].tolist() == [5, 100, 200]


def test_dataset_of_16_and_32_bit_pictures() -> None:
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    data = from_dataset([(Image.fromarray(ramp), i % 2) for i in range(4)])  # type: ignore[arg-type]
    np.testing.assert_array_equal(data.train_x[0, 0].numpy(), ramp >> 8)
    for wide, mode in ((ramp.astype(np.int32), "I"), (ramp.astype(np.float32), "F")):
        with pytest.raises(DataError, match=f"custom, sample 0: .*mode {mode}.*8 or 16 bits"):
            from_dataset([(Image.fromarray(wide), i % 2) for i in range(4)])  # type: ignore[arg-type]


def test_iterable_dataset() -> None:
    assert repr(from_dataset(Endless())) == "ImageData('custom': 4 + 2 samples of 3, 2 classes)"


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "empty"),
        ([torch.zeros(3)] * 4, "item 0 to be a pair"),
        ([(torch.zeros(3), 0), (torch.zeros(4), 1)], "sample 1 has shape"),
    ],
)
def test_invalid_datasets_are_refused(items: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_dataset(items)  # type: ignore[arg-type]


@pytest.mark.parametrize("as_test", [False, True])
def test_dataloader_is_refused_with_its_dataset_named(as_test: bool) -> None:
    dataset = TensorDataset(torch.rand(10, 3), torch.arange(10) % 2)
    loader: Any = DataLoader(dataset, batch_size=5)
    with pytest.raises(DataError, match=r"found a DataLoader, .*; give its Dataset, loader\.dataset"):
        from_dataset(dataset if as_test else loader, loader if as_test else None)


# from_folder


def write_pictures(folder: Path, count: int, size: int = 10, mode: str = "RGB") -> None:
    for kind, colour in (("red", (250, 0, 0)), ("blue", (0, 0, 250))):
        (folder / kind).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (size + i, size), colour).convert(mode).save(folder / kind / f"{i}.png")
        (folder / kind / "notes.txt").write_text("not a picture")


def test_folder_is_split(tmp_path: Path) -> None:
    write_pictures(tmp_path / "pets", 5)
    data = from_folder(tmp_path / "pets", size=16)
    assert repr(data) == "ImageData('pets': 8 + 2 samples of 3×16×16, 2 classes)"
    assert data.class_names == ("blue", "red")
    for images, labels in ((data.train_x, data.train_y), (data.test_x, data.test_y)):
        torch.testing.assert_close((images[:, 0, 0, 0] == 250).long(), labels)
    assert from_folder(str(tmp_path / "pets"), size=16, mode="L").shape == (1, 16, 16)


def test_folder_with_train_and_test(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train", 3)
    write_pictures(tmp_path / "test", 1, mode="L")
    assert repr(from_folder(tmp_path, name="mine")) == "ImageData('mine': 6 + 2 samples of 3×32×32, 2 classes)"


def test_folder_with_train_and_val(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train", 3)
    write_pictures(tmp_path / "val", 1)
    assert repr(from_folder(tmp_path, name="mine")) == "ImageData('mine': 6 + 2 samples of 3×32×32, 2 classes)"
    write_pictures(tmp_path / "test", 2)
    assert repr(from_folder(tmp_path, name="mine")) == "ImageData('mine': 6 + 4 samples of 3×32×32, 2 classes)"


@pytest.mark.parametrize("size", [0, -3])
def test_picture_size_must_be_positive(tmp_path: Path, size: int) -> None:
    write_pictures(tmp_path / "pets", 3)
    with pytest.raises(DataError, match=rf"pets: size is {size}; give .* at least 1"):
        from_folder(tmp_path / "pets", size=size)


def test_folder_is_decoded_again_only_when_changed(tmp_path: Path) -> None:
    write_pictures(tmp_path / "pets", 5)
    first = from_folder(tmp_path / "pets", name="a/b c")
    (tmp_path / "pets" / "red" / "0.png").rename(tmp_path / "pets" / "blue" / "moved.png")
    second = from_folder(tmp_path / "pets", name="a/b c")
    assert first.train_y.sum() + first.test_y.sum() == 5
    assert second.train_y.sum() + second.test_y.sum() == 4


@pytest.mark.parametrize("variable", ["SPCL_CACHE", "HOME"])
def test_folder_without_a_writable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    write_pictures(tmp_path / "pets", 5)
    expected = from_folder(tmp_path / "pets")
    (tmp_path / "file").touch()
    for other in ("SPCL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "file" / "folder"))
    with pytest.warns(RuntimeWarning, match=rf"{tmp_path}/file/folder/.*Not a directory.* SPCL_CACHE") as warned:
        data = from_folder(tmp_path / "pets")
    assert len(warned) == 1
    assert data.train_x.equal(expected.train_x)
    assert data.test_y.equal(expected.test_y)


def test_invalid_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a folder"):
        from_folder(tmp_path / "nowhere")
    (tmp_path / "pets").mkdir()
    with pytest.raises(DataError, match="one sub-folder of pictures per class"):
        from_folder(tmp_path / "pets")
    write_pictures(tmp_path / "pets", 3)
    (tmp_path / "pets" / "green").mkdir()
    with pytest.raises(DataError, match=r"green: expected pictures"):
        from_folder(tmp_path / "pets")
    (tmp_path / "pets" / "green" / "bad.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"bad\.png: expected a picture, .* does not decode \(no known format\)$"):
        from_folder(tmp_path / "pets")
    content = (tmp_path / "pets" / "red" / "0.png").read_bytes()
    (tmp_path / "pets" / "green" / "bad.png").write_bytes(content[:50])
    with pytest.raises(DataError, match=r"bad\.png: expected a picture, .* does not decode \(.*truncated.*\)$"):
        from_folder(tmp_path / "pets")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that cannot be read, even by root")
def test_unreadable_picture_is_refused(tmp_path: Path) -> None:
    write_pictures(tmp_path / "pets", 3)
    (tmp_path / "pets" / "red" / "broken.png").symlink_to("/proc/self/mem")
    with pytest.raises(DataError, match=r"pets cannot be read: Input/output error"):
        from_folder(tmp_path / "pets")


RAMP = np.arange(65536, dtype=np.uint16).reshape(256, 256)


def encoded(pixels: np.ndarray, kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def grey_tiff(content: bytes, side: int, bits: int, order: str) -> bytes:
    """A TIFF of a depth or byte order that Pillow reads but does not write."""
    start = 128
    numbers = {256: side, 257: side, 258: bits, 259: 1, 262: 1, 273: start, 277: 1, 278: side, 279: len(content)}
    entries = b"".join(struct.pack(f"{order}HHII", tag, 4, 1, number) for tag, number in numbers.items())
    head = {">": b"MM", "<": b"II"}[order] + struct.pack(f"{order}HIH", 42, 8, len(numbers))
    return (head + entries).ljust(start, b"\0") + content


def colour_png() -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = np.repeat(RAMP.astype(">u2"), 3, axis=1)
    packed = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    header = struct.pack(">IIBBBBB", 256, 256, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "content",
    [
        encoded(RAMP, "PNG"),
        encoded(RAMP, "TIFF"),
        encoded(RAMP, "PPM"),
        grey_tiff(RAMP.astype(">u2").tobytes(), 256, 16, ">"),
        colour_png(),
    ],
    ids=["png", "tiff", "pgm", "big-endian tiff", "colour png"],
)
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_sixteen_bit_pictures_keep_their_upper_byte(content: bytes, mode: Any) -> None:
    for channel in decode_picture(content, "ramp", mode):
        np.testing.assert_array_equal(channel, RAMP >> 8)


def test_twelve_bit_pictures_keep_their_upper_byte() -> None:
    bits = np.unpackbits(np.arange(4096, dtype=">u2").view(np.uint8).reshape(4096, 2), axis=1)
    pixels = decode_picture(grey_tiff(np.packbits(bits[:, 4:]).tobytes(), 64, 12, "<"), "ramp", "L")
    np.testing.assert_array_equal(pixels.ravel(), np.arange(4096) >> 4)


@pytest.mark.parametrize(("dtype", "mode"), [(np.int32, "I"), (np.float32, "F")])
def test_pictures_of_unknown_range_are_refused(tmp_path: Path, dtype: type, mode: str) -> None:
    write_pictures(tmp_path / "pets", 2)
    Image.fromarray((RAMP[:4, :4] / 7).astype(dtype)).save(tmp_path / "pets" / "red" / "wide.tif")
    with pytest.raises(DataError, match=rf"wide\.tif: .*mode {mode}.*8 or 16 bits.*floats in an \.npz"):
        from_folder(tmp_path / "pets")


def test_folders_with_equal_files_have_separate_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, brightness in (("first", 10), ("second", 20)):
        for kind in ("cat", "dog"):
            (tmp_path / place / "set" / kind).mkdir(parents=True)
            for i in range(2):
                file = tmp_path / place / "set" / kind / f"{i}.bmp"
                Image.new("L", (4, 4), brightness).save(file)
                os.utime(file, ns=(0, 0))
    assert from_folder(tmp_path / "first" / "set").train_x.unique().tolist() == [10]
    assert from_folder(tmp_path / "second" / "set").train_x.unique().tolist() == [20]
    for place, brightness in (("first", 10), ("second", 20)):
        monkeypatch.chdir(tmp_path / place)
        assert from_folder("set").train_x.unique().tolist() == [brightness]
    assert len(list((tmp_path / "cache" / "decoded").iterdir())) == 2


def test_changes_in_linked_class_folders_are_detected(tmp_path: Path) -> None:
    write_pictures(tmp_path / "pets", 2)
    (tmp_path / "pets" / "blue").rename(tmp_path / "elsewhere")
    (tmp_path / "pets" / "blue").symlink_to(tmp_path / "elsewhere")
    assert len(from_folder(tmp_path / "pets").train_x) == 2
    Image.new("RGB", (5, 5)).save(tmp_path / "elsewhere" / "new.png")
    assert len(from_folder(tmp_path / "pets").train_x) == 3


def test_folder_named_like_a_picture_is_ignored(tmp_path: Path) -> None:
    write_pictures(tmp_path / "pets", 2)
    (tmp_path / "pets" / "red" / "folder.png").mkdir()
    assert repr(from_folder(tmp_path / "pets")) == "ImageData('pets': 2 + 2 samples of 3×32×32, 2 classes)"


@pytest.mark.parametrize("decoded_before", [False, True])
def test_broken_link_is_named(tmp_path: Path, decoded_before: bool) -> None:
    write_pictures(tmp_path / "pets", 2)
    if decoded_before:
        from_folder(tmp_path / "pets")
    (tmp_path / "pets" / "red" / "z.png").symlink_to("gone.png")
    with pytest.raises(DataError, match=r"red/z\.png is a link to gone\.png, which does not exist"):
        from_folder(tmp_path / "pets")


# .npz files


@pytest.mark.parametrize("damage", ["a single array", "empty", "garbage inside"])
def test_invalid_npz_files_are_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "own.npz"
    np.savez(path, x=IMAGES, y=LABELS)
    assert load_benchmark(str(path), None).classes == 4
    if damage == "a single array":
        np.save(tmp_path / "own.npy", IMAGES)
        (tmp_path / "own.npy").rename(path)
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        np.savez_compressed(path, x=IMAGES, y=LABELS)
        content = path.read_bytes()
        path.write_bytes(content[:60] + bytes(600) + content[660:])
    message = r"own\.npz must hold arrays x and y .*found one array without a name.*np\.savez"
    with pytest.raises(DataError, match=message if damage == "a single array" else r"cannot read .*own\.npz"):
        load_benchmark(str(path), None)


@pytest.mark.parametrize("content", ["text", "objects"])
def test_npz_errors_give_no_advice_to_load_pickles(tmp_path: Path, content: str) -> None:
    path = tmp_path / "own.npz"
    if content == "text":
        path.write_text("x,y\n1,2\n")
    else:
        np.savez(path, x=np.array([{"a": 1}], dtype=object), y=LABELS[:1])
    reason = "it is damaged, or not an .npz file" if content == "text" else "its arrays hold Python objects"
    with pytest.raises(DataError) as caught:
        load_benchmark(str(path), None)
    assert str(caught.value) == f"cannot read {path}: {reason}; write it with np.savez(path, x=…, y=…)"


@pytest.mark.parametrize("benchmark", ["./no/such/folder", "no/such/folder", "absent.npz", "~/absent-folder"])
def test_missing_path_is_not_called_an_unknown_data_set(benchmark: str) -> None:
    with pytest.raises(DataError, match=f"^the data {benchmark} does not exist; give a folder of pictures"):
        load_benchmark(benchmark, None)


def test_file_that_is_no_benchmark_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("x,y")
    with pytest.raises(DataError, match=r"data\.csv is neither a folder nor an \.npz file; give"):
        load_benchmark(str(tmp_path / "data.csv"), None)


def test_other_arrays_in_npz_files_are_ignored(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x=IMAGES, y=LABELS, notes=np.array([{"by": "me"}], dtype=object))
    assert load_benchmark(str(tmp_path / "own.npz"), None).shape == (3, 8, 8)


def test_invalid_npz_arrays_are_reported_as_such(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x=np.full((20, 2), 1e300), y=LABELS)
    with pytest.raises(DataError, match=r"^own: samples reach 1e\+300"):
        load_benchmark(str(tmp_path / "own.npz"), None)


@pytest.mark.parametrize("backbone", ["cnn", "resnet18", "mlp"])
def test_images_need_not_be_square(tmp_path: Path, backbone: str) -> None:
    np.savez(tmp_path / "wide.npz", x=random_images(20, 3, 32, 48), y=LABELS)
    settings = resolve_settings({"benchmark": str(tmp_path / "wide.npz"), "backbone": backbone})
    data = load_benchmark(settings.benchmark, None)
    network = make_backbone(settings, data, torch.device("cpu"))
    assert network(data.train_x).shape == (len(data.train_x), network.feature_dim)


# batch size


def write_features(path: Path, per_class: int, classes: int = 4) -> Path:
    y = np.repeat(np.arange(classes), per_class)
    np.savez(
        path,
        x=np.random.default_rng(0).normal(size=(len(y), 3)),
        y=y,
        test_x=np.zeros((classes, 3)),
        test_y=np.arange(classes),
    )
    return path


@pytest.mark.parametrize(
    ("per_class", "settings", "expected"), [(60, {}, 4), (200, {}, 16), (200, {"tasks": 4}, 8), (5000, {}, 128)]
)
def test_default_batch_size_gives_every_task_steps(
    tmp_path: Path, per_class: int, settings: dict[str, int], expected: int
) -> None:
    benchmark = write_features(tmp_path / "own.npz", per_class)
    resolved = resolve_settings({"benchmark": str(benchmark)}, settings)
    assert resolved.batch_size == expected
    problem = make_problem(resolved, torch.device("cpu"))
    assert min(problem.configuration.timeline.durations) >= 20


def test_few_steps_are_warned_of(tmp_path: Path) -> None:
    benchmark = write_features(tmp_path / "own.npz", 40)
    settings = resolve_settings({"benchmark": str(benchmark), "batch_size": 128})
    message = (
        r"^a task of own trains for only 1 step at batch_size = 128; "
        "choose a smaller batch_size, more epochs or fewer tasks, or give more samples$"
    )
    with pytest.warns(UserWarning, match=message):
        make_problem(settings, torch.device("cpu"))
