"""Three live sources of different speed and loss; one is added late, one fails and is restarted.

    python examples/live_multi_source.py [--steps 600] [--out live_multi_source.png]

Three simulated sensors of a machine, each with its own driver and rate, train one network:

- `vibration` classifies which of four bearings is worn (cross-entropy), at 200 batches per second;
- `load` predicts the load of the machine (squared error), at a low rate, and its driver fails after a while;
- `acoustic` classifies which of three gears is engaged (cross-entropy), and is added after a third of the steps.

No source waits for another; one that is silent for more than a second is named beside the losses. The figure shows the
stability of the gradients before and after SORO.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import spcl
from spcl.learner import StepReport
from spcl.stability import Stability
from spcl.streams import Failure

WINDOW, BATCH = 64, 16
Batch = tuple[Tensor, Tensor]


# -- the sources


def signals(frequencies: Tensor, amplitudes: Tensor, generator: torch.Generator) -> Tensor:
    """Return windows of noisy sines, one per frequency."""
    phases = 2 * torch.pi * torch.rand(len(frequencies), 1, generator=generator)
    waves = torch.sin(frequencies[:, None] * torch.linspace(0, 2 * torch.pi, WINDOW) + phases)
    noise = 0.3 * torch.randn(len(frequencies), WINDOW, generator=generator)
    return (amplitudes[:, None] * waves + noise)[:, None]


def vibration(generator: torch.Generator) -> Batch:
    """Return a batch in which the frequency depends on the bearing."""
    y = torch.randint(4, (BATCH,), generator=generator)
    return signals(2.0 + 3.0 * y, torch.ones(BATCH), generator), y


def acoustic(generator: torch.Generator) -> Batch:
    """Return a batch in which the overtone depends on the gear."""
    y = torch.randint(3, (BATCH,), generator=generator)
    return signals(torch.full((BATCH,), 4.0), torch.ones(BATCH), generator) + signals(
        9.0 + 5.0 * y, torch.full((BATCH,), 0.7), generator
    ), y


def load(generator: torch.Generator) -> Batch:
    """Return a batch in which the amplitude grows with the load."""
    y = torch.rand(BATCH, 1, generator=generator)
    return signals(torch.full((BATCH,), 7.0), 0.5 + y.squeeze(1), generator), y


SOURCES = {"vibration": (vibration, 0.005), "load": (load, 0.03), "acoustic": (acoustic, 0.015)}


def driver(name: str, seed: int, fails_after: int | None = None) -> Iterator[Batch]:
    """Yield batches of a sensor at its rate, without end or until the driver fails."""
    make, pause = SOURCES[name]
    generator = torch.Generator().manual_seed(seed)
    count = 0
    while fails_after is None or count < fails_after:
        time.sleep(pause)
        yield make(generator)
        count += 1
    raise ConnectionError("cable disconnected")


# -- the run


def make_learner() -> spcl.Learner:
    torch.manual_seed(0)
    backbone = nn.Sequential(
        nn.Conv1d(1, 16, 9, stride=2, padding=4),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Conv1d(16, 32, 5, stride=2, padding=2),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(4),
        nn.Flatten(),
    )
    return spcl.Learner(backbone, spcl.SORO(), optimizer=partial(torch.optim.Adam, lr=1e-3), memory=spcl.Reservoir(300))


def add_task(learner: spcl.Learner, name: str) -> None:
    if name == "load":
        learner.add_task(name, head=nn.Linear(128, 1), loss=mse_loss)
    else:
        learner.add_task(name, classes={"vibration": 4, "acoustic": 3}[name])


@dataclass
class History:
    """The reports of all steps, and events by step."""

    reports: list[StepReport] = field(default_factory=list)
    events: list[tuple[int, str]] = field(default_factory=list)

    def add_event(self, event: str) -> None:
        self.events.append((len(self.reports), event))


def run(steps: int, console: Console) -> tuple[spcl.Learner, spcl.LiveStream, History]:
    learner, history = make_learner(), History()

    def on_failure(name: str, failure: Failure) -> None:
        history.add_event(f"{name} fails")
        console.print(f"step {len(history.reports)}: source {name!r} failed: {failure.exception}")

    first = {"vibration": driver("vibration", 1), "load": driver("load", 2, fails_after=max(steps // 20, 1))}
    bars = Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=console)
    with bars, spcl.LiveStream(first, on_failure=on_failure) as stream:
        bar = bars.add_task("waiting", total=steps)
        for moment in stream:
            for name in moment.started:
                add_task(learner, name)
            if moment.batches:
                history.reports.append(learner.step(moment.batches))
            step = len(history.reports)
            if step == max(steps // 3, 1):
                stream.add("acoustic", driver("acoustic", 3))
                history.add_event("acoustic is added")
            if step >= steps * 2 // 3 and "load" in stream.failed:
                stream.restart("load", driver("load", 4))
                history.add_event("load is restarted")
            stalled = [f"{name} silent for {lag:.0f} s" for name, lag in stream.lag.items() if lag > 1.0]
            bars.update(bar, completed=step, description="  ".join([describe(history.reports[-1]), *stalled]))
            if step == steps:
                break
    return learner, stream, history


def describe(report: StepReport) -> str:
    if report.before is None or report.after is None:
        return "all sources were skipped"
    κ = f"{report.before.condition_number:5.1f} → {report.after.condition_number:4.2f}"
    return f"κ {κ}  " + "  ".join(f"{name} {loss:.2f}" for name, loss in report.losses.items())


# -- the results


def show_table(learner: spcl.Learner, stream: spcl.LiveStream, console: Console) -> None:
    table = Table("source", "batches", "failures", "score on new data", "last batch")
    for name, task in learner.tasks.items():
        generator = torch.Generator().manual_seed(99)
        pairs = [SOURCES[name][0](generator) for _ in range(20)]
        found, y = learner.predict(torch.cat([x for x, _ in pairs]), task=name), torch.cat([y for _, y in pairs])
        score = f"{(found == y).float().mean():.1%} right" if task.classes else f"off by {(found - y).abs().mean():.3f}"
        failures = stream.failures[name].count if name in stream.failures else 0
        last_seen = f"{time.time() - stream.last_seen[name]:.1f} s ago"
        table.add_row(name, str(stream.delivered[name]), str(failures), score, last_seen)
    console.print(table)


def draw(history: History, path: Path) -> None:
    figure = Figure(figsize=(10, 7), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True).flatten()
    draw_measure(panels[0], history, lambda stability: stability.condition_number, "condition number κ")
    draw_measure(panels[1], history, worst_conflict, "strongest conflict (−cosine)")
    draw_measure(panels[2], history, lambda stability: stability.mean_magnitude_similarity, "magnitude similarity")
    for name in {name: None for report in history.reports for name in report.losses}:
        draw_smoothed(panels[3], [report.losses.get(name, np.nan) for report in history.reports], name)
    panels[0].set_yscale("log")
    panels[3].set(ylabel="loss", yscale="log")
    for panel in panels:
        for step, event in history.events:
            panel.axvline(step, color="grey", linewidth=0.7, linestyle=":")
            panel.annotate(f" {event}", (step, 0.5), xycoords=("data", "axes fraction"), rotation=90, fontsize=7)
        panel.legend(frameon=False)
    figure.supxlabel("step")
    figure.savefig(path, dpi=150)


def worst_conflict(stability: Stability) -> float:
    return max(0.0, -float(stability.cosines.min()))


def draw_measure(panel: Axes, history: History, measure: Callable[[Stability], float], label: str) -> None:
    draw_smoothed(panel, [measure(report.before) for report in history.reports if report.before], "before SORO")
    draw_smoothed(panel, [measure(report.after) for report in history.reports if report.after], "after")
    panel.set_ylabel(label)


def draw_smoothed(panel: Axes, values: list[float], label: str, span: int = 15, gap: int = 40) -> None:
    """Plot a moving average over the steps with a value, interrupted at gaps longer than `gap` steps."""
    line = np.array(values)
    (steps,) = np.nonzero(np.isfinite(line))
    kernel = np.ones(min(span, len(steps)))
    smooth = np.convolve(line[steps], kernel, "same") / np.convolve(np.ones(len(steps)), kernel, "same")
    breaks = np.nonzero(np.diff(steps) > gap)[0] + 1
    panel.plot(np.insert(steps, breaks, steps[breaks]), np.insert(smooth, breaks, np.nan), label=label)


def main() -> None:
    parser = argparse.ArgumentParser(description="Three live sources, one network.")
    parser.add_argument("--steps", type=int, default=600, help="number of training steps")
    parser.add_argument("--out", type=Path, default=Path("live_multi_source.png"), help="path of the figure")
    arguments = parser.parse_args()
    if arguments.steps < 3:
        parser.error(f"--steps is {arguments.steps}, but must be at least 3")
    console = Console()
    learner, stream, history = run(arguments.steps, console)
    show_table(learner, stream, console)
    draw(history, arguments.out)
    console.print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
