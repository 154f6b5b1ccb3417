"""Preset ``plus``: the same rehearsal options for any method, and its name in tables."""

from pathlib import Path
from typing import Any

import pytest

from spcl.errors import SpclError
from spcl.results.names import display_name, family_of, method_order
from spcl.results.records import RunRecord, find_variants
from spcl.runs import resolve_settings

PLUS = {"preset": "plus"}


def changed_by_plus(benchmark: str, method: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings that the preset changes, of the run and of the method."""
    plain, plus = (
        resolve_settings({"benchmark": benchmark, "method": method, "scenario": "class"}, more).model_dump()
        for more in ({}, PLUS)
    )
    before, after = plain.pop("method"), plus.pop("method")
    return {name: plus[name] for name in plain if plain[name] != plus[name]}, {
        name: after[name] for name in before if before[name] != after[name]
    }


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("spcl", {"memory_share": 0.5, "logit_weight": 0.2, "finished_weight": 1.0}),
        ("soro", {"memory_share": 0.5}),
        ("der++", {"logit_weight": 0.2}),
        ("er", {}),
    ],
)
def test_plus_sets_how_photographs_are_rehearsed_and_nothing_else(method: str, expected: dict[str, Any]) -> None:
    settings, of_method = changed_by_plus("ps-cifar100", method)
    assert settings == {
        "preset": "plus",
        "learning_rate": 0.001,
        "memory_batch": 512,
        "updates": 8,
        "average": 0.995,
        "augment": ("crop", "flip"),
        "predict_by": "class-means",
    }
    assert of_method == expected


@pytest.mark.parametrize(("method", "expected"), [("spcl", {"logit_weight": 2.0}), ("er", {})])
def test_samples_that_cannot_be_augmented_are_replayed_less(method: str, expected: dict[str, Any]) -> None:
    assert changed_by_plus("ps-emnist", method) == (
        {"preset": "plus", "learning_rate": 0.001, "memory_batch": 128, "updates": 3, "average": 0.995},
        expected,
    )


def test_settings_that_are_given_precede_the_preset() -> None:
    given = resolve_settings(PLUS, {"benchmark": "ps-emnist", "batch_size": 16, "updates": 2, "scenario": "task"})
    assert (given.memory_batch, given.updates, given.augment, given.predict_by) == (16, 2, (), "head")
    weight = {"name": "spcl", "logit_weight": 1.0}
    assert resolve_settings(PLUS, {"benchmark": "ps-cifar100", "method": weight}).method["logit_weight"] == 1.0
    without = resolve_settings(PLUS, {"benchmark": "ps-cifar100", "memory_budget": 0, "scenario": "class"})
    assert without.predict_by == "head"


@pytest.mark.parametrize("preset", ["default", "plus", "released"])
def test_a_method_without_a_name_is_refused(preset: str) -> None:
    with pytest.raises(SpclError, match=r"method needs a name, but it is \{'name': 3\}"):
        resolve_settings({"benchmark": "ps-emnist", "preset": preset, "method": {"name": 3}})


def test_tables_name_the_preset_by_a_plus() -> None:
    settings = [
        resolve_settings({"benchmark": "ps-emnist", "method": method}, more).model_dump(mode="json")
        for method in ("soro", "der++")
        for more in ({}, PLUS)
    ]
    records = [
        RunRecord(Path(), each, None, variant) for each, variant in zip(settings, find_variants(settings), strict=True)
    ]
    assert [record.label for record in records] == ["soro", "soro+", "der++", "der+++"]
    assert [display_name(record.label) for record in records] == ["SORO", "SORO+", "DER++", "DER+++"]
    assert [family_of(record.recipe) for record in records] == ["PCL", "PCL", "SCL", "SCL"]
    assert sorted(["soro+", "der+++", "soro", "der++"], key=method_order) == ["der++", "der+++", "soro", "soro+"]
