"""Conditions choose runs by any setting, as it is written where runs are made."""

from pathlib import Path
from typing import Any

import pytest

from spcl.errors import SpclError
from spcl.results import RunRecord
from spcl.results.records import filter_runs, parse_conditions

ADAM = {"optimizer": "adam", "memory": "balanced", "clip_norm": None}
SGD = {"optimizer": {"name": "sgd", "momentum": 0.9}, "memory": {"name": "reservoir"}, "clip_norm": 1.0}
BETAS = {"optimizer": {"name": "adam", "betas": [0.9, 0.99]}, "memory": "balanced", "clip_norm": 2.0}


def _runs() -> list[RunRecord]:
    settings = {"benchmark": "ps-glyphs", "method": {"name": "er"}}
    return [
        RunRecord(Path(str(seed)), settings | own | {"seed": seed}, None) for seed, own in enumerate((ADAM, SGD, BETAS))
    ]


@pytest.mark.parametrize(
    ("condition", "seeds"),
    [
        ("optimizer=adam", [0, 2]),
        ("optimizer=adam,sgd", [0, 1, 2]),
        ("memory=reservoir", [1]),
        ("optimizer.momentum=0.9", [1]),
        ("optimizer.betas=[9e-1,0.99]", [2]),
        ("clip_norm=null,2", [0, 2]),
        ("method=ER", [0, 1, 2]),
    ],
)
def test_runs_are_chosen_by_named_things_options_and_lists(condition: str, seeds: list[int]) -> None:
    assert [run.seed for run in filter_runs(_runs(), parse_conditions([condition]))] == seeds


@pytest.mark.parametrize("condition", [{"optimizer": "sgd"}, {"optimizer": {"name": "sgd"}}, {"optimizer.name": "sgd"}])
def test_conditions_from_python_may_be_nested_or_dotted(condition: dict[str, Any]) -> None:
    assert [run.seed for run in filter_runs(_runs(), condition)] == [1]


def test_an_error_names_settings_as_they_are_given() -> None:
    with pytest.raises(SpclError, match="none of 3 runs has optimizer=rprop; there are adam, sgd"):
        filter_runs(_runs(), parse_conditions(["optimizer=rprop"]))
    with pytest.raises(SpclError, match="did you mean 'optimizer'"):
        filter_runs(_runs(), parse_conditions(["optimiser=adam"]))
