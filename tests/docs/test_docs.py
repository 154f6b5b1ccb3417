"""The tutorials and examples of the documentation do what they say."""

import doctest
import re
import runpy
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spcl.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "\n>>> " in page.read_text(encoding="utf-8")]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def steps(page: Path) -> Iterator[tuple[str, str]]:
    """The examples and commands of a page, in their order."""
    text = page.read_text(encoding="utf-8")
    for block, command in re.findall(
        r"^```python\n(>>>.*?)^```$|^    spcl ((?:[^\n]*\\\n)*[^\n]*)$", text, re.DOTALL | re.M
    ):
        yield ("python", block) if block else ("spcl", command.replace("\\\n", " "))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_can_be_followed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    parser = doctest.DocTestParser()
    for kind, text in steps(page):
        if kind == "python":
            test = parser.get_doctest(text, names, page.stem, str(page), 0)
            said: list[str] = []
            assert runner.run(test, out=said.append, clear_globs=False).failed == 0, "".join(said)
            names.update(test.globs)
        elif page in TUTORIALS:
            result = CliRunner().invoke(app, shlex.split(text, comments=True))
            assert result.exit_code == 0, f"spcl {text}\n{result.output}"
    assert runner.tries > 0


def test_the_program_of_the_tutorial_survives_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (DOCS / "tutorials" / "live.md").read_text(encoding="utf-8")
    (program,) = re.findall(r'^```python\n(""".*?)^```$', text, re.DOTALL | re.MULTILINE)
    shorter = program.replace("1200", "200").replace("600", "100")
    assert shorter != program
    (tmp_path / "train.py").write_text(shorter, encoding="utf-8")
    process = subprocess.Popen([sys.executable, "train.py"], cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "checkpoint").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    assert process.wait() == -9
    monkeypatch.chdir(tmp_path)
    runpy.run_path("train.py", run_name="__main__")
    printed = capsys.readouterr().out
    assert int(re.findall(r"goes on after (\d+) steps", printed)[0]) > 0
    assert int(re.findall(r"left: (\d+)%", printed)[0]) > 90


def test_the_program_for_lightning_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (DOCS / "how-to" / "lightning.md").read_text(encoding="utf-8")
    (program,) = re.findall(r'^```python\n(""".*?)^```$', text, re.DOTALL | re.MULTILINE)
    compile(program, "lightning.md", "exec")
    pytest.importorskip("lightning", reason="the program needs Lightning, on which SPCL does not depend")
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, e.g. that there is no optimiser
        names = runpy.run_path("train.py")
    assert names["learner"].steps == 5 * 16
    accuracies = re.findall(r"'accuracy/\w+': (\d\.\d+)", capsys.readouterr().out)
    assert len(accuracies) == 2
    assert min(map(float, accuracies)) > 0.7
    assert (tmp_path / "learner.safetensors").exists()


MARKDOWN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "results" / "README.md"]


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_of_pages_outside_of_the_site_lead_to_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"", text)
    local = [link for pair in links for link in pair if link and "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 150
