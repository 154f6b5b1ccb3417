"""Tuning settings with Optuna, by their accuracy on a validation split of the training data."""

import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from spcl._util.files import read_json, write_json, write_text
from spcl.errors import SpclError, install_command
from spcl.grids.base import Pool
from spcl.grids.plan import Job, check_job_data, plan_grid
from spcl.grids.scheduler import run_jobs
from spcl.grids.view import GridView
from spcl.runs import FolderError, RunFolder, RunResult
from spcl.runs.settings import BOOKKEEPING, merge_settings, nested_settings, parse_value

PLOTS = ("optimization_history", "param_importances", "slice", "parallel_coordinate", "contour")


@dataclass(frozen=True)
class Dimension:
    """A setting, by dotted name, and its values: the ends of a range, or choices."""

    name: str
    kind: Literal["float", "log", "int", "choice"]
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Tuning:
    """The settings ``base`` of one method in one scenario, scored over configurations and seeds, and what to search."""

    base: Mapping[str, Any]
    method: str
    scenario: str
    configs: Sequence[int]
    seeds: Sequence[int]
    search: Sequence[Dimension]

    def jobs(self, out: Path, params: Mapping[str, Any]) -> list[Job]:
        """Plan the runs that score these values of the searched settings, which are given by dotted name."""
        return plan_grid(
            out,
            merge_settings(self.base, *(nested_settings(name, value) for name, value in params.items())),
            methods=[self.method],
            scenarios=[self.scenario],
            configs=self.configs,
            seeds=self.seeds,
        )


def parse_search(text: str) -> Dimension:
    """Parse ``name=kind:…``; kinds are ``float``, ``log`` (a float on a logarithmic scale), ``int`` and ``choice``.

    >>> parse_search("method.sigma=log:1:1000")
    Dimension(name='method.sigma', kind='log', values=(1.0, 1000.0))
    >>> parse_search("memory=choice:balanced:reservoir").values
    ('balanced', 'reservoir')
    """
    name, _, rest = text.partition("=")
    kind, *parts = rest.split(":")
    try:
        if name and kind == "choice" and parts:
            return Dimension(name, "choice", tuple(map(parse_value, parts)))
        if name and kind in ("float", "log", "int"):
            low, high = map(int if kind == "int" else float, parts)
            if low < high and (kind != "log" or low > 0):
                return Dimension(name, cast(Literal["float", "log", "int"], kind), (low, high))
    except ValueError:
        pass
    raise SpclError(
        f"expected name=log:low:high, name=float:low:high, name=int:low:high or name=choice:a:b:…, "
        f"found {text!r}; write, for example, method.sigma=log:1:1000"
    )


@dataclass(frozen=True)
class Trial:
    """One point of the search: its number, its settings, and the mean validation accuracy or None if a run failed."""

    number: int
    params: dict[str, Any]
    accuracy: float | None


def tune(
    tuning: Tuning,
    out: str | Path,
    trials: int,
    *,
    pool: Pool,
    view: GridView,
    on_progress: Callable[[Trial], None] = lambda trial: None,
    seed: int = 0,
) -> Trial:
    """Run ``trials`` trials, or all trials that the folder has if these are more, and return the best.

    Every trial is a folder of ordinary runs, ``trial-000`` and so on, and these folders are all that a search needs to
    continue: after a stop or a kill it resumes the unfinished trial, and proposes what it would have proposed. The best
    trial is written to ``best.json``, Optuna's plots to ``plots/*.json`` (for Plotly). ``on_progress`` is called after
    each trial.
    """
    optuna, out = _import_optuna(), Path(out)
    _check(tuning)
    with RunFolder(out).locked():
        _check_same_search(tuning, out)
        study = optuna.create_study(direction="maximize")
        made = []
        for number in range(max(trials, _count_trials(out))):
            study.sampler = optuna.samplers.TPESampler(seed=_trial_seed(seed, number))
            made.append(_run_trial(study, tuning, _trial_folder(out, number), pool, view))
            on_progress(made[-1])
        best = max(made, key=lambda trial: -math.inf if trial.accuracy is None else trial.accuracy, default=None)
        if best is None or best.accuracy is None:
            raise SpclError(f"none of the {len(made)} trials in {out} succeeded; failure.json in their runs says why")
        write_json(out / "best.json", asdict(best))
        _write_plots(optuna, study, out / "plots")
    return best


