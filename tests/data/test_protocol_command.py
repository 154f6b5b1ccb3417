"""``spcl protocol``: files that are drawn or converted, and that runs accept."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from small_benchmark import small_settings
from spcl.cli.app import app
from spcl.data import convert_protocol, load_protocol
from spcl.errors import DataError, SpclError
from spcl.runs import execute, resolve_settings

DOCS = Path(__file__).resolve().parents[2] / "docs" / "protocols.md"

PUBLISHED = """\
0:
  LabelSet:
  - - 3
    - 0
  - - 5
    - 1
  - - 2
    - 4
  TimeLines:
    0:
    - - 0
      - 9
    - - 3
      - 12
    - - 3
      - 12
    1:
    - - 0
      - 9
    - - 9
      - 18
    - - 20
      - 29
1:
  LabelSet:
  - [0, 1]
  - [2, 3]
  - [4, 5]
  TimeLines:
    0: [[0, 9], [1, 10], [2, 11]]
    1: [[0, 9], [2, 11], [4, 13]]
"""


def invoke(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_drawn_protocol_gives_the_run_that_its_seed_gives(benchmark: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / "mine.json"
    small = ["--set", "tasks=3", "--set", "batch_size=8"]
    outcome = invoke("protocol", "--benchmark", benchmark, "--protocol-seed", 4, *small, "--out", file)
    assert outcome.exit_code == 0, outcome.output
    assert (
        f"9 configurations (3 label sets of 3 tasks, 3 timelines each) at batch size 8 are in {file}" in outcome.output
    )
    drawn = execute(small_settings(benchmark, protocol_seed=4, config=5), tmp_path / "drawn")
    read = execute(small_settings(benchmark, protocol=str(file), config=5), tmp_path / "read")
    assert (read.tasks, read.timeline, read.confusion) == (drawn.tasks, drawn.timeline, drawn.confusion)


def test_the_batch_size_of_a_protocol_is_the_default(benchmark: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    invoke("protocol", "--benchmark", benchmark, "--set", "tasks=2", "--set", "batch_size=5", "--out", file)
    given = {"benchmark": str(benchmark), "protocol": str(file)}
    assert resolve_settings(given).batch_size == 5
    assert resolve_settings(given, {"batch_size": 7}).batch_size == 7


def test_a_published_file_is_converted(benchmark: Path, tmp_path: Path) -> None:
    source, file = tmp_path / "SMALL_task3_mean_8.yml", tmp_path / "small.json"
    source.write_text(PUBLISHED)
    words = ["--benchmark", benchmark, "--set", "batch_size=8", "--out", file]
    outcome = invoke("protocol", "--from", source, *words)
    assert outcome.exit_code == 0, outcome.output
    protocol = load_protocol(file)
    assert (protocol.benchmark, protocol.batch_size, protocol.classes, len(protocol)) == ("clusters", 8, 6, 4)
    assert protocol.configuration(1).label_set == ((3, 0), (5, 1), (2, 4))
    assert protocol.configuration(1).timeline.spans == ((0, 9), (9, 18), (20, 29))
    assert protocol.configuration(2).timeline.spans == ((0, 9), (1, 10), (2, 11))
    settings = resolve_settings({"benchmark": str(benchmark), "protocol": str(file), "config": 3, "device": "cpu"})
    assert execute(settings, tmp_path / "run").timeline == protocol.configuration(3).timeline.spans


def test_a_published_file_needs_no_data(tmp_path: Path) -> None:
    (tmp_path / "x.yml").write_text(PUBLISHED)
    outcome = invoke("protocol", "--from", tmp_path / "x.yml", "--benchmark", "ps-emnist", "--out", tmp_path / "x.json")
    assert outcome.exit_code == 0, outcome.output
    assert json.loads((tmp_path / "x.json").read_text())["batch_size"] == 128


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        (PUBLISHED.replace("LabelSet", "Labels"), "is not valid at 0.LabelSet: Field required; expected LabelSet and"),
        (PUBLISHED.replace("- - 3\n    - 0", "- - 3\n    - x"), "is not valid at 0.LabelSet.0.1: Input should be a"),
        (PUBLISHED.replace("[4, 13]", "[4, 13, 14]"), "task 2 has the span [4, 13, 14]; give its first and last step"),
        (PUBLISHED.replace("- [4, 5]", "- [4, 4]"), "label set 1: class 4 is in the label set 2 times"),
        (PUBLISHED.replace(", [4, 13]", ""), "label set 1 has 3 tasks, its timeline 1 has 2"),
        ("{}", "has no label set; download the authors' file again"),
        ("0: [", "is not YAML; download the authors' file again"),
        ("- 1", "is not valid at the file: Input should be a valid dictionary"),
    ],
)
def test_an_invalid_published_file_is_named_with_the_reason(tmp_path: Path, spoilt: str, message: str) -> None:
    path = tmp_path / "bad.yml"
    path.write_text(spoilt)
    with pytest.raises(DataError, match=f"^the protocol {re.escape(str(path))} .*{re.escape(message)}"):
        convert_protocol(path, "x", 8)


def test_a_seed_and_a_file_exclude_each_other(tmp_path: Path) -> None:
    outcome = invoke("protocol", "--from", "x.yml", "--protocol-seed", 1, "--out", tmp_path / "x.json")
    assert isinstance(outcome.exception, SpclError)
    assert "--protocol-seed is for a protocol that is drawn" in str(outcome.exception)


def test_a_file_that_cannot_be_written_is_named(benchmark: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outcome = invoke("protocol", "--benchmark", benchmark, "--out", tmp_path / "file" / "x.json")
    assert isinstance(outcome.exception, SpclError)
    assert f"cannot write to {tmp_path / 'file'}" in str(outcome.exception)


def test_the_documented_examples_are_the_same_valid_protocol(tmp_path: Path) -> None:
    text = DOCS.read_text(encoding="utf-8")
    for kind in ("json", "yaml"):
        (example,) = re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)
        (tmp_path / f"example.{kind}").write_text(example)
    protocol = load_protocol(tmp_path / "example.json")
    assert convert_protocol(tmp_path / "example.yaml", protocol.benchmark, protocol.batch_size) == protocol


@pytest.mark.parametrize("length", [5, 30, 200])
def test_bars_of_a_timeline_are_not_wrapped(tmp_path: Path, length: int) -> None:
    """A task has one line, however long its name is, and bars are as long as the axis below them."""
    names = [f"{number}{'x' * length}" for number in range(2)]
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for name in names:
        arrays[f"{name}_x"] = rng.random((64, 4), dtype=np.float32)
        arrays[f"{name}_y"] = rng.integers(0, 2, 64)
    path = tmp_path / "sources.npz"
    np.savez(path, **arrays)
    runner = CliRunner(env={"COLUMNS": "80"})
    outcome = runner.invoke(app, ["timeline", "--benchmark", str(path), "--set", "batch_size=4"])
    assert outcome.exit_code == 0, outcome.exception
    lines = outcome.output.splitlines()
    assert len(lines) == len(names) + 2
    assert max(map(len, lines)) <= 80
    assert all("█" in line for line in lines[:2])
