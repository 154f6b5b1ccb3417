"""How far SORO's update is from σ_min·UVᵀ1, at which its descent starts, in training.

    python benchmarks/soro_limit.py
    python benchmarks/soro_limit.py benchmark=ps-emnist preset=paper protocol=ps-emnist.json fit=true data_dir=data
    python benchmarks/soro_limit.py benchmark=ps-cifar100 preset=paper device=cuda    # or other settings

For every step of a run of SORO, by default on PS-Glyphs, the relative difference ‖u − u₀‖/‖u₀‖ of its update from that
without descent is computed from the Gramian of the step's gradients.
"""

import sys
from collections.abc import Sequence

import numpy as np
import torch

from spcl.aggregation import SOROSettings, solve_soro
from spcl.learner import StepReport
from spcl.runs import resolve_settings
from spcl.runs.build import make_learner, make_problem, pick_device
from spcl.runs.settings import RunSettings, parse_assignments

CHOICES = {"paper's σ = λ = 100": SOROSettings(), "published code's": SOROSettings.released()}
TARGET = 0.01


def main() -> None:
    """Print the differences."""
    settings = resolve_settings({"method": "soro", "device": "cpu"}, parse_assignments(sys.argv[1:]))
    gramians = training_gramians(settings)
    print(f"{len(gramians)} steps of two gradients or more, {settings.benchmark}, method soro\n")
    print("| settings of SORO | 95 % of steps below | largest | median difference | target | met |")
    print("|:--|--:|--:|--:|--:|:--|")
    for name, choice in CHOICES.items():
        found = differences(gramians, choice)
        median, most, largest = np.median(found), np.quantile(found, 0.95), found.max()
        print(
            f"| {name} | {most:.2%} | {largest:.2%} | {median:.2%} | below {TARGET:.0%} | "
            f"{'yes' if median < TARGET else 'no'} |"
        )


def training_gramians(settings: RunSettings) -> list[torch.Tensor]:
    """Return the Gramians of the gradients of a run."""
    device = pick_device(settings.device)
    problem = make_problem(settings, device)
    reports: list[StepReport] = []
    learner = make_learner(settings, problem.data, device, 0)
    for moment in problem.stream:
        for task in moment.started:
            learner.add_task(task, classes=problem.tasks[task].classes)
        reports.append(learner.step(moment.batches))
        for task in moment.ended:
            learner.finish_task(task)
    found = [report.before.gramian for report in reports if report.before is not None]
    return [gramian for gramian in found if len(gramian) > 1]


def differences(gramians: Sequence[torch.Tensor], settings: SOROSettings) -> np.ndarray:
    """Return ‖u − u₀‖/‖u₀‖ for each Gramian."""
    return np.array([difference(gramian, settings) for gramian in gramians])


def difference(gramian: torch.Tensor, settings: SOROSettings) -> float:
    """Return ‖u − u₀‖/‖u₀‖."""
    start = solve_soro(gramian, settings.model_copy(update={"iterations": 0})).weights
    change = solve_soro(gramian, settings).weights - start
    return float((change @ gramian @ change).clamp(min=0).sqrt() / (start @ gramian @ start).sqrt())


if __name__ == "__main__":
    main()
