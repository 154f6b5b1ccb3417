"""Checks for plug-ins: each takes a function that makes the thing, and tests the properties that SPCL relies on.

A check raises an :class:`AssertionError` that names the thing, the property, what was found and what was expected:

>>> from spcl.methods import SPCL
>>> check_method(SPCL, scaling=0)
>>> check_schedule(lambda steps: lambda step: 1.0 - 2.0 * step / steps)
Traceback (most recent call last):
...
AssertionError: schedule <lambda>, every factor is a finite number of at least 0: found -1.0 in step 1 of 1, expected a
number ≥ 0
"""

from spcl.testing.hubs import check_hub
from spcl.testing.memories import check_memory
from spcl.testing.methods import check_method
from spcl.testing.parts import (
    check_backbone,
    check_loss,
    check_optimizer,
    check_schedule,
    check_transform,
)

__all__ = [
    "check_backbone",
    "check_hub",
    "check_loss",
    "check_memory",
    "check_method",
    "check_optimizer",
    "check_schedule",
    "check_transform",
]
