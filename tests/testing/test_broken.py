"""Every check can fail: things that break one property each, and the words in which the check says so."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from list_hub import ListHub
from spcl.memory import BalancedCoreset, Memory
from spcl.methods import Gradients, Method, MethodSettings, Output, Weights
from spcl.models import InputSpec
from spcl.sources import Entry
from spcl.testing import (
    check_backbone,
    check_hub,
    check_loss,
    check_memory,
    check_method,
    check_optimizer,
    check_schedule,
    check_transform,
)


def fails(law: str, check: Callable[[], None]) -> None:
    with pytest.raises(AssertionError, match=rf"(?s)^\w+ .+, {law}.*: found .+, expected .+"):
        check()


# -- methods


class Mean(Method):
    """A method with nothing wrong."""

    name = "mean"

    def weigh(self, gradients: Gradients) -> Weights:
        return Weights(torch.full((len(gradients.names),), 1.0 / len(gradients.names), dtype=torch.float64))


def test_the_method_of_these_tests_passes() -> None:
    check_method(Mean, scaling=0)


class NoMethod:
    pass


class Fails(Mean):
    def __init__(self) -> None:
        raise KeyError("boom")


class OtherFamily(Mean):
    family = "XXL"  # type: ignore[assignment]


class Forgets(Mean):
    class Settings(MethodSettings):
        power: float = 1.0

    def __init__(self, power: float = 2.0, **settings: Any) -> None:
        super().__init__(**{"power": min(power, 2.0)} | settings)
        if power != 2.0:
            raise ValueError("a power of 2, please")
        self.settings = self.settings.model_copy(update={"power": random.random()})


class AnySetting(Mean):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**{name: settings[name] for name in settings if name in MethodSettings.model_fields})


class Divides(Mean):
    def weigh(self, gradients: Gradients) -> Weights:
        return Weights(1.0 / gradients.known_gramian().diagonal())


class Writes(Mean):
    def weigh(self, gradients: Gradients) -> Weights:
        gradients.known_gramian().fill_(1.0)
        return super().weigh(gradients)


class ClearsLosses(Mean):
    def weigh(self, gradients: Gradients) -> Weights:
        gradients.losses[:] = 0.0
        return super().weigh(gradients)


class OneWeight(Mean):
    def weigh(self, gradients: Gradients) -> Weights:
        return Weights(torch.ones(1))


class FirstCounts(Mean):
    def weigh(self, gradients: Gradients) -> Weights:
        return Weights(torch.arange(1, len(gradients.names) + 1).double() / 10)


class Nothing(Mean):
    def weigh(self, gradients: Gradients) -> Weights:
        return Weights(torch.zeros(len(gradients.names)))


class OwnDice(Mean):
    def weigh(self, gradients: Gradients) -> Weights:
        return Weights(random.random() * super().weigh(gradients).values)


class Counts(Mean):
    """Has a state that it does not save."""

    steps = 0

    def after_step(self, losses: Mapping[str, float]) -> None:
        self.steps += 1

    def weigh(self, gradients: Gradients) -> Weights:
        return Weights(super().weigh(gradients).values / (1 + self.steps))


class Unsaved(Mean):
    def state_dict(self) -> dict[str, Any]:
        return {"print": print}


class Aliases(Mean):
    """Gives away the tensor that it changes in place, from which a step cannot be undone."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.calls = torch.zeros(())

    def task_loss(self, output: Output) -> Tensor:
        self.calls += 1
        return output.loss() / self.calls.item()

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class Chaotic(Mean):
    """Makes much of the last digits, in which engines differ."""

    def weigh(self, gradients: Gradients) -> Weights:
        return Weights(0.1 + (1e7 * gradients.known_gramian().diagonal()) % 1.0)


class NoBfloat16(Mean):
    def task_loss(self, output: Output) -> Tensor:
        if torch.equal(output.value, output.value.bfloat16().to(output.value.dtype)):
            raise TypeError("float32, please")
        return output.loss()


