"""Grids on a Ray cluster: the runs of the local engine, however often workers, nodes and drivers are lost."""

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from _runs import PATIENCE, metrics_in, results_in, start_command, wait_for
from spcl.cli.app import app
from spcl.errors import SpclError
from spcl.grids import (
    GridState,
    Job,
    RayPool,
    SilentGridView,
    Tuning,
    WorkerPool,
    parse_search,
    plan_grid,
    run_jobs,
    tune,
)
from spcl.grids.ray import import_ray
from spcl.grids.worker import source_files, with_local_sources
from spcl.plugins import load_plugins
from spcl.runs import RunSettings, execute
from spcl.runs.settings import first_difference

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.timeout(900),  # a busy machine takes minutes for what else takes seconds
]

SMALL = {"tasks": 3, "batch_size": 6, "epochs": 8, "memory_budget": 24, "threads": 1, "device": "cpu"}
LONGER = SMALL | {"batch_size": 1}
ER = {"methods": ["er"], "scenarios": ["task", "class"], "configs": [0], "seeds": [0]}
METHODS = ("er", "soro")
PLUGIN = '''
"""A method of my own."""

import torch

from spcl.methods import Method, Weights


class Halved(Method):
    """Half of the sum of the gradients."""

    name = "halved"
    family = "MTL"
    summary = "half of the sum"
    reference = "nobody"

    def weigh(self, gradients):
        return Weights(torch.full((len(gradients.names),), 0.5))
'''


def plan(benchmark: Path, out: Path, **settings: object) -> list[Job]:
    base = {"benchmark": str(benchmark), **SMALL, **settings}
    return plan_grid(out, base, methods=METHODS, scenarios=["task", "class"], configs=[0], seeds=[0])


class RecordingView(SilentGridView):
    """Keeps what happened, and lets a test act at every tick."""

    def __init__(self, act: Callable[[GridState], None] = lambda state: None) -> None:
        self.act = act
        self.summaries: dict[str, list[str]] = {}
        self.failures: list[tuple[str, str, bool]] = []
        self.losses: list[tuple[str, str, bool]] = []

    def tick(self, state: GridState) -> None:
        self.act(state)

    def finished(self, job: Job, state: GridState, summary: str, skipped: int) -> None:
        self.summaries.setdefault(job.name, []).append(summary)

    def failed(self, job: Job, state: GridState, reason: str, again: bool) -> None:
        self.failures.append((job.name, reason, again))

    def lost(self, job: Job, state: GridState, reason: str, begun: bool) -> None:
        self.losses.append((job.name, reason, begun))


