import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spcl.errors import DataError, SpclError
from spcl.streams import check_label_set, draw_label_set, split_by_task, task_durations


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
