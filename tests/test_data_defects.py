"""What is given by hand is taken as it is meant, or refused: class weights, kinds of targets, files, sizes and names."""

from typing import Any

import numpy as np
import pytest
import torch

from spcl.data import ImageData, from_arrays
from spcl.errors import SpclError
from spcl.losses import LOSSES, CrossEntropy
from spcl.runs import make_problem, resolve_settings
from spcl.runs.settings_page import named_settings
from spcl.runs.tasks import make_losses

CPU = torch.device("cpu")
SMALL = {"method": "er", "batch_size": 4, "memory_budget": 30, "threads": 1, "device": "cpu", "learning_rate": 0.01}
RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(80, 5)).astype(np.float32)


# -- class weights


def letters() -> ImageData:
    return from_arrays(FEATURES, list("abcd") * 20, name="letters")


def weighted(weights: Any, **settings: Any) -> dict[str, Any]:
    return SMALL | {"tasks": 2, "loss": {"name": "cross-entropy", "class_weights": weights}} | settings


@pytest.mark.parametrize("config", range(4))
def test_class_weights_are_those_of_the_classes_named_in_any_order(config: int) -> None:
    data = letters()
    settings = resolve_settings(weighted({"b": 3.0, "d": 0.5}, config=config), data=data)
    tasks = make_problem(settings, CPU, data).tasks
    losses = make_losses(tasks.values(), settings)
    found: dict[str, float] = {}
    for name, task in tasks.items():
        loss = losses[name]
        assert isinstance(loss, CrossEntropy)
        assert loss.class_weights is not None
        found |= dict(zip(task.class_names, loss.class_weights, strict=True))
    assert found == {"a": 1.0, "b": 3.0, "c": 1.0, "d": 0.5}


def test_numbers_name_classes_as_well() -> None:
    data = from_arrays(FEATURES, [7, 8] * 40)
    settings = resolve_settings(weighted({8: 2.0}, tasks=1), data=data)
    problem = make_problem(settings, CPU, data)
    (loss,) = make_losses(problem.tasks.values(), settings).values()
    names = next(iter(problem.tasks.values())).class_names
    assert isinstance(loss, CrossEntropy)
    assert loss.class_weights == tuple({"7": 1.0, "8": 2.0}[name] for name in names)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 2.0], "give 'balanced' or a mapping from class name to weight, as a task's classes may be in any order"),
        ({"b": 3.0, "e": 2.0}, "names 'e', no class of letters; choose one of a, b, c, d"),
    ],
)
def test_class_weights_that_name_no_class_are_refused_before_training(weights: Any, message: str) -> None:
    settings = resolve_settings(weighted(weights), data=letters())
    with pytest.raises(SpclError, match=message):
        make_problem(settings, CPU, letters())


def test_every_loss_says_what_it_is_for() -> None:
    meanings = {name: meaning for name, meaning, _ in named_settings()["loss"]}
    kinds = ("classification", "regression", "multi-label")
    for name in LOSSES:
        assert any(kind in meanings[name] for kind in kinds), name
