"""The documentation site: `make docs` builds it from these pages, the docstrings and the command, without a network."""

import re
import shutil
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import typer
from sphinx.application import Sphinx
from sphinx.config import Config
from typer.cli import get_docs_for_click
from typing_extensions import is_protocol

from spcl import __version__
from spcl.cli.app import app

project = "SPCL"
author = "The SPCL developers"
copyright = "the SPCL developers; MIT licence"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "sphinx_copybutton"]
exclude_patterns = ["build"]
nitpicky = False
default_role = "code"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "attrs_inline", "attrs_block"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"exclude-members": "model_config"}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"SPCL {release}"
html_static_path = ["static"]
pygments_dark_style = "a11y-high-contrast-dark"
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
mathjax_path = "tex-svg.js"

DOCS = Path(__file__).parent
GENERATED = DOCS / "generated"
PACKAGES = {
    "learner": "Learner",
    "methods": "Methods",
    "aggregation": "Aggregation",
    "orthogonality": "Orthogonality",
    "stability": "Stability",
    "memory": "Memory",
    "streams": "Streams",
    "sources": "Sources",
    "models": "Backbones",
    "losses": "Losses",
    "schedules": "Schedules",
    "transforms": "Transforms",
    "plugins": "Plug-ins",
    "testing": "Checks of plug-ins",
    "data": "Data",
    "trackers": "Trackers",
    "runs": "Runs",
    "grids": "Grids",
    "distributed": "Several devices",
    "results": "Results",
    "serve": "Serve",
    "checkpoint": "Checkpoints",
    "errors": "Errors",
}
"""The public packages, in the order of the reference."""

ON_THE_SITE = {
    "../README.md#results": "results.md",
    "../results/README.md": "generated/records.md",
    "../results/ps-emnist/table.md": "results.md#ps-emnist",
    "../results/ps-emnist/stability.md": "results.md#stability-on-ps-emnist",
    "../results/ps-emnist-released/table.md": "results.md#ps-emnist-preset-released",
    "../results/ps-emnist-one-change/table.md": "results.md#ps-emnist-one-change-at-a-time",
    "../results/ps-cifar100-held-out/table.md": "results.md#ps-cifar-100-held-out",
    "../results/ps-cifar100/table.md": "results.md#ps-cifar-100",
    "../results/ps-cifar100/stability.md": "results.md#stability-on-ps-cifar-100",
    "../results/ps-cifar100-released/table.md": "results.md#ps-cifar-100-preset-released",
    "../results/ps-cifar100-one-change/table.md": "results.md#ps-cifar-100-one-change-at-a-time",
    "../results/ps-cifar100-default/table.md": "results.md#ps-cifar-100-preset-default",
    "../results/ps-cifar100-twenty/table.md": "results.md#ps-cifar-100-twenty-tasks",
    "../results/ps-cifar100-penalty/table.md": "results.md#ps-cifar-100-penalties",
    "../results/ps-cifar100-hyperparameters/table.md": "results.md#ps-cifar-100-hyper-parameters",
    "../results/ps-cifar100-rehearsal/table.md": "results.md#ps-cifar-100-rehearsal",
    "../results/toy-cifar10-ablation/table.md": "results.md#toy-experiments",
    "../results/ps-emnist-held-out/table.md": "results.md#ps-emnist-held-out",
    "../results/ps-cifar100-plus/table.md": "results.md#ps-cifar-100-preset-plus",
    "../results/ps-tiny-imagenet/table.md": "results.md#ps-imagenet-tiny",
    "../results/ps-tiny-imagenet-twenty/table.md": "results.md#ps-imagenet-tiny-twenty-tasks",
    "../results/ps-tiny-imagenet/stability.md": "results.md#stability-on-ps-imagenet-tiny",
    "../results/ps-emnist-search/table.md": "results.md#ps-emnist-search-of-defaults",
    "../results/ps-cifar100-search/table.md": "results.md#ps-cifar-100-search-of-defaults",
    "../results/ps-emnist-betas/table.md": "results.md#ps-emnist-adam-with-a-short-memory",
    "../results/ps-emnist-recipes/table.md": "results.md#ps-emnist-losses-on-memory",
    "../results/ps-emnist-plus/table.md": "results.md#ps-emnist-preset-plus",
    "../results/ps-emnist-plus-ablation/table.md": "results.md#ps-emnist-preset-plus-without-one-part",
    "../results/ps-emnist-plus-search/table.md": "results.md#ps-emnist-search-of-plus",
    "../results/ps-emnist-plus-finished/table.md": "results.md#ps-emnist-preset-plus-rivals-with-the-weight-of-spcl",
    "../results/ps-emnist-finished-weight/table.md": "results.md#ps-emnist-weight-of-finished-classes-held-out",
    "../results/ps-cifar100-finished-weight/table.md": (
        "results.md#ps-cifar-100-spcl-with-its-default-weight-of-finished-classes"
    ),
    "../results/ps-cifar100-narrow-search/table.md": "results.md#ps-cifar-100-weight-of-finished-classes-held-out",
    "../results/ps-cifar100-plus-search/table.md": "results.md#ps-cifar-100-search-of-plus",
    "../results/ps-cifar100-search-nine/table.md": "results.md#ps-cifar-100-defaults-over-nine-configurations",
}
"""Pages that show files from outside of this folder: links to the one lead to the other."""


