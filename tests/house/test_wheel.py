"""The wheel in an environment of its own, outside of the source tree, with an installed plug-in package."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import dedent
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LIBRARIES = ("purelib", "platlib")
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]), file=sys.stderr)"

PYPROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "own-things"
version = "1.2.3"

[project.entry-points."spcl.plugins"]
own = "own_things.parts"
"""

PLUGIN = '''
"""Things of my own."""

import math
import os
import signal

import numpy as np
import torch
from torch import nn

from spcl.data import from_arrays
from spcl.methods import Method, Weights
from spcl.plugins import backbone, data_set, loss


class Doubled(Method):
    """Twice the sum of the gradients."""

    name = "doubled"
    family = "MTL"
    summary = "twice the sum"
    reference = "nobody"
    steps = 0

    def weigh(self, gradients):
        self.steps += 1
        if self.steps == int(os.environ.get("KILL_AT", 0)):
            os.kill(os.getpid(), signal.SIGKILL)
        return Weights(torch.full((len(gradients.names),), 2.0))


@backbone("two-layers")
def two_layers(inputs, width=16):
    """Two layers."""
    return nn.Sequential(nn.Linear(math.prod(inputs.shape), width), nn.Tanh(), nn.Linear(width, width))


@data_set("clusters")
def clusters(samples=30):
    """Six classes around six centres."""
    rng = np.random.default_rng(0)
    names = np.repeat(["ant", "bee", "cat", "dog", "eel", "fox"], samples)
    centres = rng.normal(size=(6, 5))
    return from_arrays(np.repeat(centres, samples, axis=0) + rng.normal(size=(6 * samples, 5)), names)


@loss("focal")
def focal(task, gamma=2.0):
    """Cross-entropy that counts what is right already less."""

    def compute(logits, labels):
        log_p = logits.log_softmax(1).gather(1, labels[:, None])
        return -((1 - log_p.exp()) ** gamma * log_p).mean()

    return compute
'''

SETTINGS = {
    "benchmark": "clusters",
    "data": {"samples": 36},
    "backbone": {"name": "two-layers", "width": 12},
    "loss": {"name": "focal", "gamma": 1.5},
    "tasks": 3,
    "batch_size": 8,
    "memory_budget": 24,
    "threads": 1,
    "device": "cpu",
    "epochs": 3,
    "learning_rate": 0.01,
    "checkpoint_seconds": 0,
}

IMPORTED = """
    import json, sys
    import own_things, spcl
    print(json.dumps([spcl.__file__, own_things.__file__, sys.path, [str(finder) for finder in sys.meta_path]]))
"""

SHOWN = """
    import sys
    import numpy as np
    from spcl.cli.app import app
    from spcl.runs import load_run
    run, x, out = sys.argv[1:]
    app(["table", "grid", "--format", "csv"], standalone_mode=False)
    print("====")
    app(["report", "grid", "--out", "report.html"], standalone_mode=False)
    print("====")
    app(["predict", run, x, "--format", "json"], standalone_mode=False)
    np.save(out, load_run(run, device="cpu").logits(np.load(x)).numpy())
"""

TORCH_ALONE = """
    import sys
    packages, program, x, out = sys.argv[1:]
    sys.path.append(packages)
    sys.modules["spcl"] = sys.modules["own_things"] = None  # cannot be imported
    import numpy as np
    import torch
    with torch.no_grad():
        output = torch.export.load(program).module()(torch.from_numpy(np.load(x)))
    np.save(out, output.numpy())
"""


