"""Methods by name: those in the files of ``spcl.methods``, of plug-ins and of installed packages."""

import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from importlib import import_module
from math import inf
from types import ModuleType
from typing import Any

from spcl.errors import SpclError
from spcl.methods.base import FAMILIES, Method, MethodSettings
from spcl.methods.torchjd import PREFIX, aggregators, torchjd_method
from spcl.registry import PLUGIN_HINT, load_installed, on_plugin, path, same_definition
from spcl.suggestions import did_you_mean

__all__ = ["METHODS", "make_method", "method_class", "method_modules", "recorded_settings", "usual_replay_loss"]

DECLARED = ("name", "family", "summary", "reference")


class _Methods(Mapping[str, type[Method]]):
    """Read-only mapping of this package's methods, and of those that the modules of plug-ins define."""

    def __init__(self) -> None:
        self._others: dict[str, type[Method]] = {}
        on_plugin(self._add_module)

    @cached_property
    def _own(self) -> dict[str, type[Method]]:
        return {method.name: method for method in _in_order(_own_methods())}

    @property
    def _methods(self) -> dict[str, type[Method]]:
        load_installed()
        return self._own | {method.name: method for method in _in_order(self._others.values())}

    def _add_module(self, module: ModuleType) -> int:
        """Add the methods that a plug-in's module has; return how many are its own."""
        methods = [method for method in _methods_in(module) if self._own.get(method.name) is not method]
        for method in methods:
            _check_declarations(method)
            known = self._own.get(method.name) or self._others.get(method.name)
            if known is not None and not same_definition(known, method):
                raise SpclError(
                    f"two methods are named {method.name!r}, {path(known)} and {path(method)}; rename one of them"
                )
            self._others[method.name] = method
        return len(methods)

    def __getitem__(self, name: str) -> type[Method]:
        return self._methods[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._methods)

    def __len__(self) -> int:
        return len(self._methods)


METHODS: Mapping[str, type[Method]] = _Methods()
"""Every method by name: first those of this package, then those of plug-ins, each by family (MTL, SCL, PCL)."""


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
    return method_class(name)(**settings)


def recorded_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a method from a record, with those that an earlier version did not have as they were then.

    >>> recorded_settings({"name": "spcl", "kappa": 2.0})["finished_weight"]
    1.0
    """
    return {"finished_weight": 1.0, **settings}


def method_class(name: str) -> type[Method]:
    """Return the class of the method of this name.

    >>> method_class("torchjd:UPGrad").name
    'torchjd:UPGrad'
    """
    if name in METHODS:
        return METHODS[name]
    if name.startswith(PREFIX) and name.removeprefix(PREFIX) in aggregators():
        return torchjd_method(name.removeprefix(PREFIX))
    known = [*METHODS, *(PREFIX + other for other in aggregators())]
    raise SpclError(f"there is no method {name!r}; {did_you_mean(name, known, PLUGIN_HINT)}")


def usual_replay_loss(name: str) -> str:
    """Return the loss on memory that a method has by default; that of most for a method that is not known here.

    >>> usual_replay_loss("soro"), usual_replay_loss("der++")
    ('labels', 'logits')
    """
    settings = METHODS[name].Settings if name in METHODS else MethodSettings
    return str(settings.model_fields["replay_loss"].default)


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


def _check_declarations(method: type[Method]) -> None:
    missing = [name for name in DECLARED if not isinstance(getattr(method, name, None), str)]
    if missing:
        raise SpclError(f"{path(method)} must declare {', '.join(missing)} as text")
    if method.family not in FAMILIES:
        raise SpclError(f"{path(method)} must be of the family {', '.join(FAMILIES)}, but is of {method.family!r}")
    required = [name for name, field in method.Settings.model_fields.items() if field.is_required()]
    if required:
        raise SpclError(f"{path(method)} must have a default for every setting, but {', '.join(required)} has none")


def _in_order(methods: Iterable[type[Method]]) -> list[type[Method]]:
    """Sort by family, then by the ``order`` that a class declares in its family (without one: last), then by name."""
    return sorted(
        methods, key=lambda method: (list(FAMILIES).index(method.family), vars(method).get("order", inf), method.name)
    )
