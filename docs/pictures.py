"""Draw the pictures of the documentation, in a light and a dark version: python docs/pictures.py

The first is of a real run on the embedded benchmark, which takes a minute; the others are computed by the package.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import nn

from spcl.aggregation import SOROSettings, solve_soro
from spcl.memory import BalancedCoreset
from spcl.orthogonality import orthogonality_penalty, toeplitz_matrix
from spcl.runs import execute, resolve_settings
from spcl.stability import condition_number

FOLDER = Path(__file__).parent / "pictures"
COLOURS = ["#3b7dd8", "#e0712c", "#3aa37a", "#b5539c", "#8a8f2a"]
LOUD, QUIET = "#d1495b", "#2a9d8f"
THEMES = {"light": "#333333", "dark": "#cfd0d0"}
Record = dict[str, Any]
Array = NDArray[np.float64]


def main() -> None:
    """Write every picture as SVG, once for light and once for dark pages."""
    records = train()
    pictures: dict[str, Callable[[], Figure]] = {
        "training": lambda: training(records),
        "moments": lambda: moments(records),
        "gradients": gradients,
        "memory": memory,
        "layers": layers,
    }
    for theme, ink in THEMES.items():
        style = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), ink)
        fixed = {"svg.hashsalt": "spcl", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
        with mpl.rc_context(style | fixed):
            for name, draw in pictures.items():
                draw().savefig(FOLDER / f"{name}-{theme}.svg", transparent=True, metadata={"Date": None})


# -- tasks that come and go


def train() -> list[Record]:
    """Return the records of a run of SORO on the embedded benchmark, evaluated every second step."""
    chosen = {"method": "soro", "config": 4, "evaluate_every": 2, "record_every": 1, "epochs": 2}
    settings = resolve_settings(chosen, {"threads": 1, "device": "cpu"})
    with tempfile.TemporaryDirectory() as folder:
        execute(settings, Path(folder) / "run")
        return [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]


def training(records: list[Record]) -> Figure:
    """Draw when tasks train, their accuracies, and the condition number before and after SORO."""
    figure = Figure(figsize=(5.6, 4.8), layout="constrained")
    top, middle, bottom = figure.subplots(3, sharex=True, height_ratios=[1, 2, 1.3])
    start = records[0]
    draw_timeline(top, start["timeline"])
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    for task, colour in zip(start["tasks"], COLOURS, strict=True):
        seen = [(record["step"], record["accuracy"][task]) for record in evaluations if task in record["accuracy"]]
        middle.plot(*zip(*seen, strict=True), color=colour, linewidth=1.8)
    middle.set(ylabel="test accuracy, %", ylim=(0, None))
    measured = [record for record in records if record["kind"] == "step" and record["before"]]
    for moment, colour, label in (("before", LOUD, "before SORO"), ("after", QUIET, "after")):
        values = [(record["step"], record[moment]["condition_number"]) for record in measured]
        bottom.plot(*zip(*values, strict=True), color=colour, linewidth=1.5, label=label)
    bottom.set(ylabel="κ of the gradients", xlabel="step", yscale="log")
    bottom.legend(frameon=False, loc="upper left")
    return figure


def draw_timeline(axes: Axes, timeline: list[list[int]]) -> None:
    """Draw a bar for every task, from its first to its last step."""
    for row, ((first, last), colour) in enumerate(zip(timeline, COLOURS, strict=True)):
        axes.barh(row, last - first + 1, left=first, color=colour, height=0.7)
    axes.set_yticks(range(len(timeline)), [f"task {row + 1}" for row in range(len(timeline))])
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)


def moments(records: list[Record]) -> Figure:
    """Draw the timeline of the run with one moment marked, and what comes in it."""
    timeline = records[0]["timeline"]
    step = (timeline[2][0] + timeline[0][1]) // 2
    running = [row for row, (first, last) in enumerate(timeline) if first <= step <= last]
    figure = Figure(figsize=(5.6, 2.2), layout="constrained")
    axes = figure.subplots()
    draw_timeline(axes, timeline)
    axes.axvline(step, color=mpl.rcParams["text.color"], linewidth=1.2)
    names = ", ".join(str(row + 1) for row in running)
    axes.set_title(f"the moment at step {step}: one batch of each of tasks {names}", fontsize=10, loc="left")
    axes.set_xlabel("step")
    return figure


# -- gradients and their ellipse

CONFLICTING = np.array([[3.0, -0.5], [0.5, 0.8]])
"""Two gradients as columns: a large one and a small one that points the other way."""


def adjusted(G: Array) -> Array:
    """Return what SORO makes of the gradients in the columns of G: Ĝ = G M, a column of M for every unit vector."""
    C = torch.from_numpy(G.T @ G)
    columns = [solve_soro(C, SOROSettings(), unit).weights for unit in torch.eye(len(C), dtype=torch.float64)]
    return G @ torch.stack(columns, dim=1).numpy()


def gradients() -> Figure:
    """Draw two conflicting gradients, their sum, and the image of the unit circle, before and after SORO."""
    figure = Figure(figsize=(5.6, 2.5), layout="constrained")
    for axes, G, title in zip(
        figure.subplots(1, 2), (CONFLICTING, adjusted(CONFLICTING)), ("gradients", "after SORO"), strict=True
    ):
        angles = np.linspace(0, 2 * np.pi, 200)
        axes.fill(*(G @ np.array([np.cos(angles), np.sin(angles)])), color="grey", alpha=0.2, linewidth=0)
        for column, colour in zip(G.T, COLOURS, strict=False):
            arrow(axes, column, colour)
        arrow(axes, G.sum(axis=1), mpl.rcParams["text.color"])
        kappa = condition_number(torch.from_numpy(G.T @ G))
        axes.set_title(f"{title}: κ = {float(kappa):.2f}", fontsize=11)
        axes.set_aspect("equal")
        axes.set_axis_off()
    return figure


def arrow(axes: Axes, to: Array, colour: str) -> None:
    """Draw an arrow from the origin."""
    axes.annotate(
        "", to, (0, 0), arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 2, "shrinkA": 0, "shrinkB": 0}
    )
    axes.plot(*to, alpha=0)


# -- memory


def memory() -> Figure:
    """Draw how many samples of each task the balanced coreset holds, as tasks end one after another."""
    coreset = BalancedCoreset(60, seed=0)
    classes = (4, 2, 6, 3)
    held = np.zeros((len(classes), len(classes) + 1))
    for task, count in enumerate(classes):
        coreset.start(str(task), count)
        coreset.observe(str(task), torch.rand(300, 1), torch.arange(300) % count)
        coreset.finish(str(task))
        for name, samples in coreset.counts().items():
            held[int(name), task + 1] = sum(samples)
    figure = Figure(figsize=(5.6, 2.4), layout="constrained")
    axes = figure.subplots()
    ended = np.arange(1, len(classes) + 1)
    below = np.zeros(len(classes))
    for task, count in enumerate(classes):
        axes.bar(ended, held[task, 1:], bottom=below, color=COLOURS[task], label=f"task {task + 1}, {count} classes")
        below += held[task, 1:]
    axes.set(xlabel="tasks that have ended", ylabel="samples in memory", xticks=ended, xlim=(0.4, 7.6))
    axes.spines["bottom"].set_bounds(0.4, len(classes) + 0.6)
    axes.legend(frameon=False, loc="center right")
    return figure


# -- orthogonal layers


def layers() -> Figure:
    """Draw the singular values of a convolution as it is initialised, and after the DBT penalty was minimised."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(6, 4, 3, bias=False)
    figure = Figure(figsize=(5.6, 2.2), layout="constrained")
    axes = figure.subplots()
    draw_singular_values(axes, convolution, LOUD, "as initialised")
    optimizer = torch.optim.Adam(convolution.parameters(), lr=0.02)
    for _ in range(400):
        optimizer.zero_grad()
        orthogonality_penalty(convolution).backward()
        optimizer.step()
    draw_singular_values(axes, convolution, QUIET, "penalty minimised")
    axes.set(xlabel="singular values of the convolution of 6×6 inputs, in order", ylim=(0, None))
    axes.legend(frameon=False)
    return figure


def draw_singular_values(axes: Axes, convolution: nn.Conv2d, colour: str, label: str) -> None:
    """Draw the singular values of the convolution's matrix, largest first."""
    matrix = toeplitz_matrix(convolution.weight.detach(), (6, 6))
    axes.plot(torch.linalg.svdvals(matrix).numpy(), color=colour, label=label, linewidth=2)


if __name__ == "__main__":
    main()
