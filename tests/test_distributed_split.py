"""Ranks that split batches, or tasks and batches: real processes on gloo, against one process and a naive loop."""

import json
import re
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import _ranks
from _ranks import STEPS, Ranks, compare
from small_benchmark import small_settings
from spcl.cli.app import app
from spcl.distributed.shares import share_of
from spcl.errors import SpclError
from spcl.learner import Scenario
from spcl.methods import METHODS

CASES = [*product(METHODS, ["task", "class"])]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(("method", "scenario"), CASES)
def test_ranks_that_split_batches_train_what_one_process_trains(ranks: Ranks, method: str, scenario: Scenario) -> None:
    case = partial(_ranks.trained, name=method, scenario=scenario, batch_norm=False)
    ranks.start(case, 2, "data")
    expected = case(None)
    compare(ranks.results(), expected)
    compare(ranks.call(case, 3, "data"), expected)


@pytest.mark.parametrize(
    ("method", "scenario", "settings"),
    [
        ("soro", "class", {}),
        ("soro", "task", {"alpha": 0.1}),
        ("soro", "task", {"weigh_heads": True}),
        ("er", "class", {"alpha": 0.1, "decoupled": True}),
        ("der++", "class", {}),
        ("gmed", "class", {}),
        ("graddrop", "task", {"alpha": 0.1}),
        ("spcl", "class", {"finished_weight": 0.2}),
    ],
)
def test_a_mesh_of_task_groups_trains_what_one_process_trains(
    ranks: Ranks, method: str, scenario: Scenario, settings: dict[str, Any]
) -> None:
    case = partial(_ranks.trained, name=method, scenario=scenario, batch_norm=False, **settings)
    compare(ranks.call(case, 4, "2x2"), case(None))


@pytest.mark.parametrize("split", ["data", "2x2"])
@pytest.mark.parametrize("momentum", [0.3, None])
def test_batch_norm_has_the_statistics_of_shares(ranks: Ranks, split: str, momentum: float | None) -> None:
    shares = 4 if split == "data" else 2
    found = ranks.call(partial(_ranks.trained_on_large_batches, momentum=momentum), 4, split)
    compare(found, _ranks.trained_by_shares(shares, momentum))


@pytest.mark.parametrize("split", ["data", "2x2"])
@pytest.mark.parametrize("method", ["soro", "der++"])
def test_shares_may_be_unequal_or_empty(ranks: Ranks, split: str, method: str) -> None:
    case = partial(_ranks.trained_on_uneven_batches, method=method)
    compare(ranks.call(case, 4, split), case(None))


def test_ranks_stay_equal_with_dropout_and_batch_norm(ranks: Ranks) -> None:
    case = partial(_ranks.trained, name="rlw", scenario="task", dropout=0.3)
    first, *others = ranks.call(case, 3, "data")
    assert not isinstance(first, Exception), first
    for other in others:
        assert all(one.tobytes() == two.tobytes() for one, two in zip(first, other, strict=True))
    assert any(not np.allclose(one, two) for one, two in zip(first, case(None), strict=True))


BATCHES, ROWS, GRAMIAN, UPDATE, HEADS = "allgather_base", "alltoall_base", "allreduce", "allgather_base", "allreduce"
LOGITS = DIRECTION = "allreduce"


@pytest.mark.parametrize(
    ("method", "batch_norm", "split", "expected"),
    [
        ("soro", False, "tasks", [BATCHES, ROWS, GRAMIAN, UPDATE, HEADS]),
        ("soro", True, "tasks", [BATCHES, ROWS, GRAMIAN, UPDATE, HEADS]),
        ("soro", True, "data", [BATCHES, ROWS, GRAMIAN, UPDATE, HEADS]),
        ("soro", True, "2x2", [BATCHES, ROWS, ROWS, GRAMIAN, UPDATE, UPDATE, HEADS]),
        ("er", True, "data", [BATCHES, ROWS, GRAMIAN, UPDATE, HEADS]),
        ("graddrop", True, "tasks", [BATCHES, ROWS, GRAMIAN, HEADS]),
        ("der++", True, "tasks", [BATCHES, LOGITS, ROWS, GRAMIAN, UPDATE, HEADS]),
        ("der++", False, "data", [BATCHES, LOGITS, ROWS, GRAMIAN, UPDATE, HEADS]),
        ("gmed", True, "tasks", [BATCHES, DIRECTION, DIRECTION, ROWS, GRAMIAN, UPDATE, HEADS]),
    ],
)
def test_a_step_has_the_collectives_that_are_documented(
    ranks: Ranks, method: str, batch_norm: bool, split: str, expected: list[str]
) -> None:
    case = partial(_ranks.collectives, name=method, batch_norm=batch_norm)
    for found in ranks.call(case, 4 if split == "2x2" else 2, split):
        assert found == expected


