"""Error messages, output errors and terminal encodings."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from _runs import spcl, write_run
from spcl.cli.app import COMMANDS, app
from spcl.errors import SpclError

SMALL = ["--device", "cpu", *(word for name in ("tasks=3", "batch_size=8", "threads=1") for word in ("--set", name))]


def error_of(*arguments: object) -> str:
    """The one line that the command ends with."""
    outcome = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert isinstance(outcome.exception, SpclError), outcome.output
    assert "\n" not in str(outcome.exception)
    return str(outcome.exception)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("seed=99999999999999999999999", "seed = 99999999999999999999999: Input should be less than"),
        ("threads=100000", "threads = 100000: Input should be less than or equal to 1024"),
        ("learning_rate=inf", "learning_rate = 'inf': Input should be a finite number"),
        ("learning_rate=1e999", "learning_rate = inf: Input should be a finite number"),
        ("checkpoint_seconds=.nan", "checkpoint_seconds = nan: Input should be a finite number"),
        ("method.alpha=inf", "alpha = 'inf': Input should be a finite number"),
    ],
)
def test_numbers_that_no_run_can_have_are_refused(
    benchmark: Path, tmp_path: Path, assignment: str, message: str
) -> None:
    said = error_of("run", "--benchmark", benchmark, "--out", tmp_path / "run", "--set", assignment)
    assert message in said
    assert not (tmp_path / "run").exists()


def test_the_largest_seed_runs(benchmark: Path, tmp_path: Path) -> None:
    words = ["run", "--benchmark", str(benchmark), "--out", str(tmp_path / "run"), "--seed", str(2**32 - 1), *SMALL]
    assert CliRunner().invoke(app, words).exit_code == 0


def test_a_complete_run_is_reported_and_not_repeated(benchmark: Path, tmp_path: Path) -> None:
    words = ["run", "--benchmark", str(benchmark), "--out", str(tmp_path / "run"), *SMALL]
    first, second = (CliRunner().invoke(app, words).output for _ in range(2))
    assert "complete already" not in first
    assert second.startswith("this run was complete already: accuracy ")


def test_a_run_ends_with_the_commands_that_show_it(benchmark: Path, tmp_path: Path) -> None:
    out = tmp_path / "my run"
    words = ["run", "--benchmark", str(benchmark), "--out", str(out), *SMALL]
    lines = CliRunner().invoke(app, words).output.splitlines()
    shows = [f"next: spcl table '{out}'", f"      spcl report '{out}'"]
    uses = [
        f"      spcl predict '{out}' FILE --task task-0",
        f"      spcl export '{out}' --task task-0 --out model.pt2",
    ]
    assert lines[-4:] == shows + uses
    shutil.rmtree(out)
    assert CliRunner().invoke(app, [*words, "--no-model"]).output.splitlines()[-2:] == shows


@pytest.mark.parametrize("device", ["mps", "mps:0"])
def test_a_missing_apple_gpu_is_named_in_a_line(benchmark: Path, tmp_path: Path, device: str) -> None:
    if torch.backends.mps.is_available():
        pytest.skip("there is one here")
    said = error_of("run", "--benchmark", benchmark, "--out", tmp_path / "run", *SMALL, "--device", device)
    reason = "there is none on this machine; choose another, such as cpu (--device cpu)"
    assert said == f"cannot use device '{device}': {reason}"


@pytest.mark.parametrize("command", ["run", "timeline", "grid", "tune"])
def test_a_timeline_that_does_not_fit_is_answered_with_the_flag(benchmark: Path, tmp_path: Path, command: str) -> None:
    file = tmp_path / "other.json"
    made = CliRunner().invoke(app, ["protocol", "--benchmark", str(benchmark), "--out", str(file), *SMALL[2:]])
    assert made.exit_code == 0, made.output
    words = [command, "--benchmark", benchmark, "--protocol", file, "--set", "batch_size=4"]
    words += [] if command == "timeline" else ["--out", tmp_path / "out"]
    words += ["--search", "method.sigma=log:1:10"] if command == "tune" else []
    said = error_of(*words)
    assert "the timeline does not fit the data at batch size 4" in said
    assert said.endswith("(--fit)")


@pytest.mark.parametrize("command", ["run", "grid", "tune"])
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("device=gpu", "there is no device 'gpu'; did you mean 'cuda'?"),
        ("optimizer.betas=[2,3]", "optimizer 'adam' cannot be made with {'betas': [2, 3]}: Invalid beta parameter"),
    ],
)
def test_what_no_run_could_use_is_refused_before_any(
    benchmark: Path, tmp_path: Path, command: str, setting: str, message: str
) -> None:
    words = [command, "--benchmark", benchmark, "--out", tmp_path / "out", *SMALL[2:], "--set", setting]
    words += ["--search", "method.sigma=log:1:10"] if command == "tune" else []
    assert message in error_of(*words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("device", ["meta", "hpu"])
def test_a_device_that_cannot_compute_is_named(benchmark: Path, tmp_path: Path, device: str) -> None:
    said = error_of("run", "--benchmark", benchmark, "--out", tmp_path / "run", *SMALL, "--device", device)
    assert f"cannot use device '{device}'" in said
    assert "choose another, such as cpu (--device cpu)" in said


@pytest.mark.parametrize("command", [["table", "runs"], ["table", "runs", "--format", "csv"], ["methods"]])
def test_an_output_without_room_is_one_clear_line(tmp_path: Path, command: list[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no output here that is always full")
    write_run(tmp_path / "runs/er")
    done = spcl(*command, folder=tmp_path, stdout=Path("/dev/full"))
    assert done.returncode == 1
    assert done.stderr == "error: cannot write the output: No space left on device; send it somewhere else\n"


def test_a_terminal_with_few_characters_gets_what_it_can_show(benchmark: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "runs/er")
    data = ["--benchmark", benchmark]
    for command, shown in {
        ("run", *data, *SMALL, "--out", tmp_path / "run"): "step 1/",
        ("table", tmp_path / "runs"): "80.00",
        ("timeline", *data, "--set", "tasks=3", "--set", "batch_size=8"): "task-0 (2 classes) ???",
    }.items():
        done = spcl(*command, folder=tmp_path, encoding="ascii")
        assert done.returncode == 0, done.stderr
        assert shown in done.stdout


def test_the_list_of_commands_shows_their_own_summaries() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    for name, (_, summary) in COMMANDS.items():
        command = group.get_command(None, name)
        assert command.help.splitlines()[0] == summary, name


@pytest.mark.parametrize("command", ["", "run", "grid"])
def test_help_imports_neither_torch_nor_matplotlib(command: str) -> None:
    program = (
        "import sys; from typer.testing import CliRunner; from spcl.cli.app import app; "
        f"assert 'Usage: ' in CliRunner().invoke(app, [*{command.split()!r}, '--help']).output; "
        "print(sorted({'torch', 'matplotlib', 'numpy', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_misspelt_command_is_answered_with_the_nearest() -> None:
    result = CliRunner().invoke(app, ["gird"])
    assert result.exit_code == 2
    assert "Did you mean 'grid'?" in result.output
