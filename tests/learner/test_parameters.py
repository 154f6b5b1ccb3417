"""Frozen backbones: linear probes, freezing and unfreezing between steps, statistics of frozen layers, checkpoints."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from _learning import TinyResNet, assert_same, batch, complete_state, images
from spcl.engine.graphs import CudaGraphEngine
from spcl.errors import SpclError
from spcl.learner import Learner
from spcl.memory import BalancedCoreset, Reservoir
from spcl.methods import ER, METHODS, SORO, SORODBT, make_method

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and this machine has none")
engines = pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)


def use_static_tensors(learner: Learner) -> None:
    """Send the work through the captured path, on a device that has no graphs."""
    learner._use_engine(CudaGraphEngine(learner.model, learner.method))


def head(seed: int) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(8, 3)


# -- linear probes


@engines
@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_heads_on_a_frozen_backbone(name: str, captured: bool) -> None:
    backbone = TinyResNet(dropout=0.2).requires_grad_(False)
    before = copy.deepcopy(backbone.state_dict())
    memory = BalancedCoreset(6, dtype=torch.float32)
    learner = Learner(backbone, make_method(name), optimizer=SGD, memory=memory, measure_stability=True)
    if captured:
        use_static_tensors(learner)
    learner.add_task("a", classes=2)
    learner.add_task("b", classes=3)
    for step in range(4):
        report = learner.step({each: batch(5, 2, step) for each in learner.active_tasks})
        assert (report.before, report.after, report.weights) == (None, None, {})
        if step == 1:
            learner.finish_task("a")
            weights = copy.deepcopy(learner.tasks["a"].head.state_dict())
    assert set(report.losses) == {"b", "memory"}
    assert not torch.equal(learner.tasks["a"].head.weight, weights["weight"])  # by replay
    assert_same(dict(backbone.state_dict()), before)


@engines
def test_a_linear_probe_is_trained_as_by_hand(captured: bool) -> None:
    backbone = TinyResNet().double().requires_grad_(False)
    learner = Learner(backbone, SORODBT(), optimizer=SGD)
    if captured:
        use_static_tensors(learner)
    learner.add_task("a", head=head(0).double(), loss=cross_entropy)
    by_hand = head(0).double()
    optimizer = SGD(by_hand.parameters())
    features = copy.deepcopy(backbone).eval()
    for step in range(4):
        x, y = batch(6, 3, step, torch.float64)
        learner.step({"a": (x, y)})
        optimizer.zero_grad()
        cross_entropy(by_hand(features(x)), y).backward()
        optimizer.step()
    for mine, theirs in zip(learner.tasks["a"].head.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_backbone_may_have_no_parameters_at_all() -> None:
    learner = Learner(nn.Flatten(), SORO(), memory=Reservoir(5))
    learner.add_task("a", classes=2)
    learner.add_task("mean", head=nn.Linear(32, 1), loss=mse_loss)
    for seed in range(2):
        report = learner.step({"a": batch(4, 2, seed), "mean": (images(4, seed), torch.ones(4, 1))})
    assert set(report.losses) == {"a", "mean", "memory"}
    assert report.skipped == {}


def test_a_faulty_task_is_skipped_by_a_linear_probe_too() -> None:
    learner = Learner(TinyResNet().requires_grad_(False), SORO())
    learner.add_task("a", classes=2)
    learner.add_task("b", classes=2)
    report = learner.step({"a": batch(4, 2, 0), "b": (images(4, 0) * torch.nan, torch.zeros(4, dtype=torch.int64))})
    assert (set(report.losses), set(report.skipped)) == ({"a"}, {"b"})


# -- freezing and unfreezing


class Plain:
    """The same in plain PyTorch: frozen parameters have no gradient, and lose the optimiser's state."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.backbone, self.head = TinyResNet().double(), head(0).double()
        self.optimizer = make([*self.backbone.parameters(), *self.head.parameters()])
        self.frozen: list[str] = []

    def freeze(self, *names: str) -> None:
        self.frozen = list(names)
        for name in names:
            for parameter in self.backbone.get_submodule(name).parameters():
                self.optimizer.state.pop(parameter, None)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.backbone.train()
        for name in self.frozen:
            self.backbone.get_submodule(name).eval()
        self.optimizer.zero_grad()
        cross_entropy(self.head(self.backbone(x)), y).backward()
        for name in self.frozen:
            for parameter in self.backbone.get_submodule(name).parameters():
                parameter.grad = None
        self.optimizer.step()


