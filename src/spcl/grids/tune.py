"""Searching for good settings with Optuna, by their accuracy on a validation split of the training stream."""

import itertools
import json
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from spcl.errors import SpclError
from spcl.grids.grid import GridView, run_jobs
from spcl.grids.plan import Job, check_data, plan_grid
from spcl.grids.pool import WorkerPool
from spcl.runs.identity import BOOKKEEPING, flat_settings
from spcl.runs.record import RunFolder, write_json, write_text
from spcl.runs.settings import parse_assignments

__all__ = ["Dimension", "Trial", "Tuning", "parse_search", "run_command", "tune"]

PLOTS = ("optimization_history", "param_importances", "slice", "parallel_coordinate", "contour")


@dataclass(frozen=True)
class Dimension:
    """A setting, by dotted name, and its values: the ends of a range, or a choice."""

    name: str
    kind: Literal["float", "log", "int", "choice"]
    values: tuple[Any, ...]


def parse_search(text: str) -> Dimension:
    """A dimension as ``name=kind:…``: ``float``, ``log`` (a float on a logarithmic scale), ``int`` or ``choice``.

    >>> parse_search("method.sigma=log:1:1000")
    Dimension(name='method.sigma', kind='log', values=(1.0, 1000.0))
    >>> parse_search("memory=choice:balanced:reservoir").values
    ('balanced', 'reservoir')
    """
    name, _, rest = text.partition("=")
    kind, *parts = rest.split(":")
    try:
        if name and kind == "choice" and parts:
            return Dimension(name, "choice", tuple(_value(name, part) for part in parts))
        if name and kind in ("float", "log", "int"):
            low, high = map(int if kind == "int" else float, parts)
            if low < high and (kind != "log" or low > 0):
                return Dimension(name, cast(Literal["float", "log", "int"], kind), (low, high))
    except ValueError:
        pass
    raise SpclError(
        f"--search takes name=log:low:high, name=float:low:high, name=int:low:high or name=choice:a:b:…, "
        f"but got {text!r}; for example method.sigma=log:1:1000"
    )


def _value(name: str, text: str) -> Any:
    return flat_settings(parse_assignments([f"{name}={text}"]))[name]


@dataclass(frozen=True)
class Tuning:
    """What is tuned: settings ``base`` of one method in one scenario, scored over configurations and seeds."""

    base: Mapping[str, Any]
    method: str
    scenario: str
    configs: Sequence[int]
    seeds: Sequence[int]
    search: Sequence[Dimension]

    def jobs(self, out: Path, params: Mapping[str, Any]) -> list[Job]:
        """The runs that score these values of the searched settings."""
        return plan_grid(
            out,
            _layered(self.base, params),
            methods=[self.method],
            scenarios=[self.scenario],
            configs=self.configs,
            seeds=self.seeds,
        )


