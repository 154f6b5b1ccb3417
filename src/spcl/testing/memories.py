"""The conformance suite of memories."""

from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from spcl._util.registry import Registry
from spcl.checkpoint import read_checkpoint, write_checkpoint
from spcl.learner import Learner
from spcl.memory import Memory, ReplayBatch
from spcl.methods import ER
from spcl.testing.claims import Claims, left_out, new_backbone, spoilt, state_of, train

CLASSES = 3


def check_memory(make: Callable[..., Memory], *, replays_running: bool | None = None) -> None:
    """Check a memory: a subclass of :class:`spcl.memory.Memory`, or ``make(budget, *, seed, …)``.

    It keeps at most its budget of the observed samples, each with its own target and logits; it draws at most as many
    as asked for, and the same ones for the same seed; a checkpoint can hold its state and resumes it exactly; it copies
    the samples that it stores; and a learner that skips a task stores nothing of the skipped batch.

    Args:
        make: makes the memory from a budget and, if it takes them, ``seed``, ``device`` and ``dtype``.
        replays_running: whether samples of a task are drawn while it runs; None leaves this unchecked.
    """
    claims = Claims("memory", make)
    registry: Registry[Callable[..., Memory]] = Registry("memory", positional=1, keywords=("seed", "device", "dtype"))
    registry.register("checked")(make)

    def new(budget: int = 12, **options: Any) -> Memory:
        with claims.law("it can be made"):
            made = registry.make("checked", budget, seed=1, **options)
        claims.that(isinstance(made, Memory), "it is a memory", repr(made), "an instance of spcl.memory.Memory")
        return made  # type: ignore[no-any-return]

    _check_budget(claims, new, replays_running)
    _check_draws(claims, new)
    _check_targets_and_logits(claims, new)
    _check_memory_state(claims, new)
    _check_copies(claims, new)
    _check_stored_type(claims, new)
    _check_skipped_batches(claims, new)


