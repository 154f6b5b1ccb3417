"""The numbers of the paper's Tables 1 and 2."""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = ["PaperResult", "paper_benchmarks", "paper_methods", "paper_result"]


@dataclass(frozen=True)
class PaperResult:
    """Accuracy and forgetting with their standard deviations, in per cent, as published."""

    accuracy: float
    accuracy_std: float
    forgetting: float
    forgetting_std: float


def paper_result(scenario: str, benchmark: str, method: str) -> PaperResult | None:
    """Return the published result of a method on a benchmark, both by the names of this package; None if there is none.

    >>> paper_result("task", "ps-emnist", "soro")
    PaperResult(accuracy=91.062, accuracy_std=0.447, forgetting=-4.679, forgetting_std=0.425)
    >>> paper_result("task", "ps-glyphs", "soro") is None
    True
    """
    values = _content()["methods"].get(method, {}).get(scenario, {}).get(benchmark)
    return PaperResult(*values) if values else None


def paper_methods() -> list[str]:
    """Return the methods of the paper's tables, in their order.

    >>> paper_methods()[:3]
    ['mgda', 'dwa', 'pcgrad']
    """
    return list(_content()["methods"])


def paper_benchmarks() -> set[str]:
    """Return the benchmarks of the paper's tables.

    >>> sorted(paper_benchmarks())
    ['ps-cifar100', 'ps-emnist', 'ps-tiny-imagenet']
    """
    return {name for scenarios in _content()["methods"].values() for row in scenarios.values() for name in row}


@cache
def _content() -> Any:
    return json.loads(files("spcl.results.tables").joinpath("paper_results.json").read_text(encoding="utf-8"))
