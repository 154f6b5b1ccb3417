"""Methods by name."""

from difflib import get_close_matches
from typing import Any

from spcl.errors import SpclError
from spcl.learner import Method
from spcl.methods.er import ER
from spcl.methods.soro import SORO, SORODBT

__all__ = ["METHODS", "make_method"]

METHODS: dict[str, type[Method]] = {method.name: method for method in (ER, SORO, SORODBT)}
"""Every method of the package, by name."""


def make_method(name: str, **settings: Any) -> Method:
    """The method of this name with these settings.

    >>> make_method("soro", sigma=50.0)
    SORO(sigma=50.0)
    >>> make_method("sorro")
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: there is no method 'sorro'; did you mean 'soro'? 'spcl methods' lists them
    """
    if name not in METHODS:
        near = get_close_matches(name, METHODS, n=1)
        raise SpclError(
            f"there is no method {name!r};{f' did you mean {near[0]!r}?' if near else ''} 'spcl methods' lists them"
        )
    return METHODS[name](**settings)
