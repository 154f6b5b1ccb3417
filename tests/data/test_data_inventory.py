"""Search, status and download of data sets, by the library and the command."""

import gzip
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from data_files import (
    cifar100_binary_files,
    clinc_files,
    small_cifar100,
    small_emnist,
    tiny_imagenet_files,
    wisdm_files,
    write_files,
    write_tar,
    write_zip,
)
from spcl.cli.listing import data as app
from spcl.data import DATA_NAMES, check_data, get_data, list_data, load_data
from spcl.data.cache import file_sha256
from spcl.data.catalogue import DATA_SETS, DOWNLOADS, SOURCE_SETS, Download, find_data_set
from spcl.errors import DataError
from spcl.runs import load_benchmark

PUBLISHED_ONES = tuple(name for name in DATA_NAMES if name != "ps-glyphs")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPCL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SPCL_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "500")


@pytest.fixture
def quick_glyphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spcl.data.glyphs.TRAIN_PER_CLASS", 2)
    monkeypatch.setattr("spcl.data.glyphs.TEST_PER_CLASS", 1)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spcl.data.cache.PAUSES", ())
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # the discard port: no server listens


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def write_emnist(folder: Path) -> None:
    write_files(folder, small_emnist()[0])


def write_cifar100(path: Path, count: int = 110) -> None:
    write_tar(path / "cifar-100-binary.tar.gz", "cifar-100-binary", cifar100_binary_files(*small_cifar100(count)))


# Search paths


def test_folders_are_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {name: tmp_path / name for name in ("given", "environment", "cache")}
    for count, folder in zip((101, 102, 103), folders.values(), strict=True):
        folder.mkdir()
        write_cifar100(folder, count)
    assert len(load_data("ps-cifar100").train_x) == 103
    monkeypatch.setenv("SPCL_DATA", str(folders["environment"]))
    assert len(load_data("ps-cifar100").train_x) == 102
    assert len(load_data("ps-cifar100", folders["given"]).train_x) == 101
    assert len(load_data("ps-cifar100", str(folders["given"])).train_x) == 101


def test_set_missing_in_one_folder_is_found_in_the_next(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    write_emnist(tmp_path / "cache" / "emnist")
    assert len(load_data("ps-emnist", tmp_path / "given").train_x) == 70


def test_missing_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="nowhere is not a folder"):
        load_data("ps-emnist", tmp_path / "nowhere")
    monkeypatch.setenv("SPCL_DATA", str(tmp_path / "neither"))
    with pytest.raises(DataError, match=r"SPCL_DATA: .*neither is not a folder"):
        load_data("ps-emnist")


@pytest.mark.parametrize("name", PUBLISHED_ONES)
def test_missing_files_are_reported_with_instructions(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError) as caught:
        load_benchmark(name, str(tmp_path))
    message = str(caught.value)
    assert f"spcl data get {name}" in message
    for file in find_data_set(name).files:
        assert DOWNLOADS[Path(file).name].url in message
        assert str(tmp_path / file) in message


def test_unknown_names_are_reported_with_a_suggestion() -> None:
    with pytest.raises(DataError, match="did you mean 'ps-cifar100'"):
        load_data("ps-cifar-100")
    with pytest.raises(DataError, match="choose one of ps-glyphs"):
        load_data("xyz")
    with pytest.raises(DataError, match="beijing-air has several sources; load it with load_beijing_air"):
        load_data("beijing-air")


def test_catalogue_is_consistent() -> None:
    sets = [find_data_set(name) for name in PUBLISHED_ONES]
    for data_set in sets:
        assert {Path(file).name for file in data_set.files} <= DOWNLOADS.keys()
        read = {layout.path for layout in data_set.layouts}
        assert {file if Path(file).suffix != ".json" else str(Path(file).parent) for file in data_set.files} <= read
    archives = {Path(layout.path).name for data_set in sets for layout in data_set.layouts if layout.top}
    assert archives | {"data_full.json", "domains.json"} == DOWNLOADS.keys()
    assert all(len(published.sha256 or "x" * 64) == 64 for published in DOWNLOADS.values())
    assert all(published.url.startswith("https://") for published in DOWNLOADS.values())
    assert all("cite" in data_set.terms for data_set in SOURCE_SETS.values())


