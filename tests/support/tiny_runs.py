"""Real runs that take a moment, for tests of what is made from their records."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from spcl.runs import execute, resolve_settings

SIDE = 18  # the smallest image that the small network takes
TWO_TASKS = {"tasks": 2, "backbone": "cnn", "evaluate_every": 2}
GRID_METHODS = ("er", "soro", "graddrop")


@cache
def tiny_data(base: Path) -> Path:
    """Six classes of noisy pictures, each with a bar of its own."""
    generator = np.random.default_rng(0)
    path = base / "tiny.npz"
    arrays = {}
    for prefix, per_class in (("", 24), ("test_", 6)):
        y = np.repeat(np.arange(6), per_class)
        x = generator.integers(0, 120, (len(y), 1, SIDE, SIDE), dtype=np.uint8)
        for label in range(6):
            x[y == label, :, 3 * label : 3 * label + 2] += 130
        arrays |= {f"{prefix}x": x, f"{prefix}y": y}
    np.savez(path, **arrays)
    return path


def tiny_run(base: Path, name: str, method: dict[str, Any], **settings: Any) -> Path:
    """One run in a folder below ``base``."""
    chosen = {"benchmark": str(tiny_data(base)), "batch_size": 8, "memory_budget": 12, "threads": 1, "device": "cpu"}
    out = base / name
    execute(resolve_settings(chosen | settings, {"method": method}), out)
    return out


@cache
def two_task_runs(base: Path) -> Path:
    """Two tasks on a convolutional network: the four conditions of the ablation, and two timelines."""
    for config in (0, 1):
        for name, method in {
            "er": {"name": "er"},
            "er-dbt": {"name": "er", "alpha": 1e-5},
            "soro": {"name": "soro"},
            "soro-dbt": {"name": "soro+dbt"},
        }.items():
            tiny_run(base, f"two/{name}/{config}", method, config=config, **TWO_TASKS)
    return base / "two"


@cache
def grid_runs(base: Path) -> Path:
    """Three methods in both scenarios, two seeds, three tasks."""
    for scenario in ("task", "class"):
        for method in GRID_METHODS:
            for seed in (0, 1):
                where = f"grid/{scenario}/{method}/{seed}"
                tiny_run(base, where, {"name": method}, scenario=scenario, seed=seed, tasks=3, backbone="mlp")
    return base / "grid"


@cache
def sweep_runs(base: Path) -> Path:
    """Runs of SORO that differ in one hyper-parameter, and without any iteration."""
    for name, values in {
        "sigma": (1.0, 100.0),
        "lambda_": (0.0, 100.0),
        "alpha": (0.0, 0.01),
        "iterations": (0,),
    }.items():
        for value in values:
            for seed in (0, 1):
                method = {"name": "soro", name: value}
                tiny_run(base, f"sweep/{name}={value}/{seed}", method, seed=seed, tasks=2, backbone="mlp")
    return base / "sweep"


@cache
def memory_runs(base: Path) -> Path:
    """Two methods with three memory budgets."""
    for method in ("er", "soro"):
        for budget in (6, 12, 24):
            where = f"memory/{method}/{budget}"
            tiny_run(base, where, {"name": method}, memory_budget=budget, tasks=2, backbone="mlp")
    return base / "memory"


@cache
def paradigm_runs(base: Path) -> Path:
    """One method under the three paradigms."""
    for paradigm in ("parallel", "joint", "serial"):
        tiny_run(base, f"paradigms/{paradigm}", {"name": "er"}, paradigm=paradigm, tasks=3, backbone="mlp")
    return base / "paradigms"


def entries(run: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind of a run's metrics, read the plain way."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def result(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "result.json").read_text())
    return content
