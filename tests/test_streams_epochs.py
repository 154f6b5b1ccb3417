"""Epochs pass over all samples again, in another order; tasks may have samples of their own, of any structure."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spcl.errors import DataError, SpclError, TimelineError
from spcl.streams import Moment, ParallelStream, StreamTask, Timeline, draw_label_set, task_durations


def batches_of(name: str, moments: list[Moment]) -> list[tuple[Any, Tensor]]:
    return [moment.batches[name] for moment in moments if name in moment.batches]


def make_stream(epochs: int, batch_size: int = 4, seed: int = 3) -> ParallelStream:
    labels = torch.arange(6).repeat(7)
    label_set = draw_label_set(6, 2, 0)
    timeline = Timeline.parallel(task_durations(labels, label_set, batch_size), 1).stretched(epochs)
    return ParallelStream(torch.arange(42), labels, label_set, timeline, batch_size, seed, epochs=epochs)


@given(st.integers(1, 4), st.integers(1, 9))
def test_every_epoch_sees_every_sample_once_with_its_label(epochs: int, batch_size: int) -> None:
    stream = make_stream(epochs, batch_size)
    moments = list(stream)
    for name, members in zip(stream.names, stream.label_set, strict=True):
        samples = torch.cat([x for x, _ in batches_of(name, moments)])
        labels = torch.cat([y for _, y in batches_of(name, moments)])
        assert [members[label] for label in labels.tolist()] == (samples % 6).tolist()
        mine = [sample for sample in range(42) if sample % 6 in members]
        for epoch in range(epochs):
            seen = samples[epoch * len(mine) : (epoch + 1) * len(mine)]
            assert sorted(seen.tolist()) == mine


def test_the_first_epoch_is_that_of_a_single_pass_and_the_others_differ() -> None:
    single, three = list(make_stream(1)), list(make_stream(3))
    for name in ("task-0", "task-1"):
        once, often = batches_of(name, single), batches_of(name, three)
        assert len(often) == 3 * len(once)
        epochs = [
            [x.tolist() for x, _ in often[start : start + len(once)]] for start in range(0, len(often), len(once))
        ]
        assert epochs[0] == [x.tolist() for x, _ in once]
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_moments_can_be_read_in_any_order_and_resumed_in_any_epoch() -> None:
    expected = [{name: x.tolist() for name, (x, _) in moment.batches.items()} for moment in make_stream(3)]
    stream = make_stream(3)
    for position in (len(stream) - 1, 0, len(stream) // 2, 1):
        found = {name: x.tolist() for name, (x, _) in stream[position].batches.items()}
        assert found == expected[position]
    stream.load_state_dict({"position": len(stream) // 2, "moments": len(stream)})
    rest = [{name: x.tolist() for name, (x, _) in moment.batches.items()} for moment in stream]
    assert rest == expected[len(stream) // 2 :]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 5), st.integers(0, 99))
def test_a_stretched_timeline_keeps_its_shape(durations: list[int], factor: int, seed: int) -> None:
    timeline = Timeline.parallel(durations, seed, gap=2)
    stretched = timeline.stretched(factor)
    assert stretched.durations == tuple(factor * duration for duration in durations)
    assert all(stretched.active(step) == timeline.active(step // factor) for step in range(stretched.steps))


def test_a_timeline_of_another_number_of_epochs_is_refused() -> None:
    labels = torch.zeros(8, dtype=torch.int64)
    with pytest.raises(TimelineError, match=r"batch size 2 in 3 epochs: task 0 has 4 steps and needs 12 \(8 too few\)"):
        ParallelStream(labels, labels, ((0,),), Timeline(((0, 3),)), 2, 0, epochs=3)
    with pytest.raises(SpclError, match="epochs is 0"):
        ParallelStream(labels, labels, ((0,),), Timeline(((0, 3),)), 2, 0, epochs=0)
    with pytest.raises(SpclError, match="stretched by 0"):
        Timeline(((0, 3),)).stretched(0)


def mixed_tasks() -> list[StreamTask]:
    number = torch.arange(10)
    return [
        StreamTask("text", {"input_ids": number[:, None].expand(10, 4), "mask": number % 2}, number % 3, classes=3),
        StreamTask("speed", (number.float(), -number[:, None].float()), number[:, None].float()),
        StreamTask("images", number[:6, None, None, None].expand(6, 3, 8, 8).byte(), torch.ones(6, 2)),
    ]


def test_tasks_of_any_structure_keep_inputs_and_targets_together() -> None:
    timeline = Timeline(((0, 2), (1, 3), (1, 2))).stretched(2)
    stream = ParallelStream.of_tasks(mixed_tasks(), timeline, batch_size=4, seed=0, epochs=2)
    moments = list(stream)
    assert stream.classes == {"text": 3}
    assert stream.label_set == ((0, 1, 2), (), ())
    texts, speeds, images = (batches_of(name, moments) for name in ("text", "speed", "images"))
    for x, y in texts:
        assert torch.equal(x["input_ids"][:, 0] % 3, y)
        assert torch.equal(x["input_ids"][:, 3] % 2, x["mask"])
    for x, y in speeds:
        assert torch.equal(x[0], y[:, 0])
        assert torch.equal(x[1], -y)
    assert sorted(torch.cat([y for _, y in speeds]).flatten().tolist()) == sorted([*range(10)] * 2)
    assert [x.shape for x, _ in images] == [(4, 3, 8, 8), (2, 3, 8, 8)] * 2


def test_tasks_with_their_own_samples_are_ordered_like_a_data_set_of_classes() -> None:
    stream = make_stream(2)
    split = [[sample for sample in range(42) if sample % 6 in members] for members in stream.label_set]
    tasks = [
        StreamTask(name, torch.tensor(mine), torch.tensor(mine), 3) for name, mine in zip("ab", split, strict=True)
    ]
    own = ParallelStream.of_tasks(tasks, stream.timeline, 4, seed=3, epochs=2)
    for moment, other in zip(stream, own, strict=True):
        for (x, _), (y, _) in zip(moment.batches.values(), other.batches.values(), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": {"a": torch.zeros(3, 1), "b": torch.zeros(2, 1)}}, "has 3, 2 samples and 3 targets"),
        ({"x": torch.zeros(0, 2), "y": torch.zeros(0)}, "task 0 has no sample"),
        ({"x": torch.zeros(9, 2), "y": torch.zeros(9)}, "task 0 has 2 steps and needs 5"),
    ],
)
def test_invalid_tasks_are_refused(change: dict[str, Any], message: str) -> None:
    task = {"name": "a", "x": torch.zeros(3, 2), "y": torch.zeros(3)} | change
    with pytest.raises(DataError, match=message):
        ParallelStream.of_tasks([StreamTask(**task)], Timeline(((0, 1),)), 2, 0)
