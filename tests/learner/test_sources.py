"""Sources that share tasks, with encoders: each engine against autograd with a gradient per source, and their lives."""

import copy
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from _by_hand import er_by_hand, soro_by_hand
from _learning import capture_without_graphs
from _sources_by_hand import SourcesByHand
from spcl.encoders import Affine
from spcl.errors import CheckpointError, SpclError, TaskError
from spcl.learner import Learner
from spcl.memory import BalancedCoreset, EpochCoreset, Reservoir
from spcl.methods import METHODS, make_method
from spcl.streams import LiveStream

RATE, REPLAYED = 0.05, 5
COMBINE = {"er": er_by_hand, "soro": soro_by_hand}
ENGINES: dict[str, dict[str, Any]] = {
    "one pass": {},
    "apart": {},
    "parts": {"micro_batch": 3},
    "low memory": {"low_memory": True},
    "graphs": {},
}


def trunk() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))


def learner_of(
    method: str = "soro", engine: str = "one pass", scenario: str = "task", memory: Any = None, **options: Any
) -> Learner:
    torch.manual_seed(0)
    backbone = options.pop("backbone", None) or trunk()
    learner = Learner(
        backbone.double(),
        make_method(method, **options.pop("choices", {})),
        optimizer=partial(torch.optim.SGD, lr=RATE),
        memory=memory,
        memory_batch=REPLAYED if memory is not None else None,
        scenario=scenario,
        **ENGINES[engine],
        **options,
    )
    if engine == "apart":
        learner._engine.one_pass = None  # type: ignore[attr-defined]
    if engine == "graphs":
        capture_without_graphs(learner)
    return learner


def samples(seed: int, width: int, classes: int | None, count: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator, dtype=torch.float64)
    if classes is None:
        return x, torch.randn(count, 2, generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, (count,), generator=generator)


class Stem(nn.Module):
    """A stem that sources have in common, and an affine layer of one source's own."""

    def __init__(self, stem: nn.Module, width: int) -> None:
        super().__init__()
        self.own, self.stem = Affine(width), stem

    def forward(self, x: Tensor) -> Tensor:
        return self.stem(self.own(x))


def wearables(learner: Learner) -> dict[str, tuple[int, int | None]]:
    """Add five sources of three tasks, with shared and own encoders; return the width and classes of each."""
    phone, stem = nn.Sequential(nn.Linear(3, 6), nn.Tanh()).double(), nn.Linear(4, 6).double()
    learner.add_task("activity", classes=3)
    learner.add_task("speed", head=nn.Linear(5, 2).double(), loss=mse_loss)
    learner.add_task("place", classes=2)
    learner.add_source("watch", "activity")
    learner.add_source("phone", "activity", encoder=phone)
    learner.add_source("other phone", "speed", encoder=phone)
    learner.add_source("ring", "activity", encoder=Stem(stem, 4).double())
    learner.add_source("other ring", "speed", encoder=Stem(stem, 4).double())
    learner.add_source("belt", "activity", encoder="affine")
    widths = {"watch": 6, "phone": 3, "other phone": 3, "ring": 4, "other ring": 4, "place": 6, "belt": 6}
    return {name: (width, learner.sources[name].task.classes) for name, width in widths.items()}


def batches_of(kinds: dict[str, tuple[int, int | None]], seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: samples(seed + place, *kind, 3 + place % 3) for place, (name, kind) in enumerate(kinds.items())}


def weights(learner: Learner) -> list[Tensor]:
    return [each.detach().clone() for module in learner.model.modules() for each in module.parameters()]


# -- the gradients of Algorithm 2


