"""Methods that add up gradients take one pass over all batches, and hold no gradient per task."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from spcl.learner import Learner
from spcl.memory import Reservoir
from spcl.methods import make_method

TASKS, SAMPLES = 9, 4


def batches() -> dict[str, tuple[Tensor, Tensor]]:
    return {str(task): (torch.randn(SAMPLES, 6), torch.randint(3, (SAMPLES,))) for task in range(TASKS)}


def trained(method: str, memory: bool, measured: bool) -> tuple[Learner, list[str]]:
    """Return a learner after two steps and the passes through its backbone in the second, of which replay is part."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    learner = Learner(
        backbone,
        make_method(method),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        memory=Reservoir(20) if memory else None,
        measure_stability=measured,
    )
    for task in range(TASKS):
        learner.add_task(str(task), classes=3)
    learner.step(batches())
    passes: list[str] = []

    def note(module: nn.Module, inputs: object, features: Tensor) -> None:
        passes.append("forward")
        features.register_hook(lambda gradient: passes.append("backward"))

    backbone.register_forward_hook(note)
    learner.step(batches())
    assert learner._engine.fallback_reason is None
    return learner, passes


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("method", ["er", "der++", "dwa", "rlw"])
def test_sums_take_one_pass_and_no_row_per_task(method: str, memory: bool) -> None:
    learner, passes = trained(method, memory, measured=False)
    plan = learner._engine.gradients.plan
    assert passes == ["forward", "backward"]
    assert len(plan.names) == TASKS + memory
    assert plan.rows == (2 if memory and learner.method.reduction == "mean" else 1)  # tasks, and memory beside them


@pytest.mark.parametrize("method", ["er", "rlw"])
def test_measured_sums_keep_a_row_per_gradient(method: str) -> None:
    learner, passes = trained(method, memory=True, measured=True)
    assert passes == ["forward", "backward"]
    assert learner._engine.gradients.plan.rows == TASKS + 1
