"""Methods are found, not listed: in files of ``spcl.methods`` and in entry points of other packages."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

import spcl._util.registry
import spcl.methods
from spcl.methods import ER, METHODS, Method
from spcl.methods.registry import _Methods

SPCL = [sys.executable, "-W", "error", "-c", "from spcl.cli import main; main()"]
LENIENT = [sys.executable, "-c", "from spcl.cli import main; main()"]
PACKAGE = Path(spcl.methods.__file__).parents[1]
Fresh = Callable[[], Mapping[str, type[Method]]]

BUILT_IN = dict(METHODS)  # found before a test adds packages to the path

NEW_METHOD = '''
"""Fixed shares, an example of a method."""

import torch
from pydantic import Field

from spcl.methods import Gradients, Method, MethodSettings, Weights

__all__ = ["Halves"]


class HalvesSettings(MethodSettings):
    """Settings of :class:`Halves`."""

    share: float = Field(0.5, ge=0.0, le=1.0, description="share of the current tasks")


class Halves(Method):
    r"""Fixed shares of the current tasks and of memory.

    .. math:: u = \\rho\\, g + (1 - \\rho)\\, g_m

    Nobody, *On Fixed Shares*, 2026.
    """

    name = "halves"
    family = "SCL"
    summary = "fixed shares of the current tasks and of memory"
    reference = "Nobody, On Fixed Shares, 2026"
    reduction = "mean"
    uses_gramian = False
    Settings = HalvesSettings
    settings: HalvesSettings

    def weigh(self, gradients: Gradients) -> Weights:
        """Return the shares."""
        if len(gradients.names) == 1:
            return Weights(torch.ones(1))
        return Weights(torch.tensor([self.settings.share, 1.0 - self.settings.share]))
'''


def install(folder: Path, package: str, entry_point: str, source: str | None = None) -> Path:
    """Write a package of one module, as it lies in site-packages, with an entry point for plug-ins."""
    metadata = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[spcl.plugins]\n{entry_point}\n")
    if source is not None:
        (folder / f"{entry_point.split('=')[1].split(':')[0].strip()}.py").write_text(source)
    return folder


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Fresh:
    """Methods as a new process would find them, entry points included, but for our own plug-in, which has none."""
    monkeypatch.setattr(spcl._util.registry, "OWN", ())
    monkeypatch.setattr(spcl._util.registry, "_installed", False)
    monkeypatch.setattr(spcl._util.registry, "_listeners", [])
    monkeypatch.setattr(spcl._util.registry, "_versions", {})
    return _Methods


SUBCLASS = """
from spcl.methods import ER

__all__ = ["MyER"]


class MyER(ER):
    name = "my-er"
