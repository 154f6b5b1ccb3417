"""For the tests of experiments: what run folders hold, records written by hand, commands that can be killed."""

import io
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

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
    anytime: float | None = None,
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
        if anytime is not None:
            result["anytime"] = anytime
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
    return start_process(run_command, arguments, log, dict(environment or {}))


def start_process(called: Callable[..., None], *arguments: object) -> BaseProcess:
    """A process that has all modules loaded already, and nothing else that happened in this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["spcl.cli.run", "spcl.cli.grid", "spcl.grids", "torch._dynamo"])
    process = context.Process(target=called, args=arguments, daemon=True)
    process.start()
    return process


class Done(NamedTuple):
    """How a process ended, and what it printed."""

    returncode: int | None
    stdout: str
    stderr: str


def spcl(
    *arguments: object,
    folder: Path,
    encoding: str = "utf-8",
    stdout: Path | None = None,
    path: Sequence[Path] = (),
    strict: bool = True,
) -> Done:
    """Run the command in a process of its own, in a folder, without importing everything once more.

    ``path`` is searched for modules, too; ``strict`` turns warnings into errors, as ``-W error`` does.
    """
    out, errors = stdout or folder / ".stdout", folder / ".stderr"
    process = start_process(_run_spcl, [str(word) for word in arguments], folder, out, errors, encoding, path, strict)
    process.join(PATIENCE)
    printed = "" if stdout else out.read_text(encoding)
    done = Done(process.exitcode, printed, errors.read_text(encoding))
    for file in (folder / ".stdout", errors):
        file.unlink(missing_ok=True)
    return done


def _run_spcl(
    arguments: list[str],
    folder: Path,
    stdout: Path,
    stderr: Path,
    encoding: str,
    path: Sequence[Path],
    strict: bool,
) -> None:
    os.chdir(folder)
    for number, file, stream in ((1, stdout, sys.stdout), (2, stderr, sys.stderr)):
        with file.open("w") as opened:
            os.dup2(opened.fileno(), number)
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(encoding=encoding, errors="strict" if number == 1 else "backslashreplace")
    sys.path[:0] = map(str, path)
    sys.argv = ["spcl", *arguments]
    if strict:
        warnings.simplefilter("error")
    main()


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
