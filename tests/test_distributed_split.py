"""Ranks that split batches, or tasks and batches: real processes on gloo, against one process and a naive loop."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

import _ranks
from _ranks import Ranks
from spcl.learner import Scenario
from spcl.methods import METHODS
from test_distributed import compare

CASES = [*product(METHODS, ["task", "class"])]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(("method", "scenario"), CASES)
def test_ranks_that_split_batches_train_what_one_process_trains(
    ranks: Ranks, method: str, scenario: Scenario
) -> None:
    case = partial(_ranks.trained, name=method, scenario=scenario, batch_norm=False)
    ranks.start(case, 2, "data")
    expected = case(None)
    compare(ranks.results(), expected)