@pytest.mark.parametrize(
    ("method", "law", "options"),
    [
        (NoMethod, "it is a method", {}),
        (Fails, "it can be made", {}),
        (OtherFamily, "it declares what it is", {}),
        (Forgets, "its settings round-trip through JSON", {}),
        (AnySetting, "an unknown setting is refused", {}),
        (Divides, "every gradient has a finite weight", {}),
        (Writes, "weigh does not change its arguments", {}),
        (ClearsLosses, "weigh does not change its arguments", {}),
        (OneWeight, "every gradient has one weight", {}),
        (FirstCounts, "weights do not depend on the order of the gradients", {}),
        (Mean, r"multiplying gradients by 0\.125 multiplies weights by 0\.125\^1", {"scaling": 1}),
        (Nothing, "it trains while tasks come and go", {}),
        (OwnDice, "the same seed gives the same model", {"random": True}),
        (Counts, "it resumes exactly", {}),
        (Unsaved, "it resumes exactly", {}),
        (Aliases, "a task with non-finite inputs leaves no trace", {}),
        (Chaotic, "engines agree", {}),
        (NoBfloat16, "it trains in bfloat16", {}),
    ],
)
def test_broken_methods(method: Any, law: str, options: dict[str, Any]) -> None:
    fails(law, partial(check_method, method, **options))


# -- memories


class Newest(Memory):
    """A memory with nothing wrong: of every task an equal share of the newest samples."""

    def rank(self, arrivals: Any) -> Any:
        return -arrivals.astype(float)

    def choose(self) -> dict[str, Any]:
        share = self.budget // max(1, len(self.buffers))
        return {task: buffer.ranks.argsort().argsort() < share for task, buffer in self.buffers.items()}


def test_the_memory_of_these_tests_passes() -> None:
    check_memory(Newest, replays_running=True)


class Everything(Newest):
    def choose(self) -> dict[str, Any]:
        return {}


class Empty(Newest):
    def choose(self) -> dict[str, Any]:
        return {task: np.zeros(len(buffer.ranks), dtype=bool) for task, buffer in self.buffers.items()}


class Twice(Newest):
    def pick(self, size: int, count: int) -> Any:
        return np.zeros(min(count, size), dtype=np.int64)


class Scrambles(Newest):
    def draw(self, count: int) -> Any:
        for batch in (batches := super().draw(count)):
            batch.y.copy_((batch.y + 1) % 3)
        return batches


class TooMany(Newest):
    def draw(self, count: int) -> Any:
        return super().draw(count + 1)


class SharedDice(Newest):
    """Draws from the generator that everything else draws from, too."""

    def draw(self, count: int) -> Any:
        torch.rand(())
        return super().draw(count)


class WholeTargets(Newest):
    def observe(self, task: str, x: Any, y: Tensor, logits: Tensor | None = None) -> None:
        super().observe(task, x, y.long(), logits)


class MixesLogits(Newest):
    def draw(self, count: int) -> Any:
        drawn = super().draw(count)
        return [each if each.logits is None else replace(each, logits=each.logits.flip(0)) for each in drawn]


class WithoutSeed(Newest):
    def __init__(self, budget: int, dtype: Any = None) -> None:
        super().__init__(budget, seed=random.randrange(2**32), dtype=dtype)


class KeepsCount(Newest):
    """Has a state that it does not save."""

    observed = 0

    def observe(self, *arguments: Any) -> None:
        self.observed += 1
        super().observe(*arguments)

    def choose(self) -> dict[str, Any]:
        kept = super().choose()
        return kept if self.observed % 2 else {task: mask & (mask.cumsum() < 2) for task, mask in kept.items()}


class Unwritable(Newest):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"print": print}


class Shares(Newest):
    """Gives away what it stores."""

    def draw(self, count: int) -> Any:
        drawn = vars(self).setdefault("drawn", {})
        return drawn.setdefault(count, super().draw(count)) if len(self) else []


class Spoils(Newest):
    def observe(self, task: str, x: Any, y: Tensor, logits: Tensor | None = None) -> None:
        super().observe(task, x, y, logits)
        x.zero_()


