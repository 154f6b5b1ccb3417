"""Methods that see the losses after every update: against a naive computation, and without a trace in training."""

import copy
import runpy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from _by_hand import ByHand, assert_equals_by_hand, present, trained_learner
from _learning import EVENTS, TinyResNet, assert_same, batch, complete_state, heads, images, live_one_event
from spcl.distributed import World
from spcl.engine.graphs import CudaGraphEngine
from spcl.errors import SpclError
from spcl.learner import Learner
from spcl.memory import Reservoir
from spcl.methods import DERPP, GMED, SORO, Method
from spcl.testing import check_method

ROOT = Path(__file__).resolve().parents[2]
FAMO: type[Method] = runpy.run_path(str(ROOT / "examples" / "own_method_famo.py"))["FAMO"]


def watching(method: type[Method]) -> type[Method]:
    """Return the method, which also keeps the losses before and after every update."""

    class Watching(method):  # type: ignore[misc,valid-type]
        watches_updates = True

        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.seen: list[tuple[dict[str, float], dict[str, float]]] = []

        def after_update(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
            self.seen.append((dict(before), dict(after)))

    return Watching


# -- against a naive computation


@pytest.mark.parametrize("scenario", ["task", "class"])
@pytest.mark.parametrize("memory", [False, True], ids=["no memory", "memory"])
def test_famo_is_what_its_algorithm_gives_by_hand(scenario: str, memory: bool) -> None:
    rate, decay = 0.025, 0.001
    learner = trained_learner(FAMO(), scenario, memory)
    state = learner.method.state_dict()["xi"]
    logits = {name: state.get(name, 0.0) for name in ("a", "b", "c", "memory")}
    for seed in range(2, 6):
        given = present(learner, seed)
        names = [*given, *(["memory"] if memory else [])]
        reference, probe, memory_before = ByHand(learner), ByHand(learner), copy.deepcopy(learner.memory)
        before = torch.stack(probe.losses(given)).detach()
        shares = torch.tensor([logits[name] for name in names], dtype=torch.float64).softmax(dim=0)

        def combine(rows: Tensor, with_memory: bool, ratios: Tensor = shares / before) -> Tensor:
            return ratios @ rows / ratios.sum()

        reference.step(given, combine)
        learner.step(given)
        assert_equals_by_hand(learner, reference)
        probe.backbone, probe.heads, probe.memory = copy.deepcopy(reference.backbone), reference.heads, memory_before
        falls = before.log() - torch.stack(probe.losses(given)).detach().log()
        jacobian = torch.diag(shares) - torch.outer(shares, shares)
        for name, slope in zip(names, (jacobian @ falls).tolist(), strict=True):
            logits[name] -= rate * (slope + decay * logits[name])
    found = learner.method.state_dict()["xi"]
    assert found == pytest.approx({name: logits[name] for name in found}, rel=1e-9)


def test_famo_passes_the_checks_of_methods() -> None:
    check_method(FAMO, scaling=0, scenarios=["task"])


# -- nothing but the method notices


def lived(method: Method, path: Path, saves: tuple[int, ...] = (), **options: Any) -> Learner:
    torch.manual_seed(3)
    memory = Reservoir(9, seed=1, dtype=torch.float32)
    learner = Learner(TinyResNet(), method, memory=memory, memory_batch=4, **options)
    for event in range(EVENTS):
        live_one_event(learner, event)
        if event in saves:
            learner.save(path)
            learner = Learner.load(path, backbone=TinyResNet(seed=event + 1), method=type(method)(), heads=heads())
    return learner


@pytest.mark.parametrize("method", [SORO, DERPP, GMED])
@pytest.mark.parametrize("updates", [1, 2])
def test_a_method_that_only_watches_learns_the_same(method: type[Method], updates: int, tmp_path: Path) -> None:
    plain, watched = (lived(each(), tmp_path / "c", updates=updates) for each in (method, watching(method)))
    states = [complete_state(learner) for learner in (plain, watched)]
    for state in states:
        del state["method"]
    assert_same(*states)


def test_a_method_that_watches_resumes_exactly(tmp_path: Path) -> None:
    whole = lived(FAMO(), tmp_path / "c")
    assert_same(complete_state(lived(FAMO(), tmp_path / "c", saves=(2, 5))), complete_state(whole))


@pytest.mark.parametrize("options", [{}, {"low_memory": True}, {"updates": 3}], ids=str)
@pytest.mark.parametrize("method", [SORO, DERPP, GMED])
def test_losses_after_an_update_that_changes_nothing_are_the_losses_before(
    method: type[Method], options: dict[str, Any]
) -> None:
    """On the same augmented samples, with the batches' own statistics, and over all replay batches."""
    learner = Learner(
        TinyResNet(),
        watching(method)(),
        memory=Reservoir(20, seed=1, dtype=torch.float32),
        optimizer=partial(torch.optim.SGD, lr=0.0),
        augment=lambda x: x + torch.randn_like(x),
        **options,
    )
    learner.add_task("a", classes=3)
    learner.add_task("speed", head=nn.Linear(8, 1), loss=mse_loss)
    for seed in range(3):
        learner.step({"a": batch(6, 3, seed), "speed": (images(5, seed), torch.full((5, 1), 0.5))})
    for before, after in learner.method.seen:
        assert after == pytest.approx(before, rel=1e-4)
    assert any("memory" in after for _, after in learner.method.seen)


@pytest.mark.parametrize("engine", ["joint", "separate", "graphs"])
def test_engines_give_the_same_losses_after_an_update(engine: str) -> None:
    expected, found = (trained_learner(watching(SORO)()) for _ in range(2))
    if engine == "separate":
        found._engine.one_pass = None
    elif engine == "graphs":
        pytest.importorskip("triton")
        if not torch.cuda.is_available():
            pytest.skip("needs a GPU, and this machine has none")
        found._use_engine(CudaGraphEngine(found.model, found.method))
    for learner in (expected, found):
        for seed in range(2, 5):
            learner.step(present(learner, seed))
    for (_, one), (_, other) in zip(expected.method.seen, found.method.seen, strict=True):
        assert other == pytest.approx(one, rel=1e-6)


def test_a_skipped_task_has_no_loss_after_the_update() -> None:
    learner = trained_learner(watching(SORO)())
    given = present(learner, 2)
    given["b"] = given["b"][0] * np.nan, given["b"][1]
    learner.step(given)
    before, after = learner.method.seen[-1]
    assert list(before) == list(after) == ["c", "memory"]
    count = len(learner.method.seen)
    learner.step({"b": given["b"]})  # makes no update
    assert len(learner.method.seen) == count


def test_several_ranks_are_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(SpclError, match=r"FAMO\(\) needs the losses after an update, which several ranks do not"):
            Learner(nn.Linear(3, 4), FAMO(), distributed=World())
    finally:
        dist.destroy_process_group()
