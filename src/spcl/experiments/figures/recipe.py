"""The runs a figure is drawn from, as grids that ``spcl grid`` makes."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spcl.experiments.plan import Job, parse_methods, parse_numbers, parse_sweep, plan_grid
from spcl.experiments.settings import parse_assignments

__all__ = ["Recipe"]


@dataclass(frozen=True)
class Recipe:
    """One call of ``spcl grid``, its arguments as they are written there.

    >>> recipe = Recipe("toy-cifar10", "er,soro", seeds="0", sets=("evaluate_every=10",))
    >>> recipe.command("results/toy")
    'spcl grid --benchmark toy-cifar10 --methods er,soro --scenarios task --configs 0 --seeds 0
        --set evaluate_every=10 --out results/toy'
    >>> [job.name for job in recipe.on("ps-glyphs").jobs(Path("results/toy"), {})]
    ['task/er/config-0/seed-0', 'task/soro/config-0/seed-0']
    """

    benchmark: str
    methods: str
    scenarios: str = "task"
    configs: str = "0"
    seeds: str = "0-2"
    sets: tuple[str, ...] = ()
    sweeps: tuple[str, ...] = ()

    def on(self, benchmark: str) -> "Recipe":
        """The same on another benchmark."""
        return replace(self, benchmark=benchmark)

    def command(self, out: str) -> str:
        """What to type."""
        options = {
            "--benchmark": self.benchmark,
            "--methods": self.methods,
            "--scenarios": self.scenarios,
            "--configs": self.configs,
            "--seeds": self.seeds,
        }
        words = [word for option in options.items() for word in option]
        words += [word for text in self.sweeps for word in ("--sweep", text)]
        words += [word for text in self.sets for word in ("--set", text)]
        return shlex.join(["spcl", "grid", *words, "--out", out])

    def jobs(self, out: Path, base: Mapping[str, Any]) -> list[Job]:
        """What that does, over more settings."""
        return plan_grid(
            out,
            {"benchmark": self.benchmark, **parse_assignments(self.sets), **base},
            methods=parse_methods(self.methods),
            scenarios=self.scenarios.split(","),
            configs=parse_numbers(self.configs),
            seeds=parse_numbers(self.seeds),
            sweeps=[parse_sweep(text) for text in self.sweeps],
        )
