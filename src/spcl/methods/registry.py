"""Methods by name: those in the files of ``spcl.methods``, of plug-ins and of installed packages."""

import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from importlib import import_module
from math import inf
from types import ModuleType
from typing import Any

from spcl._util.registry import PLUGIN_HINT, load_installed, on_plugin, path, same_definition
from spcl.errors import SpclError, did_you_mean
from spcl.methods.base import FAMILIES, Method

TORCHJD = "torchjd:"
"""What the names of TorchJD's aggregators begin with."""

DECLARED = ("name", "family", "summary", "reference")


class _Methods(Mapping[str, type[Method]]):
    """Read-only mapping of this package's methods and of the methods in plug-ins."""

    def __init__(self) -> None:
        self._others: dict[str, type[Method]] = {}
        on_plugin(self._add_module)

    @cached_property
    def _own(self) -> dict[str, type[Method]]:
        methods = list(own_methods())
        for method in methods:
            _check_declarations(method)
        return {method.name: method for method in _in_order(methods)}

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
        return self._own[name] if name in self._own else self._methods[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._methods)

    def __len__(self) -> int:
        return len(self._methods)


METHODS: Mapping[str, type[Method]] = _Methods()
"""Every method by name: first this package's, then the plug-ins', each by family (MTL, SCL, PCL)."""


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
    """Return settings of a method from a record; settings that are newer than the record get the value used then.

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
    from spcl.methods.torchjd import aggregators, torchjd_method

    if name.startswith(TORCHJD) and name.removeprefix(TORCHJD) in aggregators():
        return torchjd_method(name.removeprefix(TORCHJD))
    known = [*METHODS, *(TORCHJD + other for other in aggregators())]
    raise SpclError(f"there is no method {name!r}; {did_you_mean(name, known, PLUGIN_HINT)}")


def usual_replay_loss(name: str) -> str:
    """Return the loss on memory that a method has by default; for an unknown method, the usual default.

    >>> usual_replay_loss("soro"), usual_replay_loss("der++")
    ('labels', 'logits')
    """
    settings = METHODS[name].Settings if name in METHODS else Method.Settings
    return str(settings.model_fields["replay_loss"].default)


def own_methods() -> Iterator[type[Method]]:
    """Import the modules of ``spcl.methods`` and yield the methods that they define."""
    package = import_module("spcl.methods")
    for found in pkgutil.iter_modules(package.__path__):
        module = import_module(f"{package.__name__}.{found.name}")
        yield from (method for method in _methods_in(module) if method.__module__ == module.__name__)


def _methods_in(module: ModuleType) -> list[type[Method]]:
    """Return the methods among a module's attributes: subclasses of Method with a name of their own."""
    classes = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Method)]
    return [method for method in classes if "name" in vars(method)]


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
