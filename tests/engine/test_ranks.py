"""One learner on several ranks, real processes on gloo: ranks equal to the bit, and to one process up to rounding."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import _ranks
import _sharded
from _ranks import STEPS, Ranks, compare
from persons import persons_settings, write_persons
from small_benchmark import small_settings
from spcl.cli.app import app
from spcl.engine.ranks import deal
from spcl.engine.ranks.shares import share_of
from spcl.errors import OtherRankError, SpclError
from spcl.grids.worker import free_port
from spcl.learner import Learner, Scenario
from spcl.methods import METHODS, make_method

pytestmark = pytest.mark.usefixtures("double")

CASES = [*product(METHODS, ["task", "class"])]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


# -- ranks with different tasks


@pytest.mark.parametrize(("method", "scenario"), CASES)
def test_two_and_three_ranks_train_what_one_process_trains(ranks: Ranks, method: str, scenario: Scenario) -> None:
    case = partial(_ranks.trained, name=method, scenario=scenario)
    ranks.start(case, 2)
    expected = case(None)
    compare(ranks.results(), expected)
    compare(ranks.call(case, 3), expected)


@pytest.mark.parametrize(
    ("method", "scenario", "settings"),
    [
        ("soro", "task", {"momentum": None}),  # averages over all batches, in passes of their own
        ("soro", "task", {"alpha": 0.1}),
        ("soro", "task", {"weigh_heads": True}),
        ("soro", "task", {"memory_share": "samples"}),
        ("soro", "task", {"memory_share": "slopes"}),
        ("er", "class", {"alpha": 0.1, "decoupled": True}),
        ("soro", "task", {"alpha": 0.1, "adaptive": True}),
        ("graddrop", "task", {"alpha": 0.1}),
        ("spcl", "class", {"finished_weight": 0.2}),
    ],
)
def test_three_ranks_train_what_one_process_trains_with_other_settings(
    ranks: Ranks, method: str, scenario: Scenario, settings: dict[str, Any]
) -> None:
    case = partial(_ranks.trained, name=method, scenario=scenario, **settings)
    compare(ranks.call(case, 3), case(None))


@pytest.mark.parametrize("split", ["tasks", "data"])
@pytest.mark.parametrize(("method", "alpha"), [("soro", 0.0), ("er", 0.1), ("dwa", 0.0)])
def test_two_ranks_train_sources_with_encoders_as_one_process(
    ranks: Ranks, method: str, alpha: float, split: str
) -> None:
    case = partial(_ranks.trained_on_sources, name=method, alpha=alpha)
    compare(ranks.call(case, 2, split), case(None))


@pytest.mark.parametrize("split", ["tasks", "data"])
@pytest.mark.parametrize(
    ("case", "rounding"),
    [(_ranks.trained_on_numbers, 1e-11), (_ranks.trained_in_float32, 1e-5)],
    ids=["heads", "float32"],
)
def test_ranks_train_other_heads_and_types_as_one_process(
    ranks: Ranks, case: _ranks.Case, rounding: float, split: str
) -> None:
    compare(ranks.call(case, 3, split), case(None), rounding)


@pytest.mark.parametrize("split", ["tasks", "data"])
def test_ranks_stay_equal_in_bfloat16(ranks: Ranks, split: str) -> None:
    found = ranks.call(_ranks.trained_in_bfloat16, 3, split)
    compare(found, found[0])  # sums in numbers of three digits differ from the sums of one process


def test_ranks_stay_equal_with_dropout(ranks: Ranks) -> None:
    first, *others = ranks.call(partial(_ranks.trained, name="rlw", scenario="task", dropout=0.3), 3)
    for other in others:
        assert all(one.tobytes() == two.tobytes() for one, two in zip(first, other, strict=True))


def test_a_rank_says_why_its_batches_share_no_pass(ranks: Ranks) -> None:
    assert ranks.call(_ranks.fallback_reason, 2)[0] == _ranks.fallback_reason(None) is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and this machine has none")
def test_ranks_on_gpus_say_once_that_they_capture_no_graphs() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=endpoint, rank=0, world_size=1)
    try:
        with pytest.warns(RuntimeWarning, match="capture no CUDA graphs") as found:
            learner = Learner(nn.Linear(6, 4).to("cuda"), make_method("er"), distributed=_ranks.World())
        assert len(found) == 1
        learner.freeze("bias")
        assert learner.fallback_reason == str(found[0].message)
        captures = Learner(nn.Linear(6, 4).to("cuda"), make_method("er"), distributed=_ranks.World(), capture=False)
        assert captures.fallback_reason is None
    finally:
        dist.destroy_process_group()


def test_a_checkpoint_of_three_ranks_loads_with_any_number(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    assert ranks.call(partial(_ranks.saved, path=path, pause=STEPS // 2), 3) == [None] * 3
    resumed = partial(_ranks.resumed, path=path, pause=STEPS // 2)
    expected = _ranks.trained(None, "soro", "class")
    for found in (ranks.call(resumed, 3), ranks.call(resumed, 2), [resumed(None)]):
        compare(found, expected)


def test_a_task_that_is_not_finite_is_skipped_by_all_ranks(ranks: Ranks) -> None:
    found = ranks.call(partial(_ranks.with_bad_batches, bad=True), 2)
    expected, _ = _ranks.with_bad_batches(None, bad=False)
    assert [skipped for _, skipped in found] == [["b"]] * 2
    compare([tensors for tensors, _ in found], expected)


def test_an_error_of_one_rank_is_raised_by_all_and_undone(ranks: Ranks) -> None:
    found = ranks.call(_ranks.after_error, 2)
    _, expected = _ranks.after_error(None)
    assert all("a loss that fails" in message for message, _ in found)
    compare([tensors for _, tensors in found], expected)


def test_a_bad_batch_costs_ranks_no_other_batch(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.call(partial(_ranks.fitted, path=tmp_path / "c", bad="everywhere"), 2)
    message, expected = _ranks.fitted(None, tmp_path / "alone", "nowhere")
    assert message == "no error"
    assert {message for message, _ in found} == {found[0][0]}
    assert "task 'b' has classes 0 to" in found[0][0]
    compare([tensors for _, tensors in found], expected)


def test_a_batch_that_is_bad_on_one_rank_ends_fit_on_all(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.call(partial(_ranks.fitted, path=tmp_path / "c", bad="on rank 1"), 2)
    assert all("task 'b' has classes 0 to" in message for message, _ in found)
    assert found[0][0].startswith("rank 1 stopped: ")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("label", "classes 0 to 1, but the batch has label"),
        ("first label", "classes 0 to 1, but the batch has label"),
        ("unknown task", "there is no source 'unknown'"),
        ("first loss", "a loss that fails"),
        ("augmentation", "an augmentation that fails"),
    ],
)
def test_what_one_rank_refuses_is_raised_by_all_at_once_and_changes_nothing(
    ranks: Ranks, fault: str, message: str
) -> None:
    begin = time.monotonic()
    found = ranks.call(partial(_ranks.with_fault, fault=fault), 2)
    assert time.monotonic() - begin < 20
    (first, _), (second, _) = found
    assert isinstance(first, OtherRankError)
    assert re.search(message, str(second))
    assert str(first) == f"rank 1 stopped: {second}"
    compare([tensors for _, tensors in found], _ranks.with_fault(None, fault)[1])


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (_ranks.with_other_batches, "different batches of a: rank 1 differs from rank 0; give every"),
        (_ranks.with_other_backbones, r"different backbones: rank 0 has .*weight.*; start all of them with the same"),
    ],
)
def test_a_wrong_world_is_refused_by_every_rank(ranks: Ranks, case: Any, message: str) -> None:
    for error in ranks.call(case, 3):
        assert isinstance(error, SpclError)
        assert re.search(message, str(error))


@pytest.mark.parametrize(
    ("wrapper", "message"),
    [
        (DistributedDataParallel, "DistributedDataParallel; pass the module that it wraps"),
        (FullyShardedDataParallel, "FullyShardedDataParallel; pass the module that it wraps"),
    ],
)
def test_a_backbone_that_ranks_share_already_is_refused(wrapper: type, message: str) -> None:
    kind = type("Wrapped", (wrapper, nn.Module), {})
    wrapped = nn.Module.__new__(kind)
    nn.Module.__init__(wrapped)
    with pytest.raises(SpclError, match=message):
        Learner(nn.Sequential(wrapped), make_method("er"))


def test_a_world_needs_a_process_group() -> None:
    with pytest.raises(SpclError, match="there is no process group; start the program by torchrun"):
        _ranks.World()


def test_blocks_of_gradients_are_those_of_least_largest_cost() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        costs, size = generator.integers(1, 9, int(generator.integers(1, 7))).tolist(), int(generator.integers(1, 4))
        blocks = deal(costs, size)
        assert [index for block in blocks for index in block] == list(range(len(costs)))
        bounds = [sorted(cut) for cut in product(range(len(costs) + 1), repeat=size - 1)]
        largest = [max(sum(costs[i:j]) for i, j in zip([0, *cut], [*cut, len(costs)], strict=True)) for cut in bounds]
        assert max(sum(costs[index] for index in block) for block in blocks) == min(largest)


# -- ranks with shares of the same batches


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


# -- sharded backbones

SHARDED: dict[str, dict[str, Any]] = {
    "er": {"name": "er"},
    "soro": {"name": "soro"},
    "mgda": {"name": "mgda"},
    "der++": {"name": "der++"},
    "averaged": {"name": "soro", "options": _sharded.AVERAGED},
    "frozen": {"name": "soro", "prepare": _sharded.freeze_and_shard},
}


@pytest.mark.parametrize("scenario", ["task", "class"])
@pytest.mark.parametrize("case", SHARDED)
def test_sharded_ranks_train_what_one_process_trains(ranks: Ranks, case: str, scenario: Scenario) -> None:
    function = partial(_sharded.trained, scenario=scenario, **SHARDED[case])
    ranks.start(function, 2, "data")
    expected = function(None)
    compare(ranks.results(), expected)


def test_a_mesh_of_task_groups_may_be_sharded_within_them(ranks: Ranks) -> None:
    case = partial(_sharded.trained, scenario="class", **SHARDED["averaged"])
    compare(ranks.call(case, 4, "2x2"), case(None))


@pytest.mark.parametrize("method", ["soro", "der++"])
def test_shares_of_sharded_ranks_may_be_unequal_or_empty(ranks: Ranks, method: str) -> None:
    case = partial(_ranks.trained_on_uneven_batches, method=method, prepare=_sharded.shard_over_all)
    compare(ranks.call(case, 4, "data"), case(None))


def test_batch_norm_is_that_of_a_backbone_that_is_not_sharded(ranks: Ranks) -> None:
    found = ranks.call(_sharded.with_batch_norm, 2, "data")
    assert not isinstance(found[0], Exception), found[0]
    compare([sharded for sharded, _ in found], found[0][1])


def test_a_checkpoint_loads_with_and_without_shards(ranks: Ranks, tmp_path: Path) -> None:
    expected = _sharded.trained(None, scenario="class", **SHARDED["averaged"])
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


def test_a_task_that_is_not_finite_is_skipped_by_all_sharded_ranks(ranks: Ranks) -> None:
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


def test_sharded_ranks_save_together(ranks: Ranks, tmp_path: Path) -> None:
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


# -- runs


def test_a_run_of_ranks_is_that_of_one_process(ranks: Ranks, benchmark: Path, tmp_path: Path) -> None:
    settings = small_settings(benchmark, method={"name": "soro"}, scenario="class")
    found = ranks.call(partial(_ranks.run, settings=settings, out=tmp_path / "ranks"), 3)
    expected = _ranks.run(None, settings, tmp_path / "one")
    assert found[0]["tasks"] == expected["tasks"]
    assert found[0]["confusion"] == expected["confusion"]
    assert found[1] == found[0]
    assert json.loads((tmp_path / "ranks" / "result.json").read_text())["environment"]["ranks"] == 3
    assert ranks.call(partial(_ranks.run, settings=settings, out=tmp_path / "ranks"), 2) == found[:2]  # is complete


def test_ranks_with_other_settings_are_refused(ranks: Ranks, benchmark: Path, tmp_path: Path) -> None:
    case = partial(_ranks.run, settings=small_settings(benchmark), out=tmp_path / "run", seed_by_rank=True)
    for error in ranks.call(case, 2):
        assert "different settings: rank 0 has {'seed': 0}, rank 1 has {'seed': 1}" in str(error)


def test_an_error_of_the_first_rank_ends_all(ranks: Ranks, benchmark: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, other = ranks.call(partial(_ranks.run, settings=small_settings(benchmark), out=tmp_path / "file"), 2)
    assert isinstance(first, SpclError)
    assert isinstance(other, OtherRankError)


def test_a_run_whose_rank_was_killed_ends_and_is_resumed(ranks: Ranks, benchmark: Path, tmp_path: Path) -> None:
    settings = small_settings(benchmark, checkpoint_seconds=0, epochs=5)
    out, file = tmp_path / "run", tmp_path / "settings.json"
    file.write_text(settings.model_dump_json())
    arguments = ["--nproc-per-node=2", "--standalone", "-m", "spcl", "run", f"--settings={file}", f"--out={out}"]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    while not (out / "checkpoint.safetensors").exists():
        assert launcher.poll() is None, launcher.stderr.read() if launcher.stderr else ""
        time.sleep(0.02)
    killed = time.monotonic()
    os.kill(_rank(launcher.pid, 1), signal.SIGKILL)
    _, errors = launcher.communicate(timeout=30)
    assert time.monotonic() - killed < 20
    assert launcher.returncode != 0
    assert "Signal 9 (SIGKILL)" in errors
    # torchrun may end rank 0 before it has said so
    assert len(re.findall(r"^error: rank 0 of 2 has lost another rank", errors, re.MULTILINE)) <= 1
    assert not (out / "result.json").exists()
    settings = settings.model_copy(update={"checkpoint_seconds": 60})
    (found, _), expected = (
        ranks.call(partial(_ranks.run, settings=settings, out=out), 2),
        _ranks.run(None, settings, tmp_path / "one"),
    )
    assert not isinstance(found, Exception), found
    assert found["tasks"] == expected["tasks"]


@pytest.mark.parametrize("split", ["tasks", "data"])
def test_a_run_of_sources_is_that_of_one_process(ranks: Ranks, tmp_path: Path, split: str) -> None:
    path = write_persons(tmp_path / "persons.npz")
    settings = persons_settings(path, scenario="domain", at_once=3, encoder="affine", prequential=True)
    found = ranks.call(partial(_ranks.run, settings=settings, out=tmp_path / "ranks"), 2, split)
    expected = _ranks.run(None, settings, tmp_path / "one")
    for each in found:
        assert not isinstance(each, Exception), each
        for name in ("tasks", "unseen", "prequential", "first", "confusion"):
            assert each[name] == expected[name]


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


def _rank(launcher: int, rank: int) -> int:
    """Return the process of a rank, among the children of a launcher."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"\0RANK={rank}\0" in "\0" + Path(f"/proc/{child}/environ").read_text():
            return int(child)
    raise AssertionError("no such rank")
