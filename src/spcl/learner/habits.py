"""Training habits of a learner: schedule, clipping, averaged weights, augmentation and updates per step."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from spcl.errors import CheckpointError, SpclError

__all__ = ["check_habits", "habits_state", "learning_rate_factor", "saved_habits"]

HABITS: Mapping[str, object] = {
    "schedule": None,
    "clip_norm": None,
    "average": None,
    "predict_by": "head",
    "augment": None,
    "updates": 1,
}
"""The habits by the names of the learner's arguments, with their defaults."""


def check_habits(schedule: object, clip_norm: object, average: object, augment: object, updates: object) -> None:
    """Refuse values that cannot be used."""
    for (name, module), function in zip(_MODULES.items(), (schedule, augment), strict=True):
        if function is not None and not callable(function):
            raise SpclError(f"{name} must be a function, but it is {function!r:.80}; see spcl.{module}")
    if clip_norm is not None and not (_is_number(clip_norm) and 0.0 < clip_norm < math.inf):
        raise SpclError(f"clip_norm is {clip_norm!r}; give the largest norm of an update, a positive number, or None")
    if average is not None and not (_is_number(average) and 0.0 <= average < 1.0):
        raise SpclError(f"average is {average!r}; give the decay of the average, from 0 to below 1, or None")
    if not isinstance(updates, int) or isinstance(updates, bool) or updates < 1:
        raise SpclError(f"updates is {updates!r}; give a positive whole number")


def learning_rate_factor(schedule: Callable[[int], float] | None, step: int) -> float | None:
    """Return the factor of the learning rates in a step, or None without a schedule."""
    if schedule is None:
        return None
    factor: Any = schedule(step)
    if not _is_number(factor) or not 0.0 <= factor < math.inf:
        raise SpclError(f"the schedule must give a factor of at least 0, but it gives {factor!r:.80} for step {step}")
    return float(factor)


def habits_state(habits: Mapping[str, Any]) -> dict[str, Any]:
    """Return the habits that are not the defaults as plain data; of functions only that there is one."""
    return {
        name: True if name in _MODULES else habits[name] for name, default in HABITS.items() if habits[name] != default
    }


def saved_habits(settings: Mapping[str, Any], **functions: Any) -> dict[str, Any]:
    """Return the habits of :func:`habits_state`, with the functions, which must be given exactly if they were used."""
    for name, function in functions.items():
        if name in settings and function is None:
            raise CheckpointError(f"the checkpoint was made with {name}=, which is a function; pass it again")
        if name not in settings and function is not None:
            raise CheckpointError(f"the checkpoint was made without {name}=; load it without")
    return {name: settings.get(name, default) for name, default in HABITS.items()} | functions


_MODULES = {"schedule": "schedules", "augment": "transforms"}


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
