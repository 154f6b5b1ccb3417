"""The preference W: memory's share by a number, classes, samples or slopes of losses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from method_runs import new_learner, paused, run, tensors
from spcl.engine.graphs import CudaGraphEngine
from spcl.errors import SpclError
from spcl.learner import Learner
from spcl.memory import BalancedCoreset, Reservoir
from spcl.methods import SORO, SPCL, Gradients, Method, SOROKappa, Weights, make_method

SHARES = ("classes", "samples", "slopes")
NAMES = ("a", "b", "memory")


def step(*names: str, **known: tuple[Any, ...]) -> Gradients:
    return Gradients(names, np.ones(len(names)), torch.eye(len(names), dtype=torch.float64), **known)


def share(method: SPCL, gradients: Gradients) -> float:
    """Return memory's share of W, after checking the sum of W and that tasks share the rest alike."""
    W = method.preference(gradients)
    assert W is not None
    count, place = len(gradients.names), gradients.names.index("memory")
    assert float(W.sum()) == pytest.approx(count)
    rest = [float(value) for index, value in enumerate(W) if index != place]
    assert rest == pytest.approx([sum(rest) / len(rest)] * len(rest))
    return float(W[place]) / count


class Recorder(SPCL):
    """SPCL that keeps what it saw and the share that memory had."""

    name = "recorder"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.seen: list[Gradients] = []
        self.shares: list[float | None] = []

    def preference(self, gradients: Gradients) -> Tensor | None:
        W = super().preference(gradients)
        self.seen.append(gradients)
        self.shares.append(None if W is None else float(W[-1]) / len(W))
        return W


class CurrentAgainstMemory(Method):
    """A method with the reduction ``"mean"`` that keeps what it saw."""

    name = "current-against-memory"
    reduction = "mean"

    def weigh(self, gradients: Gradients) -> Weights:
        self.seen = gradients
        return Weights(torch.ones(len(gradients.names)))


@pytest.mark.parametrize("method", [SORO(memory_share=0.5), SOROKappa(memory_share=0.5), SPCL(memory_share=0.5)])
def test_memory_has_its_share_of_orthogonal_gradients(method: Method) -> None:
    values = method.weigh(step("a", "b", "c", "memory")).values
    torch.testing.assert_close(values[-1] / values.sum(), torch.tensor(0.5, dtype=torch.float64))
    assert values[:-1].max() - values[:-1].min() < 1e-9
    alone = method.weigh(step("a", "b")).values
    torch.testing.assert_close(alone / alone.sum(), torch.full((2,), 0.5, dtype=torch.float64))


def test_a_share_outside_of_its_range_is_refused() -> None:
    for wrong in (0.0, 1.0, "tasks"):
        with pytest.raises(SpclError, match="memory_share"):
            SPCL(memory_share=wrong)


@pytest.mark.parametrize("name", ["soro", "soro+dbt", "soro-kappa", "spcl"])
def test_all_gradients_count_alike_unless_asked_and_without_memory(name: str) -> None:
    assert make_method(name).preference(step(*NAMES)) is None
    for kind in SHARES:
        known = {"classes": (2, 2), "samples": (8, 8)}
        assert make_method(name, memory_share=kind).preference(step("a", "b", **known)) is None


# -- classes and samples


def test_memory_counts_by_the_samples_seen_of_its_tasks() -> None:
    method = SPCL(memory_share="samples")
    method.preference(step("a", "b", samples=(30, 10)))
    method.preference(step("a", "b", samples=(30, 10)))
    known = {"samples": (10, 32), "replayed": ("a",)}
    assert share(method, step("b", "memory", **known)) == pytest.approx(60 / (60 + 30))
    known = {"samples": (10, 20, 32), "replayed": ("a",)}
    assert share(method, step("b", "c", "memory", **known)) == pytest.approx(60 / (60 + 40 + 20))
    known = {"samples": (20, 32), "replayed": ("a", "b")}
    assert share(method, step("c", "memory", **known)) == pytest.approx(100 / (100 + 40))


