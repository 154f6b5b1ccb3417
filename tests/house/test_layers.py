"""Packages import only what the diagram in CONTRIBUTING allows; its table lists them in the same order."""

import ast
import re
from collections import defaultdict
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "spcl"
PACKAGES = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
PACKAGES -= {"__init__", "__main__"}


def diagram() -> str:
    (found,) = re.findall(r"```mermaid\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL)
    return str(found)


def nodes() -> dict[str, list[str]]:
    """The modules that every node stands for: the modules in its label, or the module with the node's name."""
    labelled = {node: re.findall(r"\w+", label) for node, label in re.findall(r"(\w+)\[\"?(.*?)\"?\]", diagram())}
    ends = {end for edge in edges() for end in edge}
    return {node: labelled.get(node, [node]) for node in ends}


def edges() -> list[tuple[str, str]]:
    """Every arrow, from a package to one that uses it."""
    found = []
    for line in diagram().splitlines():
        parts = [part.strip() for part in re.split(r"-->(?:\|.*?\|)?", re.sub(r"\[.*?\]", "", line))]
        for left, right in pairwise(parts):
            found += [(a.strip(), b.strip()) for a in left.split("&") for b in right.split("&")]
    return found


@cache
def allowed() -> dict[str, set[str]]:
    """The packages that every package may import: all from which arrows lead to it."""
    sources = defaultdict(set)
    for left, right in edges():
        sources[right].add(left)

    def upstream(node: str) -> set[str]:
        return set().union(*({source} | upstream(source) for source in sources[node]))

    modules = nodes()
    return {
        module: {name for source in upstream(node) for name in modules[source]} | (set(modules[node]) - {module})
        for node in modules
        for module in modules[node]
    }


@cache
def imports() -> dict[str, dict[str, str]]:
    """The packages that every package imports anywhere, also in functions, each with a place of the import."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for path in SOURCE.rglob("*.py"):
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for module in imported_modules(node):
                _, *rest = module.split(".")
                if rest and rest[0] in PACKAGES and rest[0] != package:
                    found[package][rest[0]] = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
    return found


def imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports hide what is imported"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
        names = [node.args[0].value] if isinstance(node.args[0], ast.Constant) else []
    else:
        names = []
    return [name for name in names if name.split(".")[0] == "spcl"]


def test_no_packages_import_each_other() -> None:
    graph = imports()

    def reaches(package: str, path: tuple[str, ...]) -> None:
        assert package not in path, " → ".join((*path, package))
        for name in graph.get(package, {}):
            reaches(name, (*path, package))

    for package in PACKAGES:
        reaches(package, ())


def test_the_diagram_shows_every_package() -> None:
    assert {module for modules in nodes().values() for module in modules} == PACKAGES


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_package_imports_only_what_the_diagram_allows(package: str) -> None:
    forbidden = {name: place for name, place in imports().get(package, {}).items() if name not in allowed()[package]}
    assert not forbidden


def test_contributing_lists_the_packages_in_an_order_of_the_diagram() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`spcl\.\w+`(?:, )?)+) \|", text, re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"spcl\.(\w+)", row)]
    assert set(listed) == PACKAGES
    for place, package in enumerate(listed):
        later = set(listed[place + 1 :]) & set(imports().get(package, {}))
        assert not later - set(same_row(rows, package)), package


def same_row(rows: list[str], package: str) -> list[str]:
    return next(names for row in rows if package in (names := re.findall(r"spcl\.(\w+)", row)))
