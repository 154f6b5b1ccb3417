"""Batches survive the wire, and anything else is refused with a reason."""

import json
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from list_hub import batch, damaged
from spcl.errors import DataError, TaskError
from spcl.sources import (
    announce,
    decode,
    encode_batch,
    encode_start,
    sequence_of,
)
from spcl.sources.wire import _layout, describe_task, stamped

TWO = announce("a", classes=2)


SHAPES = st.lists(st.integers(0, 3), max_size=2)


DTYPES = st.sampled_from([torch.float32, torch.float64, torch.uint8, torch.int64, torch.bool, torch.bfloat16])


@st.composite
def tensors(draw: st.DrawFn, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    values = torch.randn(rows, *draw(SHAPES), generator=generator)
    return values.to(draw(DTYPES))


@st.composite
def batches(draw: st.DrawFn) -> tuple[Any, Tensor]:
    rows = draw(st.integers(1, 3))
    names = st.dictionaries(st.text(min_size=1, max_size=5), tensors(rows), min_size=1, max_size=3)
    parts = st.lists(tensors(rows), min_size=1, max_size=12).map(tuple)
    return draw(st.one_of(tensors(rows), names, parts)), draw(tensors(rows))


@given(batches())
@settings(max_examples=60, deadline=None)
def test_batches_survive_the_wire(given_batch: tuple[Any, Tensor]) -> None:
    data = encode_batch(given_batch, announce("a", classes=("x", "ü")))
    letter = decode(data, source="a")
    assert letter.batch is not None
    assert letter.announced == announce("a", classes=["x", "ü"])
    (x, y), (sent, targets) = letter.batch, given_batch
    assert type(x) is type(sent)
    pairs = [(y, targets)]
    if isinstance(sent, dict):
        assert x.keys() == sent.keys()
        pairs += [(x[name], sent[name]) for name in sent]
    else:
        pairs += list(zip(x, sent, strict=True)) if isinstance(sent, tuple) else [(x, sent)]
    for one, other in pairs:
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_parts_that_share_memory_can_be_sent() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    letter = decode(encode_batch(((x, x.T.reshape(2, 3), x[:, ::2]), x[:, 0])))
    assert letter.batch is not None
    assert [part.tolist() for part in letter.batch[0]][2] == [[0, 2], [3, 5]]


def test_damaged_bytes_are_letters_or_data_errors() -> None:
    counts = {"letter": 0, "error": 0}
    for data in damaged(3000, seed=1):
        try:
            decode(data)
        except DataError:
            counts["error"] += 1
        else:
            counts["letter"] += 1
    assert min(counts.values()) > 50, counts


@pytest.mark.parametrize(
    ("classes", "kind"),
    [
        (0, "classification"),
        (None, "classification"),
        (["a", "a"], "multilabel"),
        (["\ud800", "b"], "multilabel"),
        (10**9, "regression"),
    ],
)
def test_impossible_tasks_are_refused(classes: Any, kind: Any) -> None:
    with pytest.raises(TaskError, match="task 'a'"):
        describe_task("a", kind, classes)


def test_a_known_header_lets_no_wrong_body_in() -> None:
    first = encode_batch(batch(1), TWO)
    length = int.from_bytes(first[:8], "little")
    second = first.replace(torch.ones(6).numpy().tobytes(), torch.full((6,), 2.0).numpy().tobytes())
    for data, expected in ((first, 1.0), (second, 2.0), (bytearray(second), 2.0)):
        letter = decode(data)
        assert letter.batch is not None
        assert letter.batch[0].tolist() == [[expected] * 3] * 2
    for wrong in (first[:-1], first + b"\0", first[: 8 + length], first[:7], b""):
        with pytest.raises(DataError, match="no safetensors"):
            decode(wrong)


def test_tensors_may_be_changed_and_begin_at_any_byte() -> None:
    x, y = torch.arange(6, dtype=torch.float32).view(2, 3), torch.tensor([0, 1])
    for padding in range(8):
        entries = {
            "x": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "y": {"dtype": "I64", "shape": [2], "data_offsets": [24, 40]},
        }
        header = json.dumps(entries).encode() + b" " * padding
        letter = decode(struct.pack("<Q", len(header)) + header + x.numpy().tobytes() + y.numpy().tobytes())
        assert letter.batch is not None
        found = letter.batch[0]
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, x)
        assert torch.equal(letter.batch[1], y)
        assert found.data_ptr() % 4 == letter.batch[1].data_ptr() % 8 == 0
        found += 1
        assert torch.equal(found, x + 1)


def test_a_number_changes_nothing_else_of_a_message() -> None:
    plain = encode_batch(batch(3), TWO)
    for number in (0, 9, 10, 10**18 - 1):
        numbered = stamped(plain, "p", number)
        letter, expected = decode(numbered), decode(plain)
        assert letter.batch is not None
        assert expected.batch is not None
        assert torch.equal(letter.batch[0], expected.batch[0])  # type: ignore[arg-type]
        assert letter.announced == expected.announced
        assert sequence_of(numbered) == ("p", number)
        assert int.from_bytes(numbered[:8], "little") % 8 == 0
    assert sequence_of(plain) is None
    assert encode_batch(batch(3), TWO) == plain


def test_numbered_messages_are_checked_by_one_look_at_their_header() -> None:
    decode(stamped(encode_batch(batch(0), TWO), "another", 1))
    before = _layout.cache_info().misses
    for number in range(100, 200):
        decode(stamped(encode_batch(batch(number), TWO), "another", number))
    assert _layout.cache_info().misses == before


@pytest.mark.parametrize("encoder", [None, "affine", {"name": "low-rank", "rank": 2}])
def test_a_source_says_its_task_and_its_encoder(encoder: Any) -> None:
    announced = announce("watch-1", classes=["sit", "walk"], task="activity", encoder=encoder)
    letter = decode(encode_start(announced), source="watch-1")
    assert letter.announced == announced
    assert letter.announced.task.name == "activity"
    old = announce("activity", classes=["sit", "walk"])
    assert decode(encode_start(old), source="activity").announced == old  # as messages of before said it


@pytest.mark.parametrize(
    "wrong", [{"task": "../up"}, {"encoder": 7}, {"encoder": {"rank": 2}}, {"encoder": "a" * 2000}]
)
def test_impossible_tasks_and_encoders_of_sources_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match="cannot"):
        announce("watch-1", classes=2, **wrong)
    values = json.dumps({"kind": "classification", "classes": 2} | wrong)
    data = encode_start(announce("watch-1", classes=2))
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"]["task"] = values
    text = json.dumps(header).encode()
    with pytest.raises(DataError, match="cannot"):
        decode(struct.pack("<Q", len(text)) + text, source="watch-1")
