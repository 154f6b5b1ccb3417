"""The options of a learner, from which its keywords, its checkpoints and the settings of runs and services follow."""

from dataclasses import fields
from inspect import signature
from typing import Any, get_type_hints

import pytest
from torch import nn

from spcl._util.validation import tagged
from spcl.errors import SpclError
from spcl.learner import Learner
from spcl.methods import SORO
from spcl.options import LEARNER, OPTIONS, LearnerOptions, restored_options, saved_options
from spcl.runs import RunSettings, resolve_settings
from spcl.runs.build import learner_options

OTHERS: dict[str, Any] = {
    "scenario": "class",
    "seed": 3,
    "clip_norm": 0.5,
    "average": 0.9,
    "predict_by": "class-means",
    "updates": 2,
    "memory_batch": 7,
    "micro_batch": 5,
    "measure_stability": True,
    "capture": False,
    "low_memory": False,
}


def test_every_option_is_a_keyword_of_the_learner_with_this_type_and_default() -> None:
    keywords, types = signature(Learner).parameters, get_type_hints(Learner.__init__)
    for name, option in OPTIONS.items():
        assert keywords[name].kind is keywords[name].KEYWORD_ONLY
        assert (keywords[name].default, types[name]) == (option.default, option.type), name


def test_every_option_is_a_setting_of_runs_and_services() -> None:
    settings = resolve_settings({option.setting: OTHERS[name] for name, option in OPTIONS.items()})
    assert learner_options(settings).items() >= OTHERS.items()
    shared = tagged(RunSettings, LEARNER)
    for option in OPTIONS.values():
        field = RunSettings.model_fields[option.setting]
        assert (field.description, field.default) == (option.description, option.run_default)
        assert option.setting in shared


@pytest.mark.parametrize("name", [field.name for field in fields(LearnerOptions)])
def test_every_option_is_saved_where_it_is_not_the_default(name: str) -> None:
    changed = {name: OTHERS[name]}
    assert restored_options(saved_options(LearnerOptions(**changed))) == vars(LearnerOptions(**changed))
    learner = Learner(nn.Linear(2, 2), SORO(), **changed)
    state = learner.model_state()
    assert state["learner"][name] == OTHERS[name]
    assert getattr(Learner.load(state, backbone=nn.Linear(2, 2)), name) == OTHERS[name]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("scenario", "joint"),
        ("seed", 0.5),
        ("seed", -1),
        ("clip_norm", 0.0),
        ("clip_norm", float("nan")),
        ("average", 1.0),
        ("average", True),
        ("predict_by", 3),
        ("updates", 0),
        ("updates", None),
        ("memory_batch", 2.5),
        ("micro_batch", 0),
        ("measure_stability", 1),
        ("capture", "yes"),
        ("low_memory", "always"),
    ],
)
def test_wrong_values_are_refused_with_what_to_give(name: str, wrong: object) -> None:
    with pytest.raises(SpclError, match=rf"^{name} is {wrong!r}; give {OPTIONS[name].expected[:10]}"):
        LearnerOptions(**{name: wrong})  # type: ignore[arg-type]
