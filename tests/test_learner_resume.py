"""What is saved comes back: training goes on bit for bit, and a file that does not fit changes nothing."""

import pickle
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import mse_loss

from _learning import Preferences, TinyResNet, assert_same, batch, complete_state, images
from spcl.checkpoint import write_checkpoint
from spcl.errors import CheckpointError, SpclError
from spcl.learner import Learner
from spcl.memory import BalancedCoreset, Memory, Reservoir
from spcl.methods import ER, METHODS, SORO, SORODBT, Method, make_method
from spcl.streams import ParallelStream, Timeline

ADAM = partial(torch.optim.Adam, lr=0.01)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
EVENTS = 10


def head(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.Dropout(0.2), nn.Linear(4, 1))


def heads() -> dict[str, tuple[nn.Module, Any]]:
    return {"speed": (head(1), mse_loss)}


def live_one_event(learner: Learner, event: int) -> None:
    """Tasks come and go: a classifier without data yet, a regression made before it, a bad batch, a finished task."""
    if event == 0:
        learner.add_task("a", classes=3)
        if learner.method.name != "mdmtr":  # which is for classifiers only
            learner.add_task("speed", head=head(), loss=mse_loss)
    if event == 3:
        learner.add_task("b", classes=2)
    if event == 6:
        learner.finish_task("a")
    speed = images(5, event), torch.full((5, 1), torch.nan if event in (4, 8, 9) else 0.5)
    batches = {"speed": speed} if "speed" in learner.tasks else {}
    batches |= {"a": batch(6, 3, event)} if event < 6 and (event or not batches) else {}
    batches |= {"b": batch(4, 2, event)} if event >= 5 else {}
    learner.step(batches)


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
