"""Seeds, checked where they are given."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from spcl.data import from_arrays, from_sources
from spcl.errors import SpclError
from spcl.memory import Reservoir
from spcl.streams import ParallelStream, StreamTask, Timeline

X, Y = torch.rand(8, 2), torch.arange(8) % 2
TIMELINE = Timeline(((0, 3),))
TAKERS: dict[str, Callable[..., Any]] = {
    "arrays with test samples": partial(from_arrays, X, Y, X, Y),
    "sources": partial(from_sources, {"a": (X, Y)}),
    "memory": partial(Reservoir, 9),
    "stream": partial(ParallelStream, X, Y, ((0, 1),), TIMELINE, 2),
    "stream of tasks": partial(ParallelStream.of_tasks, [StreamTask("a", X, Y, 2)], TIMELINE, 2),
}


@pytest.mark.parametrize("taker", TAKERS.values(), ids=TAKERS)
@pytest.mark.parametrize("seed", ["x", "1", 1.5, -1, True, None])
def test_a_seed_is_a_whole_number(taker: Callable[..., Any], seed: object) -> None:
    with pytest.raises(SpclError, match=rf"^seed is {seed!r}; give a whole number from 0$"):
        taker(seed=seed)
    taker(seed=np.int64(3))
