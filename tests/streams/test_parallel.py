"""Label sets split classes, and a parallel stream yields every sample once an epoch, from any position."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spcl.errors import CheckpointError, DataError, SpclError, TimelineError
from spcl.streams import (
    Moment,
    ParallelStream,
    StreamTask,
    Timeline,
    check_label_set,
    draw_label_set,
    split_by_task,
    task_durations,
)

# -- label sets


@given(st.data(), st.integers(1, 80), st.integers(0, 2**32))
def test_every_class_is_in_one_task_and_sizes_are_equal(data: st.DataObject, classes: int, seed: int) -> None:
    tasks = data.draw(st.integers(1, classes))
    label_set = draw_label_set(classes, tasks, seed)
    sizes = [len(task) for task in label_set]
    assert len(sizes) == tasks
    assert sizes == sorted(sizes)
    assert sizes[-1] - sizes[0] <= 1
    assert sorted(label for task in label_set for label in task) == list(range(classes))
    check_label_set(label_set, classes)
    assert label_set == draw_label_set(classes, tasks, seed)


@given(st.lists(st.integers(1, 10), min_size=1, max_size=6))
def test_sizes_can_be_chosen(sizes: list[int]) -> None:
    label_set = draw_label_set(sum(sizes), sizes, seed=1)
    assert [len(task) for task in label_set] == sizes
    check_label_set(label_set, sum(sizes))


def test_label_sets_depend_on_the_seed() -> None:
    assert len({draw_label_set(62, 5, seed) for seed in range(20)}) == 20


@pytest.mark.parametrize(("classes", "tasks"), [(5, 0), (5, 6), (5, -1), (5, (2, 2)), (5, (5, 0)), (5, ())])
def test_impossible_splits_are_refused(classes: int, tasks: int | tuple[int, ...]) -> None:
    with pytest.raises(SpclError, match="5 classes"):
        draw_label_set(classes, tasks, seed=0)


@pytest.mark.parametrize(
    ("label_set", "message"),
    [
        (((0, 1), (2, 2)), "class 2 is in the label set 2 times"),
        (((0, 2),), "class 1 is in the label set 0 times"),
        (((0, 1, 2), ()), "task 1 of the label set has no class"),
        (((0, 1), (2, 3)), "task 1 of the label set has class 3"),
        (((0, 1), (2, -1)), "task 1 of the label set has class -1"),
    ],
)
def test_invalid_label_sets_are_named(label_set: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_label_set(label_set, classes=3)


@given(st.data(), st.integers(1, 12), st.integers(1, 7))
def test_split_agrees_with_a_plain_loop(data: st.DataObject, classes: int, batch_size: int) -> None:
    label_set = draw_label_set(classes, data.draw(st.integers(1, classes)), seed=0)
    labels = data.draw(st.lists(st.integers(0, classes - 1), max_size=40))
    expected = [
        [(i, members.index(label)) for i, label in enumerate(labels) if label in members] for members in label_set
    ]
    split = split_by_task(torch.tensor(labels, dtype=torch.uint8), label_set)
    assert [list(zip(index.tolist(), local.tolist(), strict=True)) for index, local in split] == expected
    assert all(local.dtype == torch.int64 for _, local in split)
    durations = task_durations(torch.tensor(labels, dtype=torch.int32), label_set, batch_size)
    assert durations == tuple(len(range(0, len(members), batch_size)) for members in expected)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 1, 2]), "label 2 belongs to no task"),
        (torch.tensor([0, -1]), "label -1 belongs to no task"),
        (torch.tensor([0.0, 1.0]), "torch.float32"),
        (torch.tensor([[0], [1]]), r"shape \(2, 1\)"),
    ],
)
def test_invalid_labels_are_named(labels: torch.Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        split_by_task(labels, ((0,), (1,)))


def test_invalid_batch_size_is_named() -> None:
    with pytest.raises(SpclError, match="batch size is 0"):
        task_durations(torch.tensor([0]), ((0,),), batch_size=0)


# -- one epoch


@st.composite
def streams(draw: st.DrawFn) -> tuple[ParallelStream, list[int]]:
    """A stream whose samples are their own indices, and the classes of its samples."""
    classes = draw(st.integers(1, 8))
    label_set = draw_label_set(classes, draw(st.integers(1, classes)), draw(st.integers(0, 99)))
    labels = draw(st.permutations([*range(classes), *draw(st.lists(st.integers(0, classes - 1), max_size=30))]))
    batch_size = draw(st.integers(1, 6))
    durations = task_durations(torch.tensor(labels), label_set, batch_size)
    timeline = Timeline.parallel(durations, draw(st.integers(0, 99)), gap=draw(st.integers(0, 4)))
    x = torch.arange(len(labels))
    return ParallelStream(x, torch.tensor(labels), label_set, timeline, batch_size, draw(st.integers(0, 99))), labels


def small_stream(seed: int = 0, timeline: Timeline | None = None, **options: object) -> ParallelStream:
    labels = torch.arange(6).repeat(10)
    timeline = timeline or Timeline(((0, 9), (4, 13), (4, 13)))
    return ParallelStream(
        torch.arange(60),
        labels,
        ((5, 0), (1, 2), (4, 3)),
        timeline,
        2,
        seed,
        **options,  # type: ignore[arg-type]
    )


def assert_same(moments: list[Moment], others: list[Moment]) -> None:
    assert len(moments) == len(others)
    for moment, other in zip(moments, others, strict=True):
        assert (moment.step, moment.started, moment.ended) == (other.step, other.started, other.ended)
        assert list(moment.batches) == list(other.batches)
        for (x, y), (other_x, other_y) in zip(moment.batches.values(), other.batches.values(), strict=True):
            assert torch.equal(x, other_x)
            assert torch.equal(y, other_y)


def batches_of(name: str, moments: list[Moment]) -> list[tuple[Any, Tensor]]:
    return [moment.batches[name] for moment in moments if name in moment.batches]


@given(streams())
def test_every_sample_is_seen_once_with_its_local_label(case: tuple[ParallelStream, list[int]]) -> None:
    stream, labels = case
    moments = list(stream)
    for name, members in zip(stream.names, stream.label_set, strict=True):
        batches = batches_of(name, moments)
        samples = torch.cat([x for x, _ in batches]).tolist()
        assert sorted(samples) == [i for i, label in enumerate(labels) if label in members]
        assert torch.cat([y for _, y in batches]).tolist() == [members.index(labels[i]) for i in samples]
        assert all(len(x) == len(y) == stream.batch_size for x, y in batches[:-1])
        assert 1 <= len(batches[-1][0]) <= stream.batch_size


@given(streams())
def test_moments_follow_the_timeline(case: tuple[ParallelStream, list[int]]) -> None:
    stream, _ = case
    moments = list(stream)
    assert len(moments) == len(stream)
    assert all(earlier.step < later.step for earlier, later in pairwise(moments))
    for moment in moments:
        active = stream.timeline.active(moment.step)
        assert active
        assert list(moment.batches) == [stream.names[task] for task in active]
    for name, (first, last) in zip(stream.names, stream.timeline.spans, strict=True):
        assert [moment.step for moment in moments if name in moment.started] == [first]
        assert [moment.step for moment in moments if name in moment.ended] == [last]
        assert [moment.step for moment in moments if name in moment.batches] == list(range(first, last + 1))


@settings(max_examples=50)
@given(streams(), st.data())
def test_stream_resumes_at_any_position(case: tuple[ParallelStream, list[int]], data: st.DataObject) -> None:
    stream, _ = case
    expected = [stream[position] for position in range(len(stream))]
    position = data.draw(st.integers(0, len(stream)))
    first = [moment for _, moment in zip(range(position), stream, strict=False)]
    state = stream.state_dict()
    rest = list(stream)
    assert_same([*first, *rest], expected)
    assert list(stream) == []
    stream.load_state_dict(state)
    assert_same(list(stream), rest)


def test_prefetching_does_not_change_moments_or_position() -> None:
    plain, ahead = small_stream(), small_stream()
    moments = []
    ahead.prefetch()
    for number, moment in enumerate(ahead):
        moments.append(moment)
        ahead.prefetch()
        assert ahead.state_dict()["position"] == number + 1
        if number == 6:
            ahead.load_state_dict({"position": 3, "moments": len(ahead)})
            break
    moments = moments[:3] + list(ahead)
    assert_same(moments, list(plain))


def test_same_seed_gives_same_stream() -> None:
    assert_same(list(small_stream(seed=3)), list(small_stream(seed=3)))
    different = [
        torch.cat([x for x, _ in batches_of("task-0", list(small_stream(seed=seed)))]).tolist() for seed in range(5)
    ]
    assert len(set(map(tuple, different))) == 5


def test_tasks_are_shuffled_independently() -> None:
    moments = list(small_stream())
    orders = {tuple((torch.cat([x for x, _ in batches_of(f"task-{i}", moments)]) // 6).tolist()) for i in range(3)}
    assert len(orders) == 3


def test_batches_of_a_task_are_independent_of_the_paradigm() -> None:
    parallel = list(small_stream())
    for timeline in (Timeline.joint((10, 10, 10)), Timeline.serial((10, 10, 10))):
        other = list(small_stream(timeline=timeline))
        for name in ("task-0", "task-1", "task-2"):
            for (x, y), (other_x, other_y) in zip(batches_of(name, parallel), batches_of(name, other), strict=True):
                assert torch.equal(x, other_x)
                assert torch.equal(y, other_y)


def test_names_and_classes() -> None:
    stream = small_stream(names=["camera", "lidar", "radar"])
    assert stream.classes == {"camera": 2, "lidar": 2, "radar": 2}
    assert stream[0].started == ("camera",)
    assert stream[4].started == ("lidar", "radar")
    with pytest.raises(SpclError, match="not 3 different names"):
        small_stream(names=["camera", "lidar", "camera"])
    with pytest.raises(SpclError, match="not 3 different names"):
        small_stream(names=["camera"])


def test_samples_keep_their_dtype_and_shape() -> None:
    images = torch.randint(0, 256, (8, 3, 4, 4), dtype=torch.uint8)
    stream = ParallelStream(images, torch.tensor([0, 1] * 4), ((0, 1),), Timeline(((0, 2),)), 3, seed=0)
    assert [tuple(moment.batches["task-0"][0].shape) for moment in stream] == [(3, 3, 4, 4), (3, 3, 4, 4), (2, 3, 4, 4)]
    assert stream[0].batches["task-0"][0].dtype == torch.uint8
    assert stream[0].batches["task-0"][1].dtype == torch.int64


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_samples_stay_on_their_device() -> None:
    labels = torch.arange(6).repeat(10)
    spans = Timeline(((0, 9), (4, 13), (4, 13)))
    stream = ParallelStream(torch.arange(60, device="cuda"), labels, ((5, 0), (1, 2), (4, 3)), spans, 2, seed=0)
    for moment, expected in zip(stream, small_stream(), strict=True):
        for name, (x, y) in moment.batches.items():
            assert x.is_cuda
            assert not y.is_cuda
            assert torch.equal(x.cpu(), expected.batches[name][0])


def test_mismatched_timeline_is_reported_with_the_difference() -> None:
    with pytest.raises(DataError) as caught:
        small_stream(timeline=Timeline(((0, 9), (4, 10), (4, 25))))
    message = str(caught.value)
    assert "task 0" not in message
    assert "task 1 has 7 steps and needs 10 (3 too few)" in message
    assert "task 2 has 22 steps and needs 10 (12 too many)" in message


def test_inconsistent_arguments_are_refused() -> None:
    x, labels, timeline = torch.zeros(4), torch.tensor([0, 0, 1, 1]), Timeline(((0, 1), (0, 1)))
    with pytest.raises(DataError, match="4 samples and 3 labels"):
        ParallelStream(x, labels[:3], ((0,), (1,)), timeline, 1, seed=0)
    with pytest.raises(DataError, match="there are 1 tasks, but the timeline has 2"):
        ParallelStream(x, labels, ((0, 1),), timeline, 1, seed=0)
    with pytest.raises(DataError, match=r"task 1 has no sample: its classes \(2,\)"):
        ParallelStream(x, labels, ((0, 1), (2,)), timeline, 1, seed=0)
    with pytest.raises(DataError, match="class 0 is in the label set 2 times"):
        ParallelStream(x, labels, ((0, 1), (0,)), timeline, 1, seed=0)


@pytest.mark.parametrize("state", [{"position": 3, "moments": 13}, {"position": 15, "moments": 14}])
def test_position_of_another_stream_is_refused(state: dict[str, int]) -> None:
    stream = small_stream()
    with pytest.raises(CheckpointError, match=f"position {state['position']} of {state['moments']} moments"):
        stream.load_state_dict(state)
    assert stream.state_dict() == {"position": 0, "moments": 14}


@pytest.mark.parametrize("position", [3.0, None, True, "3"])
def test_a_position_that_is_no_number_is_refused(position: object) -> None:
    with pytest.raises(CheckpointError, match=f"position of the stream is {position!r} in the checkpoint"):
        small_stream().load_state_dict({"position": position, "moments": 14})


# -- epochs, and tasks with samples of their own


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
