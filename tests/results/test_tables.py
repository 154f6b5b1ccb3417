import csv
import io
import json
import re
import shlex
import subprocess
import tarfile
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scipy.stats import wilcoxon
from typer.testing import CliRunner

from _runs import write_grid, write_run
from small_benchmark import small_settings, write_benchmark
from spcl.cli.app import app
from spcl.errors import SpclError
from spcl.methods import METHODS
from spcl.paper.numbers import paper_methods, paper_result
from spcl.results.names import display_name, method_order
from spcl.results.records import read_runs
from spcl.results.tables import (
    Cell,
    ResultTable,
    csv_text,
    holm,
    latex_text,
    make_tables,
    markdown_text,
    paired_p_value,
    terminal_table,
)
from spcl.runs import execute

GENERATOR = np.random.default_rng(7)
VALUES = {name: GENERATOR.normal(80, 3, size=(4, 3)) for name in ("er", "mgda", "soro")}
VALUES["soro"] += 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    methods = {name: lambda c, s, table=table: float(table[c, s]) for name, table in VALUES.items()}
    write_grid(tmp_path / "runs", methods, configs=4, seeds=3)
    return tmp_path / "runs"


# -- reading


def test_runs_are_found_with_their_keys(folder: Path) -> None:
    runs = read_runs(folder)
    assert len(runs) == 36
    keys = [(run.benchmark, run.scenario, run.method, run.config, run.seed) for run in runs]
    assert keys == sorted(keys)
    assert len(set(keys)) == 36
    run = runs[0]
    assert (run.label, run.paradigm, run.preset, run.variant) == ("er", "parallel", "default", {})
    assert run.result is not None
    assert run.result.accuracy == VALUES["er"][0, 0]
    assert run.result.confusion == {}
    assert run.confusion() == {"task-0": [[3, 1], [0, 4]]}


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_reading_writes_nothing(folder: Path) -> None:
    before = contents(folder)
    for command in (["table", folder], ["table", folder, "--paper"], ["compare", folder / "er/config-0/seed-0"]):
        assert CliRunner().invoke(app, list(map(str, command))).exit_code == 0
    assert contents(folder) == before


def test_an_index_of_an_earlier_version_is_not_believed(folder: Path) -> None:
    before = read_runs(folder)
    entry = {"stamp": [0, 0, 0, 0], "settings": {}, "result": None}
    (folder / "index.json").write_text(json.dumps({"version": 2, "runs": {"er/config-0/seed-0": entry}}))
    assert read_runs(folder) == before


def test_damaged_settings_are_named_and_skipped(folder: Path) -> None:
    (folder / "er/config-0/seed-0/settings.json").write_text("{")
    with pytest.warns(UserWarning, match=r"er.config-0.seed-0.settings\.json cannot be read"):
        assert len(read_runs(folder)) == 35


def test_a_run_folder_itself_is_read_and_folders_may_overlap(folder: Path) -> None:
    run = folder / "er/config-0/seed-0"
    assert [record.path for record in read_runs(run)] == [run]
    assert len(read_runs(folder, folder / "er", run)) == 36
    with pytest.raises(SpclError, match="there is no folder"):
        read_runs(folder / "absent")


DAMAGED_RESULTS = [
    "",
    "null",
    "[1, 2]",
    "3",
    "{}",
    '{"accuracy": 80.0, "forgett',
    '{"accuracy": 80.0, "forgetting": 1.0}',
    '{"accuracy": 80.0, "tasks": {}}',
    '{"forgetting": 1.0, "tasks": {}}',
    '{"accuracy": "80", "forgetting": 1.0, "tasks": {}}',
    '{"accuracy": 80.0, "forgetting": 1.0, "tasks": {"task-0": {}}}',
    '{"accuracy": 80.0, "forgetting": 1.0, "tasks": {}, "seconds": 3}',
    '{"accuracy": 80.0, "forgetting": 1.0, "tasks": {}, "left_out": 3}',
]


@pytest.mark.parametrize("content", DAMAGED_RESULTS)
def test_a_run_with_a_damaged_result_counts_as_not_complete(folder: Path, content: str) -> None:
    run = folder / "er/config-0/seed-0"
    (run / "result.json").write_text(content)
    incomplete = [record for record in read_runs(folder) if record.result is None]
    assert [record.path for record in incomplete] == [run]
    assert incomplete[0].confusion() == {}
    (table,) = make_tables(read_runs(folder))
    assert (table.cells["er", "ps-emnist"].runs, table.cells["er", "ps-emnist"].missing) == (11, 1)


def test_values_that_are_not_finite_are_read(tmp_path: Path) -> None:
    write_run(tmp_path / "x", method_tolerance=float("inf"))
    assert read_runs(tmp_path)[0].settings["method"]["tolerance"] == float("inf")


