"""The model of the time of a step on many GPUs: what the docs show of it is what the script prints."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "results" / "speed" / "scaling_model.txt"


def test_the_committed_output_of_the_scaling_model_is_what_it_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    runpy.run_path(str(ROOT / "benchmarks" / "scaling_model.py"), run_name="__main__")
    assert capsys.readouterr().out == RECORD.read_text(encoding="utf-8").partition("\n")[2]


def cells(line: str, bar: str) -> list[str]:
    return [cell.strip() for cell in line.split(bar)[1:-1]]


def test_the_docs_show_what_the_scaling_model_prints() -> None:
    titled = RECORD.read_text(encoding="utf-8").split(" tasks of 128 images")[1:]
    four, sixteen, many = ([cells(line, "│") for line in table.splitlines() if line[:1] == "│"] for table in titled)
    rows = [
        [one[0], one[5], two[5], three[5], three[7].replace("%", " %"), three[8]]
        for one, two, three in zip(four, sixteen, many, strict=True)
    ]
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    shown = page[page.index("| GPUs | T = 4 |") :].split("\n\n")[0].splitlines()[2:]
    assert [cells(line, "|") for line in shown] == rows
