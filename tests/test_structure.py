"""Files and functions stay short, modules say what they offer, and imports stand at the top."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "spcl"
MODULES = sorted(SOURCE.rglob("*.py"))
MARKDOWN = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]

MOST_LINES = 350
MOST_FUNCTION_LINES = 40
SLOW_OR_OPTIONAL = {
    "ray",
    "redis",
    "timm",
    "transformers",
    "optuna",
    "wandb",
    "onnx",
    "torch.utils.tensorboard",
    "plotly",
    "matplotlib",
    "scipy",
    "torch.distributed.tensor",
    "spcl.engine.batch_norm_kernels",  # needs Triton
}

by_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def length(function: ast.FunctionDef | ast.AsyncFunctionDef, path: Path) -> int:
    """The lines of a function; of a command without its signature, which is its help."""
    begin = function.body[0].lineno if path.parent.name == "cli" else function.lineno
    return (function.end_lineno or 0) - begin + 1


@by_module
def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
    long = {function.name: length(function, path) for function in functions(path)}
    assert {name: lines for name, lines in long.items() if lines > MOST_FUNCTION_LINES} == {}


@by_module
def test_only_slow_or_optional_libraries_are_imported_within_functions(path: Path) -> None:
    found = set()
    for function in functions(path):
        for node in ast.walk(function):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module or "")
    assert {name for name in found if not any(name.startswith(allowed) for allowed in SLOW_OR_OPTIONAL)} == set()


@by_module
def test_modules_say_what_they_offer(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    targets = [target for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) for target in names(node)]
    assert "__all__" in targets or len(tree.body) == 1


@pytest.mark.parametrize("package", sorted(path.parent.name for path in SOURCE.glob("*/__init__.py")))
def test_packages_have_what_they_offer(package: str) -> None:
    module = import_module(f"spcl.{package}")
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def names(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_markdown_wraps_at_120(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith(("|", "    ", "$$"))] == []
