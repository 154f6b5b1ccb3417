"""The update of all tensors of a group at once against that of one after the other."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from spcl.engine.update import Update
from spcl.learner import Learner
from spcl.methods import SORO
from spcl.models import MLP

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
    """Take some steps; return what the last group says of ``fused`` in each."""
    seen: list[bool | None] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[-1].get("fused")))
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
def test_tensors_get_the_same_update_at_once(kind: type[Optimizer], options: dict[str, Any]) -> None:
    found, expected = heads(40), heads(40)
    optimizer = kind(found, **options)
    seen = train(optimizer, found, at_once=True)
    train(kind(expected, **options), expected, at_once=False)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert (seen[0], seen[-1]) == (True, True)
    assert optimizer.param_groups[-1]["fused"] is None


def test_momentum_of_new_tensors_starts_beside_that_of_others() -> None:
    found, expected = heads(6), heads(6)
    optimizer = SGD(found, lr=0.1, momentum=0.9, dampening=0.5, fused=True)
    assert train(optimizer, found, at_once=True) == [True, False, True, True, True]
    train(SGD(expected, lr=0.1, momentum=0.9, dampening=0.5), expected, at_once=False)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_tensors_with_gaps_in_memory_are_updated_one_by_one() -> None:
    gappy, expected = torch.ones(4, 6)[:, ::2].requires_grad_(), torch.ones(4, 3, requires_grad=True)
    assert train(Adam([gappy]), [gappy], at_once=True) == [None] * 5
    train(Adam([expected]), [expected], at_once=False)
    torch.testing.assert_close(gappy, expected)


def test_sparse_gradients_are_added_one_by_one() -> None:
    embedding = nn.Embedding.from_pretrained(torch.zeros(4, 2), freeze=False, sparse=True)
    embedding(torch.tensor([1, 3])).sum().backward()
    Update(SGD(embedding.parameters(), lr=0.5)).apply()
    assert embedding.weight.tolist() == [[0.0, 0.0], [-0.5, -0.5], [0.0, 0.0], [-0.5, -0.5]]


@pytest.mark.parametrize(
    "options", [{"foreach": False}, {"fused": False}, {"foreach": True}, {"lr": torch.tensor(0.1)}]
)
def test_explicit_choices_are_left_alone(options: dict[str, Any]) -> None:
    parameters = heads(40)
    assert train(Adam(parameters, **options), parameters, at_once=True) == [options.get("fused")] * 5


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
    assert optimizer.param_groups[-1]["fused"] is None


def test_heads_that_come_later_start_their_momentum_in_a_run() -> None:
    def trained(fused: bool) -> Learner:
        torch.manual_seed(0)
        learner = Learner(MLP(6, (4,)), SORO(), optimizer=partial(SGD, lr=0.1, momentum=0.9, fused=fused))
        for name in ("first", "second"):
            learner.add_task(name, classes=2)
            for _ in range(2):
                learner.step({each: (torch.randn(3, 6), torch.tensor([0, 1, 0])) for each in learner.model.tasks})
        return learner

    pairs = zip(trained(True).optimizer.param_groups, trained(False).optimizer.param_groups, strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found["params"], expected["params"])