def test_all_count_alike_while_no_sample_of_memory_was_counted() -> None:
    method = SPCL(memory_share="samples")
    method.load_state_dict({})  # of a checkpoint with other settings
    assert share(method, step(*NAMES, samples=(8, 8, 8), replayed=("old",))) == pytest.approx(1 / 3)


def trained(method: Method) -> None:
    """Train two tasks, finish them, and make a step of two others and memory."""
    learner = Learner(nn.Linear(3, 4), method, memory=BalancedCoreset(20), memory_batch=7)
    x = torch.randn(12, 3)
    for name, classes in (("a", 3), ("b", 2)):
        learner.add_task(name, classes=classes)
        learner.step({name: (x, torch.arange(12) % classes)})
        learner.finish_task(name)
    learner.add_task("c", classes=4)
    learner.add_task("d", head=nn.Linear(4, 1), loss=nn.functional.mse_loss)
    learner.step({"c": (x, torch.arange(12) % 4), "d": (x[:5], x[:5, :1])})


def test_a_weighting_knows_classes_samples_and_the_tasks_of_memory() -> None:
    for kind, expected in (("classes", 5 / 10), ("samples", 24 / 41)):
        method = Recorder(memory_share=kind)
        trained(method)
        last = method.seen[-1]
        assert last.names == ("c", "d", "memory")
        assert (last.classes, last.samples, last.replayed) == ((4, 1, 5), (12, 5, 7), ("a", "b"))
        assert method.shares == [None, pytest.approx(3 / 5 if kind == "classes" else 1 / 2), pytest.approx(expected)]


def test_reduced_gradients_have_the_classes_and_samples_of_their_tasks() -> None:
    method = CurrentAgainstMemory()
    trained(method)
    assert method.seen.names == ("current", "memory")
    assert (method.seen.classes, method.seen.samples, method.seen.replayed) == ((5, 5), (17, 7), ("a", "b"))


def test_a_reservoir_counts_for_all_tasks_that_it_replays() -> None:
    method = Recorder(memory_share="samples")
    learner = Learner(nn.Linear(3, 4), method, memory=Reservoir(20))
    learner.add_task("a", classes=2)
    for _ in range(3):
        learner.step({"a": (torch.randn(6, 3), torch.arange(6) % 2)})
    assert method.seen[-1].replayed == ("a",)
    assert method.shares == [None, pytest.approx(0.5), pytest.approx(0.5)]


# -- slopes


def averaged(losses: list[float], decay: float) -> float:
    """Return the weighted mean of losses; the first loss stands for all before it."""
    weights = (1.0 - decay) * decay ** np.arange(len(losses))[::-1]
    return float(weights @ losses + decay ** len(losses) * losses[0])


def slope(losses: list[float]) -> float:
    return averaged(losses, 0.9) / averaged(losses, 0.99)


def test_slopes_by_their_formula_while_tasks_start_pause_and_end() -> None:
    generator, method = np.random.default_rng(0), SPCL(memory_share="slopes")
    history: dict[str, list[float]] = {}
    for moment in range(80):
        present = [name for name, (first, last) in {"a": (0, 40), "b": (0, 80), "late": (50, 80)}.items()
                   if first <= moment < last and (name, moment % 3) != ("b", 1)]  # fmt: skip
        names = (*(present or ["b"]), "memory")
        known = [slope(history[name]) if name in history else 1.0 for name in names]
        assert share(method, step(*names)) == pytest.approx(known[-1] / sum(known))
        losses = {name: float(generator.gamma(4.0) * 0.97**moment) for name in names}
        method.after_step(losses)
        for name, loss in losses.items():
            history.setdefault(name, []).append(loss)
        resumed = SPCL(memory_share="slopes")
        resumed.load_state_dict(method.state_dict())
        method = resumed


