"""Low-memory mode: the same training as with the gradients held, in the memory of plain training."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_joint import NETWORKS, CentredOverTheBatch, assert_equal_models, batch_norm_cnn, images, mlp
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from _learning import Agreement, TinyResNet, assert_same, complete_state
from spcl.engine import low_memory as engine
from spcl.engine.low_memory import LayerGramian, LowMemoryEngine, SegmentGramian
from spcl.engine.rows import GradientMatrix, ReductionPlan
from spcl.engine.segmented import SegmentedMode
from spcl.engine.segments import Segments
from spcl.errors import SpclError
from spcl.learner import Learner, engines
from spcl.memory import Reservoir
from spcl.methods import Method, make_method
from spcl.options import LowMemory

SGD = partial(torch.optim.SGD, lr=0.05)
METHODS = ["soro", "mgda", "emgd", "mega", "a-gem", "maxdo", "pcgrad", "der++", "dwa", "rlw", "er", "mdmtr"]
METHODS_FOR_ROWS = ["graddrop", "gmed"]


def make_learners(
    network: Callable[[], nn.Module], method: Callable[[], Method], memory: bool = False, **options: Any
) -> tuple[Learner, Learner]:
    """Return the same learner in low-memory mode and with its gradients held, by a pass per task."""
    learners = []
    for mode in (True, False):
        torch.manual_seed(0)
        kept = Reservoir(6) if memory else None
        options = {"optimizer": SGD, "measure_stability": True, **options}
        learners.append(Learner(network(), method(), memory=kept, low_memory=mode, **options))
    learners[1]._engine.one_pass = None
    return learners[0], learners[1]


def batches(sizes: Sequence[int], seed: int, dtype: torch.dtype = torch.float64) -> dict[str, tuple[Tensor, Tensor]]:
    pairs = [(images(size, 10 * seed + index, dtype), torch.arange(size) % 2) for index, size in enumerate(sizes)]
    return {f"task {index}": pair for index, pair in enumerate(pairs)}


def add_tasks(learner: Learner, count: int) -> None:
    for index in range(count):
        learner.add_task(f"task {index}", classes=2 + index % 2)


def train(learner: Learner, sizes: Sequence[int]) -> None:
    for step in range(2):
        learner.step(batches(sizes, step))


def assert_low(learner: Learner) -> None:
    assert isinstance(learner._engine, LowMemoryEngine)
    assert learner._engine.fallback_reason is None
    assert len(learner._engine.gradients.buffer) <= 1 + (learner.method.settings.alpha > 0.0)


# -- equality


@settings(max_examples=60, deadline=None)
@given(
    network=st.sampled_from(NETWORKS),
    method=st.sampled_from(METHODS),
    alpha=st.sampled_from([0.0, 0.01]),
    modes=st.sampled_from([[], ["decoupled"], ["adaptive"]]),
    sizes=st.lists(st.integers(2, 5), min_size=2, max_size=9),
    scenario=st.sampled_from(["task", "class"]),
    memory=st.booleans(),
    regression=st.booleans(),
    updates=st.integers(1, 2),
    numbers=st.sampled_from([1, engine.LEAST_NUMBERS]),
)
def test_updates_are_those_of_held_gradients(
    network: Callable[[], nn.Module],
    method: str,
    alpha: float,
    modes: list[str],
    sizes: list[int],
    scenario: str,
    memory: bool,
    regression: bool,
    updates: int,
    numbers: int,
) -> None:
    make = partial(make_method, method, alpha=alpha, **dict.fromkeys(modes, True))
    regression = regression and method != "mdmtr"  # whose loss is one for classifiers
    learners = make_learners(lambda: network().double(), make, memory, scenario=scenario, updates=updates)
    for learner in learners:
        add_tasks(learner, len(sizes))
        if regression:
            features = learner.model.backbone(images(2, 0)).shape[1]
            torch.manual_seed(1)
            learner.add_task("speed", head=nn.Linear(features, 1).double(), loss=mse_loss)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "LEAST_NUMBERS", numbers)  # with few, gradients are computed in slices
        for step in range(2):
            pairs = batches(sizes, step)
            if regression:
                pairs["speed"] = images(3, 70 + step), torch.ones(3, 1, dtype=torch.float64)
            reports = []
            for learner in learners:
                torch.manual_seed(step)
                reports.append(learner.step(pairs))
            one, other = reports
            assert one.losses == pytest.approx(other.losses, rel=1e-9)
            assert one.weights == pytest.approx(other.weights, rel=1e-6, abs=1e-9)
            torch.testing.assert_close(one.before.gramian, other.before.gramian)
            torch.testing.assert_close(one.after.gramian, other.after.gramian)
    assert_low(learners[0])
    assert_equal_models(*learners)


def test_batches_of_more_images_than_are_fast_together_share_the_pass() -> None:
    learners = make_learners(lambda: TinyResNet().double(), partial(make_method, "soro"))
    for learner in learners:
        add_tasks(learner, 2)
        learner.step(batches((20, 30), 0))
    assert_low(learners[0])
    assert_equal_models(*learners)


def test_dropout_is_that_of_one_forward_pass() -> None:
    """Both backward passes see the same masks, those that one pass over all batches draws with gradients held."""

    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(32, 64), nn.Dropout(0.5), nn.Linear(64, 4)).double()

    learners = make_learners(network, partial(make_method, "soro"))
    learners[1]._use_engine(learners[1]._engines.make())
    for learner in learners:
        add_tasks(learner, 3)
        torch.manual_seed(5)
        learner.step(batches((4, 4, 4), 0))
    assert_low(learners[0])
    assert_equal_models(*learners)


class Pieces(nn.Module):
    """Samples of two shapes through shared layers; one layer is used by one shape alone."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.shared = nn.Linear(32, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.wide(x.flatten(1)) if x.ndim == 4 else x).tanh()


