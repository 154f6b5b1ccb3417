"""The benchmark of how far SORO is from where its descent starts, on other data than its default."""

import runpy
from pathlib import Path

import numpy as np
import torch

from spcl.aggregation import SOROSettings, solve_soro
from spcl.runs import resolve_settings
from tiny_runs import tiny_data

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks/soro_limit.py"


def test_differences_are_those_of_the_updates_of_a_run(tmp_path: Path) -> None:
    script = runpy.run_path(str(SCRIPT))
    settings = resolve_settings(
        {"benchmark": str(tiny_data(tmp_path)), "tasks": 2, "batch_size": 8, "method": "soro", "device": "cpu"}
    )
    gramians = script["training_gramians"](settings)
    assert len(gramians) > 3
    found = script["differences"](gramians, SOROSettings())
    for gramian, difference in zip(gramians, found, strict=True):
        G = torch.linalg.cholesky(gramian).T  # gradients with these inner products
        updates = [G @ solve_soro(gramian, SOROSettings(iterations=count)).weights for count in (100, 0)]
        np.testing.assert_allclose(difference, (updates[0] - updates[1]).norm() / updates[1].norm(), rtol=1e-6)
    assert not script["differences"](gramians, SOROSettings(iterations=0)).any()