@pytest.mark.parametrize("name", ["grid", "some where"])
def test_packed_runs_are_unpacked_by_the_command_in_the_error(folder: Path, tmp_path: Path, name: str) -> None:
    packed = tmp_path / "some where"
    packed.mkdir()
    with tarfile.open(packed / "records.tar.gz", "w:gz") as archive:
        archive.add(folder, name)
    for folders in ([packed], [folder, packed]):
        outcome = CliRunner().invoke(app, ["table", *map(str, folders)])
        assert isinstance(outcome.exception, SpclError)
    command = next(line.strip() for line in str(outcome.exception).splitlines() if line.strip().startswith("tar "))
    subprocess.run(shlex.split(command), check=True)
    assert len(read_runs(packed)) == 36
    assert (packed / "er/config-0/seed-0").is_dir() == (name == packed.name), "where a grid goes on with them"


def test_metrics_are_read_without_a_last_half_line(tmp_path: Path) -> None:
    write_run(tmp_path / "x")
    (run,) = read_runs(tmp_path)
    assert run.metrics() == []
    line = json.dumps({"kind": "step", "name": "a\u2028b"}, ensure_ascii=False)
    (tmp_path / "x/metrics.jsonl").write_text(f'{line}\n{{"kind": "st', encoding="utf-8")
    assert run.metrics() == [{"kind": "step", "name": "a\u2028b"}]


def test_labels_name_settings_in_which_methods_differ(tmp_path: Path) -> None:
    write_run(tmp_path / "a", method="er", tasks=3)
    write_run(tmp_path / "b", method="soro", tasks=2, method_sigma=1.0)
    assert [run.label for run in read_runs(tmp_path)] == ["er (tasks=3)", "soro (tasks=2)"]


def test_files_that_were_moved_make_no_variants(tmp_path: Path) -> None:
    for seed, place in enumerate(("here", "there")):
        moved = {"benchmark": f"/{place}/own.npz", "protocol": f"/{place}/protocol.json"}
        write_run(tmp_path / place, method="er", seed=seed, **moved)
    (table,) = make_tables(read_runs(tmp_path))
    assert [(key, cell.runs, cell.missing) for key, cell in table.cells.items()] == [(("er", "own"), 2, 0)]


def test_held_out_accuracies_are_neither_ranked_nor_tested_beside_test_accuracies(folder: Path) -> None:
    (before,) = make_tables(read_runs(folder), against="er", paper=True)
    for seed in range(3):
        write_run(folder / f"held/{seed}", method="rlw", seed=seed, accuracy=99.0, validation=0.2)
    (table,) = make_tables(read_runs(folder), against="er", paper=True)
    held = table.cells["rlw (validation=0.2)", "ps-emnist"]
    assert (held.accuracy.rank, held.p_value, held.paper) == (None, None, None)
    assert {key: table.cells[key] for key in before.cells} == before.cells


def test_variants_are_labelled_by_what_differs(tmp_path: Path) -> None:
    write_run(tmp_path / "a", method="soro", method_sigma=1.0, threads=1)
    write_run(tmp_path / "b", method="soro", method_sigma=1e-05, threads=2)
    write_run(tmp_path / "c", method="er", paradigm="joint")
    write_run(tmp_path / "d", method="soro", method_sigma=5.0, benchmark="ps-glyphs", validation=0.2)
    labels = {run.path.name: run.label for run in read_runs(tmp_path)}
    assert labels == {
        "a": "soro (sigma=1)",
        "b": "soro (sigma=1e-05)",
        "c": "er (paradigm=joint)",
        "d": "soro (validation=0.2)",
    }


def test_variants_name_only_what_differs_from_most_of_them(tmp_path: Path) -> None:
    usual = {"method": "spcl", "method_kappa": 2.0, "updates": 3, "average": 0.995}
    changes = {"usual": {}, "one": {"updates": 1}, "two": {"average": None}, "three": {"method_kappa": 1.0}}
    for name, change in changes.items():
        for seed in range(3 if name == "one" else 1):  # repetitions of a variant do not count
            write_run(tmp_path / name / str(seed), seed=seed, **usual | change)
    write_run(tmp_path / "er", method="er", updates=3, average=0.995)
    write_run(tmp_path / "class", **usual | {"updates": 9}, scenario="class")  # in a table of its own
    labels = {run.path.relative_to(tmp_path).parts[0]: run.label for run in read_runs(tmp_path)}
    assert labels == {
        "usual": "spcl",
        "one": "spcl (updates=1)",
        "two": "spcl (average=None)",
        "three": "spcl (kappa=1)",
        "er": "er",
        "class": "spcl",
    }
    task, own = make_tables(read_runs(tmp_path))
    note = "Rows of SPCL on ps-emnist have average=0.995, kappa=2 and updates=3 where they name no other value."
    assert note in task.remarks
    assert task.only("ps-emnist").remarks == task.remarks
    assert own.remarks == []