def _layered(base: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others, by dotted name, put over them.

    >>> _layered({"seed": 0, "method": {"sigma": 1.0}}, {"method.eta": 0.1})
    {'seed': 0, 'method': {'sigma': 1.0, 'eta': 0.1}}
    """
    result = dict(base)
    for name, value in params.items():
        first, _, rest = name.partition(".")
        result[first] = _layered(result.get(first, {}), {rest: value}) if rest else value
    return result


@dataclass(frozen=True)
class Trial:
    """One try: its number, the values of the searched settings, and the mean validation accuracy, None if it failed."""

    number: int
    params: Mapping[str, Any]
    accuracy: float | None


def tune(
    tuning: Tuning,
    out: Path,
    trials: int,
    *,
    pool: WorkerPool,
    view: GridView,
    told: Callable[[Trial], None] = lambda trial: None,
    seed: int = 0,
) -> Trial:
    """Search in as many trials, or as many as the folder has, and give the best; ``told`` hears of each.

    Every trial is a folder of ordinary runs, ``trial-000`` and so on, and these folders are all there is to continue
    from: a search that was stopped or killed goes on with the trial it was at, and proposes what it would have
    proposed. The best trial goes to ``best.json``, Optuna's plots to ``plots/*.json`` (for Plotly).
    """
    optuna = _import_optuna()
    _check(tuning)
    with RunFolder(out).locked():
        _check_same(tuning, out)
        study = optuna.create_study(direction="maximize")
        made = []
        for number in range(max(trials, _begun(out))):
            study.sampler = optuna.samplers.TPESampler(seed=_trial_seed(seed, number))
            made.append(_make_trial(study, tuning, _trial_folder(out, number), pool, view))
            told(made[-1])
        best = max((trial for trial in made if trial.accuracy is not None), key=_accuracy, default=None)
        if best is None:
            raise SpclError(f"none of the {trials} trials in {out} succeeded; failure.json in their runs says why")
        write_json(out / "best.json", asdict(best))
        _write_plots(optuna, study, out / "plots")
    return best


def _begun(out: Path) -> int:
    """How many trials the folder holds, from an earlier search for more."""
    return next(number for number in itertools.count() if not (_trial_folder(out, number) / "trial.json").exists())


def _trial_folder(out: Path, number: int) -> Path:
    return out / f"trial-{number:03d}"


def _trial_seed(seed: int, number: int) -> int:
    """A seed for each trial, so that a search that is continued draws what it would have drawn."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def _accuracy(trial: Trial) -> float:
    return cast(float, trial.accuracy)


def _make_trial(study: Any, tuning: Tuning, folder: Path, pool: WorkerPool, view: GridView) -> Trial:
    """Ask for values unless the folder has them, make the runs that are missing, and tell the study."""
    record = folder / "trial.json"
    known = _read_json(record)
    if known is not None:
        study.enqueue_trial(known)
    trial = study.ask({dimension.name: _distribution(dimension) for dimension in tuning.search})
    folder.mkdir(exist_ok=True)
    write_json(record, trial.params)
    jobs = tuning.jobs(folder, trial.params)
    state = run_jobs(jobs, pool, view)
    if state.failed:
        study.tell(trial, state=_import_optuna().trial.TrialState.FAIL)
        return Trial(trial.number, trial.params, None)
    results = [RunFolder(job.out).read_result() or {} for job in jobs]
    accuracy = float(np.mean([result["accuracy"] for result in results]))
    study.tell(trial, accuracy)
    return Trial(trial.number, trial.params, accuracy)


def _distribution(dimension: Dimension) -> Any:
    distributions = _import_optuna().distributions
    if dimension.kind == "choice":
        return distributions.CategoricalDistribution(dimension.values)
    if dimension.kind == "int":
        return distributions.IntDistribution(*dimension.values)
    return distributions.FloatDistribution(*dimension.values, log=dimension.kind == "log")


def _write_plots(optuna: Any, study: Any, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of too few trials or settings for a plot to say much
        for name in PLOTS:
            with suppress(ImportError, RuntimeError, ValueError):  # or for there to be one
                figure = getattr(optuna.visualization, f"plot_{name}")(study)
                write_text(folder / f"{name}.json", figure.to_json())


# -- checks before anything runs


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise SpclError('Optuna is not installed; run: pip install "spcl[tune]"') from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _check(tuning: Tuning) -> None:
    """Raise an error for a search that cannot be made or would look at test data."""
    for params in _corners(tuning.search):
        jobs = tuning.jobs(Path(), params)
        if any(job.settings.validation == 0 for job in jobs):
            raise SpclError(
                "tuning with validation = 0 would score settings on the test data; hold out a part of the training "
                "data, for example --validation 0.2"
            )
    check_data(jobs)


def _corners(search: Sequence[Dimension]) -> Iterator[dict[str, Any]]:
    """Values such that each end of each range, and each choice, is among them."""
    if not search:
        raise SpclError("there is nothing to search; name settings, for example --search method.sigma=log:1:1000")
    for index in range(max(len(dimension.values) for dimension in search)):
        yield {dimension.name: dimension.values[min(index, len(dimension.values) - 1)] for dimension in search}


def _check_same(tuning: Tuning, out: Path) -> None:
    """Raise an error if the folder holds another search."""
    settings = {name: value for name, value in tuning.base.items() if name not in BOOKKEEPING}
    content = json.loads(json.dumps(asdict(tuning) | {"base": settings}))
    record = out / "tuning.json"
    before = _read_json(record)
    for name in content:
        if before is not None and before.get(name) != content[name]:
            raise SpclError(
                f"{out} holds a search with {name} = {before.get(name)}, but {content[name]} is asked for; "
                f"choose another --out"
            )
    write_json(record, content)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


# -- what to do with the best


def run_command(tuning: Tuning, best: Trial) -> str:
    """The command that runs the best settings on the test data."""
    base = {name: value for name, value in flat_settings(tuning.base).items() if name not in ("threads", "validation")}
    named = {"benchmark": base.pop("benchmark", "ps-glyphs"), "method": tuning.method, "scenario": tuning.scenario}
    parts = ["spcl", "run", *(part for name, value in named.items() for part in (f"--{name}", value))]
    for name, value in {**base, **best.params}.items():
        parts += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(
        [*parts, "--config", str(tuning.configs[0]), "--seed", str(tuning.seeds[0]), "--out", "runs/best"]
    )
