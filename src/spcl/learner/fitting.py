"""Training on a stream: tasks are added, trained and finished as its moments say, with checkpoints on the way."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from spcl.batches import BatchLike
from spcl.distributed import World
from spcl.errors import OtherRankError, SpclError, TaskError
from spcl.learner.report import StepReport
from spcl.learner.state import Stateful

__all__ = ["Fitting", "MomentLike", "Trainable"]


class MomentLike(Protocol):
    """An item of a stream: batches by task, the tasks that start with them, and those that end after them."""

    @property
    def batches(self) -> Mapping[str, BatchLike]:
        """(inputs, targets) of every task that has data; may be empty."""
        ...

    @property
    def started(self) -> Sequence[str]:
        """The tasks whose first batch is among these."""
        ...

    @property
    def ended(self) -> Sequence[str]:
        """The tasks without further batches."""
        ...


class Trainable(Protocol):
    """The calls of a learner that training on a stream consists of."""

    distributed: World | None
    """The ranks that train together, or None."""

    @property
    def tasks(self) -> Mapping[str, object]:
        """The tasks added so far."""
        ...

    def add_task(self, name: str, *, classes: int | Sequence[str] | None = None) -> None:
        """Start a task."""
        ...

    def step(self, batches: Mapping[str, BatchLike], meanwhile: Callable[[], object] | None = None) -> StepReport:
        """Make one update."""
        ...

    def find_errors(self, batches: Mapping[str, BatchLike]) -> dict[str, TaskError]:
        """Return why batches cannot be learned, by task."""
        ...

    def finish_task(self, name: str) -> None:
        """End a task."""
        ...

    def save(self, path: str | os.PathLike[str], /, **sources: Stateful) -> None:
        """Write a checkpoint."""
        ...


@dataclass
class Fitting:
    """Trains a learner on streams.

    Attributes:
        learner: the learner.
        checkpoint: the file to save to, or None.
        every: seconds between checkpoints.
        on_start: adds a task that starts, given its name; None for streams with ``classes``.
        on_step: receives the report of every step.
        sources: what else is saved in the checkpoints.
    """

    learner: Trainable
    checkpoint: str | os.PathLike[str] | None
    every: float
    on_start: Callable[[str], object] | None
    on_step: Callable[[StepReport], object] | None
    sources: Mapping[str, Stateful]

    def __post_init__(self) -> None:
        if not isinstance(self.every, int | float) or not self.every >= 0:
            raise SpclError(f"every is {self.every!r}; give the seconds between checkpoints, at least 0")

    def run(self, stream: Iterable[MomentLike]) -> None:
        """Train until the stream ends; a checkpoint is the state between two moments."""
        saved_at = time.monotonic()
        for moment in stream:
            if not hasattr(moment, "batches"):
                raise SpclError(
                    f"the stream must yield moments, but it yields a {type(moment).__name__}; "
                    f"merge sources by spcl.streams.LiveStream({{name: source}})"
                )
            self._train(stream, moment)
            if self._is_any(time.monotonic() - saved_at >= self.every):
                self._save(stream)
                saved_at = time.monotonic()
        self._save(stream)

    def _train(self, stream: Iterable[MomentLike], moment: MomentLike) -> None:
        """Train on a moment; batches that cannot be learned are left out, and raise an error after all others."""
        refused = self._start(moment.started, getattr(stream, "classes", {}))
        self._step(moment.batches, getattr(stream, "prefetch", None), refused)
        for name in moment.ended:
            if name in self.learner.tasks:
                self.learner.finish_task(name)
        if refused:
            self._save(stream)
            _raise(refused)

    def _start(self, names: Iterable[str], classes: Mapping[str, int | Sequence[str]]) -> dict[str, TaskError]:
        """Add the tasks that are new; return the errors of those that cannot be added, by task."""
        refused = {}
        for name in names:
            try:
                self._add(name, classes)
            except TaskError as error:
                refused[name] = error
        return refused

    def _add(self, name: str, classes: Mapping[str, int | Sequence[str]]) -> None:
        if name in self.learner.tasks:
            return
        if self.on_start is not None:
            self.on_start(name)
        elif name in classes:
            self.learner.add_task(name, classes=classes[name])
        if name not in self.learner.tasks:
            raise TaskError(
                f"task {name!r} starts, but was not added; call add_task before fit, or in the function that you pass "
                f"as on_start="
            )

    def _step(
        self,
        batches: Mapping[str, BatchLike],
        meanwhile: Callable[[], object] | None,
        refused: dict[str, TaskError],
    ) -> None:
        """Make a step of the batches that can be learned; note the errors of the others."""
        while remaining := {name: batch for name, batch in batches.items() if name not in refused}:
            try:
                report = self.learner.step(remaining, meanwhile)
            except (TaskError, OtherRankError) as error:
                found = self._errors(remaining, error)
                if not found:  # of no batch alone
                    raise
                refused |= found
            else:
                if self.on_step is not None:
                    self.on_step(report)
                return

    def _errors(self, batches: Mapping[str, BatchLike], error: Exception) -> dict[str, TaskError]:
        """Return why batches of a step that raised an error cannot be learned; of ranks, if all find the same."""
        ranks = self.learner.distributed
        if ranks is None:
            return self.learner.find_errors(batches)
        if not ranks.has_raised(error):  # the others train on
            return {}
        found = self.learner.find_errors(batches)
        return found if ranks.gather_objects([*found]) == [[*found]] * ranks.size else {}

    def _is_any(self, condition: bool) -> bool:
        """Return whether the condition holds on any rank, all of which save together."""
        ranks = self.learner.distributed
        return condition if ranks is None or self.checkpoint is None else ranks.any(condition)

    def _save(self, stream: Any) -> None:
        if self.checkpoint is not None:
            has_state = hasattr(stream, "state_dict")
            self.learner.save(self.checkpoint, **self.sources, **({"stream": stream} if has_state else {}))
            if hasattr(stream, "commit"):
                stream.commit()


def _raise(refused: Mapping[str, TaskError]) -> NoReturn:
    """Raise the first of the errors of batches that were left out; the others, and what to do, are its notes."""
    error, *others = refused.values()
    for other in others:
        error.add_note(str(other))
    error.add_note("all other batches of that moment were learned; call fit again to go on with the next moment")
    raise error