class Floats(Newest):
    def __init__(self, budget: int, seed: int = 0, dtype: torch.dtype | None = None) -> None:
        super().__init__(budget, seed=seed, dtype=torch.float64)
        self.dtype, self._wanted = torch.float64, dtype


@pytest.mark.parametrize(
    ("memory", "law", "options"),
    [
        (NoMethod, "it can be made", {}),
        (Everything, "it keeps at most its budget", {}),
        (Empty, "it keeps samples of finished tasks", {}),
        (Newest, "samples of running tasks are not drawn", {"replays_running": False}),
        (BalancedCoreset, "samples of running tasks are drawn", {"replays_running": True}),
        (Scrambles, "a drawn sample was observed, with its own target", {}),
        (TooMany, "a draw has at most as many samples as asked for", {}),
        (SharedDice, "it draws by its own generator, not by PyTorch's", {}),
        (WholeTargets, "targets keep their values and their type", {}),
        (MixesLogits, "logits stay with their samples", {}),
        (WithoutSeed, "the same seed draws the same", {}),
        (Twice, "every sample is kept once", {}),
        (KeepsCount, "it resumes exactly from its state", {}),
        (Unwritable, "a checkpoint can hold its state", {}),
        (Shares, "draws are copies", {}),
        (Spoils, "storing a batch does not change it", {}),
        (Floats, "it stores inputs in their own type", {}),
    ],
)
def test_broken_memories(memory: Any, law: str, options: dict[str, Any]) -> None:
    fails(law, partial(check_memory, memory, **options))


# -- backbones


class Net(nn.Module):
    """A backbone with nothing wrong, but for what subclasses change."""

    feature_dim: int | None = 8

    def __init__(self, inputs: InputSpec) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mean((2, 3))).tanh()  # type: ignore[no-any-return]


def test_the_backbone_of_these_tests_passes() -> None:
    check_backbone(Net)


class Maps(Net):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Integers(Net):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x).sum().backward()
        return Whole(torch.ones(len(x), 8, dtype=torch.int64))  # type: ignore[return-value]


class Whole:
    """Integers that pretend to have a gradient."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __getattr__(self, name: str) -> Any:
        return (lambda: torch.ones((), requires_grad=True)) if name == "sum" else getattr(self.values, name)


class Infinite(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float("inf")


class Clears(Net):
    def forward(self, x: Tensor) -> Tensor:
        features = super().forward(x)
        x.zero_()
        return features


class Declares(Net):
    feature_dim = 9


class Unused(Net):
    def __init__(self, inputs: InputSpec) -> None:
        super().__init__(inputs)
        self.other = nn.Linear(3, 8)


class Root(Net):
    def forward(self, x: Tensor) -> Tensor:
        return (self.layer.weight * 0.0).sum().sqrt() + super().forward(x)


class Noisy(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand(())


class Mixes(Net):
    def forward(self, x: Tensor) -> Tensor:
        features = super().forward(x)
        return features - features.mean(0)


class Random(Net):
    def __init__(self, inputs: InputSpec) -> None:
        super().__init__(inputs)
        nn.init.constant_(self.layer.weight, random.random())


class Hides(Net):
    """Keeps a weight where state_dict does not look."""

    def __init__(self, inputs: InputSpec) -> None:
        super().__init__(inputs)
        self.kept = [torch.ones(8)]

    def parameters(self, recurse: bool = True) -> Any:
        return iter([*super().parameters(recurse), *self.kept])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.kept[0]


class OnceOnly(Net):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is one of me")


class HidesNaN(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).nan_to_num()


class NoMixedPrecision(Net):
    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise TypeError("float32, please")
        return super().forward(x)


class Damped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return features.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


class Tires(Net):
    """Has a smaller gradient in every pass, so that results depend on the number of passes."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return Damped.apply(super().forward(x), 1.0 / self.passes)  # type: ignore[no-any-return,no-untyped-call]


class AloneOnly(Net):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) != 8:
            raise ValueError("eight samples, please")
        return super().forward(x)


