"""For the tests of experiments: what run folders hold, records written by hand, commands that can be killed."""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from spcl.cli.app import main

PATIENCE = 200.0


def results_in(folder: Path) -> dict[str, Any]:
    """Every result under a folder by its path, apart from times and the source tree's commit."""
    results = {}
    for path in sorted(folder.rglob("result.json")):
        content = json.loads(path.read_text())
        del content["seconds"], content["environment"]
        results[str(path.parent.relative_to(folder))] = content
    return results


def metrics_in(folder: Path) -> dict[str, str]:
    """Every ``metrics.jsonl`` under a folder by its path."""
    return {str(path.parent.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("metrics.jsonl"))}


def write_run(
    folder: Path,
    *,
    benchmark: str = "ps-emnist",
    method: str = "er",
    scenario: str = "task",
    config: int = 0,
    seed: int = 0,
    accuracy: float | None = 80.0,
    forgetting: float = -5.0,
    **settings: Any,
) -> None:
    """The record of a run as ``spcl run`` leaves it, or of an unfinished one if there is no accuracy."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {name.removeprefix("method_"): value for name, value in settings.items() if name.startswith("method_")}
    content = {
        "benchmark": benchmark,
        "preset": "default",
        "scenario": scenario,
        "method": {"name": method, "alpha": 0.0, **own},
        "config": config,
        "seed": seed,
        "paradigm": "parallel",
        "validation": 0.0,
        "threads": 1,
        **{name: value for name, value in settings.items() if not name.startswith("method_")},
    }
    (folder / "settings.json").write_text(json.dumps(content))
    if accuracy is not None:
        tasks = {"task-0": {"at_end": accuracy - forgetting, "final": accuracy}}
        confusion = {"task-0": [[3, 1], [0, 4]]}
        result = {"accuracy": accuracy, "forgetting": forgetting, "tasks": tasks, "confusion": confusion}
        (folder / "result.json").write_text(json.dumps(result))


def write_grid(
    folder: Path,
    accuracies: Mapping[str, Callable[[int, int], float | None]],
    configs: int,
    seeds: int,
    **settings: Any,
) -> None:
    """Runs of several methods, whose accuracies are functions of configuration and seed."""
    for method, accuracy in accuracies.items():
        for config in range(configs):
            for seed in range(seeds):
                path = folder / method.replace(":", "-") / f"config-{config}" / f"seed-{seed}"
                value = accuracy(config, seed)
                write_run(path, method=method, config=config, seed=seed, accuracy=value, **settings)


def run_command(arguments: list[str], log: Path, environment: Mapping[str, str]) -> None:
    """The command's process: what it prints goes to a file."""
    os.environ.update(environment)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["spcl", *arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
    main()


def start_command(arguments: list[str], log: Path, environment: Mapping[str, str] | None = None) -> BaseProcess:
    """A process that has all modules loaded already, so that it can be killed often; with further variables."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["spcl.cli.run", "spcl.cli.grid", "torch._dynamo"])  # which optimisers import
    process = context.Process(target=run_command, args=(arguments, log, dict(environment or {})), daemon=True)
    process.start()
    return process


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "nothing happens"
        time.sleep(0.01)


def rank_process(parent: int, rank: int) -> int:
    """The process of a rank of several, among the children of the one that started them."""
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        variables = Path(f"/proc/{child}/environ").read_text().split("\0")
        if f"RANK={rank}" in variables and "WORLD_SIZE=1" not in variables:
            return int(child)
    raise AssertionError(f"{parent} has started no rank {rank}")