class Environment:
    """A virtual environment with the two wheels, and a working directory outside of the source tree."""

    def __init__(self, folder: Path, wheels: list[Path]) -> None:
        self.home = folder / "home"
        self.home.mkdir()
        self.path = folder / "environment"
        venv.create(self.path, symlinks=True)
        self.python = self.path / "bin" / "python"
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "--disable-pip-version-check", "install"]
        self.call([*pip, "--quiet", "--no-deps", "--no-index", *map(str, wheels)])
        (packages,) = self.path.glob("lib/python*/site-packages")
        # a line adds a folder to the path without reading the .pth files in it, among which is the editable install
        (packages / "others.pth").write_text("\n".join(dict.fromkeys(sysconfig.get_paths()[key] for key in LIBRARIES)))

    def call(self, command: list[str], code: int = 0, **more: str) -> str:
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        variables = {name: value for name, value in os.environ.items() if name not in hidden} | more
        done = subprocess.run(command, cwd=self.home, env=variables, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def spcl(self, *arguments: object, code: int = 0, **more: str) -> str:
        return self.call([str(self.path / "bin" / "spcl"), *map(str, arguments)], code, PYTHONWARNINGS="error", **more)

    def script(self, source: str, *arguments: object) -> str:
        return self.call([str(self.python), "-c", dedent(source), *map(str, arguments)])

    def torch_alone(self, *arguments: str) -> None:
        """Load and call an exported program where neither spcl nor the plug-in can be imported."""
        libraries = sysconfig.get_paths()["platlib"]
        self.call([sys.executable, "-I", "-S", "-c", dedent(TORCH_ALONE), libraries, *arguments])


def build(source: Path, wheels: Path) -> Path:
    before = set(wheels.glob("*.whl"))
    done = subprocess.run([sys.executable, "-c", BUILD, str(wheels)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = set(wheels.glob("*.whl")) - before
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        found = version("setuptools")
    except PackageNotFoundError:
        found = "0"
    if int(found.partition(".")[0]) < 77:
        pytest.skip("the wheel is built by setuptools 77 or later, which is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(REPOSITORY / "src", folder / "source" / "src", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder / "source")
    return build(folder / "source", folder)


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("clean")
    package = folder / "source" / "src" / "own_things"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('"""Own things."""\n')
    (package / "parts.py").write_text(PLUGIN)
    (folder / "source" / "pyproject.toml").write_text(PYPROJECT)
    return Environment(folder, [wheel, build(folder / "source", folder)])


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    package = REPOSITORY / "src" / "spcl"
    files = (file for file in package.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    expected = {file.relative_to(package.parent).as_posix() for file in files}
    assert {"spcl/py.typed", "spcl/results/report/templates/report.html"} < expected
    with ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if name.startswith("spcl/")} == expected


def test_what_is_installed_is_imported(environment: Environment) -> None:
    imported, plugin, path, finders = json.loads(environment.script(IMPORTED))
    assert Path(imported).is_relative_to(environment.path)
    assert Path(plugin).is_relative_to(environment.path)
    assert not [entry for entry in path if Path(entry).is_relative_to(REPOSITORY / "src")]
    assert "editable" not in str(finders)


def test_an_installed_plugin_from_a_killed_run_to_an_export_for_torch_alone(environment: Environment) -> None:
    home, spcl = environment.home, environment.spcl
    (home / "settings.json").write_text(json.dumps(SETTINGS))
    one = ["--settings", "settings.json", "--method", "doubled", "--scenario", "class"]
    spcl("run", *one, "--out", "run", code=-9, KILL_AT="17")
    assert not (home / "run/result.json").exists()
    assert "16 done" in spcl("run", "--resume", "--out", "run")
    result = read(home / "run/result.json")
    assert result["environment"]["plugins"] == {"own-things": "1.2.3"}
    assert result["environment"]["git"] is None

    all_runs = ["--settings", "settings.json", "--methods", "doubled,er", "--scenarios", "class"]
    made = spcl("grid", *all_runs, "--configs", "0", "--seeds", "0", "--out", "grid")
    assert "2 of 2 runs are complete" in made
    whole = read(home / "grid/class/doubled/config-0/seed-0/result.json")
    assert (whole["tasks"], whole["confusion"]) == (result["tasks"], result["confusion"])

    x = np.random.default_rng(1).normal(scale=3.0, size=(7, 5)).astype(np.float32)
    np.save(home / "x.npy", x)
    with ThreadPoolExecutor(2) as pool:
        shown = pool.submit(environment.script, SHOWN, "run", "x.npy", "expected.npy")
        spcl("export", "run", "--out", "model.pt2")
        environment.torch_alone("model.pt2", "x.npy", "found.npy")
    tabulated, reported, predicted = shown.result().split("====\n")

    table = {row["method"]: row for row in csv.DictReader(io.StringIO(tabulated))}
    assert {name: row["type"] for name, row in table.items()} == {"doubled": "MTL", "er": "SCL"}
    assert float(table["doubled"]["accuracy"]) == pytest.approx(result["accuracy"])
    assert "the report is in report.html" in reported
    assert '"doubled"' in (home / "report.html").read_text()

    expected, found = np.load(home / "expected.npy"), np.load(home / "found.npy")
    assert expected.shape == (7, 6)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    rows = [json.loads(line) for line in predicted.splitlines()]
    names = [column["class"] for column in read(home / "model.pt2.json")["columns"]]
    assert [row["class"] for row in rows] == [names[index] for index in found.argmax(axis=1)]