@pytest.mark.parametrize("scenario", ["task", "class"])
@pytest.mark.parametrize("method", ["er", "soro"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_is_what_autograd_gives_source_by_source(engine: str, method: str, scenario: str) -> None:
    learner = learner_of(method, engine, scenario, Reservoir(40))
    kinds = wearables(learner)
    learner.step(batches_of(kinds, 0))
    learner.finish_source("phone")
    learner.finish_source("ring")
    for seed in (10, 20):
        running = {name: kind for name, kind in kinds.items() if not learner.sources[name].finished}
        by_hand = SourcesByHand(learner, RATE, REPLAYED)
        given = batches_of(running, seed)
        report = learner.step(given)
        by_hand.step(given, COMBINE[method])
        by_hand.assert_equals(learner)
        assert list(report.losses) == [*(name for name in learner.sources if name in given), "memory"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["er", "soro"])
def test_domain_incrementally_all_sources_answer_one_task(engine: str, method: str) -> None:
    learner = learner_of(method, engine, "domain", Reservoir(20))
    learner.add_task("activity", classes=3)
    for name in "abcd":
        learner.add_source(name, "activity")
    for seed in range(3):
        given = {name: samples(10 * seed + place, 6, 3) for place, name in enumerate("abcd")}
        if seed:
            by_hand = SourcesByHand(learner, RATE, REPLAYED)
            by_hand.step(given, COMBINE[method])
        learner.step(given)
        if seed:
            by_hand.assert_equals(learner)
    assert torch.equal(learner.predict(given["a"][0]), learner.predict(given["a"][0], task="activity"))
    with pytest.raises(TaskError, match=r"task 'place': domain-incrementally all sources answer one task, 'activity'"):
        learner.add_task("place", classes=2)


def test_one_pass_is_made_where_layers_are_known() -> None:
    learner = learner_of()
    kinds = wearables(learner)
    learner.step(batches_of(kinds, 0))
    learner.step(batches_of(kinds, 1))
    assert learner.fallback_reason is None


@pytest.mark.parametrize("method", ["er", "soro", "dwa"])
def test_one_pass_equals_separate_passes_also_with_batch_norm_in_encoders(method: str) -> None:
    found = []
    for engine in ("one pass", "apart"):
        learner = learner_of(method, engine, memory=Reservoir(30))
        learner.add_task("a", classes=3)
        shared = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).double()
        for name in ("x", "y"):
            learner.add_source(name, "a", encoder=shared)
        learner.add_source("z", "a", encoder=nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6)).double())
        for seed in range(3):
            learner.step({name: samples(10 * seed + place, 4, 3, 6) for place, name in enumerate("xyz")})
        found.append([*weights(learner), *(b for m in learner.model.modules() for b in m.buffers())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scenario", ["task", "class"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_sources_with_encoders(method: str, scenario: str) -> None:
    found = []
    for engine in ("one pass", "apart"):
        learner = learner_of(method, engine, scenario, Reservoir(30))
        kinds = wearables(learner)
        torch.manual_seed(7)
        for seed in range(3):
            running = {name: kind for name, kind in kinds.items() if not learner.sources[name].finished}
            if method == "mdmtr":  # it is a loss for classifiers
                running = {name: kind for name, kind in running.items() if kind[1] is not None}
            report = learner.step(batches_of(running, 10 * seed))
            assert not report.skipped
            if seed == 1:
                learner.finish_source("belt")
        found.append(weights(learner))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7)


def test_a_function_that_mixes_shared_and_own_parameters_gets_separate_passes() -> None:
    class Mixed(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight, self.bias = weight, nn.Parameter(torch.zeros(6, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight, self.bias)

    learner = learner_of()
    learner.add_task("a", classes=3)
    weight = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
    for name in ("x", "y"):
        learner.add_source(name, "a", encoder=Mixed(weight))
    learner.step({name: samples(place, 4, 3) for place, name in enumerate("xy")})
    by_hand = SourcesByHand(learner, RATE, REPLAYED)
    given = {name: samples(5 + place, 4, 3) for place, name in enumerate("xy")}
    learner.step(given)
    by_hand.step(given, soro_by_hand)
    by_hand.assert_equals(learner)
    assert "shared parameters together with a source's own" in (learner.fallback_reason or "")


@pytest.mark.parametrize("engine", ENGINES)
def test_the_orthogonality_penalty_is_also_on_convolutions_of_encoders(engine: str) -> None:
    alpha = 0.1
    backbone = nn.Sequential(nn.Conv1d(3, 2, 3), nn.Flatten(), nn.Linear(8, 5))
    options = {"choices": {"alpha": alpha, "layers": "all"}, "backbone": backbone}
    learner = learner_of("er", engine, memory=Reservoir(20), **options)
    learner.add_task("a", classes=3)
    shared = nn.Conv1d(2, 3, 3, padding=1).double()
    for name in ("x", "y"):
        learner.add_source(name, "a", encoder=shared)
    learner.add_source("z", "a", encoder=nn.Conv1d(2, 3, 1).double())
    for seed in range(3):
        given = {name: samples(10 * seed + place, 12, 3) for place, name in enumerate("xyz")}
        given = {name: (x.view(-1, 2, 6), y) for name, (x, y) in given.items()}
        by_hand = SourcesByHand(learner, RATE, REPLAYED) if seed else None
        learner.step(given)
        if by_hand is not None:
            by_hand.step(given, er_by_hand, alpha)
            by_hand.assert_equals(learner)


def graph(data: st.DataObject) -> tuple[dict[str, int | None], dict[str, tuple[str, int | None]]]:
    """Draw tasks with their classes, and sources with their task and the number of their encoder."""
    tasks = data.draw(st.dictionaries(st.sampled_from("pqr"), st.sampled_from([2, 3, None]), min_size=1))
    sources = data.draw(
        st.dictionaries(
            st.sampled_from("abcde"),
            st.tuples(st.sampled_from(sorted(tasks)), st.sampled_from([None, 0, 1, 2, 3])),
            min_size=1,
        )
    )
    return tasks, sources


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_graph_of_sources_encoders_and_tasks_is_trained_as_by_hand(data: st.DataObject) -> None:
    tasks, sources = graph(data)
    method = data.draw(st.sampled_from(["er", "soro"]))
    engine = data.draw(st.sampled_from(sorted(ENGINES)))
    learner = learner_of(method, engine, memory=Reservoir(12))
    for name, classes in tasks.items():
        own = {"head": nn.Linear(5, 2).double(), "loss": mse_loss}
        learner.add_task(name, **(own if classes is None else {"classes": classes}))
    stem = nn.Linear(4, 6)
    pool: list[nn.Module] = [nn.Linear(3, 6), stem, Stem(stem, 4), nn.Sequential(Affine(3), nn.Linear(3, 6))]
    widths = {None: 6, 0: 3, 1: 4, 2: 4, 3: 3}
    for name, (task, encoder) in sources.items():
        learner.add_source(name, task, encoder=None if encoder is None else pool[encoder].double())
    kinds = {name: (widths[encoder], tasks[task]) for name, (task, encoder) in sources.items()}
    for step in range(3):
        running = [name for name in kinds if not learner.sources[name].finished]
        if not running:
            return
        names = data.draw(st.lists(st.sampled_from(running), min_size=1, unique=True))
        given = {name: samples(100 * step + ord(name), *kinds[name]) for name in names}
        by_hand = SourcesByHand(learner, RATE, REPLAYED)
        learner.step(given)
        if step:  # heads are made in the first step
            heads_known = all(head is not None for head in by_hand.heads.values())
            if heads_known:
                by_hand.step(given, COMBINE[method])
                by_hand.assert_equals(learner, 1e-7)
        if data.draw(st.booleans()):
            learner.finish_source(data.draw(st.sampled_from(running)))


# -- batches that answer several tasks


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["er", "soro"])
def test_a_batch_that_answers_several_tasks_gives_a_gradient_for_each(engine: str, method: str) -> None:
    learner = learner_of(method, engine, memory=Reservoir(30))
    learner.add_task("kind", classes=3)
    learner.add_task("speed", head=nn.Linear(5, 2).double(), loss=mse_loss)
    encoder = nn.Sequential(nn.Linear(4, 6), nn.Tanh()).double()
    learner.add_source("camera", ["kind", "speed"], encoder=encoder)
    learner.add_source("radar", "speed")
    calls: list[int] = []
    for seed in range(3):
        (x, kinds), (_, speeds) = samples(seed, 4, 3), samples(seed, 4, None)
        given = {"camera": (x, {"kind": kinds, "speed": speeds}), "radar": samples(9 + seed, 6, None)}
        by_hand = SourcesByHand(learner, RATE, REPLAYED) if seed else None
        watch = encoder.register_forward_hook(lambda *_: calls.append(1)) if seed == 2 else None
        report = learner.step(given)
        if by_hand is not None:
            plain = {"camera/kind": (x, kinds), "camera/speed": (x, speeds), "radar": given["radar"]}
            by_hand.step(plain, COMBINE[method])
            by_hand.assert_equals(learner)
        if watch is not None:
            watch.remove()
    assert list(report.losses) == ["camera/kind", "camera/speed", "radar", "memory"]
    if engine in ("one pass", "apart"):
        assert len(calls) == 2  # one pass for the new samples, one for the replayed ones
    report = learner.step({"camera": (x, {"kind": kinds})})
    assert list(report.losses) == ["camera/kind", "memory"]
    assert learner.predict(x, "kind", source="camera").shape == (len(x),)
    with pytest.raises(TaskError, match=r"source 'camera' answers \['kind', 'speed'\]; pass task="):
        learner.predict(x, source="camera")
    for wrong, words in (
        ((x, kinds), "give targets as a dict by task"),
        ((x, {"place": kinds}), "source 'camera' does not answer task 'place'; its tasks are"),
        ((x, {}), "source 'camera': the batch has no targets"),
    ):
        with pytest.raises(TaskError, match=words):
            learner.step({"camera": wrong})
    learner.finish_source("camera")
    assert learner.active_sources == ["radar"]
    learner.add_source("camera")
    learner.finish_task("kind")
    assert learner.active_sources == ["camera/speed", "radar"]
    learner.add_source("camera")  # the part that has ended
    assert learner.active_sources == ["camera/kind", "camera/speed", "radar"]


def test_a_source_of_several_tasks_with_an_encoder_by_name_is_saved_and_loaded(tmp_path: Path) -> None:
    learner = learner_of(memory=Reservoir(10))
    learner.add_task("kind", classes=3)
    learner.add_task("place", classes=2)
    learner.add_source("camera", ["kind", "place"], encoder="affine")
    x, y = samples(0, 6, 2)
    for _ in range(2):
        report = learner.step({"camera": (x, {"kind": y, "place": torch.full_like(y, -100)})})
    assert report.unlabelled == {"camera/place": 4}
    learner.step({"camera": (x, {"kind": y, "place": y})})
    assert len({id(source.encoder) for source in learner.sources.values()}) == 1
    learner.save(tmp_path / "c")
    loaded = Learner.load(tmp_path / "c", backbone=trunk().double())
    for each in (learner, loaded):
        each.step({"camera": (x, {"kind": y, "place": y})})
    assert same(complete(learner), complete(loaded))


# -- lives of sources


def test_a_task_that_is_added_alone_is_its_own_source() -> None:
    learner = learner_of()
    learner.add_task("camera", classes=3)
    assert list(learner.sources) == ["camera"]
    learner.step({"camera": samples(0, 6, 3)})
    learner.finish_task("camera")
    assert learner.active_sources == learner.active_tasks == []


def test_the_implied_source_gives_way_to_the_first_that_is_added_unless_it_was_trained() -> None:
    memory = Reservoir(10)
    learner = learner_of(memory=memory)
    learner.add_task("a", classes=3)
    learner.add_source("x", "a")
    assert (list(learner.sources), list(memory.buffers)) == (["x"], ["x"])
    with pytest.raises(TaskError, match=r"task 'a' has sources of its own, \['x'\]; name one of them"):
        learner.step({"a": samples(0, 6, 3)})
    learner.add_task("b", classes=3)
    learner.step({"b": samples(0, 6, 3)})
    learner.add_source("y", "b")
    assert list(learner.sources) == ["x", "b", "y"]


@pytest.mark.parametrize("policy", [Reservoir, BalancedCoreset, EpochCoreset])
def test_a_source_that_ended_is_replayed_and_may_return(policy: Any) -> None:
    learner = learner_of("er", memory=policy(12))
    kinds = wearables(learner)
    learner.step(batches_of(kinds, 0))
    learner.finish_source("ring")
    encoder = copy.deepcopy(learner.sources["ring"].encoder)
    with pytest.raises(
        TaskError, match=r"source 'ring' of task 'activity' is finished; start it again with add_source"
    ):
        learner.step(batches_of(kinds, 1))
    learner.step(batches_of({name: kind for name, kind in kinds.items() if name != "ring"}, 2))
    changed = any(
        not torch.equal(one, other)
        for one, other in zip(encoder.parameters(), learner.sources["ring"].encoder.parameters(), strict=True)
    )
    assert changed  # by replay
    known = len(learner.memory.buffers["ring"].ranks)
    learner.add_source("ring")
    assert learner.sources["ring"].signature is not None
    assert len(learner.memory.buffers["ring"].ranks) == known
    learner.step(batches_of(kinds, 3))
    learner.finish_source("ring")


def test_what_cannot_be_added_is_refused_and_changes_nothing() -> None:
    learner = learner_of(memory=Reservoir(5))
    learner.add_task("a", classes=3)
    learner.add_source("x", "a", encoder=nn.Linear(3, 6).double())
    learner.step({"x": samples(0, 3, 3)})
    learner.finish_source("x")
    learner.add_source("y", "a")
    before = (list(learner.sources), list(learner.memory.buffers), len(learner.optimizer.param_groups[-1]["params"]))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"name": "y", "task": "a"}, "there is a source 'y' already, which is running"),
        ({"name": "z"}, "source 'z' is new; pass task="),
        ({"name": "z", "task": "b"}, "there is no task 'b'"),
        ({"name": "", "task": "a"}, "a source's name must be a non-empty text"),
        ({"name": "z", "task": "a", "encoder": "afine"}, "there is no encoder 'afine'; did you mean 'affine'"),
        ({"name": "z", "task": "a", "encoder": 3}, "its encoder must be a torch.nn.Module, or one of affine"),
        ({"name": "z", "task": "a", "encoder": learner.model.backbone}, "shares parameters with the backbone"),
        ({"name": "x", "task": "a", "encoder": "affine"}, "starts again with the encoder that it had"),
        ({"name": "x", "task": "b"}, "source 'x' answers task 'a', not 'b'"),
    ]
    for arguments, words in wrong:
        with pytest.raises(SpclError, match=words):
            learner.add_source(**arguments)
        now = (list(learner.sources), list(learner.memory.buffers), len(learner.optimizer.param_groups[-1]["params"]))
        assert now == before
    with pytest.raises(TaskError, match=r"there is a source 'y' already, of task 'a'"):
        learner.add_task("y", classes=2)


