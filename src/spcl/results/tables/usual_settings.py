"""The settings that the rows of a table share unless they name another value."""

from collections.abc import Sequence
from typing import Any

from spcl.results.formatting import format_value, joined
from spcl.results.grouping import group_by
from spcl.results.records import RunRecord
from spcl.results.tables.methods import display_name
from spcl.results.variants import USUAL_VALUES
from spcl.runs.identity import decisive_settings
from spcl.runs.settings import with_defaults

__all__ = ["usual_settings_note"]


def usual_settings_note(runs: Sequence[RunRecord]) -> str:
    """Return, for runs on one benchmark, the values that rows of methods with variants do not name; empty if none.

    >>> from pathlib import Path
    >>> settings = {"benchmark": "toy", "scenario": "task", "method": {"name": "spcl", "kappa": 2.0}}
    >>> other = RunRecord(Path(), settings | {"method": {"name": "spcl", "kappa": 1.0}}, None, {"method.kappa": 1.0})
    >>> usual_settings_note([RunRecord(Path(), settings, None), other])
    'Rows of SPCL on toy have kappa=2 where they name no other value.'
    """
    by_recipe = group_by(runs, lambda run: display_name(run.recipe))
    named = {recipe: joined(texts, "and") for recipe, group in by_recipe.items() if (texts := _usual_settings(group))}
    sentences = [
        f"Rows of {joined(recipes, 'and')} on {runs[0].benchmark} have {text} where they name no other value."
        for text, recipes in group_by(named, lambda recipe: named[recipe]).items()
    ]
    return " ".join(sentences)


def _usual_settings(runs: Sequence[RunRecord]) -> list[str]:
    """Return the settings of runs of one method that only its other runs name."""
    names = {name for run in runs for name in run.variant if name not in USUAL_VALUES}
    values: dict[str, Any] = {}
    for run in runs:
        settings = decisive_settings(with_defaults(run.settings))
        values |= {name: settings[name] for name in names if name not in run.variant and name in settings}
    return sorted(f"{name.removeprefix('method.')}={format_value(value)}" for name, value in values.items())
