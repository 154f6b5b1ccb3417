"""Ctrl-C at any time ends a command with one word and status 130."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
"""As in the foreground: what a shell starts in the background ignores SIGINT."""

MAIN = "from spcl.cli import main; main()"
SLOW = """
import time
print("begun", flush=True)
try:
    time.sleep(60)
except BaseException:
    raise ImportError("the import was interrupted")
"""
SLOW_COMMAND = """
import time
import spcl.runs.build

def load(*given):
    print("begun", flush=True)
    time.sleep(60)

spcl.runs.build.make_problem = load
"""


def interrupt(program: str, path: Path) -> tuple[int, str]:
    """Send SIGINT when the program prints its first line; return its status and what it prints on standard error."""
    known = os.environ.get("PYTHONPATH", "")
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE + program, "timeline"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{known}"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    try:
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    return process.returncode, errors


@pytest.mark.parametrize("module", ["typer", "rich", "torch"])
def test_interrupted_imports_end_without_a_traceback(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text(SLOW)
    assert interrupt(MAIN, tmp_path) == (130, "stopped\n")


def test_an_interrupted_command_ends_without_a_traceback(tmp_path: Path) -> None:
    assert interrupt(SLOW_COMMAND + MAIN, tmp_path) == (130, "stopped\n")
