"""The ``spcl grid`` commands that make the runs of a figure."""

import shlex
from dataclasses import dataclass

__all__ = ["GridCommand"]


@dataclass(frozen=True)
class GridCommand:
    """The options of one call of ``spcl grid``.

    >>> GridCommand("toy-cifar10", "er,soro", seeds="0", assignments=("evaluate_every=10",)).text("results/toy")
    'spcl grid --benchmark toy-cifar10 --methods er,soro --scenarios task --configs 0 --seeds 0 --preset default
        --set evaluate_every=10 --out results/toy'
    """

    benchmark: str
    methods: str
    scenarios: str = "task"
    configs: str = "0"
    seeds: str = "0-2"
    preset: str = "default"
    assignments: tuple[str, ...] = ()
    sweeps: tuple[str, ...] = ()

    def text(self, out: str) -> str:
        """Return the command that makes the runs in the folder ``out``."""
        words = ["spcl", "grid"]
        for name in ("benchmark", "methods", "scenarios", "configs", "seeds", "preset"):
            words += [f"--{name}", getattr(self, name)]
        words += [word for text in self.sweeps for word in ("--sweep", text)]
        words += [word for text in self.assignments for word in ("--set", text)]
        return shlex.join([*words, "--out", out])