@pytest.mark.parametrize("sample", [0, 1])
def test_a_sample_that_is_not_finite_is_skipped_with_its_task(ranks: Ranks, sample: int) -> None:
    case = partial(_ranks.with_bad_batches, batch_norm=False)
    expected, _ = case(None, bad=False)
    found = ranks.call(partial(case, bad=True, sample=sample), 4, "2x2")
    assert [skipped for _, skipped in found] == [["b"]] * 4
    compare([tensors for tensors, _ in found], expected)


@pytest.mark.parametrize("loss", ["sum", "weighted", "contrast"])
def test_losses_that_are_no_means_over_samples_are_refused_by_every_rank(ranks: Ranks, loss: str) -> None:
    for error in ranks.call(partial(_ranks.with_loss, kind=loss), 2, "data"):
        assert isinstance(error, SpclError)
        assert re.search("mean over samples.*split tasks over the ranks", str(error))


def test_an_error_of_all_ranks_names_the_task(ranks: Ranks) -> None:
    found = ranks.call(_ranks.after_error, 2, "data")
    assert all("a loss that fails" in message for message, _ in found)


def test_a_checkpoint_loads_with_any_split(ranks: Ranks, tmp_path: Path) -> None:
    path, pause = tmp_path / "checkpoint.safetensors", STEPS // 2
    assert ranks.call(partial(_ranks.saved, path=path, pause=pause, batch_norm=False), 2, "data") == [None] * 2
    resumed = partial(_ranks.resumed, path=path, pause=pause, batch_norm=False)
    expected = _ranks.trained(None, "soro", "class", batch_norm=False)
    for found in (ranks.call(resumed, 3, "data"), ranks.call(resumed, 4, "2x2"), [resumed(None)]):
        compare(found, expected)


def test_layers_that_synchronise_do_so_over_the_ranks_that_split_a_batch(ranks: Ranks) -> None:
    found = ranks.call(_ranks.synchronised, 4, "2x2")
    assert [members for members, _ in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert all("SyncBatchNorm needs 2 of one kind on each of 2 ranks" in message for _, message in found)


def test_a_split_that_does_not_fit_the_ranks_is_refused(ranks: Ranks) -> None:
    for error in ranks.call(_ranks.trained, 4, "3x2"):
        assert "the split 3x2 is for 6 ranks, but there are 4" in str(error)


def test_a_run_that_splits_batches_is_that_of_one_process(ranks: Ranks, benchmark: Path, tmp_path: Path) -> None:
    settings = small_settings(benchmark, method={"name": "soro"}, scenario="class", backbone={"name": "mlp"})
    found = ranks.call(partial(_ranks.run, settings=settings, out=tmp_path / "ranks"), 2, "data")
    expected = _ranks.run(None, settings, tmp_path / "one")
    assert found[0]["tasks"] == expected["tasks"]
    assert found[1] == found[0]
    environments = [json.loads((tmp_path / run / "result.json").read_text())["environment"] for run in ("ranks", "one")]
    assert [each.get("split") for each in environments] == ["1x2", None]


def test_a_split_without_other_processes_is_refused(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(app, ["run", "--split", "data", "--out", str(tmp_path / "run")])
    assert str(outcome.exception) == "--split data is for several processes; start them by torchrun, or leave it out"


def test_ranks_without_gradients_are_named_after_many_steps(ranks: Ranks) -> None:
    first, *others = ranks.call(_ranks.idle, 3)
    assert first == (
        "2 of 3 task groups of ranks had no gradient to compute in 50 steps in a row; split the batches of tasks over "
        "the ranks, with the split 'data'"
    )
    assert others == [None, None]


def test_heads_that_differ_are_refused_by_every_rank(ranks: Ranks) -> None:
    for error in ranks.call(_ranks.with_other_heads, 2):
        assert "different heads: rank 0 has" in str(error)


@given(st.integers(1, 9), st.integers(1, 30))
def test_shares_have_every_sample_once_and_never_a_single_one(ranks: int, samples: int) -> None:
    shares = [range(samples)[share_of(rank, ranks, samples)] for rank in range(ranks)]
    assert sorted(index for share in shares for index in share) == list(range(samples))
    sizes = [len(share) for share in shares if share]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(samples, 2)
