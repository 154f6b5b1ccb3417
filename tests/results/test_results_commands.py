"""The grids of results/reproduce.py plan runs with the settings of the records."""

import json
import runpy
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import typer

from spcl.cli.app import app
from spcl.grids import parse_methods, parse_numbers, parse_sweep, plan_grid
from spcl.methods import recorded_settings
from spcl.runs import resolve_settings
from spcl.runs.settings import parse_assignments

RESULTS = Path(__file__).resolve().parents[2] / "results"
FLAGS = ("benchmark", "preset", "fit", "device", "keep_model")
IGNORED = {
    "config",
    "seed",
    "data_dir",
    "protocol",
}  # the first two are compared apart, of the others records keep a part

SCENARIOS = ("task", "class", "domain")
Run = tuple[str, str, int, int]
"""The folder of a grid, settings as text, configuration and seed."""


def test_commands_plan_the_runs_of_the_records() -> None:
    planned, recorded = Counter(planned_runs()), Counter(recorded_runs())
    assert sum(recorded.values()) > 6000
    assert planned - recorded == Counter()
    assert recorded - planned == Counter()


def planned_runs() -> Iterator[Run]:
    group: Any = typer.main.get_command(app)
    command = group.get_command(group.make_context("spcl", ["grid"], resilient_parsing=True), "grid")
    for words in commands():
        flags = command.make_context("grid", words[2:]).params
        given = {name: flags[name] for name in FLAGS if flags[name] is not None}
        jobs = plan_grid(
            flags["out"],
            given | parse_assignments(flags["assignments"] or []),
            methods=parse_methods(flags["methods"]),
            scenarios=flags["scenarios"].split(","),
            configs=[0],
            seeds=[0],
            sweeps=[parse_sweep(sweep) for sweep in flags["sweeps"] or []],
        )
        numbers = list(product(parse_numbers(flags["configs"] or "0"), parse_numbers(flags["seeds"])))
        for job in jobs:
            text = as_text(job.settings.model_dump(mode="json"))
            yield from ((series(job.out), text, config, seed) for config, seed in numbers)


def commands() -> Iterator[list[str]]:
    """Yield the words of every ``spcl grid`` of results/reproduce.py."""
    grids = runpy.run_path(str(RESULTS / "reproduce.py"))["GRIDS"]
    assert sorted(grids) == sorted(path.parent.name for path in RESULTS.glob("*/records.tar.gz"))
    for name, made in grids.items():
        for grid in made:
            yield grid.words(Path(name), Path("data"), Path())


def recorded_runs() -> Iterator[Run]:
    for path in sorted(RESULTS.glob("*/records.tar.gz")):
        with tarfile.open(path) as archive:
            for member in archive:
                if member.name.endswith("settings.json"):
                    file = archive.extractfile(member)
                    assert file is not None
                    settings = json.load(file)
                    text = completed(as_text(settings))
                    yield series(Path(member.name)), text, settings["config"], settings["seed"]


@cache
def completed(recorded: str) -> str:
    """Add the defaults of settings that the version did not have that made the record."""
    settings = json.loads(recorded)
    settings["method"] = recorded_settings(settings["method"])
    return as_text(resolve_settings(settings).model_dump(mode="json"))


def series(folder: Path) -> str:
    """Return the folder of a grid, which is above the folders of scenarios."""
    return "/".join(folder.parts[: min(folder.parts.index(name) for name in SCENARIOS if name in folder.parts)])


def as_text(settings: Mapping[str, Any]) -> str:
    kept = {name: value for name, value in settings.items() if name not in IGNORED}
    if kept["method"].get("replay_loss") == "labels":  # no logits are replayed, whatever their weight
        kept["method"] = {name: value for name, value in kept["method"].items() if name != "logit_weight"}
    return json.dumps(kept, sort_keys=True)
