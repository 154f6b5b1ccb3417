"""The examples run and show what they promise."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_own_data_is_learnt_in_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    path = EXAMPLES / "own_data.py"
    runpy.run_path(str(path), run_name="__main__")
    found = {name: float(right) for name, right in re.findall(r"(\w+): ([\d.]+)%", capsys.readouterr().out)}
    assert found["direction"] > 90
    assert found["distance"] > 70
    lines = path.read_text().split("\nbackbone = ")[1].rstrip().splitlines()
    assert len(lines) == 10


def test_live_sources_join_late_die_and_come_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = tmp_path / "curves.png"
    monkeypatch.setattr(sys, "argv", ["live_multi_source.py", "--steps", "60", "--out", str(picture)])
    runpy.run_path(str(EXAMPLES / "live_multi_source.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "source 'load' failed: cable disconnected" in printed
    rows = {
        name: (int(count), int(failures)) for name, count, failures in re.findall(r"(\w+) +│ (\d+) +│ (\d)", printed)
    }
    assert set(rows) == {"vibration", "load", "acoustic"}
    assert rows["load"][1] == 1
    assert rows["load"][0] > 60 // 20, "it did not come back"
    assert rows["vibration"][0] > rows["acoustic"][0] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