def _samples(task: int, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return samples that hold their task, their number and their class, so that each can be recognised."""
    numbers = torch.arange(first, first + count)
    y = numbers % CLASSES
    return torch.stack([torch.full_like(numbers, task), numbers, y], dim=1).float(), y


def _live(memory: Memory, first: int = 0, last: int = 30, after: Callable[[], None] = lambda: None) -> None:
    """Let memory observe batches of tasks that start and finish; call ``after`` after every change."""
    for step in range(first, last):
        for task, (start, end) in enumerate(((0, 9), (3, 19), (8, 29), (20, 29))):
            name = f"task {task}"
            if step == start:
                memory.start(name, None if task == 3 else CLASSES)
            if start <= step <= end:
                memory.observe(name, *_samples(task, 5 * (step - start), 5))
                after()
            if step == end:
                memory.finish(name)
                after()


def _check_budget(claims: Claims, new: Callable[..., Memory], replays_running: bool | None) -> None:
    law = "it keeps at most its budget"
    for budget in (1, 2, 12, 1000):
        memory = new(budget)

        def check(memory: Memory = memory, budget: int = budget) -> None:
            claims.that(len(memory) <= budget, law, f"{len(memory)} samples", f"at most {budget}")

        with claims.law(law):
            _live(memory, after=check)
    kept = len(memory)
    claims.that(kept > 0, "it keeps samples of finished tasks", f"{kept} samples of 375", "some, with a budget of 1000")
    if replays_running is not None:
        running = new(12)
        with claims.law(law):
            running.start("a", CLASSES)
            running.observe("a", *_samples(0, 0, 5))
        law = f"samples of running tasks are {'' if replays_running else 'not '}drawn"
        claims.that(bool(running.draw(5)) == replays_running, law, f"{len(running)} samples", f"{5 * replays_running}")


def _check_draws(claims: Claims, new: Callable[..., Memory]) -> None:
    law = "a drawn sample was observed, with its own target"
    memory, other = new(), new()
    with claims.law("an empty memory draws nothing"):
        claims.same("an empty memory draws nothing", memory.draw(4), [])
    for each in (memory, other):
        with claims.law(law):
            _live(each)
    for count in (1, 5, 100):
        before = torch.get_rng_state()
        with claims.law(law):
            drawn = memory.draw(count)
            again = other.draw(count)
        claims.same("it draws by its own generator, not by PyTorch's", torch.get_rng_state(), before)
        total = sum(len(batch.y) for batch in drawn)
        claims.that(0 < total <= count, "a draw has at most as many samples as asked for", total, f"1 to {count}")
        for batch in drawn:
            task, number, y = _inputs(batch).T
            right = (task == float(batch.source.removeprefix("task "))) & (y == batch.y) & (number % CLASSES == y)
            found = f"x = {_inputs(batch).tolist()}, y = {batch.y.tolist()} in {batch.source!r}"
            claims.that(bool(right.all()), law, found, "pairs of observed samples")
        claims.same("the same seed draws the same", _content(again), _content(drawn))
    kept = Counter(_rows(memory.draw(100)))
    claims.that(max(kept.values()) == 1, "every sample is kept once", f"{max(kept.values())} times", "once")


def _check_targets_and_logits(claims: Claims, new: Callable[..., Memory]) -> None:
    """Check that targets of any type and logits, given by the batch or by the model, stay with their samples."""
    memory, (x, labels) = new(), _samples(0, 0, 6)
    targets = torch.stack([labels + 0.5, -labels - 0.25], dim=1)
    with claims.law("it stores targets that are vectors of floats"):
        memory.start("regression", None)
        memory.observe("regression", x, targets)
        memory.finish("regression")
        for batch in memory.draw(6):
            expected = targets[_inputs(batch)[:, 1].long()]
            claims.same("targets keep their values and their type", batch.y, expected)
    law, memory = "logits stay with their samples", new()
    with claims.law(law):
        memory.start("task 0", CLASSES)
        memory.observe("task 0", x, labels, 10.0 * x)
        memory.finish("task 0", lambda inputs: 10.0 * torch.as_tensor(inputs))
        for batch in memory.draw(6):
            if batch.logits is not None:
                claims.same(law, batch.logits, 10.0 * _inputs(batch))


def _content(batches: Sequence[ReplayBatch]) -> list[Any]:
    return [[batch.source, batch.x, batch.y] for batch in batches]


def _inputs(batch: ReplayBatch) -> Tensor:
    assert isinstance(batch.x, Tensor)
    return batch.x


def _rows(batches: Sequence[ReplayBatch]) -> list[tuple[float, ...]]:
    return [tuple(row) for batch in batches for row in _inputs(batch).tolist()]


def _check_memory_state(claims: Claims, new: Callable[..., Memory]) -> None:
    law = "it resumes exactly from its state"
    whole, first, second = new(), new(), new()
    with claims.law(law):
        _live(whole)
        _live(first, last=17)
    with TemporaryDirectory() as folder, claims.law("a checkpoint can hold its state"):
        write_checkpoint(path := Path(folder) / "checkpoint", first.state_dict())
        state = read_checkpoint(path)
    with claims.law(law):
        second.load_state_dict(state)
        claims.same(law, _content(second.draw(4)), _content(first.draw(4)))
    third = new()
    with claims.law(law):
        third.load_state_dict(state)
        _live(third, first=17)
        claims.same(law, _content(third.draw(5)), _content(whole.draw(5)))
        claims.same(law, third.state_dict(), whole.state_dict())
    given = first.state_dict()
    kept = deepcopy(given)
    with claims.law(law):
        _live(first, first=17)
    claims.same("its state is a copy, which later samples do not change", given, kept)


def _check_copies(claims: Claims, new: Callable[..., Memory]) -> None:
    law = "it copies what it stores"
    memory, x, y = new(), *_samples(0, 0, 6)
    with claims.law(law):
        memory.start("task 0", CLASSES)
        memory.observe("task 0", x, y)
        claims.same("storing a batch does not change it", [x, y], list(_samples(0, 0, 6)))
        x.fill_(-1.0)
        memory.finish("task 0")
        drawn = memory.draw(6)
    stored = _rows(drawn)
    claims.that(all(min(row) >= 0.0 for row in stored), law, f"{stored}", "samples as they were observed")
    for batch in drawn:
        _inputs(batch).fill_(-1.0)
    left = _rows(memory.draw(6))
    claims.that(all(min(row) >= 0.0 for row in left), "draws are copies", f"{left}", "samples as they were observed")


def _check_stored_type(claims: Claims, new: Callable[..., Memory]) -> None:
    law = "it stores inputs in their own type, or in the given dtype"
    for options, expected in (({}, torch.uint8), ({"dtype": torch.float32}, torch.float32)):
        memory = new(**options)
        x, y = _samples(0, 0, 6)
        with claims.law(law):
            memory.start("task 0", CLASSES)
            memory.observe("task 0", x.to(torch.uint8), y)
            memory.finish("task 0")
            found = [_inputs(batch).dtype for batch in memory.draw(6)]
        is_taken = not options or memory.dtype == expected  # `make` need not take a dtype
        claims.that(not is_taken or set(found) == {expected}, law, found, expected)


def _check_skipped_batches(claims: Claims, new: Callable[..., Memory]) -> None:
    law = "nothing of a skipped batch is stored"
    with claims.law(law):
        memories = [new(), new()]
        learners = [Learner(new_backbone(), ER(), memory=memory, memory_batch=6) for memory in memories]
        train(learners[0], change=spoilt)
        train(learners[1], change=left_out)
        claims.same(law, memories[0].state_dict(), memories[1].state_dict())
        claims.same(law, state_of(learners[0]), state_of(learners[1]))