# -- numbers


def test_a_cell_is_the_mean_over_seeds_of_the_mean_over_configurations(folder: Path) -> None:
    records = read_runs(folder)
    for over, axis in (("seeds", 0), ("configs", 1)):
        (table,) = make_tables(records, over)
        for name, values in VALUES.items():
            means = values.mean(axis=axis)
            cell = table.cells[name, "ps-emnist"]
            assert cell.accuracy.mean == pytest.approx(means.mean(), rel=1e-12)
            assert cell.accuracy.std == pytest.approx(means.std(ddof=1), rel=1e-12)
            assert (cell.forgetting.mean, cell.forgetting.std) == (-5.0, 0.0)
            assert (cell.runs, cell.missing) == (12, 0)


def test_the_time_of_a_step_is_the_median_over_runs(tmp_path: Path) -> None:
    write_grid(tmp_path, {"er": lambda c, s: 80.0 + c, "soro": lambda c, s: 81.0}, configs=3, seeds=1)
    for path, seconds in zip(sorted((tmp_path / "er").rglob("result.json")), (1.0, 2.5, 30.0), strict=True):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"steps": 200, "seconds": {"training": seconds}}))
    (plain,), (timed,) = make_tables(read_runs(tmp_path)), make_tables(read_runs(tmp_path), time=True)
    assert {key[0]: cell.step_time for key, cell in timed.cells.items()} == {"er": 12.5, "soro": None}
    assert "ms/step" not in markdown_text(plain)
    made = CliRunner().invoke(app, ["table", str(tmp_path), "--time", "--format", "markdown"])
    lines = [[entry.strip() for entry in line.split("|")] for line in made.output.splitlines()]
    assert lines[2][-2] == "ps-emnist ms/step"
    assert [line[-2] for line in lines[4:6]] == ["12.5", "–"]
    assert [row["ms_per_step"] for row in csv.DictReader(io.StringIO(csv_text([plain])))] == ["12.5", ""]


def test_best_and_second_best_are_marked_and_rows_are_in_the_papers_order(folder: Path) -> None:
    (table,) = make_tables(read_runs(folder))
    assert [(row.family, row.label) for row in table.rows] == [("MTL", "mgda"), ("SCL", "er"), ("PCL", "soro")]
    means = {name: values.mean() for name, values in VALUES.items()}
    order = sorted(means, key=lambda name: -means[name])
    ranks = {name: table.cells[name, "ps-emnist"].accuracy.rank for name in means}
    assert ranks == {order[0]: 1, order[1]: 2, order[2]: None}


def test_all_methods_of_the_paper_are_ours_and_in_its_order() -> None:
    assert set(paper_methods()) <= METHODS.keys()
    assert sorted(paper_methods(), key=method_order) == paper_methods()


def test_an_incomplete_cell_says_so_and_is_not_ranked(folder: Path) -> None:
    (folder / "soro/config-0/seed-0/result.json").unlink()
    write_run(folder / "soro/config-1/seed-1", method="soro", config=1, seed=1, accuracy=None)
    (folder / "soro/config-1/seed-1/result.json").unlink()
    (table,) = make_tables(read_runs(folder))
    cell = table.cells["soro", "ps-emnist"]
    assert (cell.runs, cell.missing, cell.accuracy.rank) == (10, 2, None)
    assert {table.cells[name, "ps-emnist"].accuracy.rank for name in ("er", "mgda")} == {1, 2}
    kept = [np.delete(VALUES["soro"][:, seed], gone).mean() for seed, gone in ((0, 0), (1, 1), (2, []))]
    assert cell.accuracy.mean == pytest.approx(np.mean(kept))
    assert "(2 missing)" in markdown_text(table)


@pytest.mark.parametrize(
    ("train", "test", "validation", "note"),
    [
        (50000, 10000, 0.0, ""),
        (400, 100, 0.0, "400 training samples, not 50,000, and 100 test samples, not 10,000"),
        (50000, 5000, 0.0, "5,000 test samples, not 10,000"),
        (40000, 10000, 0.2, ""),
        (320, 80, 0.2, "400 training samples, not 50,000"),
    ],
)
def test_a_table_says_how_much_of_the_published_data_there_was(
    tmp_path: Path, train: int, test: int, validation: float, note: str
) -> None:
    write_run(tmp_path / "run", benchmark="ps-cifar100", validation=validation)
    file = tmp_path / "run/result.json"
    data = f"ImageData('ps-cifar100': {train} + {test} samples of 3×32×32, 100 classes)"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"data": data}))
    (table,) = make_tables(read_runs(tmp_path))
    assert table.partial_data == ({"ps-cifar100": note} if note else {})


