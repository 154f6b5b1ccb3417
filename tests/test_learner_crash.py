"""A training process that is killed again and again ends exactly where an undisturbed one does."""

import subprocess
import sys
from pathlib import Path

from _learning import assert_same
from spcl.checkpoint import read_checkpoint

KILLS = 22


def test_a_run_killed_at_random_moments_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("_crash.py")), str(tmp_path), str(KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    resumed, _, steps = map(int, done.stdout.split())  # how many died while they wrote is left to chance
    assert resumed >= 20
    whole, killed = read_checkpoint(tmp_path / "whole"), read_checkpoint(tmp_path / "killed")
    assert whole["learner"]["steps"] == steps
    assert_same(killed, whole)
    assert {file.name for file in tmp_path.iterdir()} == {"whole", "whole.previous", "killed", "killed.previous"}