@engines
@pytest.mark.parametrize("make", [SGD, ADAM], ids=["sgd", "adam"])
def test_parts_are_frozen_and_unfrozen_as_by_hand(make: Any, captured: bool) -> None:
    learner, plain = Learner(TinyResNet().double(), ER(), optimizer=make), Plain(make)
    learner.add_task("a", head=head(0).double(), loss=cross_entropy)
    optimizer = learner.optimizer
    for step in range(9):
        if step == 2:
            learner.freeze("stem.*", "shortcut.?.*")
            plain.freeze("stem", "shortcut")
        if step == 5:
            learner.unfreeze("stem.0.weight", "stem.1.[bw]*")
            plain.freeze("shortcut")
        if step == 7:
            learner.unfreeze()
            plain.freeze()
        if captured:
            use_static_tensors(learner)
        data = batch(6, 3, step, torch.float64)
        learner.step({"a": data})
        plain.step(*data)
        for name, value in plain.backbone.state_dict().items():
            torch.testing.assert_close(learner.model.backbone.state_dict()[name], value, msg=f"{name} in step {step}")
    assert learner.optimizer is optimizer


def test_predictions_between_steps_do_not_wake_frozen_statistics() -> None:
    learner = Learner(TinyResNet(), SORO())
    learner.add_task("a", classes=2)
    learner.step({"a": batch(4, 2, 0)})
    learner.freeze("stem.1.*")
    frozen, other = learner.model.backbone.stem[1], learner.model.backbone.residual[1]
    before, moving = frozen.running_mean.clone(), other.running_mean.clone()
    for seed in range(2):
        learner.predict(images(3, seed), task="a")
        learner.model.backbone.train()
        learner.step({"a": batch(4, 2, seed)})
    assert torch.equal(frozen.running_mean, before)
    assert not torch.equal(other.running_mean, moving)
    learner.unfreeze("stem.1.*")
    learner.step({"a": batch(4, 2, 3)})
    assert not torch.equal(frozen.running_mean, before)


def test_a_normalisation_whose_parameters_are_partly_frozen_is_trained() -> None:
    learner = Learner(TinyResNet(), SORO())
    learner.freeze("stem.1.weight")
    learner.add_task("a", classes=2)
    learner.step({"a": batch(4, 2, 0)})
    assert not torch.equal(learner.model.backbone.stem[1].running_mean, torch.zeros(4))


def test_frozen_weights_leave_the_average_and_come_back_as_they_are() -> None:
    learner = Learner(TinyResNet(), SORO(), average=0.9)
    learner.add_task("a", classes=2)
    for seed in range(3):
        learner.step({"a": batch(4, 2, seed)})
    weight = learner.model.backbone.stem[0].weight
    assert not torch.equal(learner.module("a").backbone.stem[0].weight, weight)
    learner.freeze("stem.*")
    assert torch.equal(learner.module("a").backbone.stem[0].weight, weight)
    learner.unfreeze("stem.*")
    before = weight.detach().clone()
    learner.step({"a": batch(4, 2, 4)})
    rate = 9 / (10 + 3)  # of the fourth update
    torch.testing.assert_close(learner.module("a").backbone.stem[0].weight, before + rate * (weight - before))


@pytest.mark.parametrize("call", ["freeze", "unfreeze"])
def test_a_pattern_that_matches_nothing_is_refused_with_a_close_name(call: str) -> None:
    learner = Learner(TinyResNet(), SORO())
    before = complete_state(learner)
    with pytest.raises(SpclError, match=r"no parameter .* matches 'stem.0.wieght'; did you mean 'stem.0.weight'\?"):
        getattr(learner, call)("residual.*", "stem.0.wieght")
    assert_same(complete_state(learner), before)


