"""Batches computed in parts give the step of the whole batches, up to rounding."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from spcl.errors import SpclError
from spcl.learner import Learner
from spcl.losses import CrossEntropy
from spcl.memory import Reservoir
from spcl.methods import make_method

METHODS = ["soro", "er", "der++", "gmed", "mgda", "pcgrad", "rlw"]


def backbone() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 8), nn.GroupNorm(2, 8)).double()


def batch(count: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, (count,), generator=generator)


def noise(x: Any) -> Any:
    return x + 0.1 * torch.randn_like(x)


def trained(name: str, **options: Any) -> Learner:
    torch.manual_seed(0)
    settings = {} if name in ("gmed", "er") else {"alpha": 0.01}
    options = {"optimizer": lambda shared: torch.optim.SGD(shared, lr=0.1, momentum=0.9)} | options
    learner = Learner(backbone(), make_method(name, **settings), memory=Reservoir(15, seed=1), **options)
    learner.add_task("a", classes=3)
    learner.add_task("b", classes=2, loss=CrossEntropy(label_smoothing=0.1))
    learner.add_task("speed", head=nn.Linear(8, 1).double(), loss=mse_loss)
    for seed in range(2):
        x, _ = batch(5, 2, seed)
        learner.step({"a": batch(11, 3, seed), "b": batch(3, 2, seed + 9), "speed": (x, x.mean(dim=(2, 3)))})
    learner.finish_task("b")
    learner.add_task("c", classes=2)
    learner.step({"a": batch(9, 3, 2), "c": batch(6, 2, 2)})
    return learner


def assert_close(one: Learner, other: Learner) -> None:
    for mine, theirs in zip(one.model.modules(), other.model.modules(), strict=True):
        for each, expected in zip(mine.state_dict().values(), theirs.state_dict().values(), strict=True):
            torch.testing.assert_close(each, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("scenario", ["task", "class"])
def test_a_step_in_parts_equals_the_whole_step(name: str, scenario: str) -> None:
    whole, parts = trained(name, scenario=scenario), trained(name, scenario=scenario, micro_batch=4)
    assert_close(parts, whole)
    assert whole.memory is not None
    assert parts.memory is not None
    for task, buffer in whole.memory.buffers.items():
        for field in buffer.fields:
            torch.testing.assert_close(parts.memory.buffers[task].take(field), buffer.take(field), equal_nan=True)


def test_reports_are_those_of_whole_steps() -> None:
    reports = []
    for options in ({}, {"micro_batch": 2}):
        learner = trained("soro", measure_stability=True, average=0.9, clip_norm=0.3, augment=noise, **options)
        torch.manual_seed(3)
        reports.append(learner.step({"a": batch(7, 3, 9), "c": batch(5, 2, 8)}))
    one, other = reports
    assert one.losses == pytest.approx(other.losses, rel=1e-9)
    assert one.weights == pytest.approx(other.weights, rel=1e-7)
    assert one.before is not None
    assert other.before is not None
    assert one.before.condition_number == pytest.approx(other.before.condition_number, rel=1e-7)


def test_no_pass_with_gradients_has_more_samples() -> None:
    network, sizes = backbone(), []
    network.register_forward_hook(lambda module, inputs, output: sizes.append(len(output) * output.requires_grad))
    learner = Learner(network, make_method("er"), memory=Reservoir(20), micro_batch=4)
    learner.add_task("a", classes=2)
    for _ in range(2):
        sizes.clear()
        learner.step({"a": batch(10, 2, 0)})
    assert [size for size in sizes if size] == [3, 4, 3, 3, 4, 3]  # of the task, then of memory


def test_a_faulty_part_skips_its_task() -> None:
    learner = Learner(backbone(), make_method("soro"), micro_batch=4)
    learner.add_task("a", classes=2)
    learner.add_task("b", classes=2)
    x, y = batch(10, 2, 0)
    x[5] = torch.nan
    report = learner.step({"a": (x, y), "b": batch(10, 2, 1)})
    assert list(report.skipped) == ["a"]
    assert list(report.losses) == ["b"]


def total(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().sum()


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(SpclError, match=r"micro_batch computes batches in parts, but low_memory makes one pass"):
        Learner(backbone(), make_method("soro"), micro_batch=4, low_memory=True)
    learner = Learner(backbone(), make_method("soro"), micro_batch=4)
    learner.add_task("weighted", classes=2, loss=CrossEntropy(class_weights=(1.0, 2.0)))
    learner.add_task("sum", head=nn.Linear(8, 1).double(), loss=total)
    x, y = batch(9, 2, 0)
    with pytest.raises(SpclError, match=r"'weighted' has class weights .* so micro_batch cannot split .* leave micro_"):
        learner.step({"weighted": (x, y)})
    with pytest.raises(SpclError, match=r"loss of 'sum' is .* so micro_batch cannot split its batches; make it a mean"):
        learner.step({"sum": (x, x[:, 0, 0, :1])})
    learner.step({"weighted": (x[:4], y[:4]), "sum": (x[:3], x[:3, 0, 0, :1])})  # not split
