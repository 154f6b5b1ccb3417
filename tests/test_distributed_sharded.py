"""Backbones that fully_shard has sharded over ranks: real processes on gloo, against one process."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import _ranks
from _ranks import Ranks, compare
from spcl.learner import Scenario


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("scenario", ["task", "class"])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("er", {}),
        ("soro", {}),
        ("mgda", {}),
        ("der++", {}),
        ("soro", {"clip_norm": 0.3, "average": 0.9, "measure_stability": True}),
    ],
)
def test_sharded_ranks_train_what_one_process_trains(
    ranks: Ranks, method: str, scenario: Scenario, options: dict[str, Any]
) -> None:
    case = partial(_ranks.trained, name=method, scenario=scenario, batch_norm=False, options=options, sharded=True)
    ranks.start(case, 2, "data")
    expected = case(None)
    compare(ranks.results(), expected)
