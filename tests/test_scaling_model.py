"""The model of the time of a step on many GPUs: what the docs show of it is what the script prints."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_the_committed_output_of_the_scaling_model_is_what_it_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    runpy.run_path(str(ROOT / "benchmarks" / "scaling_model.py"), run_name="__main__")
    recorded = (ROOT / "results" / "speed" / "scaling_model.txt").read_text(encoding="utf-8")
    assert capsys.readouterr().out == recorded.partition("\n")[2]