def test_scenarios_are_tables_of_their_own_and_benchmarks_columns(folder: Path) -> None:
    write_run(folder / "x", scenario="class", benchmark="/somewhere/own.npz")
    write_run(folder / "y", benchmark="ps-glyphs", accuracy=None)
    task, klass = make_tables(read_runs(folder), paper=True)
    assert (task.scenario, task.benchmarks) == ("task", ("ps-emnist", "ps-glyphs"))
    assert (klass.scenario, klass.benchmarks) == ("class", ("own",))
    assert klass.cells["er", "own"].accuracy.std is None
    assert "task-incremental" in latex_text(task)
    assert "| –" in markdown_text(task)


def test_the_papers_numbers() -> None:
    emnist = paper_result("class", "ps-emnist", "a-gem")
    cifar = paper_result("task", "ps-cifar100", "soro+dbt")
    tiny = paper_result("class", "ps-tiny-imagenet", "mega")
    assert emnist is not None
    assert cifar is not None
    assert tiny is not None
    assert (emnist.accuracy, emnist.accuracy_std, emnist.forgetting, emnist.forgetting_std) == (
        26.249,
        0.511,
        -62.48,
        0.527,
    )
    assert (cifar.accuracy, cifar.forgetting) == (54.788, 27.476)
    assert (tiny.accuracy, tiny.forgetting) == (10.082, -2.375)
    assert len(paper_methods()) == 13
    assert all(
        paper_result(scenario, benchmark, method)
        for scenario in ("task", "class")
        for benchmark in ("ps-emnist", "ps-cifar100", "ps-tiny-imagenet")
        for method in paper_methods()
    )


def test_the_papers_numbers_equal_the_published_table() -> None:
    source = Path(__file__).resolve().parents[3] / "shared/paper/tables.csv"
    if not source.exists():
        pytest.skip(f"{source} is not here")
    benchmarks = {"PS-EMNIST": "ps-emnist", "PS-CIFAR-100": "ps-cifar100", "PS-ImageNet-TINY": "ps-tiny-imagenet"}
    with source.open() as file:
        for line in csv.DictReader(file):
            method = {"AGEM": "a-gem"}.get(line["method"], line["method"].lower())
            found = paper_result(line["scenario"].removesuffix("-incremental"), benchmarks[line["dataset"]], method)
            assert found is not None
            names = ("accuracy", "accuracy_std", "forgetting", "forgetting_std")
            assert [getattr(found, name) for name in names] == [float(line[name]) for name in names]
            assert METHODS[method].family == line["type"]


# -- duplicates


INSIDE = "/er/config-1/seed-2"


@pytest.mark.parametrize("again", ["again", "runs-2/deeper", "runs/again"])
def test_runs_of_the_same_in_two_folders_are_refused_in_either_order(folder: Path, tmp_path: Path, again: str) -> None:
    write_run(tmp_path / again / "er/config-1/seed-2", config=1, seed=2, accuracy=1.0)
    folders = [folder, tmp_path / again]
    for order in (folders, folders[::-1]):
        with pytest.raises(SpclError, match=r"both hold a run of er on .* configuration 1, seed 2") as caught:
            make_tables(read_runs(*order))
        one, other = str(caught.value).partition(" both hold")[0].split(" and ")
        shown = {Path(path) for path in (one.removesuffix(INSIDE), other.removesuffix(INSIDE))}
        assert shown == set(folders)


