"""The tables in results/README.md count the records: how many runs a folder has, and which commits made them."""

import json
import re
import tarfile
from collections import Counter
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "results"
FOLDERS = [path.parent.name for path in sorted(RESULTS.glob("*/records.tar.gz"))]
COMMIT = re.compile(r"\b([0-9a-f]{7})\b(?: \((\d+)\b)?")
"""A commit, and how many runs it made, which is said where a folder has several commits."""


def table(headings: str) -> list[tuple[list[str], str]]:
    """Return the rows of a table: the folders, or patterns of them, in the first column, and the last column."""
    _, below = (RESULTS / "README.md").read_text(encoding="utf-8").split(f"| {headings} |\n", 1)
    rows = [line.strip("| ").split(" | ") for line in below.split("\n\n")[0].splitlines()[1:]]
    return [(re.findall(r"`(.+?)`", row[0]), row[-1]) for row in rows]


@cache
def commits_of(folder: str) -> Counter[str]:
    """Return the commits that the records name, and how many runs each has made."""
    with tarfile.open(RESULTS / folder / "records.tar.gz") as archive:
        files = [archive.extractfile(member) for member in archive if member.name.endswith("/result.json")]
        return Counter(json.load(file)["environment"]["git"][:7] for file in files if file is not None)


def test_folders_have_as_many_runs_as_is_said() -> None:
    said: dict[str, int] = {}
    for folders, counts in table("folder | what | data | runs"):
        said |= dict(zip(folders, map(int, counts.split(" + ")), strict=True))
    assert said == {folder: commits_of(folder).total() for folder in FOLDERS}


def test_commits_are_those_of_the_records() -> None:
    rows = table("folder | commits")
    for folder in FOLDERS:
        (cell,) = (cell for patterns, cell in rows if any(fnmatch(folder, pattern) for pattern in patterns))
        found = commits_of(folder)
        expected = {commit: str(count) if len(found) > 1 else "" for commit, count in found.items()}
        assert dict(COMMIT.findall(cell)) == expected, folder
