"""What a method costs, and the reference page of all methods in Markdown, made from their docstrings."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from textwrap import wrap

from pydantic.fields import FieldInfo

from spcl.methods.base import FAMILIES, Method
from spcl.methods.registry import METHODS
from spcl.methods.replay import REPLAY_LOSSES
from spcl.methods.settings import MethodSettings
from spcl.methods.torchjd import TorchJD, aggregators

COMMENT = "<!-- Made from the docstrings of spcl.methods by: spcl methods --format markdown > docs/methods.md -->"
WIDTH = 120
JOINED = "\0"  # stands for a space at which a line must not be broken


@dataclass(frozen=True)
class Cost:
    """Cost of a step beyond one pass per task and one over a batch of memory.

    Attributes:
        gradients: number of gradients of the shared parameters held at once, for T tasks and memory.
        gradients_with_stability: the same while stability is measured, which takes every gradient by itself.
        forwards: further forward passes over a batch of memory.
        memory: what memory stores.
    """

    gradients: str
    gradients_with_stability: str
    forwards: int
    memory: str


def cost_of(method: Method) -> Cost:
    """Return the cost of a method with its settings.

    >>> from spcl.methods import DERPP, SORO
    >>> cost_of(SORO())
    Cost(gradients='T + 1', gradients_with_stability='T + 1', forwards=0, memory='samples')
    >>> cost_of(DERPP())
    Cost(gradients='2', gradients_with_stability='T + 1', forwards=1, memory='samples and logits')
    """
    penalty = bool(method.settings.alpha)
    every = f"T + {1 + penalty}"
    held = {"none": every, "mean": f"{2 + penalty}", "sum": "2"}[method.reduction]
    forwards = method.draws * (1 + 2 * method.edits_memory) - 1
    memory = "samples" + " as floats" * method.edits_memory + " and logits" * method.stores_logits
    return Cost(held, every, forwards, memory)


def reference_page() -> str:
    """Return the page: the package's docstring, then every method with its docstring, settings and cost."""
    parts = ["# Methods", COMMENT, markdown(import_module("spcl.methods").__doc__ or "", examples=True)]
    parts += ["Settings of every method:", _settings_table(MethodSettings.model_fields)]
    parts += ["Losses on replayed samples, for every method:", _replay_losses()]
    for family, title in FAMILIES.items():
        sections = [_section(method) for method in METHODS.values() if method.family == family]
        parts += [f"## {title}", *sections]
    names = ", ".join(f"``{name}``" for name in sorted(aggregators()))
    parts += ["## TorchJD", markdown(TorchJD.__doc__ or ""), markdown(f"The aggregators are {names}.")]
    return "\n\n".join(parts) + "\n"


def _replay_losses() -> str:
    """Return a list of the values of ``replay_loss``, each with its meaning and options."""
    lines = []
    for name, kind in REPLAY_LOSSES.items():
        fields = kind.Options.model_fields.items()
        options = "; ".join(f"``{option}={field.default}``, {field.description}" for option, field in fields)
        text = f"``{name}``: {inspect.getdoc(kind)}" + (f" Options: {options}." if options else "")
        lines.append("- " + _wrapped(text, WIDTH - 2).replace("\n", "\n  "))
    return "\n".join(lines)


def markdown(docstring: str, examples: bool = False) -> str:
    r"""Convert a docstring to GitHub's Markdown, with or without its doctests.

    >>> print(markdown("Length of :math:`x`, as in :func:`torch.norm`.\n\n.. math:: |x|"))
    Length of $`x`$, as in `torch.norm`.
    <BLANKLINE>
    ```math
    |x|
    ```
    """
    blocks = re.split(r"\n\s*\n", inspect.cleandoc(docstring))
    return "\n\n".join(_block(block) for block in blocks if examples or not block.startswith(">>>"))


def _block(block: str) -> str:
    if block.startswith(">>>"):
        return f"```python\n{block}\n```"
    if block.startswith(".. math::"):
        lines = [line.strip() for line in block.removeprefix(".. math::").strip().splitlines()]
        return "\n".join(["```math", *lines, "```"])
    return _wrapped(block) if re.search(r"^(\s|- )", block, re.MULTILINE) is None else _inline(block)


def _wrapped(text: str, width: int = WIDTH) -> str:
    text = re.sub(r"`[^`]*`", lambda span: span[0].replace(" ", JOINED), _inline(" ".join(text.split())))
    lines = wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace(JOINED, " ")


def _inline(text: str) -> str:
    text = re.sub(r":math:`([^`]*)`", r"$`\1`$", text)
    return re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("``", "`")


def _section(method: type[Method]) -> str:
    shared = MethodSettings.model_fields
    own = {
        name: field
        for name, field in method.Settings.model_fields.items()
        if name not in shared or field.default != shared[name].default
    }
    text = markdown(method.__doc__ or f"{method.summary}.\n\n{method.reference}.")
    parts = [f"### `{method.name}`", text, _settings_table(own) if own else "", _wrapped(_facts(method))]
    return "\n\n".join(part for part in parts if part)


def _facts(method: type[Method]) -> str:
    cost = cost_of(method())
    held = f"gradients held: {cost.gradients}"
    if cost.gradients_with_stability != cost.gradients:
        held += f"; {cost.gradients_with_stability} with stability measured"
    facts = [f"Class ``{method.__module__}.{method.__name__}``", held, f"memory stores {cost.memory}"]
    if cost.forwards:
        facts.append(f"extra forward passes over a batch of memory: {cost.forwards}")
    return ". ".join(fact[0].upper() + fact[1:] for fact in facts) + "."


def _settings_table(fields: Mapping[str, FieldInfo]) -> str:
    rows = [f"| `{name}` | `{field.default!r}` | {field.description or ''} |" for name, field in fields.items()]
    return "\n".join(["| setting | default | meaning |", "|:--|:--|:--|", *rows])