def test_an_encoder_that_does_not_fit_the_backbone_names_the_source() -> None:
    learner = learner_of()
    learner.add_task("a", classes=3)
    learner.add_source("x", "a", encoder=nn.Linear(3, 4).double())
    with pytest.raises(
        TaskError, match=r"source 'x' of task 'a': the model raised an error on 4 samples of float64\[3\]"
    ):
        learner.step({"x": samples(0, 3, 3)})
    assert learner.sources["x"].signature is None


def test_samples_without_labels_are_left_out_and_counted() -> None:
    learner, other = (learner_of("er") for _ in range(2))
    for each in (learner, other):
        each.add_task("speed", head=nn.Linear(5, 2).double(), loss=mse_loss)
        each.add_task("a", classes=3)
    other.tasks["speed"].head.load_state_dict(learner.tasks["speed"].head.state_dict())
    (x, y), (u, v) = samples(0, 6, None, 6), samples(1, 6, 3, 5)
    some, few = y.clone(), v.clone()
    some[[1, 4]], few[2] = torch.nan, -100
    report = learner.step({"speed": (x, some), "a": (u, few)})
    keep, kept = [0, 2, 3, 5], [0, 1, 3, 4]
    other.step({"speed": (x[keep], y[keep]), "a": (u[kept], v[kept])})
    assert report.unlabelled == {"speed": 2, "a": 1}
    for one, another in zip(weights(learner), weights(other), strict=True):
        torch.testing.assert_close(one, another)
    assert learner.step({"speed": (x, y * torch.nan)}).losses == {}


