"""Backbones that fully_shard has sharded over ranks: real processes on gloo, against one process."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import _ranks
import _sharded
from _ranks import Ranks, compare
from spcl.learner import Scenario

CASES: dict[str, dict[str, Any]] = {
    "er": {"name": "er"},
    "soro": {"name": "soro"},
    "mgda": {"name": "mgda"},
    "der++": {"name": "der++"},
    "averaged": {"name": "soro", "options": _sharded.AVERAGED},
    "frozen": {"name": "soro", "prepare": _sharded.freeze_and_shard},
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(4, preload="_sharded")
    yield ranks
    ranks.close()


@pytest.mark.parametrize("scenario", ["task", "class"])
@pytest.mark.parametrize("case", CASES)
def test_sharded_ranks_train_what_one_process_trains(ranks: Ranks, case: str, scenario: Scenario) -> None:
    function = partial(_sharded.trained, scenario=scenario, **CASES[case])
    ranks.start(function, 2, "data")
    expected = function(None)
    compare(ranks.results(), expected)


def test_a_mesh_of_task_groups_may_be_sharded_within_them(ranks: Ranks) -> None:
    case = partial(_sharded.trained, scenario="class", **CASES["averaged"])
    compare(ranks.call(case, 4, "2x2"), case(None))


@pytest.mark.parametrize("method", ["soro", "der++"])
def test_shares_may_be_unequal_or_empty(ranks: Ranks, method: str) -> None:
    case = partial(_ranks.trained_on_uneven_batches, method=method, prepare=_sharded.shard_over_all)
    compare(ranks.call(case, 4, "data"), case(None))


def test_batch_norm_is_that_of_a_backbone_that_is_not_sharded(ranks: Ranks) -> None:
    found = ranks.call(_sharded.with_batch_norm, 2, "data")
    assert not isinstance(found[0], Exception), found[0]
    compare([sharded for sharded, _ in found], found[0][1])


def test_a_checkpoint_loads_with_and_without_shards(ranks: Ranks, tmp_path: Path) -> None:
    expected = _sharded.trained(None, scenario="class", **CASES["averaged"])
    resumed = partial(_sharded.resumed, path=tmp_path / "two")
    assert ranks.call(partial(_sharded.saved, path=tmp_path / "two"), 2, "data") == [None] * 2
    compare([resumed(None)], expected)
    compare(ranks.call(resumed, 3, "data"), expected)
    _sharded.saved(None, path=tmp_path / "one")
    compare(ranks.call(partial(resumed, path=tmp_path / "one"), 2, "data"), expected)


def test_a_rank_holds_its_part_of_parameters_states_and_gradients(ranks: Ranks) -> None:
    for found in ranks.call(_sharded.held, 2, "data"):
        assert not isinstance(found, Exception), found
        assert found["parameters"] == found["all"] / 2
        assert found["optimizer"] == 2 * found["parameters"]
        assert found["rows"] == 2 * found["parameters"]


def test_a_task_that_is_not_finite_is_skipped_by_all_ranks(ranks: Ranks) -> None:
    case = partial(_ranks.with_bad_batches, batch_norm=False, prepare=_sharded.shard)
    found = ranks.call(partial(case, bad=True, sample=1), 2, "data")
    expected, _ = case(None, bad=False)
    assert [skipped for _, skipped in found] == [["b"]] * 2
    compare([tensors for tensors, _ in found], expected)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (partial(_ranks.after_error, batch_norm=False, prepare=_sharded.shard), "a loss that fails"),
        (_sharded.after_wrong_inputs, "task 'd': the model raised an error on 4 samples"),
    ],
)
def test_an_error_of_all_ranks_is_undone(ranks: Ranks, case: Any, message: str) -> None:
    found = ranks.call(case, 2, "data")
    _, expected = case(None)
    assert all(message in each for each, _ in found)
    compare([tensors for _, tensors in found], expected)


def test_ranks_save_together(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.call(partial(_sharded.fitted, path=tmp_path / "c"), 2, "data") == [4, 4]


def test_a_replay_batch_of_several_kinds_is_refused(ranks: Ranks) -> None:
    for error in ranks.call(_sharded.with_samples_of_two_kinds, 2, "data"):
        assert "a batch of a and b has samples of 2 kinds, each with a pass of its own" in str(error)


def test_what_shards_do_not_allow_is_refused(ranks: Ranks) -> None:
    first, second = ranks.call(_sharded.refused, 2, "data")
    assert first == second
    for message, part in zip(
        first,
        [
            "sharded over ranks by fully_shard; pass them",
            "only parts of the backbone are sharded",
            "split batches; call fully_shard(backbone, mesh=",
            "combines gradients entry by entry, which needs a backbone that is not sharded",
            "edits memory along the gradients",
            "weighs the gradients of heads, too",
            "orthogonality penalty",
            "cannot be frozen or unfrozen",
            "cannot be copied",
            "cannot be copied",
        ],
        strict=True,
    ):
        assert part in message