def test_a_folder_named_twice_nested_or_linked_is_no_duplicate(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    once = make_tables(read_runs(folder))
    assert make_tables(read_runs(folder, folder, folder / "er", tmp_path / "link")) == once
    records = read_runs(folder)
    assert make_tables([*records, *records]) == once


def test_an_unfinished_run_elsewhere_is_no_duplicate(folder: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "again", config=1, seed=2, accuracy=None)
    assert make_tables(read_runs(folder, tmp_path / "again")) == make_tables(read_runs(folder))


def test_what_sweeps_of_one_grid_have_in_common_counts_once_with_its_mean(tmp_path: Path) -> None:
    point = {"method": "soro", "method_sigma": 10.0, "method_lambda_": 1.0}
    write_run(tmp_path / "task/soro/sigma=10/seed-0", accuracy=70.0, **point)
    write_run(tmp_path / "task/soro/lambda_=1/seed-0", accuracy=72.0, **point)
    write_run(tmp_path / "task/soro/lambda_=5/seed-0", accuracy=10.0, **point | {"method_lambda_": 5.0})
    (table,) = make_tables(read_runs(tmp_path))
    found = {label: (cell.accuracy.mean, cell.runs, cell.missing) for (label, _), cell in table.cells.items()}
    assert found == {"soro (lambda_=1)": (71.0, 1, 0), "soro (lambda_=5)": (10.0, 1, 0)}


def test_custom_data_of_one_name_but_not_the_same_is_refused(tmp_path: Path) -> None:
    """Whether or not a run of the one stands for a run of the other."""
    runs = [tmp_path / "runs" / place for place in ("da", "moved", "db")]
    for seed, (run, per_class) in enumerate(zip(runs, (20, 20, 30), strict=True)):
        (tmp_path / run.name).mkdir()
        benchmark = write_benchmark(tmp_path / run.name / "data.npz", per_class=per_class)
        execute(small_settings(benchmark, seed=seed), run)
    first, moved, other = runs
    (table,) = make_tables(read_runs(first, moved))
    assert [cell.runs for cell in table.cells.values()] == [2]
    with pytest.raises(SpclError, match="have the same name 'data', but differ") as caught:
        make_tables(read_runs(first, other))
    assert str(first) in str(caught.value)
    assert str(other) in str(caught.value)


def test_custom_data_of_equal_size_is_compared_by_its_checksum(tmp_path: Path) -> None:
    for method, fingerprint in (("er", "0a"), ("soro", "0b"), ("mgda", None)):
        write_run(tmp_path / method, method=method, benchmark=f"{method}/own.npz")
        file = tmp_path / method / "result.json"
        data = "ImageData('own': 8 + 2 samples of 3×8×8, 2 classes)"
        noted = {"data": data} | ({"fingerprint": fingerprint} if fingerprint else {})
        file.write_text(json.dumps(json.loads(file.read_text()) | noted))
    make_tables(read_runs(tmp_path / "er", tmp_path / "mgda"))  # made before checksums were noted
    with pytest.raises(SpclError, match=r"8 \+ 2 samples of .*, checksum 0a and .* checksum 0b; use the runs of each"):
        make_tables(read_runs(tmp_path / "er", tmp_path / "soro"))


def test_custom_data_of_one_name_and_size_never_hides_a_run(tmp_path: Path) -> None:
    for place, accuracy in (("da", 70.0), ("db", 20.0)):
        write_run(tmp_path / "runs" / place, benchmark=f"{place}/data.npz", accuracy=accuracy)
    with pytest.raises(SpclError, match=r"on da/data\.npz and db/data\.npz, task-incremental"):
        make_tables(read_runs(tmp_path / "runs"))


# -- significance


def test_significance_is_scipys_signed_rank_test_with_holms_correction(folder: Path) -> None:
    (table,) = make_tables(read_runs(folder), against="er")
    raw = {name: wilcoxon(VALUES[name].ravel(), VALUES["er"].ravel()).pvalue for name in ("mgda", "soro")}
    small, large = sorted(raw, key=lambda name: raw[name])
    corrected = {small: min(1.0, 2 * raw[small]), large: max(min(1.0, 2 * raw[small]), raw[large])}
    for name in raw:
        cell = table.cells[name, "ps-emnist"]
        assert cell.p_value == pytest.approx(corrected[name])
        assert cell.gain == pytest.approx((VALUES[name] - VALUES["er"]).mean())
    assert table.cells["er", "ps-emnist"].p_value is None


def test_only_pairs_count() -> None:
    ours, theirs = {1: 1.0, 2: 5.0, 3: 7.5, 9: 0.0}, {1: 0.5, 2: 3.0, 3: 4.0, 8: 100.0}
    assert paired_p_value(ours, theirs) == pytest.approx(wilcoxon([0.5, 2.0, 3.5]).pvalue)
    assert paired_p_value(ours, {8: 1.0}) is None
    assert paired_p_value(ours, ours) == 1.0
    assert paired_p_value({0: 1.0}, {0: 2.0}) == 1.0


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=8), st.floats(1e-3, 10.0))
def test_the_p_value_is_exact_with_equal_differences_too(steps: list[int], size: float) -> None:
    """Against all choices of signs, counted one by one; numbers that differ by rounding are equal."""
    theirs = {key: 70.0 + key / 3 for key in range(len(steps))}
    ours = {key: theirs[key] + size * step for key, step in enumerate(steps)}
    sizes = [abs(step) for step in steps if step]
    ranks = [sum(other < one for other in sizes) + (sum(other == one for other in sizes) + 1) / 2 for one in sizes]
    sums = [sum(np.multiply(ranks, signs)) for signs in product((0, 1), repeat=len(ranks))]
    found = sum(rank for rank, step in zip(ranks, filter(None, steps), strict=True) if step > 0)
    tail = min(sum(value <= found for value in sums), sum(value >= found for value in sums)) / len(sums)
    assert paired_p_value(ours, theirs) == pytest.approx(min(1.0, 2 * tail), rel=1e-12)


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_rejects_exactly_what_the_step_down_procedure_rejects(p_values: list[float]) -> None:
    corrected = holm(p_values)
    for level in (0.01, 0.05, 0.3):
        rejected = set()
        for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
            if (len(p_values) - rank) * p_values[index] > level:
                break
            rejected.add(index)
        assert {index for index, value in enumerate(corrected) if value <= level} == rejected


