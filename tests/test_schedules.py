"""Schedules against PyTorch's, and what they refuse."""

import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from spcl._util.registry import Named
from spcl.errors import SpclError
from spcl.schedules import SCHEDULES

PYTORCH: dict[str, tuple[Named, Callable[[torch.optim.Optimizer], Any]]] = {
    "constant": ("constant", partial(lr_scheduler.LambdaLR, lr_lambda=lambda _: 1.0)),
    "cosine": (
        {"name": "cosine", "final": 0.25},
        partial(lr_scheduler.CosineAnnealingLR, T_max=20, eta_min=0.25),
    ),
    "linear": (
        {"name": "linear", "final": 0.25},
        partial(lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.25, total_iters=20),
    ),
    "steps": (
        {"name": "steps", "at": [0.25, 0.5], "factor": 0.5},
        partial(lr_scheduler.MultiStepLR, milestones=[5, 10], gamma=0.5),
    ),
}


@pytest.mark.parametrize("name", PYTORCH)
def test_schedules_are_those_of_pytorch(name: str) -> None:
    setting, make = PYTORCH[name]
    schedule = SCHEDULES.make(setting, 20)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no gradients: the optimiser has nothing to do
        theirs = make(optimizer)
        for step in range(21):
            assert schedule(step) == pytest.approx(optimizer.param_groups[0]["lr"])
            theirs.step()


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_a_warm_up_rises_in_equal_parts_and_the_rest_falls(name: str) -> None:
    schedule = SCHEDULES.make({"name": name, "warmup": 0.2, "final": 0.1}, 50)
    factors = [schedule(step) for step in range(60)]
    assert factors[:11] == pytest.approx([(step + 1) / 11 for step in range(11)])
    assert all(one > other for one, other in pairwise(factors[10:51]))
    assert factors[50:] == pytest.approx([0.1] * 10)


@pytest.mark.parametrize(
    ("setting", "steps", "words"),
    [
        ({"name": "cosine", "warmup": 10}, 100, "warmup is 10; give the fraction of the steps, from 0 to 1"),
        ({"name": "linear", "final": -1.0}, 100, "final is -1.0; give the factor at the end, at least 0"),
        ({"name": "steps", "at": [30, 60]}, 100, r"at is \[30, 60\]; give fractions of the training, from 0 to 1"),
        ({"name": "steps", "factor": -0.1}, 100, "factor is -0.1; give a number, at least 0"),
        ("constant", 0, "steps is 0; give the number of steps of the training, at least 1"),
        ("cosin", 10, r"there is no schedule 'cosin'; did you mean 'cosine'\?"),
    ],
)
def test_wrong_settings_are_refused(setting: Named, steps: int, words: str) -> None:
    with pytest.raises(SpclError, match=words):
        SCHEDULES.make(setting, steps)
