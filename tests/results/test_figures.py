"""Every figure, drawn from real runs and compared with their records read the plain way."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from test_tables_paper import write_paper_runs
from typer.testing import CliRunner

from spcl.cli.app import app
from spcl.data.protocol import load_protocol
from spcl.errors import SpclError
from spcl.methods import METHODS
from spcl.results.compare import MEASURES
from spcl.results.figures import (
    FIGURES,
    Drawing,
    MissingRunsError,
    all_figures,
    comparison_figure,
    draw_figure,
    draw_protocol,
    line_styles,
    save_drawing,
)
from spcl.results.records import filter_runs, parse_conditions, read_runs
from tiny_runs import (
    GRID_METHODS,
    entries,
    grid_runs,
    memory_runs,
    paradigm_runs,
    result,
    sweep_runs,
    tiny_data,
    two_task_runs,
)

SVG = "{http://www.w3.org/2000/svg}"
SHARED = Path(__file__).resolve().parents[3] / "shared"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


def drawn(name: str, *folders: Path) -> Drawing:
    return draw_figure(FIGURES[name], read_runs(*folders))


def lines(figure: Figure, panel: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The labelled lines of a panel that hold data."""
    found = {line.get_label(): line.get_data() for line in figure.axes[panel].get_lines() if len(line.get_xdata())}
    return {label: data for label, data in found.items() if not label.startswith("_")}


