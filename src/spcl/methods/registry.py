"""Methods by name."""

from difflib import get_close_matches
from typing import Any

from spcl.errors import SpclError
from spcl.methods.agem import AGEM
from spcl.methods.base import Method
from spcl.methods.derpp import DERPP
from spcl.methods.dwa import DWA
from spcl.methods.emgd import EMGD
from spcl.methods.er import ER
from spcl.methods.gmed import GMED
from spcl.methods.graddrop import GradDrop
from spcl.methods.maxdo import MaxDO
from spcl.methods.mdmtr import MDMTR
from spcl.methods.mega import MEGA
from spcl.methods.mgda import MGDA
from spcl.methods.pcgrad import PCGrad
from spcl.methods.rlw import RLW
from spcl.methods.soro import SORO, SORODBT
from spcl.methods.torchjd import PREFIX, aggregators, torchjd_method

__all__ = ["METHODS", "make_method"]

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        *(MGDA, DWA, GradDrop, PCGrad, RLW),
        *(AGEM, GMED, ER, MEGA, MDMTR, DERPP),
        *(MaxDO, EMGD, SORO, SORODBT),
    )
}
"""Every method of the package, by name."""


def make_method(name: str, **settings: Any) -> Method:
    """The method of this name with these settings; ``torchjd:NAME`` is any aggregator of TorchJD.

    >>> make_method("soro", sigma=50.0)
    SORO(sigma=50.0)
    >>> make_method("torchjd:GradVac", beta=0.1)
    GradVac(beta=0.1)
    >>> make_method("sorro")
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: there is no method 'sorro'; did you mean 'soro'? 'spcl methods' lists them
    """
    if name in METHODS:
        return METHODS[name](**settings)
    if name.startswith(PREFIX) and name.removeprefix(PREFIX) in aggregators():
        return torchjd_method(name.removeprefix(PREFIX))(**settings)
    known = {candidate.lower(): candidate for candidate in [*METHODS, *(PREFIX + other for other in aggregators())]}
    near = get_close_matches(name.lower(), known, n=1)
    hint = f" did you mean {known[near[0]]!r}?" if near else ""
    raise SpclError(f"there is no method {name!r};{hint} 'spcl methods' lists them")