def test_samples_of_several_shapes_share_the_gramian() -> None:
    learners = make_learners(lambda: Pieces().double(), partial(make_method, "soro"), memory=True)
    narrow = torch.randn(5, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for learner in learners:
        add_tasks(learner, 3)
        for step in range(3):
            learner.step({**batches((3, 4), step), "task 2": (narrow, torch.arange(5) % 2)})
    assert_low(learners[0])
    assert_equal_models(*learners)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(11, 6, padding_idx=0), nn.Linear(6, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embedding(tokens).mean(dim=1))


@pytest.mark.parametrize("numbers", [1, engine.LEAST_NUMBERS])
def test_embeddings(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LEAST_NUMBERS", numbers)
    learners = make_learners(lambda: Embedded().double(), partial(make_method, "soro"))
    for learner in learners:
        add_tasks(learner, 3)
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(11, (3, 4, 7), generator=generator)
            learner.step({f"task {index}": (tokens[index], torch.arange(4) % 2) for index in range(3)})
    assert_low(learners[0])
    assert_equal_models(*learners)


def test_a_weight_used_twice_keeps_the_products_between_its_uses() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 3, bias=False)
    x = torch.randn(4, 3)
    plan = ReductionPlan.make(["a", "b"], "none", separate=True)
    matrix = GradientMatrix([layer.weight])
    matrix.begin(plan, rows=0)
    gramian, segments = LayerGramian(matrix), Segments((2, 2), (0, 1))
    target = SegmentGramian(matrix, segments, gramian)
    output = SegmentedMode(segments, target, {layer.weight: "weight"}, []).run(lambda x: layer(layer(x).tanh()), x)
    output.square().sum().backward()
    rows = [torch.autograd.grad(layer(layer(part).tanh()).square().sum(), layer.weight)[0] for part in x.split(2)]
    flat = torch.stack(rows).flatten(1).double()
    torch.testing.assert_close(gramian.products, flat @ flat.T)


# -- faults and resuming


@pytest.mark.parametrize("bad", [torch.nan, 1e30])
def test_a_faulty_task_is_skipped_without_holding_gradients(bad: float) -> None:
    learners = make_learners(lambda: TinyResNet(), partial(make_method, "soro"), memory=True)
    learners[1]._use_engine(learners[1]._engines.make())
    for learner in learners:
        add_tasks(learner, 3)
        learner.step(batches((4, 4, 4), 0, torch.float32))
        pairs = batches((4, 4, 4), 1, torch.float32)
        pairs["task 1"] = pairs["task 1"][0] * bad, pairs["task 1"][1]
        report = learner.step(pairs)
        assert list(report.skipped) == ["task 1"]
    assert_equal_models(*learners, tolerance=1e-5)
    if bad != bad:
        assert_low(learners[0])


def test_a_step_that_raises_changes_nothing() -> None:
    learner, _ = make_learners(batch_norm_cnn, partial(make_method, "soro"))
    add_tasks(learner, 2)
    learner.step(batches((4, 4), 0, torch.float32))
    before = complete_state(learner)
    with pytest.raises(SpclError, match=r"task 'task 1'.* more than 1 value"):
        learner.step(batches((4, 1), 1, torch.float32))
    assert_same(complete_state(learner), before)
    learner.step(batches((4, 4), 1, torch.float32))
    assert_low(learner)


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    straight, _ = make_learners(partial(TinyResNet, dropout=0.3), partial(make_method, "soro", alpha=0.01), memory=True)
    add_tasks(straight, 3)
    for step in range(4):
        straight.step(batches((3, 4, 5), step, torch.float32))
        if step == 1:
            straight.save(tmp_path / "checkpoint")
    state = complete_state(straight)
    resumed = Learner.load(tmp_path / "checkpoint", backbone=TinyResNet(dropout=0.3))
    assert resumed.low_memory is True
    for step in (2, 3):
        resumed.step(batches((3, 4, 5), step, torch.float32))
    assert_same(complete_state(resumed), state)


# -- which mode is used


def choosing_learner(method: str = "soro", setting: LowMemory = "auto") -> Learner:
    learner = Learner(mlp().double(), make_method(method), optimizer=SGD, low_memory=setting)
    add_tasks(learner, 3)
    return learner


def test_auto_is_chosen_once_the_gradients_do_not_fit_and_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    learner = choosing_learner()
    row = learner._engine.gradients.length * 8
    monkeypatch.setattr(engines, "free_memory", lambda device: 3 * row)
    learner.step(batches((3, 3), 0))
    assert not isinstance(learner._engine, LowMemoryEngine)
    monkeypatch.setattr(engines, "free_memory", lambda device: row)
    with pytest.warns(RuntimeWarning, match=r"the 3 gradients of a step take 0 MiB of 0 MiB free: low_memory is used"):
        learner.step(batches((3, 3, 3), 1))
    monkeypatch.setattr(engines, "free_memory", lambda device: 1000 * row)
    learner.step(batches((3, 3), 2))
    assert_low(learner)
    learner.save(tmp_path / "checkpoint")
    resumed = Learner.load(tmp_path / "checkpoint", backbone=mlp().double())
    assert resumed.low_memory == "auto"
    assert isinstance(resumed._engine, LowMemoryEngine)
    resumed.freeze("1.*")
    assert isinstance(resumed._engine, LowMemoryEngine)


@pytest.mark.parametrize("free", [None, 10**15])
def test_auto_holds_gradients_that_fit_or_whose_memory_is_unknown(
    monkeypatch: pytest.MonkeyPatch, free: int | None
) -> None:
    monkeypatch.setattr(engines, "free_memory", lambda device: free)
    learner = choosing_learner()
    learner.step(batches((3, 3, 3), 0))
    assert not isinstance(learner._engine, LowMemoryEngine)
    assert not {"low_memory", "holds_gradients"} & learner._settings().keys()


def test_false_never_asks_how_much_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "free_memory", lambda device: 1)
    learner = choosing_learner(setting=False)
    learner.step(batches((3, 3, 3), 0))
    assert len(learner._engine.gradients.buffer) == 3