def vertical_lines(figure: Figure, panel: int) -> set[int]:
    """Where there are lines from the bottom of a panel to its top."""
    ends = [(list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[panel].get_lines()]
    return {int(x[0]) for x, y in ends if y == [0, 1] and x[0] == x[1]}


def labels(figure: Figure) -> set[str]:
    return {text.get_text() for legend in (*figure.legends,) for text in legend.get_texts()}


def stability(run: Path, measure: str, when: str) -> tuple[list[int], list[float]]:
    steps = [entry for entry in entries(run, "step") if entry[when]]
    return [step["step"] for step in steps], [step[when][measure] for step in steps]


def test_toy_shows_the_records_of_both_runs(base: Path) -> None:
    folder = two_task_runs(base)
    drawing = drawn("toy", folder)
    plain, stable = folder / "er/0", folder / "soro-dbt/0"
    for panel, measure in enumerate(MEASURES):
        found = lines(drawing.figure, panel)
        for label, (run, when) in {"without SPCL": (plain, "before"), "with SPCL": (stable, "after")}.items():
            steps, values = stability(run, measure, when)
            np.testing.assert_array_equal(found[label][0], steps)
            np.testing.assert_allclose(found[label][1], values)
    assert drawing.figure.axes[0].get_yscale() == "log"
    (_, end), (join, _) = result(plain)["timeline"]
    assert all(vertical_lines(drawing.figure, panel) == {join, end} for panel in range(4))
    accuracies = [line.get_data() for line in drawing.figure.axes[3].get_lines()]
    for run in (plain, stable):
        for task in ("task-0", "task-1"):
            points = [(e["step"], e["accuracy"][task]) for e in entries(run, "evaluation") if task in e["accuracy"]]
            steps, values = map(list, zip(*points, strict=True))
            assert any(list(x) == steps and list(y) == values for x, y in accuracies)
    assert labels(drawing.figure) == {"without SPCL", "with SPCL", "task 1", "task 2"}
    assert drawing.caption.startswith("Figure 1. ")
    assert "without SPCL: ER, with SPCL: SORO+DBT" in drawing.caption


def test_toy_needs_evaluations_along_the_way(base: Path) -> None:
    with pytest.raises(MissingRunsError, match="evaluated only when a task ended"):
        drawn("toy", sweep_runs(base))


def test_toy_timelines_shows_each_timeline_before_and_after(base: Path) -> None:
    folder = two_task_runs(base)
    figure = drawn("toy-timelines", folder).figure
    runs = [folder / "soro-dbt/0", folder / "soro-dbt/1"]
    assert result(runs[0])["timeline"] != result(runs[1])["timeline"]
    assert len(figure.axes) == 6
    for column, run in enumerate(runs):
        for row, measure in enumerate(MEASURES):
            found = lines(figure, 2 * row + column)
            np.testing.assert_allclose(found["original G"][1], stability(run, measure, "before")[1])
            np.testing.assert_allclose(found["adjusted Ĝ"][1], stability(run, measure, "after")[1])
        join = result(run)["timeline"][1][0]
        assert f"joins at {join}" in figure.axes[column].get_title("left")


def seen_at_ends(run: Path) -> list[float]:
    ends = [entry for entry in entries(run, "evaluation") for _ in entry["ended"]]
    return [sum(entry["accuracy"].values()) / len(entry["accuracy"]) for entry in ends]


def test_learning_process_is_the_mean_over_seeds_at_each_end(base: Path) -> None:
    folder = grid_runs(base)
    drawing = drawn("learning-process", folder)
    titles = [axes.get_title("left") for axes in drawing.figure.axes]
    assert titles == ["(a) tiny, task-incremental", "(b) tiny, class-incremental"]
    for panel, scenario in enumerate(("task", "class")):
        found = lines(drawing.figure, panel)
        assert set(found) == {"ER", "SORO", "GradDrop"}
        for label, method in (("ER", "er"), ("SORO", "soro")):
            per_seed = [seen_at_ends(folder / scenario / method / seed) for seed in "01"]
            np.testing.assert_array_equal(found[label][0], [1, 2, 3])
            np.testing.assert_allclose(found[label][1], np.mean(per_seed, axis=0))
    assert "Mean of 2 runs a line" in drawing.caption


def test_ablation_draws_four_conditions_of_two_tasks(base: Path) -> None:
    folder = two_task_runs(base)
    figure = drawn("ablation", folder).figure
    folders = {"none": "er", "gradients": "soro", "filters": "er-dbt", "both": "soro-dbt"}
    for panel, task in enumerate(("task-0", "task-1")):
        found = lines(figure, panel)
        assert list(found) == list(folders)
        for condition, name in folders.items():
            evaluations = [e for e in entries(folder / name / "0", "evaluation") if task in e["accuracy"]]
            np.testing.assert_allclose(found[condition][1], [e["accuracy"][task] for e in evaluations])


def test_ablation_names_the_conditions_it_lacks(base: Path) -> None:
    folder = two_task_runs(base)
    runs = [run for run in read_runs(folder) if run.method == "er"]
    with pytest.raises(MissingRunsError, match="found none, filters"):
        draw_figure(FIGURES["ablation"], runs)


def test_gradients_are_those_after_adjustment(base: Path) -> None:
    folder = grid_runs(base)
    drawing = drawn("gradients", folder)
    for panel, measure in enumerate(MEASURES):
        found = lines(drawing.figure, panel)
        assert set(found) == {"ER", "SORO"}
        curves = [stability(folder / "task/soro" / seed, measure, "after") for seed in "01"]
        assert curves[0][0] == curves[1][0]
        np.testing.assert_allclose(found["SORO"][1], np.mean([values for _, values in curves], axis=0))
    assert "mean over 2 seeds, " in drawing.caption
    assert "Not shown, as they form no adjusted gradients: GradDrop" in drawing.caption


def test_convolutions_compares_layers_with_and_without_the_penalty(base: Path) -> None:
    folder = two_task_runs(base)
    figure = drawn("convolutions", folder).figure
    for panel, name in enumerate(("condition_number", "norm", "correlation")):
        found = lines(figure, panel)
        for label, method in (("without DBT", "soro"), ("with DBT", "soro-dbt")):
            tables = [result(folder / method / config)["filters"] for config in "01"]
            expected = np.mean([[layer[name] for layer in table.values()] for table in tables], axis=0)
            assert len(expected) == 3
            np.testing.assert_allclose(found[label][1], expected)


def test_networks_without_convolutions_have_no_filters(base: Path) -> None:
    assert result(grid_runs(base) / "task/er/0")["filters"] == {}
    with pytest.raises(MissingRunsError, match="network has convolutions"):
        drawn("convolutions", grid_runs(base))


def test_hyperparameters_shows_means_and_the_strict_limit(base: Path) -> None:
    folder = sweep_runs(base)
    figure = drawn("hyperparameters", folder).figure
    assert [axes.get_xlabel() for axes in figure.axes] == ["α", "σ", "λ"]
    assert [axes.get_xscale() for axes in figure.axes] == ["symlog", "log", "symlog"]
    strict = np.mean([result(folder / "iterations=0" / seed)["accuracy"] for seed in "01"])
    swept = {"alpha": (0.0, 0.01), "sigma": (1.0, 100.0), "lambda_": (0.0, 100.0)}
    for axes, (name, values) in zip(figure.axes, swept.items(), strict=True):
        accuracy, *_, limit = axes.get_lines()
        expected = [
            np.mean([result(folder / f"{name}={value}" / seed)["accuracy"] for seed in "01"]) for value in values
        ]
        np.testing.assert_array_equal(accuracy.get_xdata(), values)
        np.testing.assert_allclose(np.array(accuracy.get_ydata(), float), expected)
        np.testing.assert_allclose(limit.get_ydata(), strict)
        assert limit.get_linestyle() == "--"


def test_sensitivity_shows_settings_as_multiples_of_their_defaults(base: Path) -> None:
    folder = sweep_runs(base)
    (axes,) = drawn("sensitivity", folder).figure.axes
    sigma = axes.get_lines()[0]
    assert axes.get_xscale() == "log"
    np.testing.assert_allclose(np.array(sigma.get_xdata(), float), [0.01, 1.0])  # 1 and 100, of 100
    expected = [np.mean([result(folder / f"sigma={v}" / seed)["accuracy"] for seed in "01"]) for v in (1.0, 100.0)]
    np.testing.assert_allclose(np.array(sigma.get_ydata(), float), expected)


def test_rehearsal_has_a_line_for_each_method(base: Path) -> None:
    folder = memory_runs(base)
    (axes,) = drawn("rehearsal", folder).figure.axes
    for container, method in zip(axes.containers, ("er", "soro"), strict=True):
        assert container.get_label() == method.upper()
        assert list(container[0].get_xdata()) == [6, 12, 24]
        expected = [result(folder / method / str(budget))["accuracy"] for budget in (6, 12, 24)]
        np.testing.assert_allclose(np.array(container[0].get_ydata(), float), expected)


def bars(figure: Figure, panel: int) -> list[tuple[int, int]]:
    return [(round(bar.get_x()), round(bar.get_x() + bar.get_width()) - 1) for bar in figure.axes[panel].patches]


def test_timeline_draws_tasks_and_memory(base: Path) -> None:
    folder = two_task_runs(base)
    figure = drawn("timeline", folder).figure
    for panel in (0, 1):
        spans = [tuple(span) for span in result(folder / "er" / str(panel))["timeline"]]
        memory = (min(last for _, last in spans) + 1, max(last for _, last in spans))
        assert bars(figure, panel) == [*spans, memory]
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["task 1", "task 2", "memory"]


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not there")
def test_timeline_draws_a_protocol() -> None:
    protocol = load_protocol(SHARED / "protocols/ps-emnist.json")
    drawing = draw_protocol(protocol)
    assert len(drawing.figure.axes) == 9
    assert bars(drawing.figure, 4)[:-1] == list(protocol.configuration(4).timeline.spans)


def test_paradigms_are_sketched_without_runs_and_compared_with_them(base: Path) -> None:
    assert [axes.get_title("left")[4:] for axes in draw_figure(FIGURES["paradigms"], []).figure.axes] == [
        "Multi-task (MTL)", "Serial (SCL)", "Parallel (PCL)",
    ]  # fmt: skip
    folder = paradigm_runs(base)
    figure = drawn("paradigms", folder).figure
    order = ("joint", "serial", "parallel")
    for panel, paradigm in enumerate(order):
        assert bars(figure, panel)[:3] == [tuple(span) for span in result(folder / paradigm)["timeline"]]
    (container,) = figure.axes[3].containers
    np.testing.assert_allclose(
        np.array(container[0].get_ydata(), float), [result(folder / paradigm)["accuracy"] for paradigm in order]
    )


def test_comparison_figure_puts_runs_side_by_side(base: Path) -> None:
    folder = grid_runs(base)
    runs = read_runs(folder / "task/er/0", folder / "task/soro/0")
    figure = comparison_figure(runs)
    assert labels(figure) == {"1: ER", "2: SORO"}
    heights = [bar.get_height() for bar in figure.axes[2].patches]
    expected = [
        task["final"] for run in ("er", "soro") for task in result(folder / "task" / run / "0")["tasks"].values()
    ]
    np.testing.assert_allclose(heights, expected)


def paper_runs(base: Path) -> Path:
    folder = base / "paper-runs"
    if not folder.exists():
        for method in ("er", "soro", "mgda"):
            write_paper_runs(folder / method, method=method)
    return folder


FOLDERS = {
    "overview": paper_runs,
    "toy": two_task_runs,
    "learning-process": grid_runs,
    "ablation": two_task_runs,
    "gradients": grid_runs,
    "convolutions": two_task_runs,
    "timeline": two_task_runs,
    "paradigms": paradigm_runs,
    "hyperparameters": sweep_runs,
    "sensitivity": sweep_runs,
    "rehearsal": memory_runs,
    "toy-timelines": two_task_runs,
}


def test_figures_are_found_in_the_order_of_the_paper() -> None:
    assert [spec.name for spec in all_figures()] == list(FOLDERS)


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_written_as_png_and_svg_with_its_caption(name: str, base: Path, tmp_path: Path) -> None:
    drawing = drawn(name, FOLDERS[name](base))
    png, svg = save_drawing(drawing, tmp_path / "figures")
    assert (png.name, svg.name) == (f"{name}.png", f"{name}.svg")
    with Image.open(png) as image:
        assert image.info["Description"] == drawing.caption
        assert image.width >= 800
        assert len(image.convert("L").getcolors() or []) > 10
    tree = ElementTree.parse(svg)
    assert drawing.spec.number in ElementTree.tostring(tree.getroot(), encoding="unicode")
    assert len(list(tree.iter(f"{SVG}path"))) > 10


@pytest.mark.parametrize("name", [name for name in FIGURES if name != "paradigms"])
def test_a_figure_without_runs_says_which_command_makes_them(name: str) -> None:
    with pytest.raises(MissingRunsError) as caught:
        draw_figure(FIGURES[name], [])
    commands = [line.strip() for line in str(caught.value).splitlines() if line.strip().startswith("spcl grid")]
    assert commands == FIGURES[name].commands()


@pytest.mark.parametrize("name", FIGURES)
def test_its_commands_are_understood(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in FIGURES[name].commands():
        program, *words = shlex.split(command)
        outcome = CliRunner().invoke(app, [*words, "--dry-run"])
        assert (program, outcome.exit_code) == ("spcl", 0), outcome.output
        assert "runs would be made" in outcome.output


def test_commands_are_of_the_papers_benchmarks_with_its_preset() -> None:
    """The commands of Figures 2, 4, 5, 7 and 8; the learning process needs runs of two benchmarks."""
    for name in ("learning-process", "gradients", "convolutions", "hyperparameters", "rehearsal"):
        assert {grid.preset for grid in FIGURES[name].grids} == {"paper"}
        assert {grid.benchmark for grid in FIGURES[name].grids} <= {"ps-cifar100", "ps-tiny-imagenet"}
    assert [grid.benchmark for grid in FIGURES["learning-process"].grids] == ["ps-cifar100", "ps-tiny-imagenet"]
    assert "--preset paper" in FIGURES["rehearsal"].commands()[0]
    assert "1e-6" in FIGURES["hyperparameters"].commands()[0]


def test_the_learning_process_of_two_folders_has_panels_of_both(base: Path, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("ps-cifar100", "ps-tiny-imagenet")]
    for folder in folders:
        shutil.copytree(grid_runs(base), folder)
        for path in folder.rglob("settings.json"):
            path.write_text(json.dumps(json.loads(path.read_text()) | {"benchmark": folder.name}))
    words = ["figure", "learning-process", *(word for folder in folders for word in ("--runs", str(folder)))]
    outcome = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "x.svg")])
    assert outcome.exit_code == 0, outcome.output
    assert "Not shown" not in outcome.output
    both = drawn("learning-process", *folders).figure
    titles = {axes.get_title("left").partition(" ")[2]: panel for panel, axes in enumerate(both.axes)}
    assert set(titles) == {
        f"{folder.name}, {scenario}-incremental" for folder in folders for scenario in ("task", "class")
    }
    alone = drawn("learning-process", grid_runs(base)).figure
    for panel, scenario in enumerate(("task", "class")):
        for folder in folders:
            found, expected = lines(both, titles[f"{folder.name}, {scenario}-incremental"]), lines(alone, panel)
            assert set(found) == set(expected) == {"ER", "SORO", "GradDrop"}
            np.testing.assert_allclose(found["SORO"][1], expected["SORO"][1])


