"""``import spcl``: what it offers, and what it does not import."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import spcl
from small_benchmark import small_settings
from spcl.errors import SpclError
from spcl.runs.settings import load_settings_file

IMPORTS = """
import json, sys
before = set(sys.modules)
import spcl
listed = dir(spcl)
print(json.dumps([sorted(set(sys.modules) - before), listed]))
assert spcl.SpclError.__module__ == "spcl.errors" and "torch" not in sys.modules
import spcl.learner
slow = {"torchjd", "scipy", "cvxpy", "pydantic", "matplotlib", "ray", "redis", "fastapi", "torch._dynamo"}
assert not slow & set(sys.modules), slow & set(sys.modules)  # they would double the time that PyTorch takes
"""


def test_import_spcl_imports_nothing_that_takes_time() -> None:
    """A number of modules, since a time would be that of this machine: PyTorch imports some 1,500."""
    done = subprocess.run([sys.executable, "-X", "frozen_modules=off", "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported, listed = json.loads(done.stdout)
    assert {name.partition(".")[0] for name in imported} <= {"spcl", *sys.stdlib_module_names}
    assert [name for name in imported if name.startswith("spcl")] == ["spcl"]
    assert len(imported) < 20
    assert set(spcl.__all__) <= set(listed)


@pytest.mark.parametrize("name", [name for name in spcl.__all__ if name != "__version__"])
def test_every_name_is_that_of_a_class_or_function(name: str) -> None:
    assert getattr(spcl, name).__name__ == name


def test_names_that_are_not_there_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="module 'spcl' has no attribute 'Lerner'"):
        spcl.Lerner  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(spcl, "__wrapped__")


def test_run_makes_the_run_that_the_command_makes(benchmark: Path, tmp_path: Path) -> None:
    settings = small_settings(benchmark).model_dump(mode="json")
    result = spcl.run({name: settings[name] for name in settings if name != "config"}, out=tmp_path / "run")
    assert load_settings_file(tmp_path / "run" / "settings.json") == settings
    assert spcl.run(out=tmp_path / "run", resume=True) == result
    assert set(result.tasks) == set(spcl.load_run(tmp_path / "run").tasks)


def test_a_run_that_is_resumed_has_its_own_settings(benchmark: Path, tmp_path: Path) -> None:
    with pytest.raises(SpclError, match=r"resume=True continues the run .* give no others \(found method, seed\)"):
        spcl.run({"seed": 1, "method": "er"}, out=tmp_path, resume=True)
    with pytest.raises(SpclError, match=r"there is no run in .* to resume"):
        spcl.run(out=tmp_path / "absent", resume=True)
