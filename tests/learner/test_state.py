"""What is saved comes back bit for bit, also after kills; a file that does not fit, or is wrong, changes nothing."""

import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import mse_loss

from _learning import (
    EVENTS,
    Preferences,
    TinyResNet,
    assert_same,
    batch,
    complete_state,
    head,
    heads,
    images,
    live_one_event,
)
from spcl.checkpoint import read_checkpoint, write_checkpoint
from spcl.errors import CheckpointError, SpclError
from spcl.learner import Learner
from spcl.memory import BalancedCoreset, Memory, Reservoir
from spcl.methods import ER, METHODS, SORO, SORODBT, Method, make_method
from spcl.streams import ParallelStream, Timeline

ADAM = partial(torch.optim.Adam, lr=0.01)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def uninterrupted(make: Callable[[], Learner]) -> Learner:
    torch.manual_seed(3)
    learner = make()
    for event in range(EVENTS):
        live_one_event(learner, event)
    return learner


def interrupted(make: Callable[[], Learner], path: Path, events: Sequence[int]) -> Learner:
    """The same, but after these events everything is thrown away and read from the file."""
    torch.manual_seed(3)
    learner = make()
    for event in range(EVENTS):
        live_one_event(learner, event)
        if event in events:
            learner.save(path)
            torch.manual_seed(event)
            learner = Learner.load(path, backbone=TinyResNet(dropout=0.3, seed=event + 1), heads=heads())
    return learner


def assert_resumes(make: Callable[[], Learner], path: Path, events: Sequence[int] = range(EVENTS)) -> None:
    expected = complete_state(uninterrupted(make))
    found = complete_state(interrupted(make, path, events))
    assert_same(found, expected)
    assert found["learner"]["steps"] == EVENTS


@pytest.mark.parametrize("scenario", ["task", "class"])
@pytest.mark.parametrize("memory", [BalancedCoreset, Reservoir])
@pytest.mark.parametrize("optimizer", [ADAM, SGD], ids=["adam", "sgd"])
@pytest.mark.parametrize("method", [ER, SORO])
def test_resuming_is_bit_for_bit(
    method: type[Method], optimizer: Any, memory: type[Memory], scenario: str, tmp_path: Path
) -> None:
    def make() -> Learner:
        backbone = TinyResNet(dropout=0.3)
        return Learner(backbone, method(), optimizer=optimizer, memory=memory(9, seed=5), scenario=scenario, seed=4)

    assert_resumes(make, tmp_path / "c")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    def make() -> Learner:
        return Learner(TinyResNet(dropout=0.3), make_method(name), memory=Reservoir(9))

    assert_resumes(make, tmp_path / "c", events=(1, 4, 8))


def test_settings_come_back(tmp_path: Path) -> None:
    def make() -> Learner:
        return Learner(
            TinyResNet(dropout=0.3),
            SORODBT(sigma=50.0, decoupled=True),
            optimizer=partial(torch.optim.AdamW, lr=0.02, betas=(0.8, 0.9)),
            memory=Reservoir(9, dtype=torch.float64, device="cpu"),
            memory_batch=3,
            measure_stability=True,
            seed=11,
        )

    learner = make()
    learner.save(tmp_path / "c")
    loaded = Learner.load(tmp_path / "c", backbone=TinyResNet(dropout=0.3))
    assert repr(loaded.method) == repr(learner.method)
    assert loaded.optimizer.defaults == learner.optimizer.defaults
    assert (loaded.memory.budget, loaded.memory.dtype, loaded.memory.device) == (9, torch.float64, torch.device("cpu"))
    assert (loaded.memory_batch, loaded.measure_stability, loaded.seed) == (3, True, 11)


def test_own_methods_and_memories_are_handed_back_by_their_maker(tmp_path: Path) -> None:
    class Mine(Reservoir):
        pass

    def make() -> Learner:
        return Learner(TinyResNet(), Preferences(), memory=Mine(5))

    learner = make()
    learner.add_task("a", classes=3)
    for seed in range(2):
        learner.step({"a": batch(6, 3, seed)})
    learner.save(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"'preferences'.*pass method="):
        Learner.load(tmp_path / "c", backbone=TinyResNet(), memory=Mine(5))
    with pytest.raises(CheckpointError, match=r"the memory 'Mine' is not one of spcl\.memory; pass memory="):
        Learner.load(tmp_path / "c", backbone=TinyResNet(), method=Preferences())
    loaded = Learner.load(tmp_path / "c", backbone=TinyResNet(seed=1), method=Preferences(), memory=Mine(5))
    for one in (learner, loaded):
        torch.manual_seed(0)
        one.step({"a": batch(6, 3, 2)})
    assert_same(complete_state(loaded), complete_state(learner))