# -- trials


def _count_trials(out: Path) -> int:
    """Count the trials that the folder holds from an earlier search."""
    return next(number for number in itertools.count() if not (_trial_folder(out, number) / "trial.json").exists())


def _trial_folder(out: Path, number: int) -> Path:
    return out / f"trial-{number:03d}"


def _trial_seed(seed: int, number: int) -> int:
    """Return a seed for each trial, so that a continued search draws the same values."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def _run_trial(study: Any, tuning: Tuning, folder: Path, pool: Pool, view: GridView) -> Trial:
    """Propose values unless the folder has them, run the jobs that are missing, and report the score to the study."""
    record = folder / "trial.json"
    known = read_json(record)
    if isinstance(known, dict):
        study.enqueue_trial(known)
    trial = study.ask({dimension.name: _distribution(dimension) for dimension in tuning.search})
    folder.mkdir(exist_ok=True)
    write_json(record, trial.params)
    jobs = tuning.jobs(folder, trial.params)
    state = run_jobs(jobs, pool, view)
    accuracy = None if state.failed else float(np.mean([_result(job.out).accuracy for job in jobs]))
    study.tell(trial, accuracy, state=_import_optuna().trial.TrialState.FAIL if state.failed else None)
    return Trial(trial.number, trial.params, accuracy)


def _result(out: Path) -> RunResult:
    result = RunFolder(out).read_result()
    if result is None:
        raise FolderError(f"{RunFolder(out).result} was removed or damaged during the search; start the search again")
    return result


def _distribution(dimension: Dimension) -> Any:
    distributions = _import_optuna().distributions
    if dimension.kind == "choice":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about lists, which Optuna's own files could not hold
            return distributions.CategoricalDistribution(dimension.values)
    if dimension.kind == "int":
        return distributions.IntDistribution(*dimension.values)
    return distributions.FloatDistribution(*dimension.values, log=dimension.kind == "log")


def _write_plots(optuna: Any, study: Any, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about plots of few trials or settings
        for name in PLOTS:
            with suppress(ImportError, RuntimeError, TypeError, ValueError):  # a plot may need more trials, or no lists
                figure = getattr(optuna.visualization, f"plot_{name}")(study)
                write_text(folder / f"{name}.json", figure.to_json())


# -- checks before anything runs


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise SpclError(f"Optuna is not installed; run: {install_command('tune')}") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _check(tuning: Tuning) -> None:
    """Raise an error if settings of the search are invalid, or if it would score settings on test data."""
    jobs = [job for params in _corners(tuning.search) for job in tuning.jobs(Path(), params)]
    if any(job.settings.validation == 0 for job in jobs):
        raise SpclError(
            "tuning with validation = 0 would score settings on the test data; hold out a part of the training data, "
            "for example validation = 0.2"
        )
    check_job_data(jobs)


def _corners(search: Sequence[Dimension]) -> Iterator[dict[str, Any]]:
    """Yield points that together hold both ends of each range and every choice."""
    if not search:
        raise SpclError("there is nothing to search; name settings, for example method.sigma=log:1:1000")
    for index in range(max(len(dimension.values) for dimension in search)):
        yield {dimension.name: dimension.values[min(index, len(dimension.values) - 1)] for dimension in search}


def _check_same_search(tuning: Tuning, out: Path) -> None:
    """Raise an error if the folder holds another search; write this one."""
    settings = {name: value for name, value in tuning.base.items() if name not in BOOKKEEPING}
    content = json.loads(json.dumps(asdict(tuning) | {"base": settings}))
    record = out / "tuning.json"
    before = read_json(record)
    for name in content:
        if isinstance(before, dict) and before.get(name) != content[name]:
            raise FolderError(
                f"{out} holds a search with {name} = {before.get(name)}, not {content[name]}; choose another folder"
            )
    write_json(record, content)
