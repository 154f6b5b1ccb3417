"""One PS-CIFAR-100 run on a GPU: SORO with CUDA graphs against our own eager loop, with DBT and habits, beside ER.

All variants train the same configuration in one process, round by round; what is timed is the training loop, with the
gathering of batches and all work of the GPU. The time that capturing graphs took is shown and subtracted. Two short
tables follow: the shares of the phases of a step, as the learner reports them (a phase that waits for the GPU holds the
time of the work it waits for); and how long the GPU is at work in a step of SORO, which a profile of one more run
shows, and waits in the others.

    python benchmarks/run_gpu.py --data-dir DIR [--protocol ps-cifar100.json] [--rounds 3]
"""

import argparse
from collections import Counter
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from at_work_gpu import microseconds_at_work
from spcl.runs import Problem, RunSettings, make_learner, make_problem, resolve_settings

GPU = torch.device("cuda")
CAPTURED, EAGER, DBT = "SORO", "SORO, eager", "SORO+DBT"
AUGMENTED, AVERAGED, HABITS = "SORO, crop and flip", "SORO, averaged weights", "SORO, cosine schedule, clipping"
VARIANTS = {
    CAPTURED: {"method": {"name": "soro"}},
    EAGER: {"method": {"name": "soro"}, "capture": False},
    DBT: {"method": {"name": "soro+dbt"}},
    AUGMENTED: {"method": {"name": "soro"}, "augment": ["crop", "flip"]},
    AVERAGED: {"method": {"name": "soro"}, "average": 0.99},
    HABITS: {"method": {"name": "soro"}, "schedule": "cosine", "clip_norm": 1.0},
    "ER": {"method": {"name": "er"}, "stability": False},
}


@dataclass(frozen=True)
class Run:
    """One run: its training in seconds, and how long capturing and every phase took in them."""

    seconds: float
    phases: Counter[str]

    @property
    def after_capture(self) -> float:
        return self.seconds - self.phases["capture"]


def train(settings: RunSettings, problem: Problem) -> Run:
    stream, phases = problem.stream, Counter[str]()
    learner = make_learner(settings, problem.data, GPU, len(stream))
    stream.load_state_dict({"position": 0, "moments": len(stream)})
    torch.cuda.synchronize()
    begin = perf_counter()
    learner.fit(stream, on_step=lambda report: phases.update(report.seconds))
    torch.cuda.synchronize()
    return Run(perf_counter() - begin, phases)


def measure(arguments: argparse.Namespace) -> tuple[dict[str, list[Run]], float, int]:
    """The runs of every variant, after a round that does not count, SORO's work in a step, the steps of a run."""
    base = {"benchmark": "ps-cifar100", "preset": "paper", "precision": "bfloat16", "device": "cuda", "config": 0}
    given = {"data_dir": arguments.data_dir, "protocol": arguments.protocol}
    settings = {name: resolve_settings(base, given, changes) for name, changes in VARIANTS.items()}
    problem = make_problem(settings[CAPTURED], GPU)
    rounds = [{name: train(chosen, problem) for name, chosen in settings.items()} for _ in range(arguments.rounds + 1)]
    at_work = milliseconds_at_work(settings[CAPTURED], problem)
    return {name: [one[name] for one in rounds[1:]] for name in settings}, at_work, len(problem.stream)


def milliseconds_at_work(settings: RunSettings, problem: Problem) -> float:
    """Return for how long the GPU is at work in a step."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        train(settings, problem)
    return microseconds_at_work(profiler) / 1e3 / len(problem.stream)


def ratio(runs: list[Run], others: list[Run]) -> float:
    return median(one.after_capture / other.after_capture for one, other in zip(runs, others, strict=True))


def results(found: dict[str, list[Run]], steps: int) -> Table:
    table = Table(title=f"PS-CIFAR-100, first configuration, ResNet-18, bfloat16, {steps} steps")
    for heading in ("", "training", "of that, capture", "after capture", "a step", "ratio", "target", "met"):
        table.add_column(heading, justify="right" if heading else "left")
    best, faster = median(run.after_capture for run in found[CAPTURED]), ratio(found[EAGER], found[CAPTURED])
    most = {DBT: 1.3, AUGMENTED: 1.05, AVERAGED: 1.02, HABITS: 1.02}
    slower = {name: ratio(found[name], found[CAPTURED]) for name in most}
    judged = {
        CAPTURED: ("", "at most 1.4 s", best <= 1.4),
        EAGER: (f"{faster:.2f}× SORO's time", "at least 3×", faster >= 3.0),
        **{
            name: (f"{slower[name]:.3f}× SORO's time", f"at most {target}×", slower[name] <= target)
            for name, target in most.items()
        },
    }
    for name, runs in found.items():
        seconds, capture, after = (
            median(values)
            for values in zip(*((r.seconds, r.phases["capture"], r.after_capture) for r in runs), strict=True)
        )
        said, target, met = judged.get(name, (f"{ratio(runs, found[CAPTURED]):.2f}× SORO's time", "", None))
        times = (f"{seconds:.2f} s", f"{capture:.2f} s", f"{after:.2f} s", f"{1e3 * after / steps:.1f} ms")
        table.add_row(name, *times, said, target, {True: "yes", False: "no", None: ""}[met])
    return table


def shares(found: dict[str, list[Run]], steps: int) -> Table:
    table = Table(title="Milliseconds a step, by phase, as the host sees them")
    phases = ["tasks", "memory", "orthogonality", "weighting", "update", "capture", "everything else"]
    for heading in ("", *phases):
        table.add_column(heading, justify="right" if heading else "left")
    for name, (*_, run) in found.items():
        known = {phase: run.phases[phase] for phase in phases[:-1]}
        rest = run.seconds - sum(known.values()) + known["capture"]  # capturing is part of other phases
        table.add_row(name, *(f"{1e3 * seconds / steps:.2f}" for seconds in (*known.values(), rest)))
    return table


def waits(runs: list[Run], at_work: float, steps: int) -> Table:
    table = Table(title="Milliseconds a step, after capture, of the GPU")
    for heading in ("", "in all", "at work", "waiting"):
        table.add_column(heading, justify="right" if heading else "left")
    whole = 1e3 * median(run.after_capture for run in runs) / steps
    table.add_row(CAPTURED, *(f"{value:.2f}" for value in (whole, at_work, whole - at_work)))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="The time of one PS-CIFAR-100 run on a GPU.")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each variant")
    parser.add_argument("--data-dir", help="where the publishers' files are")
    parser.add_argument("--protocol", help="the published protocol; one is drawn if it is not given")
    found, at_work, steps = measure(parser.parse_args())
    console = Console(width=140)
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    console.print(results(found, steps))
    console.print(shares(found, steps))
    console.print(waits(found[CAPTURED], at_work, steps))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
