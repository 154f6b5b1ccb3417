"""What recording and watching a run costs: `execute` against a plain loop that trains and evaluates the same way.

The plain loop keeps nothing and shows nothing. Both make the same learner from the same settings and evaluate the same
tasks at the same moments; the data is loaded once, before. Every round does all variants in turn, in one process, every
other round backwards. Ratios compare medians, by the clock and in processor time, which a busy machine disturbs less.

    python benchmarks/bookkeeping.py [--rounds 15] [--benchmark ps-emnist --data-dir DIR] [--set name=value …]
"""

import argparse
import gc
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

import spcl.runs.run
from spcl.learner import MomentLike, StepReport
from spcl.runs import (
    LiveView,
    Problem,
    RunSettings,
    SilentView,
    View,
    execute,
    make_learner,
    make_problem,
    parse_assignments,
    resolve_settings,
)
from spcl.runs.build import pick_device

TARGET = 1.03
PLAIN = "training and evaluation alone"


def plain(settings: RunSettings, problem: Problem) -> None:
    stream = problem.stream
    learner = make_learner(settings, problem.data, pick_device(settings.device), len(stream))

    def evaluate(moment: MomentLike, report: StepReport | None) -> None:
        if moment.ended:
            for name, task in learner.tasks.items():
                x, y = problem.tests[name]
                known, offset = (name, 0) if settings.scenario == "task" else (None, task.offset)
                float((learner.predict(x, task=known).cpu() == y + offset).double().mean())

    learner.fit(stream, on_moment=evaluate)


def recorded(settings: RunSettings, problem: Problem, view: Callable[[], View]) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(spcl.runs.run, "make_problem", lambda *_: problem),
    ):
        execute(settings, Path(folder), view=view())


def live_view() -> LiveView:
    return LiveView(Console(file=Path(os.devnull).open("w"), force_terminal=True, width=120))


Run = Callable[[RunSettings, Problem], None]
VARIANTS: dict[str, Run] = {
    PLAIN: plain,
    "… with records of every step": partial(recorded, view=SilentView),
    "… and a live view": partial(recorded, view=live_view),
}


def times(run: Run, settings: RunSettings, problem: Problem) -> tuple[float, float]:
    """Seconds by the clock and of the processor."""
    problem.stream.load_state_dict({"position": 0, "moments": len(problem.stream)})
    gc.collect()
    clock, processor = perf_counter(), process_time()
    run(settings, problem)
    return perf_counter() - clock, process_time() - processor


def measure(settings: RunSettings, problem: Problem, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """The times of every variant, after one round that does not count; every other round goes backwards."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    for round_ in range(rounds + 1):
        for name in list(VARIANTS)[:: (-1) ** round_]:
            taken[name].append(times(VARIANTS[name], settings, problem))
    return {name: found[1:] for name, found in taken.items()}


def chosen_settings(arguments: argparse.Namespace) -> RunSettings:
    given = {name: getattr(arguments, name) for name in ("benchmark", "data_dir", "protocol", "device")}
    small_steps = {"backbone": "mlp"} if arguments.benchmark == "ps-glyphs" else {}
    options = {name: value for name, value in given.items() if value is not None}
    return resolve_settings(small_steps, {"threads": 1}, options, parse_assignments(arguments.set))


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of recording and watching a run.")
    parser.add_argument("--rounds", type=int, default=15, help="runs of each variant")
    parser.add_argument("--benchmark", default="ps-glyphs", help="as in spcl run; ps-glyphs with the smallest network")
    parser.add_argument("--data-dir", help="where the publishers' files are")
    parser.add_argument("--protocol", help="a protocol file")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, …")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any setting of spcl run")
    arguments = parser.parse_args()
    settings = chosen_settings(arguments)
    torch.set_num_threads(settings.threads or 1)
    problem = make_problem(settings, pick_device(settings.device))
    found = measure(settings, problem, arguments.rounds)
    what = f"{settings.method['name']} on {settings.benchmark}, {settings.backbone}, {len(problem.stream)} steps"
    table = Table(title=f"{what}, {settings.device}, {settings.threads} CPU thread(s)")
    for heading in ("", "time", "a step", "ratio", "ratio (processor)", "target", "met"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, taken in found.items():
        medians = [[median(one[kind] for one in some) for kind in (0, 1)] for some in (taken, found[PLAIN])]
        clock, processor = (mine / plain for mine, plain in zip(*medians, strict=True))
        seconds = medians[0][0]
        judged = ("", "") if name == PLAIN else (f"at most {TARGET}×", "yes" if clock <= TARGET else "no")
        step = f"{1e3 * seconds / len(problem.stream):.2f} ms"
        table.add_row(name, f"{seconds:.2f} s", step, f"{clock:.3f}×", f"{processor:.3f}×", *judged)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
