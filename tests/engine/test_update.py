"""The update of all tensors of a group at once against that of one after the other."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.optimizer import register_optimizer_step_post_hook

from spcl.engine.update import Update
from spcl.learner import Learner
from spcl.methods import SORO
from spcl.models import MLP

DECOUPLED = (Adam, {"weight_decay": 0.5, "decoupled_weight_decay": True})
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


@pytest.mark.parametrize(
    ("kind", "options"),
    [*KINDS[:4], (AdamW, {"amsgrad": True}), (Adam, {"fused": True, "weight_decay": 0.5}), DECOUPLED],
)
def test_adam_gives_what_its_fused_step_gives(kind: type[Optimizer], options: dict[str, Any]) -> None:
    found, expected = heads(40), heads(40)
    direct, fused = kind(found, **options), kind(expected, **options | {"fused": True})
    generator = torch.Generator().manual_seed(1)
    for step in range(9):
        for index, pair in enumerate(zip(found, expected, strict=True)):
            gradient = torch.randn(pair[0].shape, generator=generator)
            is_new, is_absent = index == 39 and step < 5, step > 2 and (index + step // 2) % 5 == 0
            for parameter in pair:  # all but one from the first step on; from the fourth on, some are without samples
                parameter.grad = None if is_new or is_absent else gradient.clone()
        Update(direct).apply()
        fused.step()
    assert all(map(torch.equal, found, expected))
    for one, other in zip(found, expected, strict=True):
        state = direct.state[one]
        assert state.keys() == fused.state[other].keys()
        assert all(torch.equal(value, fused.state[other][name]) for name, value in state.items())


def test_adam_of_mixed_types_is_updated() -> None:
    parameters = [torch.ones(3, requires_grad=True), torch.ones(3, dtype=torch.float64, requires_grad=True)]
    optimizer = Adam(parameters, lr=0.25)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        Update(optimizer).apply()
    for parameter in parameters:
        torch.testing.assert_close(parameter, torch.full_like(parameter, 0.25))


def test_schedulers_see_the_steps() -> None:
    (parameter,) = heads(1)
    optimizer = Adam([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            parameter.grad = torch.ones_like(parameter)
            Update(optimizer).apply()
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_hooks_on_all_optimisers_are_called() -> None:
    parameters, seen = heads(2), list[int]()
    optimizer = Adam(parameters)
    hook = register_optimizer_step_post_hook(lambda *_: seen.append(1))
    try:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        for _ in range(3):
            Update(optimizer).apply()
    finally:
        hook.remove()
    assert len(seen) == 3


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