# -- predictions


def test_predictions_pass_the_encoder_of_a_source_a_given_one_or_the_common_one() -> None:
    learner = learner_of()
    kinds = wearables(learner)
    learner.step(batches_of(kinds, 0))
    x = samples(3, 3, 3)[0]
    phone = learner.sources["phone"].encoder
    with torch.no_grad():
        expected = learner.tasks["activity"].head(learner.model.backbone(phone(x)))
    assert torch.equal(learner.logits(x, source="phone"), expected)
    assert torch.equal(learner.logits(x, "activity", encoder=phone), expected)
    torch.testing.assert_close(learner.module(source="phone")(x), expected)
    torch.testing.assert_close(learner.snapshot().logits(x, source="phone"), expected)
    with pytest.raises(TaskError, match=r"sources with different encoders, \['watch', 'phone'"):
        learner.predict(x, "activity")
    with pytest.raises(TaskError, match=r"x has samples of float64\[3\], but the learner was trained on others"):
        learner.predict(x, source="watch")
    with pytest.raises(TaskError, match=r"source 'phone' of task 'activity' was given with the task 'speed'"):
        learner.predict(x, "speed", source="phone")
    with pytest.raises(TaskError, match="there is no source 'radio'"):
        learner.predict(x, source="radio")


def test_somebody_who_was_never_seen_gets_the_identity_of_affine() -> None:
    learner = learner_of()
    learner.add_task("a", classes=3)
    learner.add_source("x", "a", encoder="affine")
    learner.add_source("y", "a", encoder="affine")
    given = {name: samples(place, 6, 3, 8) for place, name in enumerate("xy")}
    for _ in range(5):
        learner.step(given)
    x = given["x"][0]
    with torch.no_grad():
        expected = learner.tasks["a"].head(learner.model.backbone(x))
    assert torch.equal(learner.logits(x, "a"), expected)
    assert not torch.equal(learner.logits(x, source="x"), expected)
    right = learner.predict(x, source="x") == given["x"][1]
    assert learner.evaluate([given["x"]], source="x") == float(right.double().mean())
    right = learner.predict(x, "a") == given["x"][1]
    assert learner.evaluate([given["x"]], "a") == float(right.double().mean())


