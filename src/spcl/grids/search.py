"""The search space of a tuning: ranges and choices of settings, and the runs that score one point of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from spcl.errors import SpclError
from spcl.grids.plan import Job, plan_grid
from spcl.runs.identity import nested_settings
from spcl.runs.settings import merge_settings, parse_value

__all__ = ["Dimension", "Tuning", "parse_search"]


@dataclass(frozen=True)
class Dimension:
    """A setting, by dotted name, and its values: the ends of a range, or choices."""

    name: str
    kind: Literal["float", "log", "int", "choice"]
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Tuning:
    """The settings ``base`` of one method in one scenario, scored over configurations and seeds, and what to search."""

    base: Mapping[str, Any]
    method: str
    scenario: str
    configs: Sequence[int]
    seeds: Sequence[int]
    search: Sequence[Dimension]

    def jobs(self, out: Path, params: Mapping[str, Any]) -> list[Job]:
        """Plan the runs that score these values of the searched settings, which are given by dotted name."""
        return plan_grid(
            out,
            merge_settings(self.base, *(nested_settings(name, value) for name, value in params.items())),
            methods=[self.method],
            scenarios=[self.scenario],
            configs=self.configs,
            seeds=self.seeds,
        )


def parse_search(text: str) -> Dimension:
    """Parse ``name=kind:…``; kinds are ``float``, ``log`` (a float on a logarithmic scale), ``int`` and ``choice``.

    >>> parse_search("method.sigma=log:1:1000")
    Dimension(name='method.sigma', kind='log', values=(1.0, 1000.0))
    >>> parse_search("memory=choice:balanced:reservoir").values
    ('balanced', 'reservoir')
    """
    name, _, rest = text.partition("=")
    kind, *parts = rest.split(":")
    try:
        if name and kind == "choice" and parts:
            return Dimension(name, "choice", tuple(map(parse_value, parts)))
        if name and kind in ("float", "log", "int"):
            low, high = map(int if kind == "int" else float, parts)
            if low < high and (kind != "log" or low > 0):
                return Dimension(name, cast(Literal["float", "log", "int"], kind), (low, high))
    except ValueError:
        pass
    raise SpclError(
        f"expected name=log:low:high, name=float:low:high, name=int:low:high or name=choice:a:b:…, "
        f"found {text!r}; write, for example, method.sigma=log:1:1000"
    )