def test_methods_that_add_gradients_hold_few_in_any_case() -> None:
    learner = choosing_learner("er", setting=True)
    learner.step(batches((3, 3, 3), 0))
    assert len(learner._engine.gradients.buffer) <= 2
    assert not isinstance(learner._engine, LowMemoryEngine)


def assert_gradients_are_held(learners: tuple[Learner, Learner], sizes: tuple[int, ...], reason: str) -> None:
    """Check that the first learner warns once, for this reason, and trains as the second, which may hold gradients."""
    for learner in learners:
        add_tasks(learner, len(sizes))
    with pytest.warns(RuntimeWarning, match=reason) as caught:
        train(learners[0], sizes)
    assert len(caught) == 1
    train(learners[1], sizes)
    assert_equal_models(*learners)


@pytest.mark.parametrize("method", [*(partial(make_method, name) for name in METHODS_FOR_ROWS), Agreement])
def test_methods_that_need_the_gradients_themselves_get_them_and_say_so(method: Callable[[], Method]) -> None:
    learners = make_learners(lambda: mlp().double(), method, memory=True)
    reason = r"the 3 gradients of a step take 0 MiB, but low_memory is not possible: .*(entry by entry|edits memory)"
    assert_gradients_are_held(learners, (3, 3), reason)


def test_networks_that_cannot_share_a_pass_hold_gradients_and_say_why() -> None:
    learners = make_learners(lambda: CentredOverTheBatch(32, 4).double(), partial(make_method, "soro"))
    assert_gradients_are_held(learners, (3, 4), r"2 gradients of a step are held \(0 MiB\): .*depend on the other")


