"""The options of a learner, each defined once: for ``Learner``, checkpoints, the settings of runs and of services.

To add an option: a field of :class:`LearnerOptions`, a keyword of the same name and default in ``Learner.__init__``,
and the code that obeys it. Its check, its place in checkpoints, the setting of runs and services and the line in
docs/settings.md follow.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from spcl._util.registry import Named
from spcl.errors import SpclError

__all__ = [
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

Scenario = Literal["task", "class"]
"""Whether a sample's task is known when predicting."""

LowMemory = Literal["auto"] | bool
"""Whether gradients are held; ``auto``: as long as they fit."""

LEARNER = "learner"
"""Tag of the settings that runs and services share, because they make the learner."""

SPEED = "speed"
"""Tag of what changes how fast something is computed, or where, but not what: it does not tell runs apart."""

RECORD = "record"
"""Tag of what changes what is recorded and shown, but not what is learned: it does not tell runs apart."""

PLANNED = "planned"
"""Tag of what a grid has several values of, beside the method."""

LOADING = "loading"
"""Tag of what decides which samples are loaded."""

LAYOUT = "layout"
"""Tag of what decides, beside the samples, whether they can be laid out in time."""

FILE = "file"
"""Tag of what names a file or a folder."""


@dataclass(frozen=True)
class Option:
    """What is said of an option beside its name.

    Attributes:
        description: what it means.
        expected: what to give, for errors.
        tags: of the setting, beside :data:`LEARNER`.
        at_least, above, below: bounds of a number.
        setting: its name among the settings of runs and services, if it has another one there.
        run_default: its default there, if it has another one there.
        always_saved: whether a checkpoint holds it even where it has its default.
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
        Option("task- or class-incremental", "'task' or 'class'", (PLANNED, LAYOUT), always_saved=True),
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
    """Collect what is said of every option, with its name, default and type."""
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
    """Return the options among the attributes of an object as a checkpoint holds them: most only if not the default.

    >>> saved_options(LearnerOptions(updates=2))
    {'scenario': 'task', 'seed': 0, 'memory_batch': None, 'updates': 2, 'measure_stability': False, 'capture': True}
    """
    values = {name: getattr(owner, name) for name in OPTIONS}
    return {name: values[name] for name, each in OPTIONS.items() if each.always_saved or values[name] != each.default}


def restored_options(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a checkpoint holds, and the defaults of the others, as keywords of a learner.

    >>> restored_options({"scenario": "class", "steps": 7})["scenario"]
    'class'
    """
    return {name: saved.get(name, option.default) for name, option in OPTIONS.items()}
