"""The report in a real browser: no errors, sorting, hovering, links, light and dark, narrow and wide."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from test_report import copy_run, make_tuning

from browser import NARROW, WIDE, Reader, browser, needs_browser
from spcl.results.report import write_report
from tiny_runs import entries, grid_runs, result, two_task_runs

pytestmark = needs_browser

MANY = 999


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    with browser(tmp_path_factory.mktemp("browser")) as reader:
        yield reader


@pytest.fixture(autouse=True)
def no_errors(reader: Reader) -> Iterator[None]:
    """Whatever a test does, the console stays empty."""
    yield
    assert reader.errors() == []


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="session")
def page(base: Path) -> Path:
    """Runs of two benchmarks, one of them with the paper's values, and a search."""
    folder = base / "browser-runs"
    for method in ("er", "soro", "graddrop"):
        for scenario in ("task", "class"):
            for seed in "01":
                run = f"{scenario}/{method}/{seed}"
                copy_run(grid_runs(base) / run, folder / "grid" / run, benchmark="ps-emnist", tasks=5)
    copy_run(two_task_runs(base) / "soro/0", folder / "soro")
    make_tuning(grid_runs(base) / "task/soro/0", folder / "search")
    return write_report([folder], base / "browser.html")


def run_number(reader: Reader, benchmark: str, run: Path) -> int:
    """Which of the runs in the report this is, by its accuracy."""
    rows = json.loads(reader.script("return document.getElementById('data').textContent"))["rows"]
    found = list(zip(rows["benchmark"], rows["accuracy"], strict=True))
    return found.index((benchmark, float(f"{result(run)['accuracy']:.12g}")))


