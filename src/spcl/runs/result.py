"""The result of a complete run: the typed content of ``result.json``."""

import re
from collections.abc import Iterable
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
)

from spcl.data import ImageData, SourceData
from spcl.runs.tasks import Metric

__all__ = ["DataSummary", "Environment", "RunResult", "TaskResult", "common_measure"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class DataSummary(_Record):
    """The data of a run: its name, the number of samples, their shape and the number of classes.

    The shape is empty where the data is of several sources whose samples differ.
    """

    name: str
    train: int
    test: int
    shape: tuple[int, ...]
    classes: int

    @classmethod
    def of(cls, data: ImageData | SourceData) -> Self:
        """Summarise a data set.

        >>> import torch
        >>> images, labels = torch.zeros(4, 1, 28, 28, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])
        >>> print(DataSummary.of(ImageData("tiny", images, labels, images[:2], labels[:2], ("zero", "one"))))
        tiny: 4 + 2 samples of 1×28×28, 2 classes
        """
        return cls(
            name=data.name,
            train=data.train_samples,
            test=data.test_samples,
            shape=data.shape,
            classes=data.classes,
        )

    @classmethod
    def from_text(cls, text: str) -> Self | None:
        """Return the summary of the text that earlier versions wrote; None for any other text."""
        pattern = r"\w+\(['\"](.*)['\"]: (\d+) \+ (\d+) samples of ([\d×]+), (\d+) classes\)"
        if (found := re.fullmatch(pattern, text)) is None:
            return None
        name, train, test, shape, classes = found.groups()
        sizes = tuple(map(int, shape.split("×")))
        return cls(name=name, train=int(train), test=int(test), shape=sizes, classes=int(classes))

    def __str__(self) -> str:
        shape = "×".join(map(str, self.shape)) or "several shapes"
        return f"{self.name}: {self.train} + {self.test} samples of {shape}, {self.classes} classes"


class TaskResult(_Record):
    """The score of a task in per cent, when it ended and at the end of the run, and what score it is."""

    at_end: float = Field(strict=True)  # accepts no text and no boolean
    final: float = Field(strict=True)
    metric: Metric = "accuracy"

    @model_serializer(mode="wrap")
    def _without_accuracy(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Name the metric only where it is not accuracy, as in records of earlier versions."""
        content: dict[str, Any] = serialise(self)
        return content if self.metric != "accuracy" else {name: content[name] for name in content if name != "metric"}


class Environment(_Record):
    """Versions and hardware that a run was made with.

    ``plugins`` are the installed packages that added plug-ins by entry points, with their versions; ``ranks`` is the
    number of processes that made the run together, ``split`` that of their task groups and of the ranks in each.

    >>> Environment(spcl="1.0", plugins={"my-things": "0.3"}).model_dump(exclude_none=True)
    {'spcl': '1.0', 'plugins': {'my-things': '0.3'}}
    """

    spcl: str | None = None
    torch: str | None = None
    python: str | None = None
    device: str | None = None
    threads: int | None = None
    git: str | None = None
    plugins: dict[str, str] = Field(default_factory=dict)
    ranks: int = 1
    split: str | None = None

    @model_serializer(mode="wrap")
    def _without_no_plugins(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Name plug-ins and the number of ranks only where there are any, as in records of earlier versions."""
        content: dict[str, Any] = serialise(self)
        unused = [*["plugins"] * (not self.plugins), *["ranks", "split"] * (self.ranks == 1)]
        return {name: value for name, value in content.items() if name not in unused}


class RunResult(_Record):
    """The result of a complete run; accuracies (or other scores) and forgetting are in per cent.

    Attributes:
        accuracy: A, the mean final accuracy of all tasks.
        forgetting: F, the mean difference between a task's final accuracy and that when it ended.
        tasks: the two accuracies of every task; of a regression 100·R², of multi-label targets F1.
        data: name and size of the data.
        fingerprint: checksum of the data.
        confusion: for every classification how often each of its classes (rows) was predicted as each class (columns).
        class_names: the names of the classes or outputs of every task that has names.
        filters: statistics of the filters of every convolution (paper, §5.5); None where they are not finite.
        left_out: (a key of existing files) steps in which a task was skipped because its loss or gradient was not
            finite.
        steps: the number of training steps.
        timeline: the first and last step of every task.
        environment: versions and hardware.
        seconds: the time of every phase.

    Fields that records of earlier versions lack are empty.

    >>> result = RunResult.parse({"accuracy": 80.0, "forgetting": -5.0, "tasks": {"a": {"at_end": 85, "final": 80}}})
    >>> result.tasks["a"].final
    80.0
    >>> RunResult.parse({"accuracy": 80.0})
    """

    scenario: str | None = None
    benchmark: str | None = None
    data: DataSummary | None = None
    method: str | None = None
    preset: str | None = None
    config: int | None = None
    seed: int | None = None
    accuracy: float = Field(strict=True)
    forgetting: float = Field(strict=True)
    tasks: dict[str, TaskResult]
    confusion: dict[str, list[list[int]]] = Field(default_factory=dict)
    class_names: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    filters: dict[str, dict[str, float | None]] = Field(default_factory=dict)
    left_out: dict[str, int] = Field(default_factory=dict)
    steps: int | None = None
    fingerprint: str | None = None
    timeline: tuple[tuple[int, int], ...] = ()
    environment: Environment | None = None
    seconds: dict[str, float] = Field(default_factory=dict)

    @property
    def measure(self) -> str:
        """What A is the mean of: accuracy, or score where a task has another metric.

        >>> tasks = {"speed": {"at_end": 75.0, "final": 70.0, "metric": "R²"}}
        >>> RunResult(accuracy=70.0, forgetting=-5.0, tasks=tasks).measure
        'score'
        """
        return "accuracy" if all(task.metric == "accuracy" for task in self.tasks.values()) else "score"

    @property
    def summary(self) -> str:
        """A and F as text.

        >>> RunResult(accuracy=70.0, forgetting=-5.0, tasks={}).summary
        'accuracy 70.00 %, F -5.00 %'
        """
        return f"{self.measure} {self.accuracy:.2f} %, F {self.forgetting:+.2f} %"

    @field_validator("data", mode="before")
    @classmethod
    def _data_of_earlier_versions(cls, value: Any) -> Any:
        return DataSummary.from_text(value) if isinstance(value, str) else value

    @classmethod
    def parse(cls, content: Any) -> Self | None:
        """Return the result that decoded JSON holds, or None where it holds none."""
        try:
            return cls.model_validate(content)
        except ValidationError:
            return None


def common_measure(results: Iterable[RunResult | None]) -> str:
    """Return what A is the mean of in all these results: accuracy, or score where some have other metrics."""
    return "score" if any(result is not None and result.measure == "score" for result in results) else "accuracy"
