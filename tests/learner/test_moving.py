"""A learner that is moved or converted trains on as it would have."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from _learning import TinyResNet, assert_same, batch, complete_state, images
from spcl.errors import SpclError
from spcl.learner import Learner
from spcl.memory import Reservoir
from spcl.methods import DERPP, SORO

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "average": {"average": 0.9, "clip_norm": 0.5},
    "class-incremental, heads from memory": {"scenario": "class", "predict_by": "class-means"},
    "logits": {"method": DERPP()},
    "low memory": {"low_memory": True},
}
configurations = pytest.mark.parametrize("options", CONFIGURATIONS.values(), ids=CONFIGURATIONS)


def new_learner(method: Any = None, **options: Any) -> Learner:
    torch.manual_seed(0)
    learner = Learner(TinyResNet(), method or SORO(), memory=Reservoir(9), **options)
    learner.add_task("a", classes=3)
    learner.add_task("b", classes=2)
    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0]))
    learner.add_task("own", head=nn.Linear(8, 2), loss=loss)
    learner.add_task("speed", head=nn.Linear(8, 1), loss=mse_loss)
    return learner


def train(learner: Learner, first: int, last: int) -> None:
    for seed in range(first, last):
        x = images(5, seed)
        speed = x, x.mean(dim=(1, 2, 3))[:, None]
        batches = {"a": batch(6, 3, seed), "b": batch(4, 2, seed + 9), "own": batch(4, 2, seed), "speed": speed}
        learner.step({name: batches[name] for name in learner.active_tasks})
        if seed == 1:
            learner.finish_task("b")


def floats(state: Any) -> Iterator[Tensor]:
    if isinstance(state, dict | list | tuple):
        for each in state.values() if isinstance(state, dict) else state:
            yield from floats(each)
    elif isinstance(state, Tensor) and state.is_floating_point():
        yield state


@configurations
def test_conversion_there_and_back_changes_nothing(options: dict[str, Any]) -> None:
    learner, other = new_learner(**options), new_learner(**options)
    train(learner, 0, 3)
    train(other, 0, 3)
    assert other.to(torch.float64).to(dtype=torch.float32) is other
    assert_same(complete_state(other), complete_state(learner))
    train(learner, 3, 5)
    train(other, 3, 5)
    assert_same(complete_state(other), complete_state(learner))
    assert torch.equal(other.logits(images(4, 0), "a"), learner.logits(images(4, 0), "a"))


@configurations
def test_a_converted_learner_trains_on_as_it_would_have(options: dict[str, Any]) -> None:
    learner, other = new_learner(**options), new_learner(**options)
    train(learner, 0, 3)
    train(other, 0, 3)
    other.to(torch.float64)
    for part in ("tasks", "backbone", "memory", "average", "prediction"):
        kept = {each.dtype for each in floats(complete_state(other).get(part)) if each.ndim > 1}
        assert kept <= {torch.float64}, part
    train(learner, 3, 6)
    train(other, 3, 6)
    x = images(4, 0)
    for task in learner.tasks:
        assert other.logits(x, task).dtype == torch.float64
        torch.testing.assert_close(other.logits(x, task).float(), learner.logits(x, task), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(other.snapshot().logits(x, "a"), other.logits(x, "a"))


def test_a_converted_learner_is_saved_and_loaded(tmp_path: Any) -> None:
    learner = new_learner()
    train(learner, 0, 2)
    learner.to(torch.float64).save(tmp_path / "c")
    heads = {
        "own": (nn.Linear(8, 2).double(), learner.tasks["own"].loss),
        "speed": (nn.Linear(8, 1).double(), mse_loss),
    }
    loaded = Learner.load(tmp_path / "c", backbone=TinyResNet(seed=1).double(), heads=heads)
    for each in (learner, loaded):
        train(each, 2, 4)
    assert_same(complete_state(loaded), complete_state(learner))


def test_a_schedule_of_pytorch_follows_a_moved_optimiser() -> None:
    learner = new_learner()
    schedule = torch.optim.lr_scheduler.ExponentialLR(learner.optimizer, 0.5)
    train(learner, 0, 1)
    learner.to("cpu", torch.float64)
    schedule.step()
    assert {group["lr"] for group in learner.optimizer.param_groups} == {5e-4}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.int64,), "dtype is torch.int64; give a floating-point type"),
        (("nowhere",), "cannot be moved to 'nowhere': "),
        ((3.5,), "cannot be moved to 3.5"),
    ],
)
def test_impossible_destinations_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    learner = new_learner()
    before = complete_state(learner)
    with pytest.raises(SpclError, match=message):
        learner.to(*arguments)
    assert_same(complete_state(learner), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@configurations
def test_a_learner_moves_to_a_gpu_and_back(options: dict[str, Any]) -> None:
    learner, other = new_learner(**options), new_learner(**options)
    for each in (learner, other):
        each.to(torch.float64)
        train(each, 0, 2)
    train(other.to("cuda"), 2, 4)
    assert {each.device.type for each in floats(other.optimizer.state_dict()["state"]) if each.ndim} == {"cuda"}
    train(other.to("cpu"), 4, 5)
    train(learner, 2, 5)
    torch.testing.assert_close(other.logits(images(4, 0), "a"), learner.logits(images(4, 0), "a"))
