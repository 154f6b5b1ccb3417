"""What a service knows of its tasks, saved in the checkpoint with the learner and the positions."""

from dataclasses import dataclass, field
from typing import Any

from spcl.runs.tasks import RunTask
from spcl.sources import Schema

__all__ = ["Records", "TaskRecord"]


@dataclass
class TaskRecord:
    """A task.

    Attributes:
        name: its name.
        schema: what its targets are; None while it is not known.
        finished: whether it has ended.
        batches: how many were learned.
        samples: how many were learned.
        dead_letters: how many messages could not be learned.
        late: how many messages were not learned because it had ended.
    """

    name: str
    schema: Schema | None = None
    finished: bool = False
    batches: int = 0
    samples: int = 0
    dead_letters: int = 0
    late: int = 0

    @property
    def run_task(self) -> RunTask:
        """The task as runs describe it."""
        assert self.schema is not None
        schema = self.schema
        return RunTask(name=self.name, kind=schema.kind, outputs=schema.outputs, class_names=schema.names)

    def state_dict(self) -> dict[str, Any]:
        """Return the task as plain data."""
        schema = None if self.schema is None else self.schema.model_dump(mode="json")
        return vars(self) | {"schema": schema}


@dataclass
class Records:
    """All tasks by name, and how far requests are carried out.

    Attributes:
        tasks: in the order in which they were seen.
        request: the position of the last request that was carried out; None before the first.
        learner: the settings that the learner was made with.
    """

    tasks: dict[str, TaskRecord] = field(default_factory=dict)
    request: str | None = None
    learner: dict[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Return the records as plain data."""
        tasks = [task.state_dict() for task in list(self.tasks.values())]
        return {"tasks": tasks, "request": self.request, "learner": self.learner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from :meth:`state_dict`."""
        for saved in state["tasks"]:
            schema = None if saved["schema"] is None else Schema.parsed(saved["schema"])
            self.tasks[saved["name"]] = TaskRecord(**saved | {"schema": schema})
        self.request = state["request"]
        self.learner = state["learner"]