def test_parameters_that_cannot_be_trained_together_stay_frozen() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).double()).float()

    backbone = Mixed()
    backbone.second.requires_grad_(False)
    learner = Learner(backbone, SORO())
    learner.add_task("a", classes=2)
    data = torch.randn(4, 4), torch.tensor([0, 1, 0, 1])
    learner.step({"a": data})
    with pytest.raises(SpclError, match=r"must share one type and device; found torch.float32 on cpu, torch.float64"):
        learner.unfreeze()
    assert [parameter.requires_grad for parameter in backbone.parameters()] == [True, True, False, False]
    learner.step({"a": data})


# -- checkpoints


def in_two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    vectors, others = ([p for p in parameters if (p.ndim < 2) == small] for small in (True, False))
    return torch.optim.AdamW([{"params": others}, {"params": vectors, "weight_decay": 0.0}], lr=0.01)


@pytest.mark.parametrize("optimizer", [SGD, ADAM, in_two_groups], ids=["sgd", "adam", "two groups"])
def test_training_with_frozen_parts_resumes_bit_for_bit(optimizer: Any, tmp_path: Path) -> None:
    def trained(interrupted: bool) -> Learner:
        torch.manual_seed(3)
        learner = Learner(TinyResNet(), SORO(), optimizer=optimizer, memory=Reservoir(9), average=0.9)
        for step in range(10):
            if step in (0, 3):
                learner.add_task(f"task {step}", classes=3)
            if step == 2:
                learner.freeze("stem.*", "residual.*")
            if step == 4:
                learner.freeze()
            if step == 6:
                learner.unfreeze("*.bias", "residual.0.*")
            if step == 8:
                learner.unfreeze()
            learner.step({name: batch(5, 3, step) for name in learner.active_tasks})
            if interrupted:
                learner.save(tmp_path / "c")
                backbone = TinyResNet(seed=step + 1)
                learner = Learner.load(tmp_path / "c", backbone=backbone, optimizer=optimizer)
        return learner

    found, expected = complete_state(trained(True)), complete_state(trained(False))
    assert_same(found, expected)
    assert sum(len(names) for names in found["learner"]["trainable"]) == 12


def test_a_checkpoint_that_does_not_fit_leaves_the_backbone_trainable_as_it_was(tmp_path: Path) -> None:
    learner = Learner(TinyResNet(), SORO(), memory=Reservoir(9))
    learner.freeze("stem.*")
    learner.save(tmp_path / "c")
    backbone = TinyResNet(seed=1)
    with pytest.raises(SpclError, match="the saved memory is a Reservoir of 9"):
        Learner.load(tmp_path / "c", backbone=backbone, memory=Reservoir(8))
    assert all(parameter.requires_grad for parameter in backbone.parameters())
    loaded = Learner.load(tmp_path / "c", backbone=backbone)
    assert [name for name, each in loaded.model.backbone.named_parameters() if not each.requires_grad] == [
        "stem.0.weight",
        "stem.1.weight",
        "stem.1.bias",
    ]


# -- on a GPU


@needs_gpu
@pytest.mark.parametrize("method", ["er", "soro", "soro+dbt", "der++", "gmed"])
def test_frozen_parts_are_captured_as_the_eager_engine_trains_them(method: str) -> None:
    learners = []
    for capture in (False, True):
        optimizer = partial(torch.optim.Adam, lr=0.01, eps=1e-3, fused=True, capturable=True)
        memory = Reservoir(20, dtype=torch.float32)
        backbone = TinyResNet().cuda()
        learner = Learner(backbone, make_method(method), optimizer=optimizer, memory=memory, capture=capture)
        learner.add_task("a", classes=3)
        learner.add_task("b", head=head(1), loss=cross_entropy)  # weights of another shape than in "a"
        for step in range(32):
            if step == 8:
                learner.freeze("stem.*")
            if step == 16:
                learner.freeze()
            if step == 24:
                learner.unfreeze()
            learner.step({name: tuple(part.cuda() for part in batch(8, 3, step)) for name in learner.tasks})
        learners.append(learner)
    eager, captured = learners
    assert captured._engine._capture.unsupported is None
    x = images(6, 77).cuda()
    for task in ("a", "b"):
        torch.testing.assert_close(captured.logits(x, task), eager.logits(x, task), rtol=5e-3, atol=5e-3)