@pytest.mark.parametrize("value", ["yes", None, 1])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(SpclError, match=r"low_memory is .*; give True, False or 'auto'"):
        Learner(mlp(), make_method("soro"), low_memory=value)


# -- memory


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of all tensors that operations within the block return, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage())._cdata not in self._live:
                self._live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self._live.values()))
        return result


def peak_memory(step: Callable[[], object]) -> int:
    step()  # the first one allocates what stays
    with PeakMemory() as memory:
        step()
    return memory.peak


def test_peak_memory_counts_what_lives_at_the_same_time() -> None:
    def step() -> None:
        first = torch.zeros(1000)
        del first
        second = torch.zeros(500)
        third = second + 1
        del second, third

    assert peak_memory(step) == 4000


def test_peak_memory_is_that_of_plain_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """With held gradients, 16 times the size of the network comes on top."""
    monkeypatch.setattr(engine, "LEAST_NUMBERS", 1)

    def network() -> nn.Module:
        convolutions = nn.Conv2d(2, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()
        return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 64))

    pairs = batches([8] * 16, 0, torch.float32)
    net, heads = network(), nn.ModuleList(nn.Linear(64, 2 + index % 2) for index in range(16))

    def plain() -> None:
        net.zero_grad()
        features = net(torch.cat([x for x, _ in pairs.values()])).split(8)
        outputs = zip(heads, features, pairs.values(), strict=True)
        sum(nn.functional.cross_entropy(head(part), y) for head, part, (_, y) in outputs).backward()

    low, held = make_learners(network, partial(make_method, "soro"))
    for learner in (low, held):
        add_tasks(learner, 16)
    weights = sum(parameter.nbytes for parameter in net.parameters())
    plainly, lowly = (weights + peak_memory(step) for step in (plain, partial(low.step, pairs)))
    held.step(pairs)
    assert_low(low)
    assert lowly <= 1.3 * plainly
    assert plainly < held._engine.gradients.buffer.nbytes