"""


def run(folder: Path, *arguments: object, command: Sequence[str] = SPCL) -> subprocess.CompletedProcess[str]:
    """Run a command with this folder before all others on Python's path."""
    paths = [str(folder), str(PACKAGE.parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "80"}
    return subprocess.run([*command, *map(str, arguments)], env=environment, capture_output=True, text=True)


def output(folder: Path, *arguments: object, command: Sequence[str] = SPCL) -> str:
    done = run(folder, *arguments, command=command)
    assert done.returncode == 0, done.stderr
    return done.stdout


def commands(out: Path) -> list[list[str]]:
    """List the method, train it, tabulate the run, and make the page of the docs."""
    tiny = ["device=cpu", "threads=1", "tasks=2", "evaluate=ended", "method.share=0.25"]
    return [
        ["methods"],
        ["run", "--method", "halves", *(word for value in tiny for word in ("--set", value)), "--out", str(out)],
        ["table", str(out), "--format", "markdown"],
        ["methods", "--format", "markdown"],
    ]


def assert_found(outputs: Sequence[str]) -> None:
    """Check the outputs of :func:`commands`."""
    listed, _, table, page = outputs
    assert "halves SCL 2 T + 1 0 samples" in " ".join(listed.split())
    assert "| Halves | SCL |" in table
    assert "### `halves`\n\nFixed shares of the current tasks and of memory.\n\n```math\nu = \\rho" in page
    assert "| `share` | `0.5` | share of the current tasks |" in page
    assert page.index("### `der++`") < page.index("### `halves`") < page.index("## Parallel")


def test_a_method_of_another_package_is_found_by_its_entry_point(tmp_path: Path) -> None:
    """The package is imported first, and ``spcl.methods`` by it, which must not look for methods in it too early."""
    assert len(NEW_METHOD.strip().splitlines()) < 60
    folder = install(tmp_path / "site", "spcl-halves", "halves = halves_method", NEW_METHOD)
    program = f"""
import halves_method, spcl.methods
assert spcl.methods.METHODS["halves"] is halves_method.Halves
from spcl.cli.app import app
for command in {commands(tmp_path / "run")}:
    app(command, standalone_mode=False)
    print("====")
"""
    printed = output(folder, command=[sys.executable, "-W", "error", "-c", program])
    assert_found(printed.split("====\n")[:-1])


def test_a_file_added_to_the_package_is_a_method(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    shutil.copytree(PACKAGE, folder / "spcl")
    (folder / "spcl" / "methods" / "halves.py").write_text(NEW_METHOD)
    (folder / "spcl" / "methods" / "a_first.py").write_text(SUBCLASS)  # imports a file that comes later
    program = """
from spcl.methods import METHODS, Halves, make_method
assert repr((Halves(), make_method("halves", share=0.1))) == "(Halves(), Halves(share=0.1))"
print(*METHODS)
"""
    names = output(folder, command=[sys.executable, "-W", "error", "-c", program]).split()
    assert set(names) - set(BUILT_IN) == {"halves", "my-er"}


def test_an_entry_point_may_name_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: Fresh) -> None:
    source = NEW_METHOD.replace("halves", "quarters")
    monkeypatch.syspath_prepend(install(tmp_path, "spcl-quarters", "q = quarters_method:Halves", source))
    assert list(fresh()) == [*BUILT_IN, "quarters"]


# -- packages that cannot be used

DECLARED = 'name = "x"; family = "MTL"; summary = "s"; reference = "r"'


@pytest.mark.parametrize(
    ("entry_point", "source", "message"),
    [
        ("x = broken_missing", None, r"ModuleNotFoundError: No module named 'broken_missing'"),
        ("x = broken_import", "import no_such_module", r"ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = broken_raise", "1 / 0", r"ZeroDivisionError: division by zero"),
        ("x = broken_class:Nothing", "", r"AttributeError: .*'Nothing'"),
        ("x = broken_empty", "", r"it defines nothing that can be used by name"),
        ("x = broken_name", "from spcl.methods import Method\nclass X(Method): name = 'x'", r"declare family, summary"),
        (
            "x = broken_family",
            f"from spcl.methods import Method\nclass X(Method): {DECLARED.replace('MTL', 'XYZ')}",
            r"broken_family.X must be of the family MTL, SCL, PCL, but is of 'XYZ'",
        ),
        (
            "x = broken_settings",
            f"from spcl.methods import Method, MethodSettings\nclass X(Method):\n  {DECLARED}\n"
            "  class Settings(MethodSettings): rate: float",
            r"must have a default for every setting, but rate has none",
        ),
    ],
)
def test_an_unusable_package_is_named_in_a_warning_and_the_others_work(
    entry_point: str, source: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: Fresh
) -> None:
    monkeypatch.syspath_prepend(install(tmp_path, "spcl-broken", entry_point, source))
    with pytest.warns(UserWarning, match=rf"'{entry_point}' of package 'spcl-broken' gives no plug-in .*{message}"):
        found = dict(fresh())
    assert found == BUILT_IN


def test_the_command_warns_in_one_line_and_works(tmp_path: Path) -> None:
    folder = install(tmp_path, "spcl-broken", "x = broken", "1 / 0")
    done = run(folder, "methods", command=LENIENT)
    assert done.returncode == 0
    assert "\nsoro " in done.stdout
    assert done.stderr.startswith("warning: the entry point 'x = broken' of package 'spcl-broken' gives no plug-in")
    assert done.stderr.count("\n") == 1


def test_a_name_that_is_taken_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: Fresh) -> None:
    source = SUBCLASS.replace("my-er", "er")
    monkeypatch.syspath_prepend(install(tmp_path, "spcl-twin", "er = twin_method", source))
    with pytest.warns(UserWarning, match=r"two methods are named 'er', spcl\.methods\.er\.ER and twin_method\.MyER"):
        assert dict(fresh()) == BUILT_IN


def test_a_method_that_a_package_only_imports_is_no_duplicate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: Fresh
) -> None:
    monkeypatch.syspath_prepend(install(tmp_path, "spcl-mine", "mine = mine_method", SUBCLASS))
    found = fresh()
    assert list(found) == [*BUILT_IN, "my-er"]
    assert found["er"] is ER


# -- order and names


def test_methods_are_ordered_by_family_as_in_the_tables() -> None:
    assert list(BUILT_IN) == [
        *("mgda", "dwa", "graddrop", "pcgrad", "rlw", "normsum", "scaledsum"),
        *("a-gem", "gmed", "er", "mega", "mdmtr", "der++"),
        *("maxdo", "emgd", "procrustes", "soro", "soro+dbt", "soro-kappa", "spcl"),
    ]


def test_the_package_exports_every_class_of_its_files() -> None:
    for method in BUILT_IN.values():
        assert getattr(spcl.methods, method.__name__) is method
        assert method.__name__ in spcl.methods.__all__
        assert method.__name__ in dir(spcl.methods)
    with pytest.raises(AttributeError, match=r"'spcl\.methods' has no attribute 'Nothing'"):
        spcl.methods.Nothing  # noqa: B018
