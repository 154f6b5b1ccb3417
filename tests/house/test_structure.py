"""Packages say what they offer, and imports stand at the top."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "spcl"
MODULES = {str(path.relative_to(SOURCE)): path for path in sorted(SOURCE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}
TEXTS = [
    path
    for folder in ("src", "tests", "docs", "examples", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".md", ".yaml", ".html") and "build" not in path.parts
]
MARKDOWN = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]

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
    "torchjd",
    "pydantic",
    "importlib.metadata",
    "filelock",
    "spcl.methods.torchjd",  # needs TorchJD
    "spcl.methods.replay",  # need pydantic
    "spcl.methods.settings",
    "torch.distributed.tensor",
    "spcl.aggregation",  # its classes for TorchJD
    "spcl.engine.kernels",  # need Triton
}

SAME_NAME = {
    "SORO": "the weighting of the gradients, and the method that trains with it: the paper has one name for both",
}
"""Names that mean different things in two packages, and why they may."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.Module) -> Iterator[Function]:
    yield from (node for node in ast.walk(tree) if isinstance(node, Function))


def test_only_slow_or_optional_libraries_are_imported_within_functions() -> None:
    inside = [
        (name, node)
        for name, tree in TREES.items()
        if not name.startswith("cli/")  # a command imports what it calls, so that its help need not wait for PyTorch
        for each in functions(tree)
        for node in ast.walk(each)
    ]
    found = [(name, alias.name) for name, node in inside if isinstance(node, ast.Import) for alias in node.names]
    found += [(name, node.module or "") for name, node in inside if isinstance(node, ast.ImportFrom)]
    assert [each for each in found if not each[1].startswith(tuple(SLOW_OR_OPTIONAL))] == []


def test_modules_have_a_docstring() -> None:
    assert [name for name, tree in TREES.items() if not ast.get_docstring(tree)] == []


@pytest.mark.parametrize("package", sorted(path.parent.name for path in SOURCE.glob("[!_]*/__init__.py")))
def test_packages_have_what_they_offer(package: str) -> None:
    module = import_module(f"spcl.{package}")
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def _is_module(path: Path) -> bool:
    return path.suffix == ".py" or (path / "__init__.py").exists()


def test_no_name_means_two_things() -> None:
    public = [path.stem for path in SOURCE.iterdir() if not path.name.startswith("_") and _is_module(path)]
    found: dict[str, dict[str, object]] = defaultdict(dict)
    for package in sorted(public):
        module = import_module(f"spcl.{package}")
        for name in getattr(module, "__all__", ()):
            found[name][package] = getattr(module, name)
    several = {
        name: sorted(things) for name, things in found.items() if any(a != b for a, b in pairwise(things.values()))
    }
    assert {name: packages for name, packages in several.items() if name not in SAME_NAME} == {}
    assert several.keys() == SAME_NAME.keys()


def test_markdown_wraps_at_120() -> None:
    lines = [(path.name, line) for path in MARKDOWN for line in path.read_text(encoding="utf-8").splitlines()]
    assert [each for each in lines if len(each[1]) > 120 and not each[1].startswith(("|", "    ", "$$"))] == []


def test_sentences_repeat_their_nouns() -> None:
    """A pronoun for a noun two clauses away makes a reader search."""
    unclear = re.compile(r"\b(?:those\s+of|of\s+which|so\s+many)\b", re.IGNORECASE)
    texts = [path for path in (*TEXTS, *MARKDOWN) if path != Path(__file__)]
    assert [path.name for path in texts if unclear.search(path.read_text(encoding="utf-8"))] == []
