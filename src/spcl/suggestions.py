"""Suggestions for unknown names."""

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["did_you_mean"]


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the closest known name as a question, or all known names where none is close, and what else to do then.

    >>> did_you_mean("sorro", ["er", "soro"])
    "did you mean 'soro'?"
    >>> did_you_mean("x", ["er", "soro"])
    'choose one of er, soro'
    >>> did_you_mean("x", ["a", "A"])
    'choose one of a, A'
    >>> did_you_mean("x", ["er", "soro"], "load the plug-in that defines it")
    'choose one of er, soro, or load the plug-in that defines it'
    """
    names = list(known)
    by_lower_case = {candidate.lower(): candidate for candidate in names}
    close = get_close_matches(name.lower(), by_lower_case, n=1)
    if close:
        return f"did you mean {by_lower_case[close[0]]!r}?"
    return f"choose one of {', '.join(names)}" + (f", or {otherwise}" if otherwise else "")
