"""The options of a learner, each defined once: for ``Learner``, checkpoints, the settings of runs and of services.

From a field of :class:`LearnerOptions` follow the check of its value, its place in checkpoints, the setting of runs and
services and the line in docs/settings.md; CONTRIBUTING.md says what else an option needs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from spcl._util.registry import Named
from spcl.errors import SpclError

__all__ = [
    "CHANGEABLE",
    "FILE",
    "LAYOUT",
    "LEARNER",
    "LOADING",
    "OPTIONS",
    "PLANNED",
    "RECORD",
    "SPEED",
    "LearnerOptions",
    "LowMemory",
    "Option",
    "Scenario",
    "restored_options",
    "saved_options",
]

Scenario = Literal["task", "class", "domain"]
"""Whether a sample's task is known when predicting; ``domain``: all sources answer one task."""

LowMemory = Literal["auto"] | bool
"""Whether to hold only the Gramian, not the gradients; ``auto``: only if the gradients would not fit."""

LEARNER = "learner"
"""Tag of the settings that make the learner, which runs and services share."""

SPEED = "speed"
"""Tag of options that change speed or device, not results: runs differing only here are the same run."""

RECORD = "record"
"""Tag of options that change what is recorded, not what is learned: runs differing only here are the same run."""

PLANNED = "planned"
"""Tag of options that a grid varies, besides the method."""

LOADING = "loading"
"""Tag of options that decide which samples are loaded."""

LAYOUT = "layout"
"""Tag of options that decide, besides the samples, whether they can be laid out in time."""

CHANGEABLE = "changeable"
"""Tag of settings that a service may start with while its state has others."""

FILE = "file"
"""Tag of options that name a file or folder."""


@dataclass(frozen=True)
class Option:
    """Everything about an option except its name.

    Attributes:
        description: what it means.
        expected: what to give, for errors.
        tags: of the setting, besides :data:`LEARNER`.
        at_least, above, below: bounds of a number.
        setting: its name in runs and services, if different.
        run_default: its default in runs and services, if different.
        always_saved: whether a checkpoint holds it even if it is the default.
        default, type: as declared; filled in.
    """

    description: str
    expected: str
    tags: tuple[str, ...] = ()
    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    setting: str = ""
    run_default: Any = ...
    always_saved: bool = False
    default: Any = None
    type: Any = None

    def accepts(self, value: object) -> bool:
        """Return whether the option may have this value."""
        if not _is_of(value, self.type):
            return False
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        return (
            math.isfinite(value)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


@dataclass(kw_only=True)
class LearnerOptions:
    """The options of a learner that are plain data.

    >>> LearnerOptions(updates=2).updates
    2
    >>> LearnerOptions(updates=0)
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: updates is 0; give a positive whole number
    """

    scenario: Annotated[
        Scenario,
        Option(
            "task-, class- or domain-incremental", "'task', 'class' or 'domain'", (PLANNED, LAYOUT), always_saved=True
        ),
    ] = "task"
    seed: Annotated[
        int,
        Option(
            "of the weights, the order of the data and the memory",
            "a whole number from 0 to below 2**32",
            (PLANNED,),
            at_least=0,
            below=2**32,
            always_saved=True,
        ),
    ] = 0
    clip_norm: Annotated[
        float | None,
        Option(
            "largest norm of an update before the optimiser's step",
            "the largest norm of an update, a positive number, or None",
            above=0.0,
        ),
    ] = None
    memory_batch: Annotated[
        int | None,
        Option(
            "samples replayed per step; by default as many as a batch has",
            "a positive whole number, or None",
            at_least=1,
            always_saved=True,
        ),
    ] = None
    micro_batch: Annotated[
        int | None,
        Option(
            "largest number of samples in a pass; gradients of the parts of a larger batch add up",
            "a positive whole number, or None",
            at_least=1,
        ),
    ] = None
    updates: Annotated[
        int,
        Option(
            "updates per step, on the same batches and on other samples of memory",
            "a positive whole number",
            at_least=1,
        ),
    ] = 1
    average: Annotated[
        float | None,
        Option(
            "decay of an average of the weights over updates, which then predicts",
            "the decay of the average, from 0 to below 1, or None",
            at_least=0.0,
            below=1.0,
        ),
    ] = None
    predict_by: Annotated[
        Named,
        Option(
            "what predicts classes: the trained heads, or heads made from memory: class-means, …",
            "the name of a predictor, or its name and options",
        ),
    ] = "head"
    measure_stability: Annotated[
        bool,
        Option(
            "measure κ, conflicts and magnitude similarity for every method",
            "True or False",
            (RECORD,),
            setting="stability",
            run_default=True,
            always_saved=True,
        ),
    ] = False
    capture: Annotated[
        bool,
        Option(
            "on a GPU, replay CUDA graphs instead of launching every kernel",
            "True or False",
            (SPEED,),
            always_saved=True,
        ),
    ] = True
    low_memory: Annotated[
        LowMemory,
        Option(
            "hold no gradients, only their Gramian, for two backward passes; auto: if they do not fit",
            "True, False or 'auto'",
            (SPEED,),
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            if not option.accepts(value := getattr(self, name)):
                raise SpclError(f"{name} is {value!r:.80}; give {option.expected}")


def _options() -> dict[str, Option]:
    """Return every option by name, with the default and type of its field."""
    found = {}
    hints = get_type_hints(LearnerOptions, include_extras=True)
    for each in fields(LearnerOptions):
        kind, option = get_args(hints[each.name])
        found[each.name] = replace(
            option,
            setting=option.setting or each.name,
            run_default=each.default if option.run_default is ... else option.run_default,
            default=each.default,
            type=kind,
        )
    return found


def _is_of(value: object, kind: Any) -> bool:
    """Return whether a value is of a type: a plain one, a literal, or one of several.

    >>> _is_of(1, float | None), _is_of(True, int), _is_of("auto", LowMemory), _is_of({"name": "er"}, Named)
    (True, False, True, True)
    """
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return any(_is_of(value, each) for each in get_args(kind))
    if origin is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if kind is float or kind is int:
        return isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    return value is None if kind is NoneType else isinstance(value, origin or kind)


OPTIONS = _options()
"""The options by name."""


def saved_options(owner: object) -> dict[str, Any]:
    """Return an object's options as saved in a checkpoint: non-default values, and those with ``always_saved``.

    >>> saved_options(LearnerOptions(updates=2))
    {'scenario': 'task', 'seed': 0, 'memory_batch': None, 'updates': 2, 'measure_stability': False, 'capture': True}
    """
    values = {name: getattr(owner, name) for name in OPTIONS}
    return {name: values[name] for name, each in OPTIONS.items() if each.always_saved or values[name] != each.default}


def restored_options(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a learner's keywords from a checkpoint: saved values, and defaults for everything else.

    >>> restored_options({"scenario": "class", "steps": 7})["scenario"]
    'class'
    """
    return {name: saved.get(name, option.default) for name, option in OPTIONS.items()}