def test_the_reference_must_be_there_and_be_one(folder: Path) -> None:
    write_run(folder / "x", method="mgda", method_alpha=0.5)
    runs = read_runs(folder)
    with pytest.raises(SpclError, match="there are no runs of 'dwa' to compare with; there are 'er', 'mgda"):
        make_tables(runs, against="dwa")
    with pytest.raises(SpclError, match=re.escape("'mgda' has variants; compare with one of 'mgda (alpha=0)', 'mgda")):
        make_tables(runs, against="mgda")
    (table,) = make_tables(runs, against="mgda (alpha=0)")
    assert table.cells["er", "ps-emnist"].p_value is not None


# -- formats


@pytest.fixture
def table(folder: Path) -> ResultTable:
    write_run(folder / "x", method="torchjd:UPGrad", method_a_b="x|y", accuracy=1.0)
    write_run(folder / "y", method="torchjd:UPGrad", method_a_b="50%", accuracy=2.0)
    (table,) = make_tables(read_runs(folder), against="er", paper=True)
    return table


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.\d+", text.replace("$-$", "-"))]


def expected_numbers(cell: Cell) -> list[float]:
    values = [cell.accuracy.mean, cell.accuracy.std, cell.forgetting.mean, cell.forgetting.std]
    if cell.paper:
        values += [cell.paper.accuracy, cell.paper.accuracy_std, cell.paper.forgetting, cell.paper.forgetting_std]
    values = [round(value, 2) for value in values if value is not None]
    p_values = [value for value in (cell.p_value, cell.config_p_value) if value is not None]
    return [*values, *(max(0.001, round(value, 3)) for value in p_values)]


def test_markdown_parses_back(table: ResultTable) -> None:
    lines = [line for line in markdown_text(table).splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert {len(row) for row in rows} == {8}
    for row, cells in zip(table.rows, rows[2:], strict=True):
        assert re.sub(r"\\(.)", r"\1", cells[0]) == display_name(row.label)
        assert cells[1] == row.family
        assert numbers(" ".join(cells[2:])) == expected_numbers(table.cells[row.label, "ps-emnist"])
    best = next(cells for cells in rows if cells[0] == "SORO")
    assert re.fullmatch(r"\*\*.*\*\*", best[2])
    assert best[6] == "0.002"  # without a mark: four configurations cannot confirm it


def test_marks_need_both_tests(tmp_path: Path) -> None:
    """A gain in seven configurations of nine is significant over 27 pairs, but not over nine means."""
    methods = {
        "er": lambda c, s: 70.0 + c,
        "soro": lambda c, s: 71.0 + c + 0.1 * s,
        "mgda": lambda c, s: 70.0 + c + (0.5, 0.8, -1.0, -1.2, 2.0, 2.2, 2.4, 2.6, 2.8)[c] + 0.01 * s,
    }
    write_grid(tmp_path, methods, configs=9, seeds=3)
    (table,) = make_tables(read_runs(tmp_path), against="er")
    both, pairs_alone = table.cells["soro", "ps-emnist"], table.cells["mgda", "ps-emnist"]
    assert both.p_value is not None
    assert both.p_value < 0.05
    assert both.config_p_value == pytest.approx(2 / 2**9)  # the least there can be
    assert pairs_alone.p_value is not None
    assert pairs_alone.config_p_value is not None
    assert pairs_alone.p_value < 0.05 < pairs_alone.config_p_value
    text = markdown_text(table)
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert ("▲" in rows["SORO"], "▲" in rows["MGDA"]) == (True, False)
    assert "▲ better, ▼ worse where both are below 0.05." in text
    (alone,) = make_tables([run for run in read_runs(tmp_path) if run.seed == 0], against="er")
    assert "▲ better, ▼ worse at p < 0.05." in markdown_text(alone)


def test_latex_parses_back(table: ResultTable) -> None:
    text = latex_text(table)
    assert text.count(r"\midrule") == 4
    assert text.count("{") == text.count("}")
    assert text.isascii() is False  # only in the comment of the first line
    assert all(line.isascii() for line in text.splitlines()[1:])
    body = [line.removesuffix(r" \\") for line in text.splitlines() if line.endswith(r"\\")][2:]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)&", line)] for line in body]
    for row, cells in zip(table.rows, rows, strict=True):
        assert len(cells) == 8
        assert cells[0].replace("\\", "") == display_name(row.label)
        assert numbers(" ".join(cells[2:])) == expected_numbers(table.cells[row.label, "ps-emnist"])
    assert r"\textbf{" in next(cells for cells in rows if cells[0] == "SORO")[2]