@pytest.mark.parametrize("size", [NARROW, WIDE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_scrolls_sideways_and_headings_are_in_order(
    reader: Reader, page: Path, size: tuple[int, int], scheme: str
) -> None:
    for where in ("", "#/run/0"):
        reader.open(page, where, size, scheme)
        reader.one("#run h1" if where else "#overview h1")
        for chart in reader.all("#content .chart"):
            reader.script("arguments[0].scrollIntoView()", chart)
        assert reader.script("return document.documentElement.scrollWidth <= innerWidth")
        headings = "[...document.querySelectorAll('main:not([hidden]) :is(h1, h2, h3)')]"
        levels = reader.script(f"return {headings}.map((heading) => Number(heading.tagName[1]))")
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after <= before + 1 for before, after in pairwise(levels))


def overflowing(reader: Reader) -> list[str]:
    """The charts and images that reach beyond the column of the page, or whose parts reach beyond them."""
    found: list[str] = reader.script(
        "const beyond = (inner, outer) => inner.width > 0 && ("
        "  inner.left < outer.left - 1 || inner.right > outer.right + 1"
        "  || inner.top < outer.top - 1 || inner.bottom > outer.bottom + 1);"
        "const box = (element) => element.getBoundingClientRect();"
        "return [...document.querySelectorAll('main:not([hidden]) :is(.chart, img)')].filter((chart) => "
        "  box(chart).left < 0 || box(chart).right > document.documentElement.clientWidth"
        "  || [...chart.querySelectorAll('.main-svg, text')].some((part) => beyond(box(part), box(chart)))"
        ").map((chart) => chart.getAttribute('aria-label') ?? chart.alt)"
    )
    return found


@pytest.mark.parametrize("before", [NARROW, WIDE])
def test_charts_and_figures_fit_a_narrow_page(reader: Reader, page: Path, before: tuple[int, int]) -> None:
    """Whether it was narrow when they were drawn or became so."""
    for where in ("", "#/run/0", f"#/run/{run_number_of_tiny(reader, page)}"):
        reader.open(page, where, before)
        reader.one("#run .chart .main-svg" if where else "#overview h1")
        for chart in reader.all("#content .chart") if not where else []:
            reader.script("arguments[0].scrollIntoView()", chart)
            reader.wait(lambda chart=chart: chart.find_elements(By.CSS_SELECTOR, ".main-svg"))
        metrics = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        reader.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        reader.wait(lambda: reader.script("return innerWidth") == 400)
        reader.wait(lambda: not overflowing(reader))


def run_number_of_tiny(reader: Reader, page: Path) -> int:
    reader.open(page)
    rows = json.loads(reader.script("return document.getElementById('data').textContent"))["rows"]
    return int(rows["benchmark"].index("tiny"))


def test_one_seed_has_no_deviation(reader: Reader, base: Path, tmp_path: Path) -> None:
    copy_run(grid_runs(base) / "task/soro/0", tmp_path / "soro")
    reader.open(write_report([tmp_path], tmp_path / "report.html"))
    chart = ".chart[data-table]"
    reader.script("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", chart)
    ActionChains(reader.driver).move_to_element(reader.one(f"{chart} .point")).perform()
    text = reader.text(f"{chart} .hoverlayer .hovertext")
    assert text.startswith(f"SORO: A {result(tmp_path / 'soro')['accuracy']:.2f}, F ")
    assert not reader.all(f"{chart} .errorbar path")


def test_run_page_needs_no_timeline(reader: Reader, base: Path, tmp_path: Path) -> None:
    """Label sets and timelines are left out of records that are passed on."""
    copy_run(two_task_runs(base) / "soro/0", tmp_path / "run")
    without = {key: value for key, value in result(tmp_path / "run").items() if key != "timeline"}
    (tmp_path / "run/result.json").write_text(json.dumps(without))
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    kept = [{key: line[key] for key in line if key not in ("label_set", "timeline")} for line in lines]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    reader.open(write_report([tmp_path], tmp_path / "report.html"), "#/run/0")
    reader.one("#run .chart .main-svg")
    finals = [f"{task['final']:.2f}" for task in result(tmp_path / "run")["tasks"].values()]
    assert reader.column("#run section:nth-of-type(2) table", 6) == finals


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(reader: Reader, page: Path, scheme: str) -> None:
    reader.open(page, scheme=scheme)
    colours = reader.script(
        "const style = getComputedStyle(document.documentElement);"
        "return Object.fromEntries(['text', 'soft', 'link', 'card', 'page', 'mark'].map("
        "(name) => [name, style.getPropertyValue('--' + name).trim()]))"
    )
    for ink in ("text", "soft", "link"):
        for paper in ("card", "page", "mark"):
            assert contrast(colours[ink], colours[paper]) >= 4.5, (ink, paper)


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_result_tables_sort_both_ways(reader: Reader, page: Path) -> None:
    reader.open(page)
    header = reader.one("#results table thead tr:nth-child(2) th:nth-child(3)")
    table = "#results .beside:first-of-type table"

    def values() -> list[float]:
        return [float(text.split(" ")[0].replace("−", "-")) for text in reader.column(table, 3) if text != "–"]

    before = values()
    header.find_element(By.TAG_NAME, "button").click()
    assert header.get_attribute("aria-sort") == "ascending"
    assert values() == sorted(before)
    header.find_element(By.TAG_NAME, "button").click()
    assert header.get_attribute("aria-sort") == "descending"
    assert values() == sorted(before, reverse=True)
    assert "–" in reader.column(table, 3)[-1], "what is not known stays at the end"


def test_run_list_sorts_and_finds(reader: Reader, page: Path) -> None:
    reader.open(page)
    reader.click("#run-list thead th:nth-child(6) button")
    accuracies = [float(text) for text in reader.column("#run-list", 6)]
    assert len(accuracies) == 14
    assert accuracies == sorted(accuracies)
    reader.one("#find").send_keys("class soro")
    assert reader.sees("#found", "2 of 14 runs")
    assert set(reader.column("#run-list", 3)) == {"class"}


def test_a_cell_leads_to_its_runs_and_they_to_their_pages_and_back(reader: Reader, page: Path) -> None:
    reader.open(page)
    reader.click('#results a[href="#/runs/class/ps-emnist/er"]')
    assert reader.sees("#found", "2 of 14 runs (class, ps-emnist, er)")
    reader.click("#run-list tbody a")
    assert reader.sees("#run h1", "ER on ps-emnist, class-incremental, configuration 0, seed 0")
    assert not reader.one("#run").find_elements(By.CSS_SELECTOR, "#content")
    reader.click("#run .others a")
    reader.wait(lambda: reader.text("#run h1").endswith("seed 1"))
    reader.driver.back()
    reader.wait(lambda: reader.text("#run h1").endswith("seed 0"))
    reader.click('nav a[href="#figures"]')
    assert reader.one("#figures h2").is_displayed()
    assert not reader.all("#run > *")
    assert reader.sees("#found", "14 of 14 runs")


def test_every_link_resolves(reader: Reader, page: Path) -> None:
    reader.open(page)
    rows = reader.script("return document.querySelectorAll('#run-list tbody tr').length")
    for link in reader.script("return [...document.querySelectorAll('a')].map((a) => a.getAttribute('href'))"):
        if link.startswith("#/runs/"):
            reader.script("location.hash = arguments[0]", link)
            reader.wait(lambda: "(" in reader.text("#found"))
            assert not reader.text("#found").startswith("0 ")
        elif link.startswith("#/run/"):
            assert 0 <= int(link.removeprefix("#/run/")) < rows
        else:
            assert reader.all(link), link


def test_images_load_and_have_words(reader: Reader, page: Path) -> None:
    reader.open(page)
    images = reader.script("return [...document.images].map((i) => [i.complete, i.naturalWidth, i.alt.length])")
    assert len(images) >= 4
    assert all(complete and width > 300 and words > 40 for complete, width, words in images)
    charts = reader.all(".chart")
    assert all(chart.get_attribute("role") == "img" and chart.get_attribute("aria-label") for chart in charts)
    loaded = reader.script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert not [name for name in loaded if name.startswith("http")]


def test_hover_shows_ours_and_the_papers_values(reader: Reader, page: Path, base: Path) -> None:
    reader.open(page)
    chart = '.chart[data-benchmark="ps-emnist"][data-table="0"]'
    reader.script("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", chart)
    reader.one(f"{chart} .point")
    texts = set()
    for point in reader.all(f"{chart} .point"):
        ActionChains(reader.driver).move_to_element(point).perform()
        texts.add(reader.text(f"{chart} .hoverlayer .hovertext"))
    mean = sum(result(grid_runs(base) / "task/soro" / seed)["accuracy"] for seed in "01") / 2
    assert any(text.startswith(f"SORO: A {mean:.2f} ±") for text in texts)
    assert "SORO in the paper: A 91.06" in texts


def test_run_page_shows_its_record_on_hover(reader: Reader, page: Path, base: Path) -> None:
    reader.open(page)
    run = two_task_runs(base) / "soro/0"
    reader.open(page, f"#/run/{run_number(reader, 'tiny', run)}")
    reader.one("#run .chart .main-svg")
    charts = [f'#run .chart[aria-label="{chart.get_attribute("aria-label")}"]' for chart in reader.all("#run .chart")]
    timeline, matrix, curves, kappa, _, _, confusion, _ = charts
    record = result(run)
    (name, *_), counts = record["class_names"]["task-0"], record["confusion"]["task-0"][0]
    assert reader.hover(confusion, (1 / 6, 1 / 6)) == f"{name} as {name}: {counts[0]} of {sum(counts)}"
    (first, last), _ = result(run)["timeline"]
    assert reader.hover(timeline, (0.1, 1 / 6)) == f"task-0: steps {first} to {last}, 3 classes"
    ends = [entry for entry in entries(run, "evaluation") if entry["ended"]]
    expected = f"task-1 when task-1 ended (step {ends[-1]['step']}): {ends[-1]['accuracy']['task-1']:.2f} %"
    assert reader.hover(matrix, (0.75, 0.75)) == expected
    assert "task-0:" in reader.hover(curves)
    text = reader.hover(kappa, (0.999, 0.5))
    last_step = entries(run, "step")[-1]
    for when, name in (("before", "original"), ("after", "adjusted")):
        assert f"{name}: {last_step[when]['condition_number']:.4g}" in text.splitlines()
    assert reader.column("#run section:nth-of-type(2) table", 6) == [
        f"{task['final']:.2f}" for task in result(run)["tasks"].values()
    ]


def test_run_page_lists_skipped_steps(reader: Reader, base: Path, tmp_path: Path) -> None:
    copy_run(two_task_runs(base) / "soro/0", tmp_path / "run")
    for left_out in ({}, {"task-0": 2, "task-1": 4}):
        (tmp_path / "run/result.json").write_text(json.dumps(result(tmp_path / "run") | {"left_out": left_out}))
        reader.open(write_report([tmp_path / "run"], tmp_path / "report.html"), "#/run/0")
        assert ("Skipped steps (not finite)\ntask-0: 2, task-1: 4" in reader.text("#run .facts")) == bool(left_out)


def brightness(colour: str) -> int:
    return sum(int(part) for part in re.findall(r"\d+", colour))


def test_theme_can_be_switched(reader: Reader, page: Path) -> None:
    reader.open(page, "#/run/0", scheme="dark")
    reader.one("#run .chart .xtick text")

    def look() -> tuple[str, str]:
        ink = "return getComputedStyle(document.querySelector('#run .chart .xtick text')).fill"
        return reader.script("return getComputedStyle(document.body).backgroundColor"), reader.script(ink)

    dark = look()
    reader.click("#theme")
    light = look()
    assert brightness(dark[0]) < 150 < 600 < brightness(light[0])
    assert dark[1] != light[1]
    reader.click("#theme")
    assert look() == dark


def test_optunas_plots_are_drawn(reader: Reader, page: Path) -> None:
    reader.open(page, "#tuning")
    assert reader.one("#tuning .chart .main-svg")
    assert "61.50 %" in reader.text("#tuning p")


def test_many_runs_stay_usable(reader: Reader, base: Path, tmp_path: Path) -> None:
    source = grid_runs(base) / "task/soro/0"
    settings = json.loads((source / "settings.json").read_text())
    for number in range(MANY):
        folder = tmp_path / "runs" / str(number)
        folder.mkdir(parents=True)
        (folder / "settings.json").write_text(json.dumps(settings | {"config": number // 3, "seed": number % 3}))
        for name in ("metrics.jsonl", "result.json"):
            (folder / name).hardlink_to(source / name)
    page = write_report([tmp_path / "runs"], tmp_path / "many.html")
    assert page.stat().st_size < 12e6
    reader.open(page)
    assert reader.sees("#found", f"{MANY} of {MANY} runs")
    assert len(reader.all("#run-list tbody tr")) == 100
    reader.script("document.getElementById('more').click()")
    assert len(reader.all("#run-list tbody tr")) == 600
    seconds = reader.script(
        "const begin = performance.now(); document.querySelector('#run-list th button').click();"
        "return (performance.now() - begin) / 1000"
    )
    assert seconds < 1
    reader.open(page, f"#/run/{MANY - 1}")
    assert reader.text("#run h1").endswith(f"configuration {(MANY - 1) // 3}, seed 2")
    reader.one("#run .chart .main-svg")
