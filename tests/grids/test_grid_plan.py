"""Plans of grids: every run has a folder of its own, whatever is swept, and wrong plans are refused."""

from pathlib import Path
from typing import Any

import pytest

from spcl.errors import SpclError
from spcl.grids import Dimension, Job, Tuning, parse_search, parse_sweep, plan_grid
from spcl.grids.tuning import _check, _distribution, _write_plots
from spcl.runs import RunFolder


def _plan(out: Path | str, *sweeps: str, **options: Any) -> list[Job]:
    planned: dict[str, Any] = {"methods": ["er"], "scenarios": ["task"], "configs": [0], "seeds": [0]} | options
    return plan_grid(out, {}, sweeps=[parse_sweep(sweep) for sweep in sweeps], **planned)


@pytest.mark.parametrize(
    ("sweep", "values"),
    [
        ("clip_norm=null,1", [None, 1.0]),
        ("frozen=[],[0.*,2.*]", [(), ("0.*", "2.*")]),
        ("frozen=0.*,2.bias", [("0.*",), ("2.bias",)]),
        ("optimizer=adam,{name: sgd, momentum: 0.9}", ["adam", {"name": "sgd", "momentum": 0.9}]),
        ("augment=[flip],[{name: crop, padding: 2}, flip]", [("flip",), ({"name": "crop", "padding": 2}, "flip")]),
        ("data={}", [{}]),
    ],
)
def test_swept_values_may_be_lists_null_and_names_with_options(sweep: str, values: list[Any]) -> None:
    jobs = _plan("x", sweep)
    assert [getattr(job.settings, sweep.partition("=")[0]) for job in jobs] == values
    assert len({job.out for job in jobs}) == len(values)


@pytest.mark.parametrize("sweep", ["frozen=0.*,0.?", "learning_rate=0.1,0.10000000000001"])
def test_swept_values_that_would_share_a_folder_are_refused(sweep: str) -> None:
    with pytest.raises(SpclError, match=r"folder task/er/(frozen=0\.-|learning_rate=0\.1)"):
        _plan("x", sweep)


def test_the_same_value_written_twice_is_one_run() -> None:
    assert [job.name for job in _plan("x", "learning_rate=1e-1,0.1")] == ["task/er/learning_rate=0.1/config-0/seed-0"]


def test_a_setting_is_swept_once() -> None:
    with pytest.raises(SpclError, match="learning_rate is swept twice"):
        _plan("x", "learning_rate=0.1,0.2", "learning_rate=0.3")


def test_configurations_and_seeds_given_twice_are_planned_once() -> None:
    assert len(_plan("x", configs=[0, 1, 0], seeds=iter([2, 2]))) == 2


def test_folders_may_be_given_as_text(tmp_path: Path) -> None:
    (job,) = _plan(str(tmp_path))
    assert job.out == tmp_path / "task/er/config-0/seed-0"
    assert RunFolder(str(tmp_path)).result == tmp_path / "result.json"


def test_choices_of_a_search_are_values_of_yaml() -> None:
    found = parse_search("optimizer.betas=choice:[9e-1,0.99]:null:adam:1e-3")
    assert found == Dimension("optimizer.betas", "choice", ([0.9, 0.99], None, "adam", 0.001))


def test_a_search_among_lists_has_the_plots_that_can_be_drawn_of_it(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    search = [parse_search("augment=choice:[]:[flip]"), parse_search("learning_rate=log:1e-3:1")]
    study = optuna.create_study(direction="maximize")
    for number in range(4):
        study.tell(study.ask({each.name: _distribution(each) for each in search}), float(number))
    _write_plots(optuna, study, tmp_path)
    assert (tmp_path / "optimization_history.json").exists()


def test_every_end_of_a_search_is_checked_against_the_data() -> None:
    choices = [Dimension("tasks", "choice", (1000, 3))]
    with pytest.raises(SpclError, match="1000"):
        _check(Tuning({"validation": 0.2}, "er", "task", [0], [0], choices))
