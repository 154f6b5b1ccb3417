"""What a run records of where it was made."""

import subprocess
from pathlib import Path

from spcl.runs.environment import _git_commit


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *words], check=True, capture_output=True, text=True
    ).stdout


def test_the_commit_says_whether_files_differ_from_it(tmp_path: Path) -> None:
    assert _git_commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "first")
    git(tmp_path, "tag", "v1")
    _git_commit.cache_clear()
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    assert _git_commit(tmp_path) == commit
    (tmp_path / "a").write_text("2")
    _git_commit.cache_clear()
    assert _git_commit(tmp_path) == f"{commit}-dirty"