def test_unfinished_runs_are_not_drawn(base: Path) -> None:
    runs = read_runs(grid_runs(base))
    halves = [replace(run, result=None) for run in runs]
    spec = FIGURES["learning-process"]
    assert draw_figure(spec, runs).svg() == draw_figure(spec, runs + halves).svg()


@pytest.mark.parametrize("content", ["[1, 2]", "3", "{}", '{"accuracy": 80.0}'])
def test_runs_with_a_damaged_result_are_not_drawn(base: Path, tmp_path: Path, content: str) -> None:
    shutil.copytree(grid_runs(base), tmp_path / "grid")
    (tmp_path / "grid/task/soro/1/result.json").write_text(content)
    assert "Mean of 1 to 2 runs a line" in drawn("learning-process", tmp_path / "grid").caption


def test_duplicates_are_refused(base: Path, tmp_path: Path) -> None:
    shutil.copytree(grid_runs(base), tmp_path / "again")
    with pytest.raises(SpclError, match=r"both hold a run of .* and no setting distinguishes them"):
        drawn("learning-process", grid_runs(base), tmp_path / "again")
    drawn("learning-process", grid_runs(base), grid_runs(base) / "task")


def test_runs_that_are_not_comparable_are_not_shown(base: Path) -> None:
    alone = drawn("learning-process", grid_runs(base))
    mixed = drawn("learning-process", grid_runs(base), memory_runs(base))
    assert mixed.caption.startswith(f"{alone.caption} Not shown, as their settings differ: er (tasks=2) ")
    assert "er (tasks=2, memory_budget=24) task-incrementally, " in mixed.caption
    assert mixed.svg().replace(mixed.caption, alone.caption) == alone.svg()


