"""Methods by name: those in the files of ``spcl.methods`` and those of installed packages."""

import pkgutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from math import inf
from types import ModuleType
from typing import Any

from spcl.errors import SpclError
from spcl.methods.base import FAMILIES, Method
from spcl.methods.torchjd import PREFIX, aggregators, torchjd_method
from spcl.suggestions import did_you_mean

__all__ = ["GROUP", "METHODS", "make_method", "method_modules"]

GROUP = "spcl.methods"
"""Group of the entry points by which other packages add methods: each names a module or a subclass of Method."""

DECLARED = ("name", "family", "summary", "reference")


class _Registry(Mapping[str, type[Method]]):
    """Read-only mapping that is filled on first use, so that a package with methods may import ``spcl.methods``."""

    @cached_property
    def _methods(self) -> dict[str, type[Method]]:
        found: dict[str, type[Method]] = {}
        for method in [*_in_order(_own_methods()), *_in_order(_installed_methods())]:
            if found.setdefault(method.name, method) is not method:
                raise SpclError(
                    f"two methods are named {method.name!r}, {_path(found[method.name])} and {_path(method)}; "
                    f"rename one of them or uninstall its package"
                )
        return found

    def __getitem__(self, name: str) -> type[Method]:
        return self._methods[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._methods)

    def __len__(self) -> int:
        return len(self._methods)


METHODS: Mapping[str, type[Method]] = _Registry()
"""Every method by name: first those of this package, then those of others, each by family (MTL, SCL, PCL)."""


def make_method(name: str, **settings: Any) -> Method:
    """Return the method of this name with these settings; ``torchjd:NAME`` is any aggregator of TorchJD.

    >>> make_method("soro", sigma=50.0)
    SORO(sigma=50.0)
    >>> make_method("torchjd:GradVac", beta=0.1)
    GradVac(beta=0.1)
    >>> make_method("sorro")
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: there is no method 'sorro'; did you mean 'soro'?
    """
    if name in METHODS:
        return METHODS[name](**settings)
    if name.startswith(PREFIX) and name.removeprefix(PREFIX) in aggregators():
        return torchjd_method(name.removeprefix(PREFIX))(**settings)
    known = [*METHODS, *(PREFIX + other for other in aggregators())]
    raise SpclError(f"there is no method {name!r}; {did_you_mean(name, known)}")


def method_modules() -> Iterator[ModuleType]:
    """Import and yield the modules of ``spcl.methods`` that define a method."""
    package = import_module("spcl.methods")
    for found in pkgutil.iter_modules(package.__path__):
        module = import_module(f"{package.__name__}.{found.name}")
        if any(method.__module__ == module.__name__ for method in _methods_in(module)):
            yield module


def _methods_in(module: ModuleType) -> list[type[Method]]:
    """Return the methods among a module's attributes: subclasses of Method with a name of their own."""
    classes = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Method)]
    return [method for method in classes if "name" in vars(method)]


def _own_methods() -> list[type[Method]]:
    methods = [method for module in method_modules() for method in _methods_in(module)]
    for method in methods:
        _check_declarations(method)
    return methods


def _installed_methods() -> list[type[Method]]:
    """Load the methods of other packages; a package whose methods cannot be used is named in a warning."""
    methods: list[type[Method]] = []
    for entry in entry_points(group=GROUP):
        try:
            methods += _methods_of(entry)
        except Exception as error:  # a package may fail in any way, and must not keep the others from working
            package = entry.dist.name if entry.dist is not None else "unknown"
            warnings.warn(
                f"the entry point '{entry.name} = {entry.value}' of package {package!r} gives no methods "
                f"({type(error).__name__}: {error}); repair, update or uninstall that package",
                stacklevel=2,
            )
    return methods


def _methods_of(entry: EntryPoint) -> list[type[Method]]:
    target = entry.load()
    if isinstance(target, type) and issubclass(target, Method):
        methods = [target]
    elif isinstance(target, ModuleType):
        methods = _methods_in(target)
    else:
        raise SpclError(f"it must be a module or a subclass of Method, but is {target!r}")
    if not methods:
        raise SpclError("the module has no subclass of Method with a name of its own")
    for method in methods:
        _check_declarations(method)
    return methods


def _check_declarations(method: type[Method]) -> None:
    missing = [name for name in DECLARED if not isinstance(getattr(method, name, None), str)]
    if missing:
        raise SpclError(f"{_path(method)} must declare {', '.join(missing)} as text")
    if method.family not in FAMILIES:
        raise SpclError(f"{_path(method)} must be of the family {', '.join(FAMILIES)}, but is of {method.family!r}")
    required = [name for name, field in method.Settings.model_fields.items() if field.is_required()]
    if required:
        raise SpclError(f"{_path(method)} must have a default for every setting, but {', '.join(required)} has none")


def _in_order(methods: Iterable[type[Method]]) -> list[type[Method]]:
    """Sort by family, then by the ``order`` that a class declares in its family (without one: last), then by name."""
    return sorted(
        methods, key=lambda method: (list(FAMILIES).index(method.family), vars(method).get("order", inf), method.name)
    )


def _path(method: type[Method]) -> str:
    return f"{method.__module__}.{method.__qualname__}"