def test_csv_parses_back_in_full_precision(table: ResultTable) -> None:
    lines = list(csv.DictReader(io.StringIO(csv_text([table]))))
    assert [line["method"] for line in lines] == [row.label for row in table.rows]
    for line in lines:
        cell = table.cells[line["method"], line["benchmark"]]
        assert float(line["accuracy"]) == cell.accuracy.mean
        assert (line["accuracy_rank"] or None) == (cell.accuracy.rank and str(cell.accuracy.rank))
        assert int(line["missing"]) == cell.missing
        assert line["paper_accuracy"] == (str(cell.paper.accuracy) if cell.paper else "")
        assert (float(line["p_value"]) if line["p_value"] else None) == cell.p_value
        assert (float(line["config_p_value"]) if line["config_p_value"] else None) == cell.config_p_value


def test_the_terminal_shows_every_number_and_marks_the_best(table: ResultTable) -> None:
    console = Console(width=200, record=True, file=io.StringIO(), force_terminal=True)
    console.print(terminal_table(table))
    text = console.export_text(clear=False)
    for row in table.rows:
        name = display_name(row.label)
        (line,) = (line for line in text.splitlines() if line.strip().startswith(name))
        found = numbers(line.replace(name, "", 1))
        assert found == expected_numbers(table.cells[row.label, "ps-emnist"])
    mean = f"{table.cells['soro', 'ps-emnist'].accuracy.mean:.2f}"
    assert f"\x1b[1m{mean}" in console.export_text(styles=True)


def test_all_formats_say_in_how_many_runs_tasks_were_skipped(folder: Path, tmp_path: Path) -> None:
    write_run(folder / "x", benchmark="[b]_c.npz", accuracy=1.0)
    (before,) = make_tables(read_runs(folder))
    for run in ("er/config-0/seed-0", "er/config-1/seed-2", "soro/config-3/seed-0", "x"):
        result = folder / run / "result.json"
        result.write_text(json.dumps(json.loads(result.read_text()) | {"left_out": {"task-0": 3}}))
    (table,) = make_tables(read_runs(folder))
    said = "Tasks were skipped in steps, because a loss or gradient was not finite, in "
    counts = "2 of 12 runs of ER on ps-emnist, 1 of 12 runs of SORO on ps-emnist."
    assert table.skips_note == f"{said}1 of 1 runs of ER on [b]_c, {counts}"
    assert table.only("ps-emnist").skips_note == said + counts

    console = Console(width=500, file=io.StringIO())
    console.print(terminal_table(table))
    assert " ".join(table.skips_note.split()) in " ".join(console.file.getvalue().split())
    assert markdown_text(table) == markdown_text(before).replace(
        "underlined</u>.\n", f"underlined</u>. {said}1 of 1 runs of ER on [b]\\_c, {counts}\n"
    )
    assert latex_text(table) == latex_text(before).replace(
        "underlined}.}\n", f"underlined}}. {said}1 of 1 runs of ER on [b]\\_c, {counts}}}\n"
    )
    lines = csv.DictReader(io.StringIO(csv_text([table])))
    found = {(line["method"], line["benchmark"]): int(line["not_finite"]) for line in lines}
    assert found == {
        ("er", "[b]_c"): 1,
        ("er", "ps-emnist"): 2,
        ("mgda", "ps-emnist"): 0,
        ("soro", "ps-emnist"): 1,
    }


def test_the_command_prints_all_formats(folder: Path) -> None:
    runner = CliRunner()
    for form, sign in (("terminal", "¹"), ("markdown", "**"), ("latex", r"\textbf"), ("csv", "accuracy_rank")):
        outcome = runner.invoke(app, ["table", str(folder), "--format", form, "--paper", "--against", "er"])
        assert outcome.exit_code == 0, outcome.output
        assert sign in outcome.output
        assert ("soro" if form == "csv" else "SORO") in outcome.output
    (folder / "empty").mkdir()
    outcome = runner.invoke(app, ["table", str(folder / "empty")])
    assert isinstance(outcome.exception, SpclError)


