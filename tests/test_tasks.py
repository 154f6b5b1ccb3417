"""The check of targets."""

import re

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from spcl.errors import TaskError
from spcl.tasks import Task, TaskSource, check_labels_of_sources


@pytest.mark.parametrize(("place", "label"), [(0, 4), (8, -1)])
def test_wrong_labels_among_many_name_their_task(place: int, label: int) -> None:
    tasks = [Task(str(number), 4, cross_entropy, None, 0) for number in range(9)]
    targets: list[tuple[TaskSource, Tensor]] = [(TaskSource(task.name, task), torch.randint(4, (6,))) for task in tasks]
    numbers = Task("regression", None, cross_entropy, None, 0)
    targets.insert(3, (TaskSource("regression", numbers), torch.randn(6, 2)))
    check_labels_of_sources(targets)
    wrong = [pair for pair in targets if pair[0].task.classes is not None][place]
    wrong[1][2] = label
    with pytest.raises(
        TaskError, match=re.escape(f"task '{place}' has classes 0 to 3, but the batch has label {label}")
    ):
        check_labels_of_sources(targets)
