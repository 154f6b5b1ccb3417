"""Schedules of the learning rate: functions from the number of a step to a factor."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from spcl._util.registry import Registry
from spcl.errors import SpclError

__all__ = ["SCHEDULES", "Constant", "Cosine", "Linear", "Schedule", "Steps"]

Schedule: TypeAlias = Callable[[int], float]
"""The factor of the learning rate in a step, counted from 0; it depends only on the step."""

SCHEDULES: Registry[Callable[..., Schedule]] = Registry("schedule", positional=1)
"""Schedules by name: factories that take the number of steps of the whole training, and options."""


@SCHEDULES.register("constant")
@dataclass(frozen=True)
class Constant:
    """The factor 1 in every step.

    >>> SCHEDULES.make("constant", 100)(50)
    1.0
    """

    steps: int

    def __post_init__(self) -> None:
        _check_steps(self.steps)

    def __call__(self, step: int) -> float:
        """Return the factor in a step."""
        return 1.0


@dataclass(frozen=True)
class _Decay:
    """A linear warm-up, then a decay to the factor ``final`` at the end of the training."""

    steps: int
    warmup: float = 0.0
    final: float = 0.0

    def __post_init__(self) -> None:
        _check_steps(self.steps)
        if not 0.0 <= self.warmup <= 1.0:
            raise SpclError(f"warmup is {self.warmup!r}; give the fraction of the steps, from 0 to 1")
        if not 0.0 <= self.final < math.inf:
            raise SpclError(f"final is {self.final!r}; give the factor at the end, at least 0")

    def __call__(self, step: int) -> float:
        """Return the factor in a step."""
        warmup = round(self.warmup * self.steps)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = min(1.0, (step - warmup) / max(1, self.steps - warmup))
        return self.final + (1.0 - self.final) * self.remaining(progress)

    def remaining(self, progress: float) -> float:
        """Return the remaining share of the decay, from 1 to 0, at a fraction of the run after the warm-up."""
        raise NotImplementedError


@SCHEDULES.register("cosine")
@dataclass(frozen=True)
class Cosine(_Decay):
    r"""Half a cosine from 1 to ``final``, after a linear warm-up.

    In step t of S, with w the number of steps of the warm-up, the factor is

    .. math:: \frac{t + 1}{w + 1} \text{ for } t < w, \qquad
        f + (1 - f)\,\frac{1 + \cos \pi p}{2}, \quad p = \min\left(1, \frac{t - w}{S - w}\right) \text{ else.}

    Args:
        steps: S, the steps of the whole training.
        warmup: the fraction of the steps that are warm-up.
        final: f, the factor at the end and after it.

    >>> schedule = SCHEDULES.make({"name": "cosine", "warmup": 0.3, "final": 0.1}, 10)
    >>> [round(schedule(step), 3) for step in (0, 1, 2, 3, 9, 10, 11)]
    [0.25, 0.5, 0.75, 1.0, 0.145, 0.1, 0.1]
    """

    def remaining(self, progress: float) -> float:
        """Return the share of the decay that is left, from 1 to 0, after a part of the run."""
        return (1.0 + math.cos(math.pi * progress)) / 2.0


@SCHEDULES.register("linear")
@dataclass(frozen=True)
class Linear(_Decay):
    r"""A straight line from 1 to ``final``, after a linear warm-up.

    In step t of S, with w the number of steps of the warm-up, the factor is

    .. math:: \frac{t + 1}{w + 1} \text{ for } t < w, \qquad
        f + (1 - f)(1 - p), \quad p = \min\left(1, \frac{t - w}{S - w}\right) \text{ else.}

    Args:
        steps: S, the steps of the whole training.
        warmup: the fraction of the steps that are warm-up.
        final: f, the factor at the end and after it.

    >>> [SCHEDULES.make("linear", 4)(step) for step in range(6)]
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """

    def remaining(self, progress: float) -> float:
        """Return the share of the decay that is left, from 1 to 0, after a part of the run."""
        return 1.0 - progress


@SCHEDULES.register("steps")
@dataclass(frozen=True)
class Steps:
    r"""A factor that is multiplied by ``factor`` at each of several points of the training.

    In step t of S the factor is :math:`\gamma^k`, where k is the number of fractions a with :math:`t \ge aS`.

    Args:
        steps: S, the steps of the whole training.
        at: the fractions of the training.
        factor: γ.

    >>> schedule = SCHEDULES.make({"name": "steps", "at": [0.5, 0.75], "factor": 0.5}, 8)
    >>> [schedule(step) for step in range(8)]
    [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """

    steps: int
    at: Sequence[float] = (0.5, 0.75)
    factor: float = 0.1

    def __post_init__(self) -> None:
        _check_steps(self.steps)
        if not all(0.0 <= fraction <= 1.0 for fraction in self.at):
            raise SpclError(f"at is {list(self.at)}; give fractions of the training, from 0 to 1")
        if not 0.0 <= self.factor < math.inf:
            raise SpclError(f"factor is {self.factor!r}; give a number, at least 0")

    def __call__(self, step: int) -> float:
        """Return the factor in a step."""
        return float(self.factor ** sum(step >= fraction * self.steps for fraction in self.at))


def _check_steps(steps: int) -> None:
    if not isinstance(steps, int) or steps < 1:
        raise SpclError(f"steps is {steps!r}; give the number of steps of the training, at least 1")
