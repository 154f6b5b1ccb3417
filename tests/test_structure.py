"""Files and functions stay short, modules say what they offer, and imports stand at the top."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "spcl"
MODULES = {str(path.relative_to(SOURCE)): path for path in sorted(SOURCE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}
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
    "spcl.engine.kernels",  # need Triton
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.Module) -> Iterator[Function]:
    yield from (node for node in ast.walk(tree) if isinstance(node, Function))


def length(function: Function, module: str) -> int:
    """The lines of a function; of a command without its signature, which is its help."""
    begin = function.body[0].lineno if module.startswith("cli/") else function.lineno
    return (function.end_lineno or 0) - begin + 1


def test_files_are_short() -> None:
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_functions_are_short() -> None:
    lines = {f"{name}: {each.name}": length(each, name) for name, tree in TREES.items() for each in functions(tree)}
    assert {name: count for name, count in lines.items() if count > MOST_FUNCTION_LINES} == {}


def test_only_slow_or_optional_libraries_are_imported_within_functions() -> None:
    inside = [(name, node) for name, tree in TREES.items() for each in functions(tree) for node in ast.walk(each)]
    found = [(name, alias.name) for name, node in inside if isinstance(node, ast.Import) for alias in node.names]
    found += [(name, node.module or "") for name, node in inside if isinstance(node, ast.ImportFrom)]
    assert [each for each in found if not each[1].startswith(tuple(SLOW_OR_OPTIONAL))] == []


def test_modules_say_what_they_offer() -> None:
    assert [name for name, tree in TREES.items() if not ast.get_docstring(tree)] == []
    assert [name for name, tree in TREES.items() if not offers(tree)] == []


def offers(tree: ast.Module) -> bool:
    """Whether a module names what it offers, or is a docstring alone."""
    assigned = [target for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign) for target in names(node)]
    return "__all__" in assigned or len(tree.body) == 1


@pytest.mark.parametrize("package", sorted(path.parent.name for path in SOURCE.glob("*/__init__.py")))
def test_packages_have_what_they_offer(package: str) -> None:
    module = import_module(f"spcl.{package}")
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def names(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_markdown_wraps_at_120() -> None:
    lines = [(path.name, line) for path in MARKDOWN for line in path.read_text(encoding="utf-8").splitlines()]
    assert [each for each in lines if len(each[1]) > 120 and not each[1].startswith(("|", "    ", "$$"))] == []