# -- new classes


@pytest.mark.parametrize("scenario", ["task", "class"])
@pytest.mark.parametrize("average", [None, 0.9])
def test_new_classes_leave_what_was_learned(scenario: str, average: float | None) -> None:
    learner = learner_of("er", scenario=scenario, memory=Reservoir(20), average=average)
    learner.add_task("a", classes=["sit", "walk"])
    learner.add_task("b", classes=3)
    for seed in range(3):
        learner.step({"a": samples(seed, 6, 2), "b": samples(9 + seed, 6, 3)})
    x = samples(50, 6, 2)[0]
    before_a, before_b = learner.logits(x, "a"), learner.logits(x, "b")
    learner.add_classes("a", ["run", "swim"])
    assert learner.tasks["a"].classes == 4
    assert learner.class_names[2:5] == [("a", "run"), ("a", "swim"), ("b", "0")]
    torch.testing.assert_close(learner.logits(x, "a")[:, :2], before_a)
    torch.testing.assert_close(learner.logits(x, "b"), before_b)
    report = learner.step({"a": samples(60, 6, 4), "b": samples(61, 6, 3)})
    assert set(report.losses) == {"a", "b", "memory"}
    by_hand = SourcesByHand(learner, RATE, REPLAYED)
    given = {"a": samples(70, 6, 4), "b": samples(71, 6, 3)}
    learner.step(given)
    by_hand.step(given, er_by_hand)
    by_hand.assert_equals(learner)
    for wrong, words in ((["run"], "has the class 'run' already"), (2, "have names; give names, not 2")):
        with pytest.raises(TaskError, match=words):
            learner.add_classes("a", wrong)


