"""Atomic writes and tolerant JSON reads."""

import os
import stat
from pathlib import Path

import pytest

from spcl._util.files import atomic_write, read_json, write_json


def test_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path: Path) -> None:
    def write_half() -> None:
        with atomic_write(path) as file:
            file.write(b"new")
            raise RuntimeError("stopped")

    path = tmp_path / "numbers.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="stopped"):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_file_is_replaced_only_at_the_end_of_the_block(tmp_path: Path) -> None:
    path = tmp_path / "numbers.txt"
    path.write_text("old")
    with atomic_write(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_json_round_trips(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", {"name": "κ", "values": [1, None]})
    assert read_json(tmp_path / "run.json") == {"name": "κ", "values": [1, None]}


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff"])
def test_missing_and_damaged_json_is_none(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_bytes(content)
    assert read_json(tmp_path / "run.json") is None


def test_a_file_that_was_renamed_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synchronised: list[str] = []
    fsync = os.fsync

    def observed(file: int) -> None:
        present = sorted(path.name for path in tmp_path.iterdir())
        synchronised.append(f"{'folder' if stat.S_ISDIR(os.fstat(file).st_mode) else 'file'} {present == ['state']}")
        fsync(file)

    monkeypatch.setattr(os, "fsync", observed)
    with atomic_write(tmp_path / "state") as file:
        file.write(b"1 2 3")
    assert synchronised == ["file False", "folder True"]