@pytest.mark.parametrize(("seeds", "methods", "needed"), [(5, 1, 6), (6, 1, None), (6, 2, 7), (7, 2, None)])
def test_too_few_pairs_for_significance_are_reported(
    tmp_path: Path, seeds: int, methods: int, needed: int | None
) -> None:
    others = ("soro", "mgda")[:methods]
    write_grid(tmp_path, {name: lambda c, s: 80.0 + s for name in ("er", *others)}, configs=1, seeds=seeds)
    (table,) = make_tables(read_runs(tmp_path), against="ER")
    said = f"Too few pairs of runs on ps-emnist for any p below 0.05: {seeds} pairs, but it takes {needed}."
    assert (said in markdown_text(table)) == (needed is not None)
    assert ("Too few" in markdown_text(table)) == (needed is not None)
    gains = {name: lambda c, s, name=name: 80.0 + (s + 1) * (name != "er") for name in ("er", *others)}
    write_grid(tmp_path, gains, configs=1, seeds=seeds)
    (table,) = make_tables(read_runs(tmp_path), against="er")
    assert all((table.cells[name, "ps-emnist"].p_value < 0.05) == (needed is None) for name in others)


def test_display_names_are_in_every_format_but_csv(tmp_path: Path) -> None:
    write_run(tmp_path / "a", method="soro+dbt")
    write_run(tmp_path / "b", method="a-gem")
    for form in ("terminal", "markdown", "latex", "csv"):
        arguments = ["table", str(tmp_path), "--format", form, "--against", "A-GEM"]
        text = CliRunner().invoke(app, arguments).output
        shown, hidden = ("soro+dbt", "SORO+DBT") if form == "csv" else ("SORO+DBT", "soro+dbt")
        assert shown in text
        assert hidden not in text
        assert form == "csv" or "p vs A-GEM" in text


# -- accuracy at any time, and forgetting


def test_accuracy_at_any_time_stands_beside_a_and_f(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / f"er-{seed}", method="er", seed=seed, accuracy=70.0, anytime=60.0 + seed)
        write_run(tmp_path / f"soro-{seed}", method="soro", seed=seed, accuracy=80.0, anytime=50.0)
        write_run(tmp_path / f"mgda-{seed}", method="mgda", seed=seed, accuracy=75.0)
    (table,) = make_tables(read_runs(tmp_path))
    er, soro, mgda = (table.cells[name, "ps-emnist"] for name in ("er", "soro", "mgda"))
    assert er.anytime is not None
    assert soro.anytime is not None
    assert (er.anytime.mean, er.anytime.std) == (60.5, pytest.approx(np.std([60, 61], ddof=1)))
    assert (er.anytime.rank, soro.anytime.rank, mgda.anytime) == (1, 2, None)
    assert "| ps-emnist A % | ps-emnist any time A % | ps-emnist F % |" in markdown_text(table)
    assert "| <u>75.00 ± 0.00</u> | – | -5.00 ± 0.00 |" in markdown_text(table)
    assert "| 70.00 ± 0.00 | **60.50 ± 0.71** | -5.00 ± 0.00 |" in markdown_text(table)
    assert "Any time A is the mean over the run" in markdown_text(table)
    assert "any time A" in latex_text(table)
    lines = {line["method"]: line for line in csv.DictReader(io.StringIO(csv_text([table])))}
    assert [lines[name]["anytime"] for name in ("er", "soro", "mgda")] == ["60.5", "50.0", ""]


def test_tables_of_records_without_it_do_not_mention_accuracy_at_any_time(table: ResultTable) -> None:
    for text in (markdown_text(table), latex_text(table), csv_text([table])):
        assert not re.search("any ?time", text, re.IGNORECASE)


def test_no_forgetting_is_marked_as_best(tmp_path: Path) -> None:
    """Forgetting rewards methods that learn little: here the worst one has the best F."""
    for name, accuracy, forgetting in (("er", 30.0, 20.0), ("soro", 70.0, -10.0), ("mgda", 60.0, -5.0)):
        write_run(tmp_path / name, method=name, accuracy=accuracy, forgetting=forgetting)
    (table,) = make_tables(read_runs(tmp_path))
    assert "| ER | SCL | 30.00 | 20.00 |" in markdown_text(table)
    assert "| SORO | PCL | **70.00** | -10.00 |" in markdown_text(table)
    assert r"ER & SCL & 30.00 & 20.00 \\" in latex_text(table)
    assert "forgetting_rank" not in csv_text([table])
    output = CliRunner().invoke(app, ["table", str(tmp_path)]).output
    assert "70.00¹" in output
    assert re.search(r"20\.00\s", output)
