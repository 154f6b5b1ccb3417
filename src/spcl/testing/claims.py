"""The common parts of all checks: claims that name what they found, and a small stream of tasks to train on."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spcl.learner import Learner, StepReport

CLASSES = {"a": 2, "b": 3, "c": 2}
SPANS = {"a": (0, 3), "b": (1, 7), "c": (4, 7)}
"""First and last step of every task: one task runs alone, two run at once, one ends, another starts."""

STEPS = 8
FEATURES = 6

SPOILT = ("b", 2)
"""Task and step of the non-finite batch."""

ROUNDING = 1e-3
"""Relative difference that the order of float32 additions may make over a few steps."""


class Claims:
    """Claims about one thing; every message begins with its name."""

    def __init__(self, kind: str, make: object) -> None:
        self.thing = f"{kind} {_name(make)}"

    def that(self, holds: bool, law: str, found: object, expected: object) -> None:
        """Raise an error unless the claim holds."""
        if not holds:
            raise AssertionError(f"{self.thing}, {law}: found {found}, expected {expected}")

    def same(self, law: str, found: Any, expected: Any, tolerance: float = 0.0) -> None:
        """Raise an error unless two trees of plain data and tensors are equal, or close; name the first difference."""
        for place, one, other in _pairs(found, expected, ""):
            if isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape:
                if not _are_close(one.cpu(), other.cpu(), tolerance):
                    distance = (one.cpu().double() - other.cpu().double()).abs().max().item()
                    where = f" in {place}" if place else ""
                    bound = f"at most {tolerance:g} of the largest" if tolerance else "none"
                    self.that(False, law, f"a difference of {distance:.3g}{where}", bound)
            else:
                same = bool(one == other) if not isinstance(one, Tensor) and not isinstance(other, Tensor) else False
                self.that(same, law, f"{one!r:.80}{f' in {place}' if place else ''}", f"{other!r:.80}")

    @contextmanager
    def law(self, law: str) -> Iterator[None]:
        """Turn any other error in the block into a failure of this law."""
        try:
            yield
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(
                f"{self.thing}, {law}: found {type(error).__name__}: {error}, expected no error"
            ) from error


def _name(make: object) -> str:
    """Return the name of a function or class that makes a thing.

    >>> from functools import partial
    >>> _name(Claims), _name(partial(Claims, "memory"))
    ('Claims', "Claims('memory')")
    """
    if isinstance(make, partial):
        given = [*map(repr, make.args), *(f"{name}={value!r}" for name, value in make.keywords.items())]
        return f"{_name(make.func)}({', '.join(given)})"
    return getattr(make, "__name__", None) or repr(make)


def _are_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if not tolerance or not one.is_floating_point():
        return torch.equal(one, other) or (
            one.is_floating_point() and torch.equal(one.nan_to_num(), other.nan_to_num())
        )
    largest = other.abs().max().item() if other.numel() else 0.0
    return torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def _pairs(found: Any, expected: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the leaves of two trees side by side; where one tree has no leaf, None takes its place."""
    if isinstance(found, np.ndarray) and isinstance(expected, np.ndarray):
        found, expected = torch.from_numpy(found), torch.from_numpy(expected)
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        for key in {**expected, **found}:
            yield from _pairs(found.get(key), expected.get(key), f"{place}.{key}".strip("."))
    elif isinstance(found, list | tuple) and isinstance(expected, list | tuple) and len(found) == len(expected):
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from _pairs(one, other, f"{place}.{index}".strip("."))
    else:
        yield place, found, expected


# -- a stream to train on


def new_backbone(dropout: float = 0.0) -> nn.Sequential:
    """Return a small network, always with the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 5), nn.Tanh())


def batch(task: str, step: int) -> tuple[Tensor, Tensor]:
    """Return separable data: the class is the place of the largest input."""
    generator = torch.Generator().manual_seed(1000 * step + ord(task))
    y = torch.randint(CLASSES[task], (6,), generator=generator)
    shift = 2.0 * nn.functional.one_hot(y + ord(task) - ord("a"), FEATURES)
    return torch.randn(6, FEATURES, generator=generator) + shift, y


def state_of(learner: Learner) -> dict[str, Any]:
    """Return the result of training: the weights of backbone and heads, and the method's state."""
    heads = {name: task.head.state_dict() for name, task in learner.tasks.items() if task.head is not None}
    return {"backbone": learner.model.backbone.state_dict(), "heads": heads, "method": learner.method.state_dict()}


def spoilt(task: str, step: int, x: Tensor) -> Tensor:
    """Replace the inputs of one batch of :func:`train` by NaN."""
    return x * float("nan") if (task, step) == SPOILT else x


def left_out(task: str, step: int, x: Tensor) -> Tensor | None:
    """Leave the same batch out."""
    return None if (task, step) == SPOILT else x


def train(
    learner: Learner,
    first: int = 0,
    last: int = STEPS,
    change: Callable[[str, int, Tensor], Tensor | None] = lambda task, step, x: x,
) -> list[StepReport]:
    """Make the steps from ``first`` up to ``last``; ``change`` may replace a batch's inputs, or omit it by None."""
    reports = []
    for step in range(first, last):
        for task, (start, _) in SPANS.items():
            if start == step:
                learner.add_task(task, classes=CLASSES[task])
        batches: dict[str, tuple[Tensor, Tensor]] = {}
        for task, (start, end) in SPANS.items():
            if start <= step <= end:
                x, y = batch(task, step)
                changed = change(task, step, x)
                batches |= {} if changed is None else {task: (changed, y)}
        reports.append(learner.step(batches))
        for task, (_, end) in SPANS.items():
            if end == step:
                learner.finish_task(task)
    return reports