@pytest.mark.parametrize(
    ("backbone", "law"),
    [
        (lambda inputs: lambda x: x, "it is a module"),
        (lambda inputs: nn.Linear(5, 8), "it computes features"),
        (Maps, "it computes features"),
        (Integers, "features are floats"),
        (Infinite, "features are finite"),
        (Clears, "inputs do not change"),
        (Declares, "feature_dim is the number of features"),
        (Unused, "every trainable parameter has a gradient"),
        (Root, "gradients are finite"),
        (Noisy, "evaluation is repeatable"),
        (Mixes, "in evaluation a row depends only on its own sample"),
        (Random, "the same seed gives the same network"),
        (OnceOnly, "a copy computes the same"),
        (Hides, "its weights are in its state_dict"),
        (HidesNaN, "a non-finite sample shows"),
        (NoMixedPrecision, "it computes finite features in mixed precision"),
        (Tires, "the learner and a pass per task give the same gradients"),
        (AloneOnly, "it trains with a learner"),
    ],
)
def test_broken_backbones(backbone: Any, law: str) -> None:
    fails(law, partial(check_backbone, backbone))


# -- losses


def squared(task: Any) -> Any:
    return lambda output, targets: ((output - targets) ** 2).mean()


def test_the_loss_of_these_tests_passes() -> None:
    check_loss(squared, "regression")


def clears(task: Any) -> Any:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        found = ((output - targets) ** 2).mean()
        targets.zero_()
        return found

    return loss


def weighted_by_place(output: Tensor, targets: Tensor) -> Tensor:
    return (torch.arange(1.0, len(output) + 1)[:, None] * (output - targets) ** 2).mean() / len(output)


def root_of_mean(output: Tensor, targets: Tensor) -> Tensor:
    return ((output - targets) ** 2).mean().sqrt()


def by_size(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets.float()).abs().mean() * output.element_size()


LOSSES: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "a row each": ("it is a scalar", lambda output, targets: (output - targets).mean(1)),
    "infinite": ("it is finite", lambda output, targets: (output - targets).mean() / 0.0),
    "detached": ("it has a gradient", lambda output, targets: (output - targets).mean().detach()),
    "root": ("its gradient is finite", lambda output, targets: (output - output).abs().sqrt().mean()),
    "flat": ("its gradient is not zero", lambda output, targets: (0.0 * output).mean()),
    "in order": ("it is the mean over the samples, in any order", weighted_by_place),
    "sum": ("it is the mean over the samples, not their sum", lambda output, targets: ((output - targets) ** 2).sum()),
    "root of the mean": ("it is the mean over the samples, also of two halves", root_of_mean),
    "hides NaN": ("a non-finite output shows", lambda output, targets: output.nan_to_num().abs().mean()),
    "hides infinity": (
        "a non-finite output shows",
        lambda output, targets: (output - targets).abs().mean().clamp(max=9),
    ),
    "by size": ("it is the same in torch.float64", by_size),
}


@pytest.mark.parametrize("name", LOSSES)
def test_broken_losses(name: str) -> None:
    law, loss = LOSSES[name]
    fails(law, lambda: check_loss(lambda task: loss, "regression"))


def test_losses_that_clear_their_targets_and_losses_of_another_kind_fail() -> None:
    fails("its arguments do not change", lambda: check_loss(clears, "regression"))
    fails("it takes outputs and targets", lambda: check_loss(lambda task: lambda output, targets: output @ targets))
    fails("it can be made", lambda: check_loss(lambda: squared, "regression"))  # type: ignore[misc,arg-type]


# -- schedules


class Remembers:
    def __init__(self, steps: int) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1.0 / self.calls


