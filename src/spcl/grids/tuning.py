"""Tuning settings with Optuna, by their accuracy on a validation split of the training data."""

import itertools
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from spcl.errors import SpclError
from spcl.files import read_json, write_json, write_text
from spcl.grids.base import Pool
from spcl.grids.checks import check_data
from spcl.grids.grid import run_jobs
from spcl.grids.progress import GridView
from spcl.grids.search import Dimension, Tuning
from spcl.runs import FolderError, RunFolder, RunResult
from spcl.runs.identity import BOOKKEEPING

__all__ = ["Trial", "tune"]

PLOTS = ("optimization_history", "param_importances", "slice", "parallel_coordinate", "contour")


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
    """Run ``trials`` trials, or as many as the folder has if these are more, and return the best.

    Every trial is a folder of ordinary runs, ``trial-000`` and so on, and the search continues from these folders
    alone: after it was stopped or killed, it resumes the trial it was at and proposes what it would have proposed. The
    best trial is written to ``best.json``, Optuna's plots to ``plots/*.json`` (for Plotly). ``on_progress`` is called
    after each trial.
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
        best = max((trial for trial in made if trial.accuracy is not None), key=_accuracy, default=None)
        if best is None:
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
    """Return a seed for each trial, so that a search that is continued draws the same values."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def _accuracy(trial: Trial) -> float:
    return cast(float, trial.accuracy)


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
    if state.failed:
        study.tell(trial, state=_import_optuna().trial.TrialState.FAIL)
        return Trial(trial.number, trial.params, None)
    accuracy = float(np.mean([_result(job.out).accuracy for job in jobs]))
    study.tell(trial, accuracy)
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
            with suppress(ImportError, RuntimeError, TypeError, ValueError):  # it may need more trials, or no lists
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
    """Raise an error for a search with invalid settings, or one that would score settings on test data."""
    jobs = [job for params in _corners(tuning.search) for job in tuning.jobs(Path(), params)]
    if any(job.settings.validation == 0 for job in jobs):
        raise SpclError(
            "tuning with validation = 0 would score settings on the test data; hold out a part of the training data, "
            "for example validation = 0.2"
        )
    check_data(jobs)


def _corners(search: Sequence[Dimension]) -> Iterator[dict[str, Any]]:
    """Yield points such that each end of each range, and each choice, is in one of them."""
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