def test_line_styles_are_unique_and_constant() -> None:
    found = line_styles(METHODS)
    assert len({(style.colour, style.marker) for style in found.values()}) == len(METHODS)
    assert len({(style.colour, str(style.dashes), style.width) for style in found.values()}) == len(METHODS)
    assert line_styles(["rlw", "er"])["er"] == found["er"]


def test_the_papers_methods_share_their_colours_with_no_other_method() -> None:
    found = line_styles(METHODS)
    for name in ("soro", "soro+dbt"):
        assert [other for other, style in found.items() if style.colour == found[name].colour] == [name]


def test_where_chooses_runs(base: Path) -> None:
    runs = read_runs(grid_runs(base))
    chosen = filter_runs(runs, {"scenario": "class", "method": {"name": "soro"}})
    assert [(run.scenario, run.method, run.seed) for run in chosen] == [("class", "soro", 0), ("class", "soro", 1)]
    assert len(filter_runs(runs, {"benchmark": "tiny"})) == len(runs) == 4 * len(GRID_METHODS)
    with pytest.raises(SpclError, match=r"no run has a setting method\.sgima"):
        filter_runs(runs, {"method": {"sgima": 1}})


def test_command_draws_lists_and_explains(base: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    target = tmp_path / "a.svg"
    outcome = run(app, ["figure", "rehearsal", "--runs", str(memory_runs(base)), "--out", str(target)])
    assert outcome.exit_code == 0, outcome.output
    assert "Figure 8. " in outcome.output
    assert list(tmp_path.iterdir()) == [target]
    listed = run(app, ["figure"]).output
    assert all(name in listed for name in FIGURES)
    for words, message in {
        ("reharsal",): "did you mean 'rehearsal'",
        ("rehearsal", "--runs", str(memory_runs(base)), "--out", "x.xyz"): "written as .png, .svg or .pdf",
        ("toy", "--runs", str(memory_runs(base))): "spcl grid --benchmark toy-cifar10",
        ("toy", "--runs", "absent"): "there is no folder absent",
        (
            "toy",
            "--runs",
            str(memory_runs(base)),
            "--where",
            "nonsense",
        ): "expected name=value, found 'nonsense'; write, for example, method.sigma=50 (--where)",
        ("toy", "--protocol", "x.json"): "--protocol is for the figure 'timeline'",
    }.items():
        outcome = run(app, ["figure", *words])
        assert isinstance(outcome.exception, SpclError)
        assert message in str(outcome.exception)


def test_where_a_figure_cannot_go_is_told_before_runs_are_made(base: Path, tmp_path: Path) -> None:
    (tmp_path / "afile").touch()
    for name in ("afile", "afile/x.png", "afile/folder"):
        words = ["figure", "rehearsal", "--runs", str(memory_runs(base)), "--out", str(tmp_path / name)]
        outcome = CliRunner().invoke(app, words)
        assert isinstance(outcome.exception, SpclError)
        assert "cannot write to" in str(outcome.exception)
    outcome = CliRunner().invoke(app, ["figure", "toy", "--make", "--runs", str(tmp_path / "runs"), "--out", "x.xyz"])
    assert "written as .png, .svg or .pdf" in str(outcome.exception)
    assert not (tmp_path / "runs").exists()


def test_an_ending_in_capitals_is_known(base: Path, tmp_path: Path) -> None:
    (path,) = save_drawing(drawn("rehearsal", memory_runs(base)), tmp_path / "x.PNG")
    with Image.open(path) as image:
        assert image.format == "PNG"


def test_a_figure_is_written_as_pdf_with_its_caption(base: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.pdf"
    outcome = CliRunner().invoke(app, ["figure", "rehearsal", "--runs", str(memory_runs(base)), "--out", str(target)])
    assert outcome.exit_code == 0, outcome.output
    content = target.read_bytes()
    assert content.startswith(b"%PDF")
    assert b"/Subject (Figure 8. Accuracy against the size of the rehearsal memory." in content


def test_the_command_names_the_flags_that_help(base: Path, tmp_path: Path) -> None:
    run, grid, memory = CliRunner().invoke, str(grid_runs(base)), str(memory_runs(base))
    out = ["--out", str(tmp_path / "x.svg")]
    mixed = run(app, ["figure", "learning-process", "--runs", grid, "--runs", memory, *out])
    assert "choose other runs with --where" in mixed.output
    alone = run(app, ["figure", "learning-process", "--runs", grid, *out])
    assert "--where" not in alone.output
    empty = run(app, ["figure", "timeline", "--runs", str(tmp_path), *out])
    assert "--protocol draws a protocol file without runs" in str(empty.exception)
    few = run(app, ["figure", "rehearsal", "--runs", memory, "--where", "memory_budget=6", *out])
    assert "--where chose 2 of 6 runs" in str(few.exception)
    assert "(--protocol)" in run(app, ["figure"]).output
    assert "(--out)" in str(run(app, ["figure", "toy", "--out", "x.xyz"]).exception)


def test_where_thins_a_figure(base: Path, tmp_path: Path) -> None:
    words = ["figure", "learning-process", "--runs", str(grid_runs(base)), "--out", str(tmp_path / "x.svg")]
    outcome = CliRunner().invoke(app, [*words, "--where", "method=er,SORO", "--where", "scenario=class"])
    assert outcome.exit_code == 0, outcome.output
    runs = filter_runs(read_runs(grid_runs(base)), parse_conditions(["method=er,SORO", "scenario=class"]))
    assert {(run.method, run.scenario) for run in runs} == {("er", "class"), ("soro", "class")}
    assert set(lines(draw_figure(FIGURES["learning-process"], runs).figure, 0)) == {"ER", "SORO"}


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        (["method=sorro"], r"none of 12 runs has method=sorro; there are er, graddrop, soro \(--where\)"),
        (["method=soro,sorro"], "none of 12 runs has method=sorro; there are er, graddrop, soro"),
        (["methd=soro"], "no run has a setting methd; did you mean 'method'"),
        (["alpha=0"], r"no run has a setting alpha; did you mean 'method\.alpha'\?"),
        (["seed=5"], "none of 12 runs has seed=5; there are 0, 1"),
        (["method=er", "seed=1,2"], "none of the 4 runs chosen so far has seed=2; there are 0, 1"),
    ],
)
def test_where_names_the_settings_and_values_there_are(base: Path, conditions: list[str], message: str) -> None:
    words = [word for condition in conditions for word in ("--where", condition)]
    outcome = CliRunner().invoke(app, ["figure", "learning-process", "--runs", str(grid_runs(base)), *words])
    assert isinstance(outcome.exception, SpclError)
    assert re.search(message, str(outcome.exception))


def test_make_makes_the_runs_once(base: Path, tmp_path: Path) -> None:
    words = ["figure", "toy", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--make"]
    words += [
        "--benchmark",
        str(tiny_data(base)),
        "--set",
        "tasks=2",
        "--set",
        "batch_size=8",
        "--set",
        "evaluate_every=3",
    ]
    first = CliRunner().invoke(app, words)
    assert first.exit_code == 0, first.output
    settings = [json.loads(path.read_text()) for path in sorted((tmp_path / "runs").rglob("settings.json"))]
    assert [(s["method"]["name"], s["evaluate_every"]) for s in settings] == [("er", 3), ("soro+dbt", 3)]
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("result.json")}
    second = CliRunner().invoke(app, words)
    assert second.exit_code == 0, second.output
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("result.json")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"toy.png", "toy.svg"}