def test_what_falls_slower_counts_more() -> None:
    method = SPCL(memory_share="slopes")
    for moment in range(30):
        method.after_step({"a": 0.9**moment, "b": 0.9**moment, "memory": 1.0})
    falling = share(method, step(*NAMES))
    assert 0.5 < falling < 0.8
    for moment in range(30):
        method.after_step({"a": 1.0, "b": 1.0, "memory": 0.9**moment})
    assert share(method, step(*NAMES)) < 1 / 3


def test_the_size_of_a_loss_changes_nothing() -> None:
    for scaled in NAMES:
        methods = [SPCL(memory_share="slopes"), SPCL(memory_share="slopes")]
        generator = np.random.default_rng(1)
        for _ in range(20):
            losses = {name: float(generator.gamma(2.0)) for name in NAMES}
            methods[0].after_step(losses)
            methods[1].after_step(losses | {scaled: 1000.0 * losses[scaled]})
            assert share(methods[1], step(*NAMES)) == pytest.approx(share(methods[0], step(*NAMES)), rel=1e-12)


@pytest.mark.parametrize("losses", [[0.0] * 3, [-1.0, -2.0], [1e-300, 1e300], [1e300, 0.0], [2.0] + [0.0] * 9000])
def test_shares_are_finite_for_any_losses(losses: list[float]) -> None:
    method = SPCL(memory_share="slopes")
    for loss in losses:
        method.after_step({"a": loss, "b": 1.0, "memory": loss})
        assert 0.0 < share(method, step(*NAMES)) < 1.0


def test_only_what_is_needed_is_saved() -> None:
    for kind, keys in (
        (None, set()),
        (0.3, set()),
        ("classes", set()),
        ("samples", {"samples"}),
        ("slopes", {"losses"}),
    ):
        learner = new_learner(SPCL(memory_share=kind), "task")
        run(learner, 0)
        assert learner.method.state_dict().keys() == keys


# -- runs


@pytest.mark.parametrize("kind", ["samples", "slopes"])
def test_a_resumed_run_is_that_without_a_pause(kind: str, tmp_path: Path) -> None:
    def make() -> Learner:
        return new_learner(SPCL(memory_share=kind), "class")

    expected = make()
    run(expected, 0)
    found = paused(make, 5, tmp_path / "checkpoint.safetensors")
    assert found.method.state_dict() == expected.method.state_dict()
    assert all(torch.equal(one, other) for one, other in zip(tensors(found), tensors(expected), strict=True))


@pytest.mark.parametrize("kind", ["samples", "slopes"])
def test_an_undone_step_is_not_counted(kind: str) -> None:
    method = Recorder(memory_share=kind)
    learner = new_learner(method, "task")
    run(learner, 0, 6)
    before = method.state_dict()
    x, y = torch.full((6, 6), torch.nan), torch.zeros(6, dtype=torch.long)
    learner.step({"b": (x, y), "c": (x, y)})
    assert method.state_dict() == before


@pytest.mark.parametrize("kind", ["samples", "slopes"])
def test_every_engine_has_the_same_preference(kind: str) -> None:
    shares = []
    for engine in ("joint", "separate", "captured"):
        method = Recorder(memory_share=kind)
        learner = Learner(nn.Sequential(nn.Linear(6, 8), nn.ReLU()), method, memory=BalancedCoreset(12))
        torch.manual_seed(0)
        for parameter in learner.model.backbone.parameters():
            nn.init.normal_(parameter)
        if engine == "separate":
            learner._engine.one_pass = None
        elif engine == "captured":
            learner._use_engine(CudaGraphEngine(learner.model, learner.method))
        torch.manual_seed(1)
        run(learner, 0)
        shares.append([each for each in method.shares if each is not None])
    assert len(shares[0]) == 4
    assert len({round(each, 6) for each in shares[0]}) > 1
    assert shares[1] == pytest.approx(shares[0], rel=1e-4)
    assert shares[2] == pytest.approx(shares[0], rel=1e-4)