def test_a_task_that_learns_probabilities_gets_no_more_classes() -> None:
    learner = learner_of(memory=Reservoir(10))
    learner.add_task("a", classes=3)
    x, _ = samples(0, 6, 3)
    learner.step({"a": (x, torch.softmax(torch.randn(4, 3, dtype=torch.float64), dim=1))})
    with pytest.raises(TaskError, match="task 'a' learns probabilities over 3 classes, and memory holds some"):
        learner.add_classes("a", 1)


def test_new_classes_keep_the_state_of_the_optimiser_and_of_stored_logits() -> None:
    torch.manual_seed(0)
    learner = Learner(trunk(), make_method("der++"), memory=Reservoir(20), scenario="class")
    learner.add_task("a", classes=2)
    learner.add_task("b", classes=3)
    pairs = {"a": (torch.randn(4, 6), torch.arange(4) % 2), "b": (torch.randn(4, 6), torch.arange(4) % 3)}
    learner.step(pairs)
    stored = learner.memory.buffers["b"].take("logits")
    moments = learner.optimizer.state[learner.tasks["a"].head.weight]["exp_avg"]
    learner.add_classes("a", 2)
    found = learner.memory.buffers["b"].take("logits")
    assert found.shape[1] == 7
    assert torch.equal(found[:, [0, 1, 4, 5, 6]], stored)
    assert found[:, 2:4].isnan().all()
    after = learner.optimizer.state[learner.tasks["a"].head.weight]["exp_avg"]
    assert torch.equal(after[:2], moments)
    assert not after[2:].any()
    learner.step({"a": (torch.randn(4, 6), torch.arange(4)), "b": pairs["b"]})


