"""Families, display names and order of methods in tables and figures."""

from spcl.methods import FAMILIES, METHODS
from spcl.results.tables.paper import paper_methods

__all__ = ["display_name", "family_of", "method_order"]


def display_name(label: str) -> str:
    """Return a method's label with the name as papers write it.

    >>> display_name("soro+dbt"), display_name("pcgrad (alpha=0.1)"), display_name("torchjd:UPGrad")
    ('SORO+DBT', 'PCGrad (alpha=0.1)', 'torchjd:UPGrad')
    >>> display_name("soro + logits"), display_name("der+++")
    ('SORO + logits', 'DER+++')
    """
    name = _method_name(label)
    if name not in METHODS:
        return label
    written = METHODS[name].__name__
    return (written if written.lower() == name else name.upper()) + label.removeprefix(name)


def family_of(method: str) -> str:
    """Return ``MTL``, ``SCL`` or ``PCL`` as in the paper's tables; ``TorchJD`` for the aggregators of that library.

    >>> family_of("er"), family_of("er + logits"), family_of("torchjd:UPGrad"), family_of("mine")
    ('SCL', 'SCL', 'TorchJD', 'other')
    """
    method = _method_name(method)
    if method in METHODS:
        return METHODS[method].family
    return "TorchJD" if method.startswith("torchjd:") else "other"


def method_order(method: str) -> tuple[int, int, str]:
    """Return a sort key for the order of the paper's tables: by family, then as there, other methods at the end.

    >>> sorted(["soro", "torchjd:UPGrad", "er", "mgda"], key=method_order)
    ['mgda', 'er', 'soro', 'torchjd:UPGrad']
    """
    family, known, name = family_of(method), paper_methods(), _method_name(method)
    return (
        list(FAMILIES).index(family) if family in FAMILIES else len(FAMILIES),
        known.index(name) if name in known else len(known),
        method,
    )


def _method_name(label: str) -> str:
    """Return the name of the method in a label, without the + of the preset ``plus``."""
    name = label.partition(" ")[0]
    return name if name in METHODS or not name.endswith("+") else name.removesuffix("+")