# list and check


@pytest.mark.usefixtures("quick_glyphs")
def test_list_distinguishes_complete_part_missing_and_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_emnist(tmp_path / "emnist")
    write_cifar100(tmp_path)
    write_files(tmp_path / "cifar-10-batches-bin", {"test_batch.bin": b"short", "data_batch_1.bin": b"short"})
    monkeypatch.setitem(DATA_SETS, "ps-cifar100", replace(DATA_SETS["ps-cifar100"], train=110, test=20))
    stock = {stock.name: stock for stock in list_data(tmp_path)}
    assert list(stock) == list(DATA_NAMES)
    assert (stock["ps-glyphs"].train, stock["ps-glyphs"].test, stock["ps-glyphs"].complete) == (124, 62, True)
    assert (stock["ps-emnist"].train, stock["ps-emnist"].test, stock["ps-emnist"].complete) == (70, 62, False)
    assert stock["ps-emnist"].path == tmp_path / "emnist"
    assert stock["ps-cifar100"].complete
    assert stock["ps-tiny-imagenet"].path is None
    assert "expected records of 3073 bytes" in (stock["toy-cifar10"].problem or "")
    result = run("list", "--data-dir", tmp_path)
    assert result.exit_code == 0
    entries = {lines[0].split()[0]: "\n".join(lines) for lines in split_entries(result.stdout)}
    assert all(words in entries["ps-emnist"] for words in ("70 + 62", "part", str(tmp_path / "emnist")))
    assert "complete" in entries["ps-cifar100"]
    assert "not here" in entries["ps-tiny-imagenet"]
    assert "problem" in entries["toy-cifar10"]
    assert "expected records of 3073 bytes" in " ".join(entries["toy-cifar10"].split())
    assert "spcl data get ps-tiny-imagenet" in entries["ps-tiny-imagenet"]


def split_entries(output: str) -> list[list[str]]:
    """The lines of each data set: the first is not indented."""
    entries: list[list[str]] = []
    for line in output.splitlines():
        if line.startswith(" "):
            entries[-1].append(line)
        else:
            entries.append([line])
    return entries


@pytest.mark.usefixtures("quick_glyphs")
def test_list_keeps_paths_whole_at_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder = tmp_path / "a folder with a rather long name" / "and another one within it, for good measure"
    write_emnist(folder / "emnist")
    lines = run("list", "--data-dir", folder).stdout.splitlines()
    assert str(folder / "emnist") in [line.strip() for line in lines]
    assert "70 + 62 images" in next(line for line in lines if line.startswith("ps-emnist"))
    assert not any("…" in line for line in lines)
    assert all(len(line) <= 80 for line in lines if "/" not in line)


def test_check_compares_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar100(tmp_path)
    (stock,) = check_data(["ps-cifar100"], tmp_path)
    assert (stock.original, stock.complete, stock.problem) == (False, False, None)
    archive = tmp_path / "cifar-100-binary.tar.gz"
    original = Download("https://example.org", file_sha256(archive))
    monkeypatch.setitem(DOWNLOADS, archive.name, original)
    (stock,) = check_data(["ps-cifar100"], tmp_path)
    assert stock.original is True
    assert "part, original" in run("check", "ps-cifar100", "--data-dir", tmp_path).stdout


def test_check_reports_a_complete_but_altered_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar100(tmp_path)
    monkeypatch.setitem(DATA_SETS, "ps-cifar100", replace(DATA_SETS["ps-cifar100"], train=110, test=20))
    result = run("check", "ps-cifar100", "--data-dir", tmp_path)
    assert result.exit_code == 1
    assert "checksum differs" in result.stdout


