"""Text from records and messages, such as names of tasks and classes, made harmless where it is shown."""

import unicodedata
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment

INVISIBLE = ("Cc", "Cs", "Zl", "Zp")
"""Unicode categories of characters that move the cursor, change colours or end lines instead of showing something."""

TURNS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Characters that turn the direction of the text around them."""

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""How a text begins that a spreadsheet takes for a formula."""


def printable(text: str, keep: str = "") -> str:
    r"""Return a text without control characters, apart from those to keep.

    >>> printable("camera\x1b[2J\nleft"), printable("one\ntwo\x9b", keep="\n")
    ('camera[2Jleft', 'one\ntwo')
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(each for each in text if each in keep or not _is_invisible(each))


def csv_cell(value: Any) -> Any:
    """Return the value of a cell of a CSV file; a text that a spreadsheet would compute gets an apostrophe before it.

    >>> csv_cell("=1+2"), csv_cell("camera"), csv_cell(-0.5)
    ("'=1+2", 'camera', -0.5)
    """
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if value.startswith(FORMULA) else text


class PlainConsole(Console):
    """A console that prints text as it is, since folders and settings may look like rich's markup or emoji names.

    Control characters, which names given by others may hold, are removed.

    >>> PlainConsole().print("runs/[bold] method=choice:a:b")
    runs/[bold] method=choice:a:b
    """

    def __init__(self, *, markup: bool = False, highlight: bool = False, **options: Any) -> None:
        super().__init__(markup=markup, emoji=False, highlight=highlight, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> RenderResult:  # type: ignore[override]
        """Render as rich does, without control characters in texts."""
        return [
            Segment(text if control else printable(text, keep="\n\t"), style, control)
            for text, style, control in super().render(renderable, options)
        ]


def _is_invisible(character: str) -> bool:
    return unicodedata.category(character) in INVISIBLE or character in TURNS
