from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spcl.errors import CheckpointError, DataError, SpclError
from spcl.streams import Moment, ParallelStream, Timeline, draw_label_set, task_durations


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


def batches_of(name: str, moments: list[Moment]) -> list[tuple[Tensor, Tensor]]:
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
    with pytest.raises(SpclError, match="not 3 different ones"):
        small_stream(names=["camera", "lidar", "camera"])
    with pytest.raises(SpclError, match="not 3 different ones"):
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
