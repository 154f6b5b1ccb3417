"""Runs of several ranks at the command line: killed, resumed with any number of ranks, refused where ranks differ.

The processes have the variables that ``torchrun`` sets; under ``torchrun`` itself, ``test_ranks.py`` kills one.
"""

import json
import os
import shutil
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from _runs import PATIENCE, metrics_in, results_in, start_command, wait_for
from small_benchmark import small_settings, write_benchmark
from spcl.grids.worker import free_port, rank_environment


class Ranks:
    """The processes of one command, and what each prints."""

    def __init__(self, folder: Path, *commands: list[str]) -> None:
        folder.mkdir(exist_ok=True)
        self.logs = [folder / f"log-{rank}" for rank in range(len(commands))]
        endpoint = ("127.0.0.1", free_port())
        self.processes: list[BaseProcess] = []
        for rank, (words, log) in enumerate(zip(commands, self.logs, strict=True)):
            log.write_text("")
            environment = rank_environment(rank, len(commands), endpoint)
            self.processes.append(start_command(words, log, environment))

    def statuses(self) -> list[int | None]:
        for process in self.processes:
            process.join(PATIENCE)
        return [process.exitcode for process in self.processes]

    def printed(self) -> list[str]:
        return [log.read_text() for log in self.logs]


@pytest.fixture
def command(benchmark: Path, tmp_path: Path) -> list[str]:
    """Train, with no checkpoint on the way."""
    settings = small_settings(benchmark, method={"name": "soro"}, scenario="class")
    (tmp_path / "settings.json").write_text(settings.model_dump_json())
    return ["run", f"--settings={tmp_path / 'settings.json'}"]


def content(out: Path) -> dict[str, Any]:
    """What a run has written, to the bit, apart from times."""
    return {"result": results_in(out), "metrics": metrics_in(out), "model": (out / "model.safetensors").read_bytes()}


def test_a_run_whose_rank_is_killed_is_resumed_with_any_number_of_ranks(command: list[str], tmp_path: Path) -> None:
    whole = Ranks(tmp_path / "whole", *[[*command, f"--out={tmp_path / 'whole'}"]] * 2)
    assert whole.statuses() == [0, 0], whole.printed()

    out = tmp_path / "killed"
    killed = Ranks(tmp_path / "logs", *[[*command, f"--out={out}", "--set=checkpoint_seconds=0"]] * 2)
    wait_for(lambda: (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").read_text().count("\n") > 3)
    begin = time.monotonic()
    os.kill(int(killed.processes[1].pid or 0), signal.SIGKILL)
    assert killed.statuses() == [1, -signal.SIGKILL]
    assert time.monotonic() - begin < 20
    (first, _) = killed.printed()
    assert first.count("error: rank 0 of 2 has lost another rank") == 1
    assert "Traceback" not in first
    assert not (out / "result.json").exists()

    folders = {size: tmp_path / f"resumed by {size}" for size in (1, 2, 3)}
    for size, folder in folders.items():
        shutil.copytree(out, folder)
        shutil.copy(tmp_path / "settings.json", folder)
        resumed = Ranks(folder, *[["run", f"--out={folder}", "--resume"]] * size)
        assert resumed.statuses() == [0] * size, resumed.printed()
        assert json.loads((folder / "result.json").read_text())["environment"].get("ranks", 1) == size
    expected = content(tmp_path / "whole")
    assert content(folders[2]) == expected
    for size in (1, 3):
        found = results_in(folders[size])["."]
        for key in ("tasks", "confusion"):
            assert found[key] == expected["result"]["."][key]
        np.testing.assert_allclose(losses(folders[size]), losses(tmp_path / "whole"), rtol=1e-4)

    again = Ranks(folders[2], *[["run", f"--out={folders[2]}", "--resume"]] * 2)
    assert again.statuses() == [0, 0]
    assert "this run was complete already: accuracy" in again.printed()[0]
    assert content(folders[2]) == expected


def losses(out: Path) -> list[float]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [loss for line in lines for loss in line.get("losses", {}).values()]


def test_ranks_with_other_settings_or_data_are_refused(command: list[str], benchmark: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other_data = write_benchmark(tmp_path / "other" / benchmark.name, per_class=41)
    refused = {
        "the ranks have different settings: rank 0 has {'seed': 0}, rank 1 has {'seed': 1}": ["--seed=1"],
        "the ranks have different data: rank 0 has ": [f"--benchmark={other_data}"],
    }
    for number, (message, flags) in enumerate(refused.items()):
        words = [*command, f"--out={tmp_path / f'out-{number}'}"]
        ranks = Ranks(tmp_path / f"logs-{number}", words, [*words, *flags])
        assert ranks.statuses() == [1, 1]
        assert all(f"error: {message}" in printed for printed in ranks.printed()), ranks.printed()
        assert not (tmp_path / f"out-{number}" / "metrics.jsonl").exists()
