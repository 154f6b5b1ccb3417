"""Inputs that are dicts or tuples of tensors, and tasks whose samples have different shapes, against plain PyTorch."""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader

from _learning import TinyResNet, assert_same, batch, complete_state
from spcl.engine.graphs import CudaGraphEngine
from spcl.errors import DataError, SpclError, TaskError
from spcl.learner import Learner, StepReport
from spcl.losses import CrossEntropy
from spcl.memory import BalancedCoreset, Memory, Reservoir
from spcl.methods import DERPP, ER, GMED, METHODS, SORO, make_method
from spcl.streams import LiveStream

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
scenarios = pytest.mark.parametrize("scenario", ["task", "class"])
devices = pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)


class Text(nn.Module):
    """The mean of the embedded tokens that the mask keeps, given as a dict or a tuple of tokens and mask."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(20, 6)
            self.top = nn.Linear(6, 5)

    def forward(self, x: dict[str, Tensor] | tuple[Tensor, Tensor]) -> Tensor:
        tokens, mask = (x["tokens"], x["mask"]) if isinstance(x, dict) else x
        kept = mask.unsqueeze(2).to(self.top.weight.dtype)
        return self.top((self.embedding(tokens) * kept).sum(dim=1) / kept.sum(dim=1)).tanh()


class Sequences(nn.Module):
    """Features of sequences of any length, of numbers or of tokens."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.numbers = nn.Linear(1, 5)
            self.tokens = nn.Embedding(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.numbers(x.unsqueeze(2)) if x.is_floating_point() else self.tokens(x)
        return embedded.tanh().mean(dim=1)


def text(count: int, seed: int, length: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length + 1, (count, 1), generator=generator)
    return {
        "tokens": torch.randint(0, 20, (count, length), generator=generator),
        "mask": torch.arange(length) < lengths,
    }


def labels(count: int, classes: int, seed: int) -> Tensor:
    return torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(seed))


