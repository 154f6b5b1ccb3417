"""Preset ``plus``: the same rehearsal options for any method, and its name in tables."""

from pathlib import Path
from typing import Any

import pytest
import torch

from data_files import wisdm_files, write_files
from spcl.errors import SpclError
from spcl.grids import default_scenarios
from spcl.results.names import display_name, family_of, method_order
from spcl.results.records import RunRecord, find_variants
from spcl.runs import make_problem, resolve_settings

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


def test_wearers_have_encoders_of_their_own() -> None:
    settings = resolve_settings(PLUS, {"benchmark": "ps-wisdm", "method": "er"})
    assert (settings.encoder, settings.average, settings.memory_batch, settings.updates) == ("affine", 0.99, 40, 1)
    assert resolve_settings(PLUS, {"benchmark": "ps-wisdm", "encoder": None}).encoder is None


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


# -- benchmarks of real sources


@pytest.mark.parametrize(
    ("benchmark", "scenario"), [("ps-wisdm", "domain"), ("ps-air", "domain"), ("ps-intents", "task")]
)
def test_settings_of_real_sources_need_no_data(benchmark: str, scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPCL_DATA", raising=False)
    settings = resolve_settings({"benchmark": benchmark})
    assert (settings.scenario, settings.tasks, settings.memory_budget) == (scenario, None, 500)
    assert resolve_settings({"benchmark": benchmark, "memory": "balanced"}).memory == "balanced", "the user's win"
    assert default_scenarios({"benchmark": benchmark}) == (["task", "class"] if scenario == "task" else ["domain"])


def test_a_benchmark_of_real_sources_reads_its_data_set(tmp_path: Path) -> None:
    persons = dict.fromkeys(range(1600, 1608), "AAAABBBB" * 8)
    write_files(tmp_path / "wisdm-dataset", wisdm_files(persons))
    settings = resolve_settings({"benchmark": "ps-wisdm", "data_dir": str(tmp_path), "data": {"unseen": 0.25}})
    problem = make_problem(settings, torch.device("cpu"))
    assert (len(problem.tests), len(problem.unseen), list(problem.tasks)) == (6, 2, ["activity"])
    assert settings.at_once == 6


def test_classes_are_split_into_a_given_number_of_tasks() -> None:
    settings = resolve_settings({"benchmark": "ps-glyphs", "tasks": None})
    with pytest.raises(SpclError, match="tasks is null, but ps-glyphs has classes to split into tasks; give a number"):
        make_problem(settings, torch.device("cpu"))