# -- checkpoints


def complete(learner: Learner) -> dict[str, Any]:
    return learner._state()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other) or bool((one.isnan() & other.isnan() | (one == other)).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("policy", [Reservoir, BalancedCoreset, EpochCoreset])
@pytest.mark.parametrize("average", [None, 0.5])
def test_a_resumed_learner_continues_exactly(policy: Any, average: float | None, tmp_path: Path) -> None:
    learner = learner_of(memory=policy(12), average=average)
    kinds = wearables(learner)
    learner.step(batches_of(kinds, 0))
    learner.finish_source("ring")
    learner.add_classes("place", 1)
    learner.save(tmp_path / "c")
    phone, stem = nn.Sequential(nn.Linear(3, 6), nn.Tanh()).double(), nn.Linear(4, 6).double()
    encoders = {"phone": phone, "ring": Stem(stem, 4).double(), "other ring": Stem(stem, 4).double()}
    heads = {"speed": (nn.Linear(5, 2).double(), mse_loss)}
    loaded = Learner.load(tmp_path / "c", backbone=trunk().double(), heads=heads, encoders=encoders)
    assert loaded.sources["other phone"].encoder is phone
    for each in (learner, loaded):
        torch.manual_seed(1)
        each.step(batches_of({name: kind for name, kind in kinds.items() if name != "ring"}, 5))
        each.add_source("ring")
        each.step(batches_of(kinds, 6))
        each.finish_source("watch")
    assert same(complete(learner), complete(loaded))
    for name, module in (("other phone", phone), ("phone", phone)):  # one of those who share it is enough
        others = {each: encoders[each] for each in ("ring", "other ring")} | {"not there yet": Affine(2)}
        again = Learner.load(tmp_path / "c", backbone=trunk().double(), heads=heads, encoders=others | {name: module})
        assert again.sources["phone"].encoder is again.sources["other phone"].encoder is phone
    wanted = r"encoders of their own; pass them as encoders=\{'phone': module, 'ring': module, 'other ring': module\}"
    with pytest.raises(CheckpointError, match=wanted):
        Learner.load(tmp_path / "c", backbone=trunk().double(), heads=heads)
    wrong = encoders | {"other phone": copy.deepcopy(phone)}
    with pytest.raises(CheckpointError, match=r"sources 'phone', 'other phone' had one encoder; pass the same module"):
        Learner.load(tmp_path / "c", backbone=trunk().double(), heads=heads, encoders=wrong)
    with pytest.raises(CheckpointError, match="the encoder of source 'phone' does not fit the checkpoint"):
        Learner.load(tmp_path / "c", backbone=trunk().double(), heads=heads, encoders=encoders | {"phone": Affine(3)})


def live(learner: Learner, moment: int) -> None:
    """Live through a moment of a life in which sources come, go and return, and a task gets classes."""
    if moment == 0:
        wearables(learner)
    if moment == 2:
        learner.finish_source("ring")
    if moment == 3:
        learner.add_classes("activity", 1)
    if moment == 4:
        learner.add_source("ring")
        learner.finish_source("watch")
    if moment == 5:
        learner.add_source("late", "activity", encoder="affine")
    widths = {"watch": 6, "phone": 3, "other phone": 3, "ring": 4, "other ring": 4, "belt": 6, "late": 6}
    names = [name for name in learner.active_sources if name in widths]
    kinds = {name: (widths[name], learner.sources[name].task.classes) for name in names}
    learner.step(batches_of(kinds, 10 * moment))


MOMENTS = 7


@settings(max_examples=8, deadline=None)
@given(kills=st.sets(st.integers(0, MOMENTS - 2), min_size=1), policy=st.sampled_from([Reservoir, BalancedCoreset]))
def test_a_life_with_kills_at_any_moments_ends_as_one_without(kills: set[int], policy: Any) -> None:
    def lived(kills: set[int]) -> dict[str, Any]:
        learner = learner_of("soro", memory=policy(15), average=0.9)
        torch.manual_seed(3)
        for moment in range(MOMENTS):
            live(learner, moment)
            if moment in kills:
                state = copy.deepcopy(complete(learner)) | {"sources": {}}
                phone, stem = nn.Sequential(nn.Linear(3, 6), nn.Tanh()).double(), nn.Linear(4, 6).double()
                encoders = {"phone": phone, "ring": Stem(stem, 4).double(), "other ring": Stem(stem, 4).double()}
                heads = {"speed": (nn.Linear(5, 2).double(), mse_loss)}
                learner = Learner.load(state, backbone=trunk().double(), heads=heads, encoders=encoders)
        return complete(learner)

    assert same(lived(kills), lived(set()))


# -- streams


def test_fit_adds_the_sources_of_a_stream_and_starts_those_that_return() -> None:
    class Moment:
        def __init__(self, names: str, started: str = "", ended: str = "") -> None:
            self.batches = {name: samples(ord(name), 6, 3) for name in names}
            self.started, self.ended = tuple(started), tuple(ended)

    class Stream(list[Moment]):
        tasks: ClassVar = {"x": "a", "y": "a"}
        classes: ClassVar = {"a": 3}
        encoders: ClassVar = {"y": "affine"}

    learner = learner_of(memory=BalancedCoreset(6))
    ended: list[str] = []
    stream = Stream([Moment("x", "x", "x"), Moment("y", "y"), Moment("xy", "x", "xy")])
    learner.fit(stream, on_end=ended.append)
    assert (list(learner.tasks), list(learner.sources), ended) == (["a"], ["x", "y"], ["x", "x", "y"])
    assert isinstance(learner.sources["y"].encoder, Affine)


def test_a_stream_that_contradicts_the_learner_is_refused() -> None:
    class Moment:
        batches: ClassVar[dict[str, Any]] = {}
        started, ended = ("x",), ()

    class Stream(list[Moment]):
        tasks: ClassVar = {"x": "b"}
        classes: ClassVar = {"b": 2}

    learner = learner_of()
    learner.add_task("a", classes=3)
    learner.add_source("x", "a")
    with pytest.raises(TaskError, match=r"the stream says that source 'x' answers 'b', but it answers \['a'\]"):
        learner.fit(Stream([Moment()]))


def test_live_batches_may_answer_several_tasks() -> None:
    learner = learner_of()
    for task in ("kind", "place"):
        learner.add_task(task, classes=2)
    learner.add_source("camera", ["kind", "place"])
    x, y = samples(0, 6, 2)
    with LiveStream({"camera": [(x, {"kind": y, "place": y}), (x.numpy(), {"kind": y.numpy()})]}) as stream:
        reports: list[Any] = []
        learner.fit(stream, on_step=reports.append)
    assert [sorted(report.losses) for report in reports] == [["camera/kind", "camera/place"], ["camera/kind"]]


# -- memory


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        ("class", {"x": [None, None], "y": [None, None], "z": [3, 3, 3]}),
        ("source", {"x": 4, "y": 4, "z": 4}),
        ("both", {"x": [2, 2], "y": [2, 2], "z": [2, 2, 2]}),
    ],
)
def test_the_budget_is_shared_by_class_by_source_or_by_both(share: Any, expected: Any) -> None:
    budget = {"class": 15, "source": 12, "both": 14}[share]
    memory = BalancedCoreset(budget, share=share)
    memory.start("x", 2, "a")
    memory.start("y", 2, "a")
    memory.start("z", 3, "b")
    for name, classes in (("x", 2), ("y", 2), ("z", 3)):
        memory.observe(name, torch.randn(60, 2), torch.arange(60) % classes)
        memory.finish(name)
    counts = memory.counts()
    if share == "class":
        assert [sum(both) for both in zip(counts["x"], counts["y"], strict=True)] == [3, 3]
        assert counts["z"] == [3, 3, 3]
    elif share == "source":
        assert {name: sum(each) for name, each in counts.items()} == expected
    else:
        assert counts == expected
    other = BalancedCoreset(budget)
    other.load_state_dict(memory.state_dict())
    assert (other.share, other.counts()) == (share, counts)
    with pytest.raises(SpclError, match=r"share is 'task'; choose one of class, source, both"):
        BalancedCoreset(3, share="task")  # type: ignore[arg-type]
