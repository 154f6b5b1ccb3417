"""Preset ``plus``: the same rehearsal options for any method, and its name in tables."""

from pathlib import Path

from spcl.results.records import RunRecord
from spcl.results.tables.methods import display_name, family_of, method_order
from spcl.results.variants import find_variants
from spcl.runs import resolve_settings

PLUS = {"preset": "plus"}


def test_plus_changes_how_memory_is_rehearsed_and_nothing_else() -> None:
    for method in ("spcl", "er", "der++"):
        plain, plus = (
            resolve_settings({"benchmark": "ps-cifar100", "method": method, "scenario": "class"}, more).model_dump()
            for more in ({}, PLUS)
        )
        changed = {name: value for name, value in plus.items() if plain[name] != value}
        assert changed == {
            "preset": "plus",
            "memory_batch": 8 * plain["batch_size"],
            "updates": 3,
            "average": 0.995,
            "augment": ("crop", "flip"),
            "predict_by": "class-means",
        }


def test_settings_that_are_given_precede_the_preset() -> None:
    given = resolve_settings(PLUS, {"benchmark": "ps-emnist", "batch_size": 16, "updates": 2, "scenario": "task"})
    assert (given.memory_batch, given.updates, given.augment, given.predict_by) == (128, 2, (), "head")
    without = resolve_settings(PLUS, {"benchmark": "ps-emnist", "memory_budget": 0, "scenario": "class"})
    assert without.predict_by == "head"


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
