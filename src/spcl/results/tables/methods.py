"""Families and order of methods in tables and figures."""

from spcl.methods import METHODS
from spcl.results.tables.paper import paper_methods

__all__ = ["family_of", "method_order"]

FAMILIES = ("MTL", "SCL", "PCL")


def family_of(method: str) -> str:
    """Return ``MTL``, ``SCL`` or ``PCL`` as in the paper's tables; ``TorchJD`` for the aggregators of that library.

    >>> family_of("er"), family_of("torchjd:UPGrad"), family_of("mine")
    ('SCL', 'TorchJD', 'own')
    """
    if method in METHODS:
        return METHODS[method].family
    return "TorchJD" if method.startswith("torchjd:") else "own"


def method_order(method: str) -> tuple[int, int, str]:
    """Return a sort key for the order of the paper's tables: by family, then as there, other methods at the end.

    >>> sorted(["soro", "torchjd:UPGrad", "er", "mgda"], key=method_order)
    ['mgda', 'er', 'soro', 'torchjd:UPGrad']
    """
    family, known = family_of(method), paper_methods()
    return (
        FAMILIES.index(family) if family in FAMILIES else len(FAMILIES),
        known.index(method) if method in known else len(known),
        method,
    )
