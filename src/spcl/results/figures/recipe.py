"""The runs a figure is drawn from, as grids that ``spcl grid`` makes."""

import shlex
from dataclasses import dataclass

__all__ = ["Recipe"]


@dataclass(frozen=True)
class Recipe:
    """One call of ``spcl grid``, its options as they are written there.

    >>> Recipe("toy-cifar10", "er,soro", seeds="0", assignments=("evaluate_every=10",)).command("results/toy")
    'spcl grid --benchmark toy-cifar10 --methods er,soro --scenarios task --configs 0 --seeds 0
        --set evaluate_every=10 --out results/toy'
    """

    benchmark: str
    methods: str
    scenarios: str = "task"
    configs: str = "0"
    seeds: str = "0-2"
    assignments: tuple[str, ...] = ()
    sweeps: tuple[str, ...] = ()

    def command(self, out: str) -> str:
        """What to type."""
        words = ["spcl", "grid"]
        for name in ("benchmark", "methods", "scenarios", "configs", "seeds"):
            words += [f"--{name}", getattr(self, name)]
        words += [word for text in self.sweeps for word in ("--sweep", text)]
        words += [word for text in self.assignments for word in ("--set", text)]
        return shlex.join([*words, "--out", out])