@pytest.mark.parametrize(
    ("schedule", "law"),
    [
        (lambda: None, "it can be made"),
        (lambda steps: lambda step: 1.0 - 2.0 * step / steps, "every factor is a finite number of at least 0"),
        (lambda steps: lambda step: float("nan"), "every factor is a finite number of at least 0"),
        (lambda steps: lambda step: torch.ones(2), "every factor is a finite number of at least 0"),
        (lambda steps: lambda step: [1.0][step // steps], "it has a factor for every step, and after the last one"),
        (Remembers, "a factor depends only on the step"),
    ],
)
def test_broken_schedules(schedule: Any, law: str) -> None:
    fails(law, partial(check_schedule, schedule))


# -- transforms


def brighten_in_place(x: Tensor) -> Tensor:
    return x.mul_(0.5) if x.is_floating_point() else x.bitwise_not_()


@pytest.mark.parametrize(
    ("transform", "law"),
    [
        (lambda x: 1 / 0, "it takes a batch"),
        (brighten_in_place, "inputs do not change"),
        (lambda x: (x * random.random()).clamp(0, 255), "it draws only from PyTorch's generator"),
        (lambda x: x[:-1], "samples keep their shape"),
        (lambda x: x.squeeze(0), "a single sample keeps its shape"),
        (lambda x: x.nan_to_num(), "a non-finite sample shows"),
        (lambda x: x if x.dtype == torch.uint8 else (255 * x).to(torch.uint8), "samples keep their type"),
        (lambda x: x / 0.0, "samples are finite"),
        (lambda x: x.float() - 200.0, "bytes stay within 0…255"),
    ],
)
def test_broken_transforms(transform: Any, law: str) -> None:
    fails(law, lambda: check_transform(lambda: transform))


def test_a_transform_that_cannot_be_made_fails() -> None:
    fails("it can be made", lambda: check_transform(lambda: 1 / 0))  # type: ignore[arg-type,return-value]


# -- optimisers


class Ascends(SGD):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr, maximize=True)


class Pushes(SGD):
    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(0.01)
        return super().step()


class Hurries(SGD):
    """Has a state that it does not save."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / self.steps
        return super().step()


class FirstGroup(SGD):
    """Updates the parameters of the first group alone."""

    def step(self, closure: Any = None) -> Any:
        later, self.param_groups = self.param_groups[1:], self.param_groups[:1]
        super().step()
        self.param_groups += later


class OneGroup(SGD):
    def add_param_group(self, group: Any) -> None:
        if self.param_groups:
            raise ValueError("one group, please")
        super().add_param_group(group)


@pytest.mark.parametrize(
    ("optimizer", "law"),
    [
        (lambda parameters: None, "it can be made"),
        (lambda parameters, lr: None, "it is an optimiser"),
        (lambda parameters, lr: SGD(parameters, lr=0.5), "it has the given learning rate"),
        (Ascends, "it minimises a parabola"),
        (Pushes, "parameters without a gradient stay"),
        (OneGroup, "it trains new groups of parameters"),
        (FirstGroup, "it trains new groups of parameters"),
        (Hurries, "it resumes exactly from its state"),
    ],
)
def test_broken_optimizers(optimizer: Any, law: str) -> None:
    fails(law, partial(check_optimizer, optimizer))


# -- hubs


class Unsorted(ListHub):
    def tasks(self) -> list[str]:
        return super().tasks()[::-1]


class Backwards(ListHub):
    def read(
        self, after: Mapping[str, str | None], count: int, wait: float, max_bytes: int = 0
    ) -> dict[str, Sequence[Entry]]:
        return {task: entries[::-1] for task, entries in super().read(after, count, wait, max_bytes).items()}


class Unlimited(ListHub):
    def read(
        self, after: Mapping[str, str | None], count: int, wait: float, max_bytes: int = 0
    ) -> dict[str, Sequence[Entry]]:
        return super().read(after, 100, wait, max_bytes)


class OtherPositions(ListHub):
    def append(self, task: str, data: bytes, keep: int | None = None) -> str:
        return f"0{super().append(task, data, keep)}"


class Stuck(ListHub):
    def append(self, task: str, data: bytes, keep: int | None = None) -> str:
        super().append(task, data, keep)
        return "1"


class WholeBacklog(ListHub):
    def backlog(self, task: str, after: str | None) -> int:
        return super().backlog(task, None)


class NeverTrims(ListHub):
    def trim(self, task: str, upto: str) -> None:
        pass


class Empties(ListHub):
    """Drops messages without content."""

    def append(self, task: str, data: bytes, keep: int | None = None) -> str:
        return super().append(task, data, keep) if data else "99"


class Waits(ListHub):
    def read(
        self, after: Mapping[str, str | None], count: int, wait: float, max_bytes: int = 0
    ) -> dict[str, Sequence[Entry]]:
        time.sleep(wait)
        return super().read(after, count, 0.0, max_bytes)


class TrimsOthers(ListHub):
    def trim(self, task: str, upto: str) -> None:
        for each in self.streams:
            super().trim(each, upto)


class DeadTasks(ListHub):
    def dead_letter(self, task: str, position: str, data: bytes, reason: str) -> None:
        self.streams.setdefault(f"dead-{task}", [])
        super().dead_letter(task, position, data, reason)


class TrimsAll(ListHub):
    def trim(self, task: str, upto: str) -> None:
        self.streams[task] = []


class KeepsAll(ListHub):
    def append(self, task: str, data: bytes, keep: int | None = None) -> str:
        return super().append(task, data)


class NeverEnds(ListHub):
    def end(self, task: str) -> None:
        self.streams[task] = []


class EndsQuietly(ListHub):
    def append(self, task: str, data: bytes, keep: int | None = None) -> str:
        return "9" if task in self.ended else super().append(task, data, keep)


class Buries(ListHub):
    def dead_letter(self, task: str, position: str, data: bytes, reason: str) -> None:
        self.streams[task] = []


class OneLetter(ListHub):
    def dead_letter(self, task: str, position: str, data: bytes, reason: str) -> None:
        if position in self.dead.get(task, {}):
            raise KeyError(position)
        super().dead_letter(task, position, data, reason)


class Closes(ListHub):
    def close(self) -> None:
        self.streams = {}


class Drops(ListHub):
    def append(self, task: str, data: bytes, keep: int | None = None) -> str:
        if data == b"y7":
            return "7"
        return super().append(task, data, keep)


class Shared(ListHub):
    def __init__(self) -> None:
        super().__init__()
        self.streams["left over"] = []


def lose(hub: ListHub) -> None:
    for stream in hub.streams.values():
        del stream[3:]


@pytest.mark.parametrize(
    ("hub", "law", "options"),
    [
        (dict, "it is a hub", {}),
        (lambda: 1 / 0, "it can be opened", {}),
        (Shared, "a new hub has no tasks", {}),
        (Unsorted, "tasks are listed, sorted", {}),
        (Backwards, "messages come in order, once, from any position", {}),
        (OtherPositions, "append returns the position that read gives", {}),
        (Stuck, "every message has a position of its own", {}),
        (Unlimited, "a read has at most `count` messages", {}),
        (WholeBacklog, "the backlog is the number of messages after a position", {}),
        (Empties, "messages come in order, once, from any position", {}),
        (Waits, "a read that finds messages does not wait for more", {}),
        (NeverTrims, "trimming deletes a task's messages before a position", {}),
        (TrimsAll, "trimming deletes a task's messages before a position", {}),
        (TrimsOthers, "trimming a task does not change other tasks", {}),
        (KeepsAll, "append keeps only the newest `keep`", {}),
        (NeverEnds, "a task that has ended is gone and takes no messages", {}),
        (EndsQuietly, "a task that has ended is gone and takes no messages", {}),
        (Buries, "a dead letter does not change the stream", {}),
        (DeadTasks, "a dead letter does not add a task", {}),
        (OneLetter, "a dead letter may be repeated", {}),
        (Closes, "a closed hub can be used again", {}),
        (Drops, "several publishers lose nothing, and each keeps its order", {"patience": 0.5}),
        (ListHub, "a position whose message was lost is a ResetError", {"lose": lose}),
        (ListHub, r"lose\(\) loses the newest messages and no others", {"lose": lambda hub: None}),
    ],
)
def test_broken_hubs(hub: Any, law: str, options: dict[str, Any]) -> None:
    fails(law, partial(check_hub, hub, **options))