def setup(app: Sphinx) -> None:
    """Connect what is made at build time."""
    app.connect("config-inited", generate)
    app.connect("source-read", as_myst)
    app.connect("autodoc-process-docstring", as_restructured_text)
    app.connect("autodoc-process-signature", as_python)


def generate(app: Sphinx, config: Config) -> None:
    """Write the pages that are made from the code, and take MathJax from the package that carries it."""
    shutil.rmtree(GENERATED, ignore_errors=True)
    (GENERATED / "static").mkdir(parents=True)
    (GENERATED / "command-line.md").write_text(command_line(), encoding="utf-8")
    (GENERATED / "records.md").write_text(records(), encoding="utf-8")
    (GENERATED / "api.md").write_text(api(), encoding="utf-8")
    for package, title in PACKAGES.items():
        (GENERATED / f"{package}.md").write_text(reference(package, title), encoding="utf-8")
    mathjax = find_spec("sphinx-mathjax-offline")
    if mathjax is None or mathjax.origin is None:
        raise RuntimeError("MathJax is not installed; install the extra 'docs'")
    shutil.copy(Path(mathjax.origin).parent / "static" / "mathjax" / "tex-svg.js", GENERATED / "static")
    config.html_static_path.append("generated/static")


def command_line() -> str:
    """Return the page of the `spcl` command, from the help of its commands."""
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="spcl", title="The spcl command")
    text = re.sub(r"^\* `--help`: .*\n|^\* `--(install|show)-completion`: .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`|(--[a-z-]+)", lambda found: f"`{found[1]}`" if found[1] else found[0], text)
    return re.sub(r"^\* `(\w+)`: .*$", lambda found: _summary(text, found[1]), text, flags=re.MULTILINE)


def _summary(text: str, command: str) -> str:
    """Return a command and the first sentence of its section, which Typer cuts off in lists."""
    heading, sentence = re.findall(rf"^#+ (`spcl.* {command}`)\n\n(.*?)$", text, re.MULTILINE)[0]
    return f"* {heading}: {sentence}"


def records() -> str:
    """Return the page on the records of runs, with links that hold in this folder."""
    text = (DOCS.parent / "results" / "README.md").read_text(encoding="utf-8")
    return text.replace("](speed/", "](../../results/speed/").replace("](../docs/", "](../")


def api() -> str:
    """Return the first page of the reference: a line about every package."""
    lines = [f"| [`spcl.{name}`]({name}.md) | {_first_line(name)} |" for name in PACKAGES]
    return "\n".join(
        [
            "# API reference\n",
            "Everything that the packages export; what is not here may change without notice.\n",
            "| package | what is in it |",
            "|:--|:--|",
            *lines,
            "\n```{toctree}\n:hidden:",
            *PACKAGES,
            "```\n",
        ]
    )


def _first_line(package: str) -> str:
    return (import_module(f"spcl.{package}").__doc__ or "").strip().splitlines()[0]


def reference(package: str, title: str) -> str:
    """Return the page of a package: all that it exports."""
    module = import_module(f"spcl.{package}")
    for name in module.__all__:  # autodoc does not see what a package imports when it is asked for
        setattr(module, name, getattr(module, name))
    inherited = "\n   :inherited-members: object" if package == "learner" else ""
    return f"""# {title}

```{{eval-rst}}
.. automodule:: spcl.{package}
   :members: {", ".join(module.__all__)}
   :imported-members:
   :show-inheritance:{inherited}
```
"""


def as_myst(app: Sphinx, docname: str, source: list[str]) -> None:
    """Turn GitHub's inline formulas into MyST's, and links to files that are pages here into links to the pages."""
    text = re.sub(r"\$`([^`]+)`\$", r"$\1$", source[0])
    for outside, page in ON_THE_SITE.items():
        text = text.replace(f"]({outside})", f"]({page})")
    source[0] = text


def as_restructured_text(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Turn the Markdown in docstrings into reStructuredText, in place."""
    text = "\n".join(lines).strip()
    if what in ("attribute", "data", "property"):  # napoleon takes what precedes a colon for a type
        text = re.sub(r"\A(.*)\n\n:type: ([^\n]*)\Z", r"\2: \1", text, flags=re.DOTALL)
    text = re.sub(r"\$`([^`]+)`\$", r":math:`\1`", text)
    text = re.sub(r"^( *)```math\n(.*?)\n *```$", _formula, text, flags=re.MULTILINE | re.DOTALL)
    lines[:] = [*text.splitlines(), ""]


def as_python(
    app: Sphinx, what: str, name: str, thing: object, options: object, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Return a signature that Sphinx can parse: fields made by a function are `...`, protocols are not called."""
    if signature == "(*args, **kwargs)" and isinstance(thing, type) and is_protocol(thing):
        return "", returned
    return signature and signature.replace("<factory>", "..."), returned


def _formula(found: re.Match[str]) -> str:
    body = "\n".join("    " + line for line in found[2].splitlines())
    return f"{found[1]}.. math::\n\n{body}\n"
