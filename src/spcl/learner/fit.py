"""Training on a stream: the one loop around steps, with functions that are called on the way."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from spcl._util.files import locked, user_errors
from spcl.batches import BatchLike
from spcl.engine.base import Stateful
from spcl.errors import OtherRankError, SpclError, TaskError, is_out_of_memory
from spcl.learner.step import StepReport

if TYPE_CHECKING:
    from spcl.learner.learner import Learner


class MomentLike(Protocol):
    """An item of a stream: batches by source, the sources that start with them, and the sources that end after them."""

    @property
    def batches(self) -> Mapping[str, BatchLike]:
        """(inputs, targets) of every source that has data; may be empty."""
        ...

    @property
    def started(self) -> Sequence[str]:
        """The sources whose first batch is among these, in this life of theirs."""
        ...

    @property
    def ended(self) -> Sequence[str]:
        """The sources without further batches, unless they start again."""
        ...


class Fit:
    """Trains a learner on streams; for the arguments see :meth:`Learner.fit`."""

    def __init__(
        self,
        learner: "Learner",
        *,
        checkpoint: str | os.PathLike[str] | None,
        every: float,
        sources: Mapping[str, Stateful],
        on_start: Callable[[str], object] | None,
        before_step: Callable[[Mapping[str, BatchLike]], object] | None,
        on_step: Callable[[StepReport], object] | None,
        on_end: Callable[[str], object] | None,
        on_refused: Callable[[str, BatchLike | None, SpclError], object] | None,
        on_moment: Callable[[MomentLike, StepReport | None], object] | None,
        on_checkpoint: Callable[[], object] | None,
        meanwhile: Callable[[], object] | None,
    ) -> None:
        if not isinstance(every, int | float) or not every >= 0:
            raise SpclError(f"every is {every!r}; give the seconds between checkpoints, at least 0")
        self._learner = learner
        self._checkpoint = checkpoint
        self._every = every
        self._sources = sources
        self._on_start = on_start
        self._before_step = before_step
        self._on_step = on_step
        self._on_end = on_end
        self._on_refused = on_refused
        self._on_moment = on_moment
        self._on_checkpoint = on_checkpoint
        self._meanwhile = meanwhile

    def run(self, stream: Iterable[MomentLike]) -> None:
        """Train until the stream ends; a checkpoint is the state between two moments."""
        with self._own_checkpoint():
            self._run(stream)

    @contextmanager
    def _own_checkpoint(self) -> Iterator[None]:
        """Lock the checkpoint's path within the block; raise an error on all ranks if somebody else trains on it."""
        ranks = self._learner.distributed
        with ExitStack() as held:
            if ranks is None:
                self._lock(held)
            else:
                ranks.attempted(lambda: (ranks.is_first and self._lock(held), 0.0))
            yield

    def _lock(self, held: ExitStack) -> bool:
        """Hold the lock until the stack ends; return False if there is nothing to lock."""
        path = None if self._checkpoint is None else Path(self._checkpoint).resolve()
        if path is None or not path.parent.is_dir():  # without a folder, saving says what is wrong
            return False
        with user_errors(path):
            is_ours = held.enter_context(locked(path.with_name(f".{path.name}.lock")))
        if not is_ours:
            raise SpclError(
                f"another fit is saving to {self._checkpoint}, and each would overwrite what the other one saves; wait "
                f"until it has ended, or give another checkpoint"
            )
        return True

    def _run(self, stream: Iterable[MomentLike]) -> None:
        saved_at = time.monotonic()
        for moment in stream:
            if not hasattr(moment, "batches"):
                raise SpclError(
                    f"the stream must yield moments, but it yields a {type(moment).__name__}; "
                    f"merge sources by spcl.streams.LiveStream({{name: source}})"
                )
            self._train(stream, moment)
            if self._checkpoint is not None and self._is_any(time.monotonic() - saved_at >= self._every):
                self._save(stream)
                saved_at = time.monotonic()
        self._save(stream)

    def _train(self, stream: Iterable[MomentLike], moment: MomentLike) -> None:
        """Train on a moment; what cannot be learned is skipped, then reported, or raised after everything else."""
        refused = self._start(moment.started, stream)
        batches = {name: batch for name, batch in moment.batches.items() if name not in refused}
        report = self._step(batches, getattr(stream, "prefetch", None), refused)
        if self._on_refused is not None:
            for name, error in refused.items():
                self._on_refused(name, moment.batches.get(name), error)
        for name in moment.ended:
            if self._learner.model.answers(name):
                self._finish(name)
        _call(self._on_moment, moment, report)
        if refused and self._on_refused is None:
            self._save(stream)
            _raise(refused)

    def _start(self, names: Iterable[str], stream: object) -> dict[str, SpclError]:
        """Add the sources that are new or return; return the errors of those that cannot be added, by source."""
        refused: dict[str, SpclError] = {}
        for name in names:
            try:
                self._add(name, stream)
            except SpclError as error:
                if self._on_refused is None and not isinstance(error, TaskError):
                    raise
                refused[name] = error
        return refused

    def _add(self, name: str, stream: Any) -> None:
        learner = self._learner
        known = learner.model.answers(name)
        said = getattr(stream, "tasks", {}).get(name)
        if known and said is not None and [said] != (tasks := [source.task.name for source in known]) and said != tasks:
            raise TaskError(f"the stream says that source {name!r} answers {said!r}, but it answers {tasks}")
        if any(not source.finished for source in known):
            return
        if known:
            learner.add_source(name)  # it returns
        elif self._on_start is not None:
            self._on_start(name)
        else:
            self._add_new(name, getattr(stream, "tasks", {}).get(name, name), stream)
        if not learner.model.answers(name):
            raise TaskError(
                f"source {name!r} starts, but was not added; call add_task or add_source before fit, or in the "
                f"function that you pass as on_start="
            )

    def _add_new(self, name: str, task: str | Sequence[str], stream: Any) -> None:
        """Add a source as the stream describes it, and its tasks if they are new."""
        classes, encoders = getattr(stream, "classes", {}), getattr(stream, "encoders", {})
        tasks = [task] if isinstance(task, str) else task
        for each in tasks:
            if each not in self._learner.tasks and each in classes:
                self._learner.add_task(each, classes=classes[each])
        if all(each in self._learner.tasks for each in tasks) and (task != name or name in encoders):
            self._learner.add_source(name, task=task, encoder=encoders.get(name))

    def _finish(self, name: str) -> None:
        try:
            self._learner.finish_source(name)
        except SpclError as error:
            if self._on_refused is None:
                raise
            self._on_refused(name, None, error)
        else:
            _call(self._on_end, name)

    def _step(
        self,
        batches: Mapping[str, BatchLike],
        prefetch: Callable[[], object] | None,
        refused: dict[str, SpclError],
    ) -> StepReport | None:
        """Make a step of the batches that can be learned; note the errors of the others."""
        if batches:
            _call(self._before_step, batches)
        while batches:
            try:
                with self._learner._while_computing(self._meanwhile, prefetch):
                    report = self._learner.step(batches)
            except Exception as error:
                found = self._errors(batches, error)
                if not found:  # of no batch alone
                    raise
                refused |= found
                batches = {name: batch for name, batch in batches.items() if name not in found}
            else:
                _call(self._on_step, report)
                return report
        return None

    def _errors(self, batches: Mapping[str, BatchLike], error: Exception) -> Mapping[str, SpclError]:
        """Return the errors of the batches that made a step fail; with ranks, only if all found the same tasks."""
        if is_out_of_memory(error) or not (isinstance(error, TaskError | OtherRankError) or self._on_refused):
            return {}
        ranks = self._learner.distributed
        if ranks is None:
            return self._learner.find_errors(batches)
        if not ranks.has_raised(error):  # the others train on
            return {}
        found = self._learner.find_errors(batches)
        return found if ranks.gather_objects([*found]) == [[*found]] * ranks.size else {}

    def _is_any(self, condition: bool) -> bool:
        """Return whether the condition holds on any rank: all ranks save together."""
        ranks = self._learner.distributed
        return condition if ranks is None else ranks.any(condition)

    def _save(self, stream: Any) -> None:
        if self._checkpoint is not None:
            sources: dict[str, Any] = {**self._sources}
            if hasattr(stream, "state_dict"):
                sources["stream"] = stream
            self._learner.save(self._checkpoint, **sources)
            if hasattr(stream, "commit"):
                stream.commit()
            _call(self._on_checkpoint)


def _call(function: Callable[..., object] | None, *arguments: object) -> None:
    if function is not None:
        function(*arguments)


def _raise(refused: Mapping[str, SpclError]) -> NoReturn:
    """Raise the first error; attach the other errors, and what to do, as notes."""
    error, *others = refused.values()
    for other in others:
        error.add_note(str(other))
    error.add_note("all other batches of that moment were learned; call fit again to continue with the next moment")
    raise error