# -- a cluster of two nodes, which are processes of this machine


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    token = tmp_path_factory.mktemp("ray") / "token"
    token.write_text("5bc1" * 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.setenv("RAY_worker_niceness", "0")  # else its workers hardly run beside other programs
        import_ray()  # before Ray is imported, so that it is as quiet as in a grid
        from ray.cluster_utils import Cluster

        cluster = Cluster()
        cluster.add_node(num_cpus=1, node_name="alpha", include_dashboard=False)
        cluster.add_node(num_cpus=1, node_name="beta")
        yield cluster
        cluster.shutdown()


@pytest.fixture
def cluster(started: Any) -> Iterator[Any]:
    """Two nodes; one that a test kills is started again, whether the test fails or not."""
    yield started
    for node in [node for node in started.worker_nodes if not is_alive(raylet(node))]:
        started.worker_nodes.remove(node)
        started.add_node(num_cpus=1, node_name="beta")


@pytest.fixture
def ray_pool(started: Any) -> Iterator[RayPool]:
    """The workers of one test: runs that a failed test leaves are not taken for the runs of the next one."""
    with RayPool(started.address) as pool:
        yield pool


@pytest.fixture(scope="module")
def undisturbed(benchmark: Path, pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of the local engine."""
    out = tmp_path_factory.mktemp("local")
    assert not run_jobs(plan(benchmark, out), pool, SilentGridView()).failed
    return out


def raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def is_alive(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def workers(node: Any) -> list[int]:
    """The processes that make runs on a node."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == raylet(node) and (path / "cmdline").read_text().startswith(("ray::task/", "ray::class/")):
                found.append(int(path.name))
        except OSError:  # it has just ended
            continue
    return found


def is_in_its_first_half(out: Path, steps: int) -> bool:
    """Whether a run that is saved after every step has been saved and has far to go: messages of its steps are late."""
    saved = (out / "checkpoint.safetensors").exists()
    return saved and (out / "metrics.jsonl").read_text().count("\n") < steps / 2


def assert_same_runs(out: Path, expected: Path, count: int) -> None:
    assert len(results_in(out)) == count
    assert results_in(out) == {name: results_in(expected)[name] for name in results_in(out)}
    assert metrics_in(out) == {name: metrics_in(expected)[name] for name in metrics_in(out)}
    left = {path.name for pattern in ("checkpoint*", "failure.json", ".grid-*") for path in out.rglob(pattern)}
    assert left == set()


def test_runs_survive_the_loss_of_a_worker_and_of_a_node(
    benchmark: Path, cluster: Any, ray_pool: RayPool, undisturbed: Path, tmp_path: Path
) -> None:
    alpha, beta = cluster.list_all_nodes()
    killed: set[str] = set()

    def kill(state: GridState) -> None:
        for name, running in state.running.items():
            if running.node not in {None, *killed} and is_in_its_first_half(tmp_path / name, running.steps or 0):
                killed.add(str(running.node))
                for process in [raylet(beta), *workers(beta)] if running.node == "beta" else workers(alpha):
                    os.kill(process, signal.SIGKILL)

    jobs = plan(benchmark, tmp_path, checkpoint_seconds=0.0)
    view = RecordingView(kill)
    state = run_jobs(jobs, ray_pool, view, retries=0)
    assert killed == {"alpha", "beta"}
    ((lost, reason, begun),) = view.losses
    assert (reason, begun) == ("the node beta was lost", True)
    ((crashed, reason, again),) = view.failures
    assert (reason, again) == ("the worker process died (often: out of memory) (on alpha)", False)
    assert lost not in state.failed  # it was made again without a retry
    assert json.loads((tmp_path / crashed / "failure.json").read_text())["attempts"] == 1

    second = RecordingView()
    assert run_jobs(jobs, ray_pool, second).done == len(jobs)
    assert second.summaries.keys() == {crashed}
    made = {**view.summaries, **second.summaries}
    assert made.keys() == {job.name for job in jobs}
    assert all(len(summaries) == 1 for summaries in made.values())
    assert made[lost][0].endswith(" % (on alpha)")
    assert_same_runs(tmp_path, undisturbed, len(jobs))


def test_a_node_without_the_folder_sends_its_files_and_gets_plugins(
    benchmark: Path, ray_pool: RayPool, undisturbed: Path, pool: WorkerPool, tmp_path: Path
) -> None:
    """A path below ``/proc/self/fd`` is one that only this process has."""
    (tmp_path / "mine.py").write_text(PLUGIN)
    plugins = [plugin.model_dump() for plugin in load_plugins([str(tmp_path / "mine.py")])]
    mine = {"benchmark": str(benchmark), **SMALL, "plugins": plugins}
    names = {"methods": ["halved"], "scenarios": ["task"], "configs": [0], "seeds": [0]}
    run_jobs(plan_grid(tmp_path / "local", mine, **names), pool, SilentGridView())

    here = os.open(tmp_path, os.O_RDONLY)
    out = Path(f"/proc/self/fd/{here}")
    (job,) = plan_grid(out / "mine", mine, **names)
    plugin = job.settings.plugins[0].model_copy(update={"name": str(out / "mine.py")})
    job = replace(job, settings=job.settings.model_copy(update={"plugins": (plugin,)}))
    others = plan(benchmark, out / "others")
    view = RecordingView()
    state = run_jobs([*others, job], ray_pool, view)
    assert (state.failed, state.done) == ({}, 5)
    assert_same_runs(tmp_path / "others", undisturbed, 4)
    assert_same_runs(tmp_path / "mine", tmp_path / "local", 1)
    recorded = json.loads((tmp_path / "mine" / job.name / "settings.json").read_text())
    assert [each["name"] for each in recorded["plugins"]] == ["../../../../../mine.py"]
    assert recorded["threads"] == 1
    os.close(here)


def test_files_that_settings_name_are_copied_where_they_are_missing(tmp_path: Path) -> None:
    for name in ("mine.py", "protocol.json"):
        (tmp_path / name).write_text(f"content of {name}")
    plugin = {"name": str(tmp_path / "mine.py"), "sha256": "0"}
    settings = RunSettings.model_validate({"plugins": [plugin], "protocol": str(tmp_path / "protocol.json")})
    sources = source_files(settings)
    assert with_local_sources(settings, sources) == settings
    (tmp_path / "mine.py").unlink()
    (tmp_path / "protocol.json").write_text("another protocol of the same name")
    copied = with_local_sources(settings, sources)
    for path in (copied.plugins[0].name, str(copied.protocol)):
        assert Path(path).read_text() == f"content of {Path(path).name}"
    assert first_difference(settings.model_dump(), copied.model_dump()) is None  # it is still the same run


def test_a_run_of_ranks_on_two_nodes_survives_the_loss_of_a_rank_and_of_a_node(
    benchmark: Path, cluster: Any, tmp_path: Path
) -> None:
    """Every node has one CPU, so that the two ranks, which split batches, are on two nodes."""
    from ray.util import placement_group_table

    alpha, beta = cluster.list_all_nodes()
    steps: list[int] = []

    def kill(state: GridState) -> None:
        step = max((running.step for running in state.running.values()), default=0)
        one_each = (len(workers(alpha)), len(workers(beta))) == (1, 1)  # not while processes of before are ending
        if len(steps) < 2 and step > max(steps, default=0) and one_each:
            steps.append(step)
            for process in workers(alpha) if len(steps) == 1 else [raylet(beta), *workers(beta)]:
                os.kill(process, signal.SIGKILL)
            if len(steps) == 2:
                cluster.worker_nodes.remove(beta)
                cluster.add_node(num_cpus=1, node_name="beta")

    (job, *_) = plan(benchmark, tmp_path / "grid", checkpoint_seconds=0.0, backbone={"name": "mlp"})
    view = RecordingView(kill)
    with RayPool(cluster.address, processes_per_run=2, split="data") as pool:
        state = run_jobs([job], pool, view)
        groups = placement_group_table().values()
    assert (state.failed, state.done, len(steps)) == ({}, 1, 2)
    ((_, reason, again),) = view.failures
    assert re.fullmatch(r"the worker process of rank [01] died \(often: out of memory\) \(on alpha\)", reason)
    assert again
    assert [loss[1:] for loss in view.losses] == [("the node beta was lost", True)]
    assert {group["state"] for group in groups} == {"REMOVED"}
    found = json.loads((job.out / "result.json").read_text())
    assert found["environment"]["split"] == "1x2"
    expected = execute(job.settings, tmp_path / "one").model_dump()
    assert [found[key] for key in ("tasks", "confusion")] == [expected[key] for key in ("tasks", "confusion")]


def test_ranks_do_not_share_a_gpu(cluster: Any) -> None:
    with pytest.raises(SpclError, match=r"2 processes cannot share a GPU, but each has 0\.5 of one; give each a whole"):
        RayPool(gpus_per_run=0.5, processes_per_run=2)


def test_tuning_on_a_cluster_finds_what_it_finds_here(
    benchmark: Path, ray_pool: RayPool, pool: WorkerPool, tmp_path: Path
) -> None:
    base = {"benchmark": str(benchmark), "validation": 0.25, **SMALL}
    tuning = Tuning(base, "soro", "task", [0, 1], [0], [parse_search("method.sigma=log:1:1000")])
    best = [
        tune(tuning, tmp_path / name, 2, pool=each, view=SilentGridView())
        for name, each in {"local": pool, "ray": ray_pool}.items()
    ]
    assert best[0] == best[1]
    assert results_in(tmp_path / "local") == results_in(tmp_path / "ray")


def test_runs_share_gpus_as_told(benchmark: Path, cluster: Any, ray_pool: RayPool, tmp_path: Path) -> None:
    """The GPU is a number only: it decides how many runs a node makes at once."""
    import ray

    gamma = cluster.add_node(num_cpus=4, num_gpus=1, node_name="gamma")
    free: list[float] = []
    view = RecordingView(lambda state: free.append(ray.available_resources().get("GPU", 0.0)))
    jobs = plan(benchmark, tmp_path)[:2]
    with RayPool(cluster.address, gpus_per_run=0.4) as shared:
        state = run_jobs(jobs, shared, view)
    cluster.remove_node(gamma)
    assert (state.failed, state.done) == ({}, len(jobs))
    assert min(free) == pytest.approx(0.2)  # both at once, each with its part
    assert all(summary.endswith("(on gamma)") for (summary,) in view.summaries.values())


# -- whole grids as processes of their own


def start(arguments: list[str], log: Path) -> BaseProcess:
    """A command with this process's token, which the server that forks it may not have."""
    return start_command(arguments, log, {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")})


def command_line(benchmark: Path, out: Path, address: str) -> list[str]:
    settings = [f"--set={name}={value}" for name, value in LONGER.items() if name not in ("threads", "device")]
    choice = ["--methods", "er", "--configs", "0", "--seeds", "0", "--jobs", "1", "--engine", "ray"]
    return ["grid", "--benchmark", str(benchmark), "--out", str(out), "--address", address, *choice, *settings]


def test_two_grids_on_one_cluster_are_interrupted_and_killed_and_continue(
    benchmark: Path, cluster: Any, pool: WorkerPool, tmp_path: Path
) -> None:
    local = plan_grid(tmp_path / "local", {"benchmark": str(benchmark), **LONGER}, **ER)
    assert not run_jobs(local, pool, SilentGridView()).failed
    numbers = (signal.SIGINT, signal.SIGKILL)
    outs, logs = ([tmp_path / f"{kind}-{number.name}" for number in numbers] for kind in ("out", "log"))

    def grids() -> dict[Path, BaseProcess]:
        commands = [command_line(benchmark, out, cluster.address) for out in outs]
        return {out: start(words, log) for out, words, log in zip(outs, commands, logs, strict=True)}

    def has_begun(out: Path) -> bool:
        """The first lines are written before a run can be interrupted."""
        return any(path.read_text().count("\n") > 5 for path in out.rglob("metrics.jsonl"))

    def signal_those_that_have_begun() -> bool:
        for out, number in list(waiting.items()):
            if has_begun(out):
                os.kill(int(processes[out].pid or 0), number)
                del waiting[out]
        return not waiting

    processes, waiting = grids(), dict(zip(outs, numbers, strict=True))
    wait_for(signal_those_that_have_begun)
    for process, log, status in zip(processes.values(), logs, (130, -signal.SIGKILL), strict=True):
        process.join(PATIENCE)
        assert process.exitcode == status, log.read_text()
    assert "of 2 runs are complete; the same command continues" in logs[0].read_text()
    assert list(outs[0].rglob("checkpoint.safetensors"))  # Ctrl-C saves; the next checkpoint was a minute away

    for (out, process), log in zip(grids().items(), logs, strict=True):
        process.join(PATIENCE)
        assert process.exitcode == 0, log.read_text()
        assert re.search(r"2/2  .*: accuracy .* % \(on (alpha|beta)\)", log.read_text())
        assert_same_runs(out, tmp_path / "local", 2)


# -- errors


def test_what_would_differ_from_node_to_node_is_an_error(benchmark: Path, ray_pool: RayPool, tmp_path: Path) -> None:
    wrong = {"threads = None differs": {"threads": None}, "device = auto differs": {"device": "auto"}}
    for message, settings in wrong.items():
        with pytest.raises(SpclError, match=message):
            run_jobs(plan(benchmark, tmp_path, **settings), ray_pool, SilentGridView())
    with (
        RayPool(gpus_per_run=2.0) as pool,
        pytest.raises(SpclError, match="a run needs 1 CPUs and 2 GPUs, for which the cluster has no room"),
    ):
        run_jobs(plan(benchmark, tmp_path), pool, SilentGridView())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "ray", "--address", "127.0.0.1:9"], "no Ray cluster answers at 127.0.0.1:9"),
        (
            ["--engine", "ray", "--address", "ray://head:1"],
            "'ray://head:1' is not the address of a Ray cluster",
        ),
        (["--gpus-per-run", "0.5"], "--gpus-per-run 0.5 is of use on a cluster only; add --engine ray"),
    ],
)
def test_a_command_that_reaches_no_cluster_says_so(
    benchmark: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    words = ["grid", "--benchmark", str(benchmark), "--out", str(tmp_path / "out"), "--set=tasks=3", "--methods=er"]
    outcome = CliRunner().invoke(app, [*words, *arguments])
    assert isinstance(outcome.exception, SpclError), outcome.output
    assert message in str(outcome.exception)


def test_without_ray_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SpclError, match=r"Ray is not installed; run: pip install .*\[ray\]"):
        RayPool()
