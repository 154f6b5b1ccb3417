"""The update of many small tensors at once against that of one after the other."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from spcl.engine.update import Update

KINDS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (Adam, {}),
    (Adam, {"weight_decay": 0.1, "amsgrad": True}),
    (Adam, {"maximize": True, "betas": (0.5, 0.9)}),
    (AdamW, {"eps": 1e-4}),
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
]


def heads(count: int, width: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, width + index % 2, generator=generator).requires_grad_() for index in range(count)]


def train(optimizer: Optimizer, parameters: list[Tensor], at_once: bool) -> list[bool | None]:
    """Take some steps; return what the last group says of ``foreach`` in each."""
    seen: list[bool | None] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[-1].get("foreach")))
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        for index, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if (index + step) % 5 == 0 else gradient  # a head without samples in this step
        if at_once:
            Update(optimizer).apply()
        else:
            optimizer.step()
    return seen


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_many_small_tensors_get_the_same_update_to_the_last_bit(kind: type[Optimizer], options: dict[str, Any]) -> None:
    found, expected = heads(40), heads(40)
    optimizer = kind(found, **options)
    assert train(optimizer, found, at_once=True) == [True] * 5
    train(kind(expected, **options), expected, at_once=False)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert optimizer.param_groups[-1]["foreach"] is None


@pytest.mark.parametrize(
    ("parameters", "options"), [(heads(4), {}), (heads(40, width=10_000), {}), (heads(40), {"foreach": False})]
)
def test_few_or_large_tensors_and_explicit_choices_are_left_alone(
    parameters: list[Tensor], options: dict[str, Any]
) -> None:
    assert train(Adam(parameters, **options), parameters, at_once=True) == [options.get("foreach")] * 5


def test_other_optimisers_are_left_alone() -> None:
    parameters = heads(40)
    assert train(RMSprop(parameters), parameters, at_once=True) == [None] * 5


def test_the_choice_is_undone_when_the_optimiser_raises() -> None:
    optimizer = Adam(heads(40))

    def fail(*_: object) -> None:
        raise RuntimeError("interrupted")

    optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="interrupted"):
        Update(optimizer).apply()
    assert optimizer.param_groups[-1]["foreach"] is None