def small_stream(samples: int = 24) -> ParallelStream:
    labels = torch.arange(samples) % 4
    durations = [-(-samples // 2 // 4)] * 2
    return ParallelStream(images(samples, 0), labels, ((0, 1), (2, 3)), Timeline.serial(durations), 4, seed=0)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of a learner with a stream, and the one before it."""
    learner, stream = Learner(TinyResNet(), SORO(), memory=Reservoir(5)), small_stream()
    for moment in stream:
        for name in moment.started:
            learner.add_task(name, classes=2)
        learner.step(moment.batches)
        learner.save(tmp_path / "c", stream=stream)
        if moment.step == 2:
            break
    return tmp_path / "c"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replace_by_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"step": 3}))


def replace_by_weights(path: Path) -> None:
    save_file(TinyResNet().state_dict(), path)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [truncate, flip, empty, replace_by_pickle, replace_by_weights, remove])
def test_a_damaged_or_foreign_file_is_refused_and_the_previous_one_still_loads(
    saved: Path, harm: Callable[[Path], None]
) -> None:
    harm(saved)
    backbone, stream = TinyResNet(seed=1), small_stream()
    before, random = complete_state(Learner(backbone, ER())), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=r"the previous checkpoint is valid: load .*c\.previous") as error:
        Learner.load(saved, backbone=backbone, stream=stream)
    assert str(saved) in str(error.value)
    assert_same(complete_state(Learner(backbone, ER())), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert stream.state_dict()["position"] == 0
    learner = Learner.load(f"{saved}.previous", backbone=backbone, stream=stream)
    assert (learner.steps, stream.state_dict()["position"]) == (2, 2)


WIDE = TinyResNet(width=5)
MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "another backbone": (
        {"backbone": WIDE},
        r"the backbone does not fit .* in \d+ tensors, e.g. 'residual.0.weight': float32\[10, 5, 3, 3\] here",
    ),
    "another type": ({"backbone": TinyResNet().double()}, r"float64\[8, 4, 3, 3\] here, float32\[8, 4, 3, 3\]"),
    "frozen": (
        {"backbone": TinyResNet().requires_grad_(False)},
        r"groups of \[12, 2\] parameters, .* of \[0, 2\]",
    ),
    "unknown source": ({"camera": small_stream()}, r"holds no source 'camera'; it has \['stream'\]"),
    "another stream": ({"stream": small_stream(48)}, r"position 3 of 6 moments does not fit this stream of 12"),
    "another method": ({"method": ER()}, "made with the method 'soro', not 'er'"),
    "another optimiser": ({"optimizer": SGD}, "made with Adam, but the optimiser is SGD"),
    "another memory": ({"memory": BalancedCoreset(5)}, "the saved memory is a Reservoir of 5"),
    "another budget": ({"memory": Reservoir(6)}, "the saved memory is a Reservoir of 5 samples, this one a .* of 6"),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_what_does_not_fit_is_said_and_the_backbone_is_untouched(saved: Path, kind: str) -> None:
    options, words = MISFITS[kind]
    options = {"backbone": TinyResNet(seed=1), **options}
    before = {name: value.clone() for name, value in options["backbone"].state_dict().items()}
    random = torch.get_rng_state()
    with pytest.raises(ValueError, match=words):
        Learner.load(saved, **options)
    assert_same(dict(options["backbone"].state_dict()), before)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", {"epoch": 3, "backbone": {}})
    with pytest.raises(CheckpointError, match="not that of a learner: it has no learner, method, tasks"):
        Learner.load(tmp_path / "c", backbone=TinyResNet())


def test_heads_of_ones_own_are_asked_for_and_checked(tmp_path: Path) -> None:
    learner = Learner(TinyResNet(), SORO())
    learner.add_task("speed", head=head(), loss=mse_loss)
    learner.step({"speed": (images(4, 0), torch.zeros(4, 1))})
    learner.save(tmp_path / "c")
    backbone = TinyResNet(seed=1)
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"task 'speed' .* pass them as heads=\{'speed': \(head, loss\)\}"):
        Learner.load(tmp_path / "c", backbone=backbone)
    with pytest.raises(CheckpointError, match=r"the head of task 'speed' does not fit .* '0.bias': missing here, "):
        Learner.load(tmp_path / "c", backbone=backbone, heads={"speed": (nn.Linear(8, 1), mse_loss)})
    with pytest.raises(CheckpointError, match=r"'memory'|holds no memory"):
        Learner.load(tmp_path / "c", backbone=backbone, heads=heads(), memory=Reservoir(3))
    with pytest.raises(CheckpointError, match=r"heads\['speed'\] must be the pair of the task's head and loss, but it"):
        Learner.load(tmp_path / "c", backbone=backbone, heads={"speed": head()})
    shared = backbone.residual[3]
    with pytest.raises(CheckpointError, match="the head of task 'speed' shares parameters with the backbone or"):
        Learner.load(tmp_path / "c", backbone=backbone, heads={"speed": (shared, mse_loss)})
    assert_same(dict(backbone.state_dict()), before)
    loaded = Learner.load(tmp_path / "c", backbone=backbone, heads=heads())
    assert_same(complete_state(loaded), complete_state(learner))


def test_heads_may_share_what_is_frozen(tmp_path: Path) -> None:
    decoder = nn.Linear(8, 1).requires_grad_(False)
    own = {task: (nn.Sequential(nn.Flatten(), nn.Linear(8, 8), decoder), mse_loss) for task in ("speed", "height")}
    learner = Learner(TinyResNet(), SORO())
    for task, (module, loss) in own.items():
        learner.add_task(task, head=module, loss=loss)
    learner.step({task: (images(4, 0), torch.zeros(4, 1)) for task in own})
    learner.save(tmp_path / "c")
    loaded = Learner.load(tmp_path / "c", backbone=TinyResNet(seed=1), heads=deepcopy(own))
    assert_same(complete_state(loaded), complete_state(learner))


@pytest.mark.parametrize("name", ["backbone", "method", "optimizer", "memory", "heads"])
def test_a_source_needs_a_name_that_loading_does_not_use(saved: Path, name: str) -> None:
    learner = Learner.load(saved, backbone=TinyResNet())
    content = saved.read_bytes()
    with pytest.raises(SpclError, match=rf"a source cannot be saved as '{name}', because load\({name}=…\)"):
        learner.save(saved, **{name: small_stream()})
    assert saved.read_bytes() == content


def test_a_failed_save_leaves_the_learner_and_the_last_checkpoint(saved: Path) -> None:
    class Unsaveable:
        def state_dict(self) -> dict[str, Any]:
            return {"socket": object()}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    learner = Learner.load(saved, backbone=TinyResNet())
    before = complete_state(learner)
    with pytest.raises(CheckpointError, match=r"\['socket'\] is a object"):
        learner.save(saved, stream=Unsaveable())
    assert_same(complete_state(learner), before)
    assert Learner.load(saved, backbone=TinyResNet()).steps == 3


GONE = object()
WRONG = (GONE, None, "text", -1, float("nan"), [], {}, torch.zeros(3, 2), torch.zeros(1, dtype=torch.int64), 10**9)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())


def step(learner: Learner, *tasks: str) -> None:
    learner.step({task: (torch.randn(6, 4), torch.arange(6) % 2) for task in tasks})


@pytest.fixture(scope="module", params=["soro-task-head", "spcl-class-class-means"])
def content(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    method, scenario, predict_by = request.param.split("-", 2)
    learner = Learner(
        network(),
        make_method(method),
        memory=BalancedCoreset(12),
        average=0.9,
        scenario=scenario,
        predict_by=predict_by,
    )
    learner.add_task("a", classes=["x", "y", "z"])
    learner.add_task("b", classes=2)
    step(learner, "a", "b")
    learner.finish_task("a")
    step(learner, "b")
    path = tmp_path_factory.mktemp("saved") / "c"
    learner.save(path)
    return read_checkpoint(path)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys and indices that lead to everything in a state, of long lists only to the first entries."""
    for key in value if isinstance(value, dict) else range(min(len(value), 3)) if isinstance(value, list) else ():
        yield (*place, key)
        yield from places(value[key], (*place, key))


def changed(value: Any, place: tuple[Any, ...], new: object) -> Any:
    """A copy of the state with another value in one place, or without it."""
    if not place:
        return new
    first, *rest = place
    copy = value.copy()
    if rest or new is not GONE:
        copy[first] = changed(value[first], tuple(rest), new)
    else:
        del copy[first]
    return copy


def test_wrong_content_is_refused_or_harmless(content: dict[str, Any]) -> None:
    cases = [(place, wrong) for place in places(content) for wrong in WRONG]
    refused = 0
    for place, wrong in random.Random(0).sample(cases, 250):
        try:
            learner = Learner.load(changed(content, place, wrong), backbone=network())
            learner.predict(torch.randn(3, 4), task="b")
            step(learner, "b")
        except SpclError:
            refused += 1
        except Exception as error:
            pytest.fail(f"{place} = {wrong!r}: {type(error).__name__}: {error}")
    assert refused > 100


def test_an_optimiser_never_gets_state_of_another_size(content: dict[str, Any]) -> None:
    parameter = next(iter(content["optimizer"]["state"]))
    for name in ("exp_avg", "exp_avg_sq"):  # the fused optimiser would write beyond their ends
        for wrong in (torch.zeros(1), torch.zeros(3, 2), None):
            state = changed(content, ("optimizer", "state", parameter, name), wrong)
            with pytest.raises(CheckpointError, match=f"the optimiser's .*{name}|wrong content"):
                Learner.load(state, backbone=network())


@pytest.mark.parametrize(
    ("place", "wrong", "words"),
    [
        (("groups",), None, "groups of the optimiser is None in the checkpoint"),
        (("groups",), [], "the optimiser has no groups"),
        (("groups", 0), 7, r"groups of the optimiser is \[7"),
        (("groups", 0, "params"), "text", "params of a group of the optimiser is 'text'"),
        (("groups", 0, "params", 0), {}, r"params of a group of the optimiser is \[{}"),
        (("groups", 0, "lr"), None, "lr of a group of the optimiser is None"),
        (("groups", 0, "weight_decay"), "text", "weight_decay of a group of the optimiser is 'text'"),
        (("groups", 0, "betas"), {}, "betas of a group of the optimiser is {}"),
        (("groups", 0, "maximize"), 7, "maximize of a group of the optimiser is 7"),
        (("groups", 1, "tasks"), 7, "tasks of a group of the optimiser is 7"),
        (("groups", 1, "tasks", 0), "c", "the head of task 'c', which the learner has not"),
        (("state",), [], r"state of the optimiser is \[\]"),
        (("state", "0"), None, "state of parameter 0 is None"),
        (("class",), 7, "class of the optimiser is 7"),
        (("defaults",), 7, "defaults of the optimiser is 7"),
        (("defaults", "eps"), "text", "eps of the optimiser's defaults is 'text'"),
    ],
)
def test_wrong_content_of_an_optimiser_is_named(
    content: dict[str, Any], place: tuple[Any, ...], wrong: object, words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        Learner.load(changed(content, ("optimizer", *place), wrong), backbone=network())


@pytest.mark.parametrize(
    ("method", "place", "wrong"),
    [
        ("dwa", ("losses", "b", 0), "text"),
        ("dwa", ("losses",), None),
        ("emgd", ("norms", "b"), []),
        ("emgd", ("norms", "b"), float("nan")),
        ("graddrop", ("steps",), -1),
        ("spcl", ("samples", "b"), 1.5),
        ("torchjd:GradVac", ("columns",), 7),
        ("torchjd:GradVac", ("rule",), []),
    ],
)
def test_wrong_content_of_a_method_is_named(method: str, place: tuple[Any, ...], wrong: object) -> None:
    learner = Learner(network(), make_method(method, **({"memory_share": "samples"} if method == "spcl" else {})))
    for task in ("a", "b"):
        learner.add_task(task, classes=2)
    step(learner, "a", "b")
    state = changed(learner.model_state(), ("method", "state", *place), wrong)
    with pytest.raises(CheckpointError, match=f"{place[0]} of method {method!r} is "):
        Learner.load(state, backbone=network())


def test_a_state_that_a_rule_of_torchjd_cannot_take_is_refused() -> None:
    learner = Learner(network(), make_method("torchjd:GradVac"))
    for task in ("a", "b"):
        learner.add_task(task, classes=2)
    step(learner, "a", "b")
    state = changed(learner.model_state(), ("method", "state", "rule", "weighting.weighting._beta"), "text")
    with pytest.raises(SpclError, match=r"state of method 'torchjd:GradVac' does not fit it \(.*_beta is 'text'"):
        step(Learner.load(state, backbone=network()), "a", "b")


@pytest.mark.parametrize("place", [("learner", "feature_dim"), ("tasks", 0, "classes")])
def test_a_checkpoint_that_asks_for_a_giant_head_is_refused(content: dict[str, Any], place: tuple[Any, ...]) -> None:
    with pytest.raises(CheckpointError, match="but its head has"):
        Learner.load(changed(content, place, 10**9), backbone=network())


KILLS = 22


def test_a_run_killed_at_random_moments_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).parents[1] / "support" / "_crash.py"), str(tmp_path), str(KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    resumed, _, steps = map(int, done.stdout.split())  # how many died while they wrote is left to chance
    assert resumed >= 20
    whole, killed = read_checkpoint(tmp_path / "whole"), read_checkpoint(tmp_path / "killed")
    assert whole["learner"]["steps"] == steps
    assert_same(killed, whole)
    assert {file.name for file in tmp_path.iterdir()} == {"whole", "whole.previous", "killed", "killed.previous"}
