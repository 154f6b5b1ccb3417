"""Planning a grid: a job for every combination of methods, scenarios, configurations, seeds and swept settings."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from spcl import options
from spcl._util.validation import tagged, validated
from spcl.data import DATA, SOURCE_BENCHMARKS, SourceData
from spcl.data.protocol import DRAWN_CONFIGURATIONS, check_configuration, load_protocol
from spcl.errors import SpclError
from spcl.methods import METHODS
from spcl.runs import RunFolder, RunSettings, resolve_settings
from spcl.runs.build import lay_out, load_benchmark, load_samples, warn_of_few_steps
from spcl.runs.settings import VARIED, flat_settings, merge_settings, nested_settings, parse_value, split_values

SEVERAL = {name: f"{name}s" for name in VARIED} | {"method.name": "methods"}
"""The settings that a grid has several values of, and the arguments that give them."""


@dataclass(frozen=True)
class Job:
    """One run of a grid: a short name, its settings and its folder."""

    name: str
    settings: RunSettings
    out: Path

    def is_done(self) -> bool:
        """Return whether the run is complete and its settings can be read."""
        folder = RunFolder(self.out)
        return folder.read_result() is not None and folder.read_settings() is not None

    def is_begun(self) -> bool:
        """Return whether there is a checkpoint to continue from."""
        return RunFolder(self.out).has_checkpoint()


@dataclass(frozen=True)
class Sweep:
    """A setting, by dotted name, and the values to run it with."""

    name: str
    values: tuple[str, ...]


MOST_RUNS = 10_000
"""The most runs that are planned at once, which takes seconds."""


def plan_grid(
    out: str | Path,
    base: Mapping[str, Any],
    *,
    methods: Sequence[str],
    scenarios: Sequence[str],
    configs: Iterable[int],
    seeds: Iterable[int],
    sweeps: Sequence[Sweep] = (),
) -> list[Job]:
    """Plan a job for every combination, over the settings ``base``, in folders like ``out/task/soro/config-0/seed-0``.

    A swept setting adds a folder such as ``sigma=10`` after the method's. Jobs are ordered by seed and configuration
    first, so that an unfinished grid already compares all methods. Unknown names and invalid values raise an error, and
    so do values whose folders would have the same name.

    >>> jobs = plan_grid(Path("x"), {}, methods=["er"], scenarios=["task"], configs=[0, 1], seeds=[0])
    >>> [job.name for job in jobs]
    ['task/er/config-0/seed-0', 'task/er/config-1/seed-0']
    """
    _check_planned(sweeps, base)
    templates: dict[str, RunSettings] = {}
    for scenario, method, swept in product(scenarios, methods, _combinations(sweeps)):
        folder = "/".join(map(_folder_name, [scenario, method, *(text for text, _ in swept)]))
        layers = [{"method": {"name": method}, "scenario": scenario}, base, *(layer for _, layer in swept)]
        template = resolve_settings(*layers)
        if templates.setdefault(folder, template) != template:
            raise SpclError(
                f"different settings would share the folder {folder}, since they differ only in special characters or "
                f"late digits; plan them as grids in different folders"
            )
    repetitions = list(product(dict.fromkeys(seeds), dict.fromkeys(configs)))
    if (count := len(templates) * len(repetitions)) > MOST_RUNS:
        raise SpclError(
            f"a grid of {count:,} runs is too large to plan at once, the most is {MOST_RUNS:,}; plan its seeds or "
            f"configurations in parts, which may share the folder"
        )
    jobs = []
    for seed, config in repetitions:
        for folder, template in templates.items():
            name = f"{folder}/config-{config}/seed-{seed}"
            settings = validated(RunSettings, template.model_dump() | {"config": config, "seed": seed}, "settings")
            jobs.append(Job(name, settings, Path(out) / name))
    return jobs


def default_scenarios(base: Mapping[str, Any]) -> list[str]:
    """Return the scenarios that the data of these settings is made for.

    They are ``task`` and ``class``; ``domain`` where all sources answer one task; ``task`` where some task is not a
    classification.

    A benchmark may have a scenario of its own.

    >>> default_scenarios({"benchmark": "ps-glyphs"}), default_scenarios({"benchmark": "ps-wisdm"})
    (['task', 'class'], ['domain'])
    """
    benchmark, options = str(base.get("benchmark")), base.get("data") or {}
    if not isinstance(options, Mapping):
        raise SpclError(f"settings: data is {options!r}; give options of the data's loader by name")
    own = SOURCE_BENCHMARKS[benchmark].settings if benchmark in SOURCE_BENCHMARKS else {}
    if "scenario" in own:
        return [own["scenario"]]
    is_of_sources = benchmark in DATA or benchmark.endswith(".npz")
    data = load_benchmark(benchmark, base.get("data_dir"), **options) if is_of_sources else None
    if not isinstance(data, SourceData):
        return ["task", "class"]
    if len({source.task_name for source in data.sources}) == 1 < len(data.trained):
        return ["domain"]
    return ["task", "class"] if all(source.kind == "classification" for source in data.sources) else ["task"]


def parse_numbers(text: str) -> list[int]:
    """Parse numbers and ranges into a sorted list without duplicates.

    >>> parse_numbers("0-3,7,2")
    [0, 1, 2, 3, 7]
    """
    ranges = []
    for part in text.split(","):
        bounds = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if bounds is None or int(bounds[2] or bounds[1]) < int(bounds[1]):
            raise SpclError(f"{text!r} is not a list of numbers; write it like 0-8 or 0,3,5")
        ranges.append(range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1))
    if (count := sum(each.stop - each.start for each in ranges)) > MOST_RUNS:
        raise SpclError(f"{text!r} is {count:,} numbers; give at most {MOST_RUNS:,} at once")
    return sorted({number for each in ranges for number in each})


def parse_methods(text: str) -> list[str]:
    """Parse method names separated by commas, without duplicates; ``all`` means every method of the package.

    >>> parse_methods("er, soro,er")
    ['er', 'soro']
    """
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise SpclError("found no method name; give some, or all ('spcl methods' lists them)")
    return list(dict.fromkeys(name for part in names for name in (METHODS if part == "all" else [part])))


def parse_sweep(text: str) -> Sweep:
    """Parse a setting and its values, which may be lists in brackets, or names with options in braces.

    >>> parse_sweep("method.sigma=1,10,100")
    Sweep(name='method.sigma', values=('1', '10', '100'))
    >>> parse_sweep("augment=[],[crop,flip]").values
    ('[]', '[crop,flip]')
    """
    name, _, values = text.partition("=")
    parts = tuple(filter(None, split_values(values)))
    if not name or not parts:
        raise SpclError(f"expected name=value,value,…, found {text!r}; write, for example, method.sigma=1,10,100")
    return Sweep(name.strip(), parts)


def _check_planned(sweeps: Sequence[Sweep], base: Mapping[str, Any]) -> None:
    """Raise an error if a setting is swept twice, or given for all runs although it is planned run by run."""
    for name, times in Counter(sweep.name for sweep in sweeps).items():
        if times > 1:
            raise SpclError(f"{name} is swept twice; give all its values in one sweep")
    layers = [base, *(layer for swept in _combinations(sweeps) for _, layer in swept)]
    names = {name for layer in layers for name in flat_settings(merge_settings(layer))}
    for name, argument in SEVERAL.items():
        if name in names:
            raise SpclError(f"{name} is planned run by run; give it as {argument}, not as a setting of all runs")


def _combinations(sweeps: Sequence[Sweep]) -> list[tuple[tuple[str, dict[str, Any]], ...]]:
    """Return every choice of one value per sweep, as folder names and layers of settings."""
    choices = [[_swept(sweep.name, value) for value in sweep.values] for sweep in sweeps]
    return list(product(*choices))


def _swept(name: str, text: str) -> tuple[str, dict[str, Any]]:
    value = parse_value(text)
    written = f"{value:.12g}" if isinstance(value, int | float) and not isinstance(value, bool) else text
    return f"{name.removeprefix('method.')}={written}", nested_settings(name, value)


def _folder_name(text: str) -> str:
    """Replace characters that are not portable in file names.

    >>> _folder_name("torchjd:UPGrad"), _folder_name("der++"), _folder_name("protocol=a/b.json")
    ('torchjd-UPGrad', 'der++', 'protocol=a-b.json')
    """
    return re.sub(r"[^\w.+=-]", "-", text)


def check_jobs(jobs: Sequence[Job]) -> None:
    """Raise an error if a job cannot run; what needs no data is checked first.

    Raises:
        MissingDataError: if everything else is well, but the files of a published data set are not here.
        SpclError: if a folder holds another run, or configurations or data do not fit the protocol.
    """
    check_folders(jobs)
    missing = [job for job in jobs if not job.is_done()]
    _check_configurations(missing)
    check_job_data(missing)


def check_folders(jobs: Iterable[Job]) -> None:
    """Raise an error if a folder holds another run than the one planned there."""
    for job in jobs:
        RunFolder(job.out).check_settings(job.settings)


def check_job_data(jobs: Iterable[Job]) -> None:
    """Raise an error if data is missing or does not fit the label sets and timelines; all data is loaded once.

    Warn if a task has very few steps.
    """
    by_data: dict[str, dict[str, RunSettings]] = defaultdict(dict)
    for job in jobs:
        data, layout = (
            repr([getattr(job.settings, name) for name in names])
            for names in (tagged(RunSettings, options.LOADING), tagged(RunSettings, options.LAYOUT))
        )
        by_data[data][layout] = job.settings
    for layouts in by_data.values():
        samples = load_samples(next(iter(layouts.values())))
        warn_of_few_steps(lay_out(settings, samples, torch.device("cpu")) for settings in layouts.values())


def _check_configurations(jobs: Iterable[Job]) -> None:
    """Raise an error if the protocol of a job lacks its configuration."""
    by_protocol: dict[str | None, set[int]] = defaultdict(set)
    for job in jobs:
        by_protocol[job.settings.protocol].add(job.settings.config)
    for path, configs in by_protocol.items():
        configurations = DRAWN_CONFIGURATIONS if path is None else len(load_protocol(Path(path)))
        for config in sorted(configs):
            check_configuration(config, configurations)