def test_check_decodes_again(tmp_path: Path) -> None:
    write_zip(tmp_path / "tiny-imagenet-200.zip", "tiny-imagenet-200", tiny_imagenet_files())
    load_data("ps-tiny-imagenet", tmp_path)
    (pixels,) = (tmp_path / "cache").rglob("train_x.npy")
    good = pixels.read_bytes()
    pixels.write_bytes(good[:-5] + b"wrong")
    assert check_data(["ps-tiny-imagenet"], tmp_path)[0].problem is None
    assert pixels.read_bytes() == good


@pytest.mark.usefixtures("quick_glyphs")
def test_check_of_all_sets_ignores_missing_ones(tmp_path: Path) -> None:
    write_emnist(tmp_path)
    assert run("check", "--data-dir", tmp_path).exit_code == 0
    (tmp_path / "emnist-byclass-test-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"rubbish"))
    result = run("check", "--data-dir", tmp_path)
    assert result.exit_code == 1
    assert "emnist-byclass-test-labels-idx1-ubyte.gz" in result.stdout
    assert run("check", "ps-cifar100", "--data-dir", tmp_path).exit_code == 1


# get


def test_get_keeps_existing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar100(tmp_path)
    archive = tmp_path / "cifar-100-binary.tar.gz"
    with pytest.raises(DataError, match="is not the publisher's file"):
        get_data("ps-cifar100", tmp_path)
    assert archive.exists()
    monkeypatch.setitem(DOWNLOADS, archive.name, Download("https://127.0.0.1:9/", file_sha256(archive)))
    result = run("get", "ps-cifar100", "--data-dir", tmp_path)
    assert result.exit_code == 0
    assert str(archive) in result.stdout


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", PUBLISHED_ONES)
def test_get_without_network_gives_instructions(tmp_path: Path, name: str) -> None:
    result = run("get", name, "--data-dir", tmp_path / "new")
    assert isinstance(result.exception, DataError)
    file = find_data_set(name).files[0]
    assert DOWNLOADS[Path(file).name].url in str(result.exception)
    assert f"save it as {tmp_path / 'new' / file}" in str(result.exception)
    if name in SOURCE_SETS:
        assert f"{name}: {DOWNLOADS[Path(file).name].url}" in result.stdout
        assert SOURCE_SETS[name].terms in result.stdout


def test_get_returns_what_is_unpacked_already(tmp_path: Path) -> None:
    write_files(tmp_path / "wisdm-dataset", wisdm_files({1600: "AAAA"}))
    result = run("get", "wisdm", "--data-dir", tmp_path)
    assert str(tmp_path / "wisdm-dataset") in result.stdout


def test_get_downloads_all_files_of_a_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = clinc_files({}, {})
    write_files(tmp_path / "clinc150", files)
    for name in files:
        original = Download("https://127.0.0.1:9/", file_sha256(tmp_path / "clinc150" / name))
        monkeypatch.setitem(DOWNLOADS, name, original)
    assert get_data("clinc150", tmp_path) == tmp_path / "clinc150"
    (tmp_path / "clinc150" / "domains.json").write_text("{ }")
    with pytest.raises(DataError, match=r"domains.json is not the publisher's file"):
        get_data("clinc150", tmp_path)


def test_list_counts_samples_of_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spcl.data.catalogue.DATA_NAMES", ("wisdm", "clinc150"))
    write_files(tmp_path / "wisdm-dataset", wisdm_files({1600: "AAAABBBB", 1602: "AAAA"}))
    (stock, _) = list_data(tmp_path)
    assert (stock.train, stock.test, stock.classes, stock.sources, stock.complete) == (9, 3, 2, 2, False)
    lines = run("list", "--data-dir", tmp_path).stdout.splitlines()
    assert any("part, 9 + 3 samples of 2 sources, 2 classes" in line for line in lines)
    assert any("not here" in line for line in lines)


def test_get_of_the_generated_set_is_an_error() -> None:
    with pytest.raises(DataError, match="nothing to download"):
        get_data("ps-glyphs")