def as_tuple(x: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return x["tokens"], x["mask"]


def as_arrays(x: dict[str, Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: leaf.numpy() for name, leaf in x.items()}


def with_text(method: Any, memory: Memory | None = None, scenario: Any = "task") -> Learner:
    learner = Learner(Text(), method, optimizer=SGD, memory=memory, scenario=scenario)
    learner.add_task("a", classes=3)
    learner.add_task("b", classes=2)
    return learner


# -- training and prediction


@pytest.mark.parametrize("form", [dict, as_tuple, as_arrays], ids=["dict", "tuple", "NumPy"])
def test_training_on_text_with_a_mask_is_that_of_a_plain_loop(form: Callable[[Any], Any]) -> None:
    learner = with_text(ER())
    learner.step({"a": (form(text(8, 0)), labels(8, 3, 0)), "b": (form(text(6, 1)), labels(6, 2, 1))})
    backbone = Text()
    heads = [nn.Linear(5, 3), nn.Linear(5, 2)]
    first = with_text(ER())
    first.model.build_heads(5)
    for head, task in zip(heads, first.tasks.values(), strict=True):
        assert task.head is not None
        head.load_state_dict(task.head.state_dict())
    optimizer = SGD([*backbone.parameters(), *(p for head in heads for p in head.parameters())])
    for step in range(5):
        pairs = [(text(8, 2 * step), labels(8, 3, 2 * step)), (text(6, 2 * step + 1), labels(6, 2, 2 * step + 1))]
        if step:
            learner.step({name: (form(x), y) for name, (x, y) in zip("ab", pairs, strict=True)})
        losses = [cross_entropy(head(backbone(x)), y) for head, (x, y) in zip(heads, pairs, strict=True)]
        optimizer.zero_grad()
        torch.autograd.backward([*losses])
        for parameter in backbone.parameters():
            parameter.grad /= 2  # type: ignore[operator]  # ER averages the gradients of the tasks
        optimizer.step()
    for mine, theirs in zip(learner.model.backbone.parameters(), backbone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(learner.tasks["b"].head.weight, heads[1].weight)  # type: ignore[union-attr]


@scenarios
def test_predictions_come_in_batches_of_the_same_samples(scenario: str) -> None:
    learner = with_text(ER(), scenario=scenario)
    learner.step({"a": (text(8, 0), labels(8, 3, 0)), "b": (text(8, 1), labels(8, 2, 1))})
    x, y = text(23, 2), labels(23, 2, 2)
    module = learner.module("b")
    expected = module(x)
    torch.testing.assert_close(learner.logits(x, "b", batch_size=4), expected)
    torch.testing.assert_close(learner.logits(as_tuple(x), "b", batch_size=23), expected)
    torch.testing.assert_close(learner.predict_proba(as_arrays(x), "b"), expected.softmax(dim=1))
    samples = [({name: leaf[index] for name, leaf in x.items()}, y[index]) for index in range(23)]
    found = learner.evaluate(DataLoader(samples, batch_size=5), "b")  # type: ignore[arg-type]
    right = learner.predict(x) == y + 3 if scenario == "class" else expected.argmax(dim=1) == y
    assert found == pytest.approx(float(right.double().mean()))


@pytest.mark.parametrize("name", sorted({*METHODS} - {"gmed"}))
def test_every_method_replays_text(name: str) -> None:
    learner = with_text(make_method(name), Reservoir(12))
    for step in range(4):
        report = learner.step({"a": (text(6, step), labels(6, 3, step)), "b": (text(6, 9), labels(6, 2, 9))})
    assert not report.skipped
    assert "memory" in report.losses


def test_the_order_of_a_dicts_parts_does_not_matter() -> None:
    one, other = with_text(ER(), Reservoir(9)), with_text(ER(), Reservoir(9))
    for step in range(3):
        x, y = text(6, step), labels(6, 3, step)
        one.step({"a": (x, y)})
        other.step({"a": (x if step != 1 else dict(reversed(x.items())), y)})
    torch.testing.assert_close(one.logits(x, "a"), other.logits(x, "a"))


def test_live_sources_may_yield_dicts_and_tuples() -> None:
    def source(form: Callable[[Any], Any]) -> Iterator[Any]:
        for seed in range(3):
            yield form(text(6, seed)), labels(6, 2, seed)

    def uneven() -> Iterator[Any]:
        yield text(6, 0), labels(5, 2, 0)

    learner = with_text(SORO(), Reservoir(9))
    with LiveStream({"a": source(as_arrays), "b": source(as_tuple), "c": uneven()}, on_failure=lambda *_: None) as live:
        learner.fit(live)
    assert live.delivered == {"a": 3, "b": 3}
    assert "int64[6, 7]} and the targets int64[5]" in str(live.failures["c"].exception)


# -- memory


@pytest.mark.parametrize("form", [dict, as_tuple], ids=["dict", "tuple"])
@pytest.mark.parametrize("policy", [BalancedCoreset, Reservoir])
def test_memory_keeps_the_leaves_a_sample_together(policy: type[Memory], form: Callable[[Any], Any]) -> None:
    memory = policy(10, seed=0)
    memory.start("a", 2)
    for first in range(0, 60, 6):
        number = torch.arange(first, first + 6)
        memory.observe("a", form({"tokens": number[:, None] * 7, "mask": (number % 3 == 0)[:, None]}), number % 2)
    memory.finish("a")
    restored = policy(10, seed=1)
    restored.load_state_dict(memory.state_dict())
    for each in (memory, restored):
        (drawn,) = each.draw(8)
        assert type(drawn.x) is (dict if form is dict else tuple)
        tokens, mask = drawn.x.values() if isinstance(drawn.x, dict) else drawn.x
        number = tokens[:, 0] // 7
        assert len(set(number.tolist())) == 8
        assert torch.equal(mask[:, 0], number % 3 == 0)
        assert torch.equal(drawn.y, number % 2)
        assert each.nbytes == 10 * (8 + 1 + 8)


def test_a_dtype_of_memory_leaves_tokens_and_masks_alone() -> None:
    memory = Reservoir(4, dtype=torch.float16)
    memory.start("a", None)
    memory.observe("a", {"tokens": torch.tensor([[1000]]), "speed": torch.tensor([0.5])}, torch.zeros(1))
    (drawn,) = memory.draw(1)
    assert isinstance(drawn.x, dict)
    assert (drawn.x["tokens"].dtype, drawn.x["speed"].dtype) == (torch.int64, torch.float16)
    with pytest.raises(TaskError, match=r"source 'a': x \(\{tokens: int64\[1\]\}\) does not fit the memory's"):
        memory.observe("a", {"tokens": torch.tensor([[1000]])}, torch.zeros(1))


@scenarios
@pytest.mark.parametrize("form", [dict, as_tuple], ids=["dict", "tuple"])
def test_training_with_text_in_memory_resumes_exactly(tmp_path: Path, scenario: str, form: Any) -> None:
    def train(learner: Learner, steps: range) -> None:
        for step in steps:
            names = "ab" if step < 4 else "b"
            learner.step({name: (form(text(6, step)), labels(6, 2, step)) for name in names})
            if step == 3:
                learner.finish_task("a")

    whole = with_text(DERPP(), BalancedCoreset(9, seed=2), scenario)
    train(whole, range(9))
    part = with_text(DERPP(), BalancedCoreset(9, seed=2), scenario)
    train(part, range(6))
    part.save(tmp_path / "text.ckpt")
    resumed = Learner.load(tmp_path / "text.ckpt", backbone=Text(seed=5))
    train(resumed, range(6, 9))
    assert_same(complete_state(resumed), complete_state(whole))
    assert resumed.memory is not None
    assert resumed.memory.counts() == {"a": [3, 3, 0]}  # nine samples for three classes


# -- tasks of different shape


def different(step: int, count: int = 6) -> dict[str, tuple[Tensor, Tensor]]:
    """Two tasks of numbers of different length, one of tokens."""
    generator = torch.Generator().manual_seed(step)
    return {
        "short": (torch.randn(count, 4, generator=generator), labels(count, 3, step)),
        "tokens": (torch.randint(0, 20, (count, 4), generator=generator), labels(count, 2, step)),
        "long": (torch.randn(count, 9, generator=generator), labels(count, 2, step)),
        "more": (torch.randn(count, 4, generator=generator), labels(count, 2, step + 1)),
    }


def with_different(method: Any, scenario: Any, names: Any = ("short", "tokens", "long", "more")) -> Learner:
    learner = Learner(Sequences(), method, optimizer=SGD, memory=Reservoir(24), scenario=scenario)
    for name in names:
        learner.add_task(name, classes=3 if name == "short" else 2)
    return learner


@scenarios
def test_replay_of_different_shapes_has_the_gradient_of_the_mean(scenario: str) -> None:
    learner = with_different(ER(), scenario)
    learner.memory_batch = 17
    for step in range(3):
        learner.step(different(step))
    reference = deepcopy(learner)
    learner.optimizer.param_groups[0]["momentum"] = 0.0
    before = [parameter.detach().clone() for parameter in learner.model.backbone.parameters()]
    batches = different(3)
    learner.step(batches)
    assert reference.memory is not None
    drawn = [(part.source, part.x, part.y) for part in reference.memory.draw(17)]
    assert len(drawn) == 4
    assert sum(len(y) for *_, y in drawn) == 17
    new = [each_loss(reference, name, x, y).mean() for name, (x, y) in batches.items()]
    old = torch.cat([each_loss(reference, *part) for part in drawn]).mean()
    loss = (torch.stack(new).mean() + old) / 2
    gradients = torch.autograd.grad(loss, list(reference.model.backbone.parameters()))
    for was, now, gradient in zip(before, learner.model.backbone.parameters(), gradients, strict=True):
        torch.testing.assert_close((was - now.detach()) / 0.1, gradient, rtol=1e-4, atol=1e-5)


def each_loss(learner: Learner, task: str, x: Any, y: Tensor) -> Tensor:
    features = learner.model.backbone(x)
    joint = learner.scenario == "class"
    heads = [learner.tasks[name].head for name in (learner.tasks if joint else [task])]
    scores = torch.cat([head(features) for head in heads if head is not None], dim=1)
    return cross_entropy(scores, y + learner.tasks[task].offset if joint else y, reduction="none")


def test_edits_of_different_shapes_depend_on_their_own_units() -> None:
    """The inputs of one shape are a thousand times larger, which must not lengthen the edits of the other."""
    moved = []
    for unit in (1.0, 1000.0):
        learner = with_different(GMED(stride=1.0), "task", names=["short", "long"])
        assert learner.memory is not None
        for step in range(3):
            batches = {name: pair for name, pair in different(step).items() if name in learner.tasks}
            batches["long"] = unit * batches["long"][0], batches["long"][1]
            before = deepcopy(learner.memory)
            learner.step(batches)
        short = learner.memory.buffers["short"].take("x"), before.buffers["short"].take("x")
        assert int(learner.memory.buffers["short"].edits.sum()) > 0
        moved.append(float((short[0][:6] - short[1][:6]).abs().max()))
    assert 0.0 < moved[1] < 20 * moved[0]


@devices
@scenarios
@pytest.mark.parametrize("method", ["er", "soro", "der++", "mdmtr"])
def test_the_captured_path_computes_the_same_for_all_inputs(method: str, scenario: str, device: str) -> None:
    learners = []
    for engine in (None, CudaGraphEngine):
        network, memory = _Both().to(device), Reservoir(24)
        learner = Learner(network, make_method(method), optimizer=SGD, memory=memory, scenario=scenario, capture=False)
        if engine is not None:
            learner._use_engine(engine(learner.model, learner.method))
        for name in ("short", "tokens", "long", "text"):
            learner.add_task(name, classes=3)
        for step in range(22):
            batches: dict[str, Any] = {**different(step), "text": (text(6, step), labels(6, 3, step))}
            del batches["more"]
            if step % 7 == 3:
                del batches["text"], batches["long"]
            learner.step(batches)
        learners.append(learner)
    x = text(5, 99)
    torch.testing.assert_close(learners[0].logits(x, "text"), learners[1].logits(x, "text"), rtol=1e-4, atol=1e-5)
    y = different(99)["long"][0]
    torch.testing.assert_close(learners[0].logits(y, "long"), learners[1].logits(y, "long"), rtol=1e-4, atol=1e-5)


class _Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sequences, self.text = Sequences(), Text()

    def forward(self, x: Any) -> Tensor:
        return self.text(x) if isinstance(x, dict) else self.sequences(x)  # type: ignore[no-any-return]


# -- refusals

X = text(4, 0)
Y = labels(4, 3, 0)
BAD_INPUTS: dict[str, tuple[Any, str]] = {
    "empty dict": ({}, "task 'a': the inputs are an empty dict or tuple; give at least one tensor"),
    "empty tuple": ((), "task 'a': the inputs are an empty dict or tuple"),
    "lengths": (
        X | {"mask": X["mask"][:3]},
        "task 'a': the parts of the inputs have different numbers of samples, tokens: 4 and mask: 3",
    ),
    "nested": ({"text": X}, "task 'a': part 'text' of the inputs is a dict; .* flat dict or tuple"),
    "no text as key": ({0: X["tokens"]}, "task 'a': the dict of inputs has the key 0; give .* a text"),
    "numbers": ([1.0, 2.0], r"task 'a': part '\[0\]' of the inputs is a float"),
    "strings": ({"tokens": np.array(["one"])}, "task 'a': a NumPy array of type <U3"),
    "no samples": (
        {name: leaf[:0] for name, leaf in X.items()},
        r"task 'a': the batch is empty \(x is \{mask: bool\[0, 7",
    ),
    "part without samples": (
        {"tokens": torch.tensor(3)},
        r"task 'a': the batch is empty \(x is \{tokens: int64\[\]\}\)",
    ),
    "fewer than targets": ({name: leaf[:3] for name, leaf in X.items()}, "task 'a': 3 inputs but targets of shape"),
    "a part is missing": ({"tokens": X["tokens"]}, r"task 'a': the model raised an error .*: KeyError: 'mask'"),
}


@pytest.mark.parametrize(("x", "words"), [pytest.param(*case, id=name) for name, case in BAD_INPUTS.items()])
def test_bad_inputs_are_refused_before_anything_changes(x: Any, words: str) -> None:
    learner = with_text(ER(), Reservoir(5))
    before = complete_state(learner)
    with pytest.raises(TaskError, match=words):
        learner.step({"a": (x, Y)})
    assert_same(complete_state(learner), before)


def test_samples_of_another_structure_are_refused() -> None:
    learner = with_text(ER(), Reservoir(5))
    learner.step({"a": (X, Y)})
    with pytest.raises(
        TaskError, match=r"its samples are \{mask: bool\[7\], tokens: int64\[7\]\} .* has \(int64\[7\], b"
    ):
        learner.step({"a": (as_tuple(X), Y)})
    with pytest.raises(TaskError, match=r"nothing to predict: x is \(int64\[0, 7\]\)"):
        learner.predict((X["tokens"][:0],), "a")
    with pytest.raises(
        TaskError, match=r"predictions cannot be made for this x: inputs are a tensor .* but they are a str"
    ):
        learner.predict("text", "a")  # type: ignore[arg-type]


@pytest.mark.parametrize("x", [X, X["tokens"]], ids=["dict", "tokens"])
def test_gmed_refuses_inputs_that_it_cannot_edit(x: Any) -> None:
    learner = Learner(_Both(), GMED(), memory=Reservoir(5, dtype=torch.float32))
    learner.add_task("words", classes=3)
    with pytest.raises(SpclError, match=r"method 'gmed' edits inputs, but the inputs of task 'words' are .*int64\[7\]"):
        learner.step({"words": (x, Y)})


def test_targets_of_dicts_may_be_of_any_kind() -> None:
    learner = Learner(Text(), SORO(), memory=Reservoir(5))
    learner.add_task("score", head=nn.Linear(5, 1), loss=mse_loss)
    for step in range(3):
        report = learner.step({"score": (text(4, step), torch.ones(4, 1))})
    assert not report.skipped
    assert learner.evaluate([(X, torch.ones(4, 1))], "score") == pytest.approx(
        float(mse_loss(learner.predict(X, "score"), torch.ones(4, 1)))
    )


def test_inputs_without_a_batch_are_refused_by_live_streams() -> None:
    def source() -> Iterator[Any]:
        yield {"text": X}, Y

    with LiveStream({"a": source()}, on_failure=lambda *_: None) as live:
        assert list(live) == []
    assert isinstance(live.failures["a"].exception, DataError)


# -- samples without labels


def some_unlabelled(seed: int, missing: Iterable[int]) -> tuple[Tensor, Tensor]:
    x, y = batch(6, 3, seed)
    y[list(missing)] = -100
    return x, y


@pytest.mark.parametrize("loss", [None, CrossEntropy(0.1)], ids=["plain", "smoothed"])
@scenarios
def test_a_step_leaves_out_what_has_no_label(scenario: str, loss: CrossEntropy | None) -> None:
    def trained(*steps: dict[str, Any]) -> tuple[Learner, list[StepReport]]:
        torch.manual_seed(0)
        learner = Learner(TinyResNet(), DERPP(), memory=Reservoir(9), scenario=scenario)
        learner.add_task("a", classes=3, loss=loss)
        learner.add_task("b", classes=3, loss=loss)
        return learner, [learner.step(batches) for batches in steps]

    (x, y), other = batch(6, 3, 0), batch(6, 3, 9)
    kept = (x[[0, 2, 3]], y[[0, 2, 3]])
    found, reports = trained(
        {"a": some_unlabelled(0, [1, 4, 5]), "b": other}, {"a": other, "b": some_unlabelled(0, range(6))}
    )
    expected, _ = trained({"a": kept, "b": other}, {"a": other})
    assert_same(complete_state(found), complete_state(expected))
    assert [report.unlabelled for report in reports] == [{"a": 3}, {"b": 6}]
    assert set(reports[1].losses) == {"a", "memory"}


def test_a_step_without_any_label_changes_nothing() -> None:
    learner = Learner(TinyResNet(), SORO(), memory=Reservoir(9))
    learner.add_task("a", classes=3)
    for _ in range(2):
        before = complete_state(learner)
        report = learner.step({"a": some_unlabelled(0, range(6))})
        assert (report.losses, report.skipped, report.unlabelled) == ({}, {}, {"a": 6})
        assert_same(complete_state(learner)["backbone"], before["backbone"])
        assert_same(complete_state(learner)["memory"], before["memory"])
        learner.step({"a": batch(6, 3, 1)})
    assert learner.steps == 4


def test_other_wrong_labels_are_refused_beside_missing_ones() -> None:
    learner = Learner(TinyResNet(), SORO())
    learner.add_task("a", classes=3)
    x, y = some_unlabelled(0, [1])
    y[0] = -1
    with pytest.raises(TaskError, match="task 'a' has classes 0 to 2, but the batch has label -1"):
        learner.step({"a": (x, y)})


def test_a_head_of_ones_own_sees_all_targets() -> None:
    learner = Learner(nn.Flatten(), SORO())
    learner.add_task("pixels", head=nn.Sequential(nn.Linear(32, 32), nn.Unflatten(1, (2, 16))), loss=cross_entropy)
    y = torch.full((6, 16), -100)
    y[:, 0] = 1
    report = learner.step({"pixels": (batch(6, 3, 0)[0], y)})
    assert isfinite(report.losses["pixels"])
    assert report.unlabelled == {}


@scenarios
def test_evaluation_leaves_out_what_has_no_label(scenario: str) -> None:
    learner = Learner(TinyResNet(), SORO(), scenario=scenario)
    learner.add_task("a", classes=3)
    learner.step({"a": batch(6, 3, 0)})
    x, y = batch(6, 3, 4)
    missing, all_missing = some_unlabelled(4, [0, 5]), some_unlabelled(4, range(6))
    for task in ("a",) if scenario == "task" else ("a", None):
        expected = learner.evaluate([(x[1:5], y[1:5])], task)
        assert learner.evaluate([missing, all_missing], task) == expected
        with pytest.raises(TaskError, match="no batch with labels"):
            learner.evaluate([all_missing], task)
