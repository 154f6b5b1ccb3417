"""The folder of a run: what counts as a checkpoint, and what is removed when the run is complete."""

from pathlib import Path

import pytest

from spcl.checkpoint import write_checkpoint
from spcl.runs import RunFolder


def test_all_that_saving_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in range(2):
        write_checkpoint(folder.checkpoint, {"step": step})
    killed = tmp_path / f".{folder.checkpoint.name}.0123abcd.partial"
    killed.write_bytes(b"half a checkpoint")
    copy = tmp_path / f"{folder.checkpoint.name}.my-copy"
    copy.write_bytes(folder.checkpoint.read_bytes())
    folder.remove_checkpoints()
    assert list(tmp_path.iterdir()) == [copy]
    assert not folder.has_checkpoint()
    folder.remove_checkpoints()


@pytest.mark.parametrize("kept", ["checkpoint.safetensors", "checkpoint.safetensors.previous"])
def test_the_previous_checkpoint_is_one_to_resume_from(tmp_path: Path, kept: str) -> None:
    folder = RunFolder(tmp_path)
    assert not folder.has_checkpoint()
    (tmp_path / kept).touch()
    assert folder.has_checkpoint()


def test_a_checkpoint_on_another_disk_has_its_previous_one_there(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    folder = RunFolder(tmp_path / "run")
    folder.checkpoint.symlink_to(tmp_path / "elsewhere")
    for step in range(2):
        write_checkpoint(folder.checkpoint, {"step": step})
    (tmp_path / "elsewhere").unlink()
    assert folder.has_checkpoint()
    folder.remove_checkpoints()
    assert not folder.has_checkpoint()
