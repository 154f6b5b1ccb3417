"""benchmarks/anchors.py runs on a folder of publishers' files, and leaves out the sets that are not there."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from data_files import air_files, air_lines, clinc_files, wisdm_files, write_files

ROOT = Path(__file__).resolve().parents[2]
QUERIES = [["my balance", "balance"], ["a visa", "visa"], ["send money", "transfer"], ["see japan", "visa"]]


def test_the_anchors_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPCL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SPCL_DATA", raising=False)
    write_files(tmp_path / "wisdm-dataset", wisdm_files({1600: "AAAABBBB", 1601: "BBBBAAAA", 1602: "AAAABBBB"}))
    domains = {"banking": ["balance", "transfer"], "travel": ["visa"]}
    write_files(tmp_path / "clinc150", clinc_files({"train": QUERIES * 5, "test": QUERIES}, domains))
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["anchors.py", "--data-dir", str(tmp_path), "--seeds", "2"])
    runpy.run_path(str(ROOT / "benchmarks" / "anchors.py"), run_name="__main__")
    printed = " ".join(capsys.readouterr().out.split())
    assert "persons never seen" in printed
    assert "after 5 passes" in printed
    assert "beijing-air is left out" in printed
    assert torch.get_num_threads() == threads


def test_persistence_is_the_last_value(tmp_path: Path) -> None:
    write_files(tmp_path / "PRSA_Data_20130301-20170228", air_files({"Dongsi": air_lines("Dongsi")}))
    anchors = runpy.run_path(str(ROOT / "benchmarks" / "anchors.py"))
    found = anchors["beijing_air"](anchors["load_beijing_air"](every=50, data_dir=tmp_path), 0)
    hours = torch.arange(28_051, 35_064 - 6)
    hours = hours[(hours - 23) % 50 == 0]
    for what, before in (("persistence, µg/m³", 6), ("the value a day before, µg/m³", 24)):
        errors = ((hours + 6) % 500 - (hours + 6 - before) % 500).abs().double()
        assert found[what] == [pytest.approx(errors.mean().item(), rel=1e-4)]
