"""Things by name: those of this package, of plug-ins and of installed packages."""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, Generic, TypeVar

from spcl.errors import SpclError
from spcl.suggestions import did_you_mean

__all__ = ["GROUP", "Named", "Registry", "UnknownNameError", "announce", "load_installed", "named_options", "on_plugin"]

GROUP = "spcl.plugins"
"""Group of the entry points by which installed packages add things: each names a module."""

Named = str | dict[str, Any]
"""A name, or a name with options: ``"adamw"`` or ``{"name": "adamw", "weight_decay": 0.01}``."""

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Mapping[str, F], Generic[F]):
    """Factories of one kind by name.

    A name that ends in a colon, such as ``timm:``, stands for all names that begin with it; its factory gets the rest
    as the argument ``model``.

    Args:
        kind: what the factories make, for error messages.

    >>> OPTIMIZERS = Registry[Callable[..., str]]("optimizer")
    >>> @OPTIMIZERS.register("sgd")
    ... def sgd(parameters, lr=0.1):
    ...     return f"SGD of {parameters} with {lr}"
    >>> OPTIMIZERS.make({"name": "sgd", "lr": 0.5}, "weights")
    'SGD of weights with 0.5'
    >>> OPTIMIZERS.make("sdg", "weights")
    Traceback (most recent call last):
    ...
    spcl.registry.UnknownNameError: there is no optimizer 'sdg'; did you mean 'sgd'?
    >>> OPTIMIZERS.make({"name": "sgd", "rate": 0.5}, "weights")
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: optimizer 'sgd' has no option 'rate'; choose one of lr
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._factories: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """Return a decorator that adds a factory under this name."""

        def add(factory: F) -> F:
            known = self._factories.get(name)
            if known is not None and _path(known) != _path(factory):
                raise SpclError(
                    f"two things of the kind {self.kind} are named {name!r}, {_path(known)} and {_path(factory)}; "
                    f"rename one of them"
                )
            self._factories[name] = factory
            return factory

        return add

    def make(self, setting: Named, *arguments: Any, **keywords: Any) -> Any:
        """Make the thing that a setting names: call its factory with these arguments and the setting's options.

        Keywords of the caller that the factory does not take are left out, and options precede them.
        """
        name, options = named_options(setting, self.kind)
        factory = self[name]
        self._check_options(name, options, len(arguments))
        taken = {key: value for key, value in keywords.items() if _takes(factory, key)}
        try:
            return factory(*arguments, **taken | options)
        except (TypeError, ValueError) as error:
            if isinstance(error, SpclError):
                raise
            raise SpclError(f"{self.kind} {name!r} cannot be made with {options}: {error}") from error

    def options(self, name: str, fixed: int = 0) -> dict[str, inspect.Parameter]:
        """Return the parameters of a factory that are options: all after the first ``fixed``."""
        parameters = list(inspect.signature(self[name]).parameters.values())[fixed:]
        return {each.name: each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}

    def __getitem__(self, name: str) -> F:
        load_installed()
        prefix, colon, rest = name.partition(":")
        if name in self._factories and not name.endswith(":"):
            return self._factories[name]
        if rest and prefix + colon in self._factories:
            return partial(self._factories[prefix + colon], model=rest)  # type: ignore[return-value]
        known = [f"{each}NAME" if each.endswith(":") else each for each in self._factories]
        raise UnknownNameError(f"there is no {self.kind} {name!r}; {did_you_mean(name, known)}")

    def __iter__(self) -> Iterator[str]:
        load_installed()
        return iter(self._factories)

    def __len__(self) -> int:
        load_installed()
        return len(self._factories)

    def _check_options(self, name: str, options: Mapping[str, Any], fixed: int) -> None:
        known = self.options(name, fixed)
        takes_any = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(self[name]).parameters.values())
        for option in options:
            if option not in known and not takes_any:
                hint = did_you_mean(option, known) if known else "it has none"
                raise SpclError(f"{self.kind} {name!r} has no option {option!r}; {hint}")


class UnknownNameError(SpclError, KeyError):
    """A name that nothing is registered under."""

    __str__ = Exception.__str__  # a KeyError shows its message in quotes


def named_options(setting: Named, kind: str) -> tuple[str, dict[str, Any]]:
    """Split a setting into name and options.

    >>> named_options({"name": "sgd", "momentum": 0.9}, "optimizer")
    ('sgd', {'momentum': 0.9})
    """
    options = {"name": setting} if isinstance(setting, str) else dict(setting)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise SpclError(f"{kind} needs a name, but it is {setting!r}")
    return name, options


_installed = False
_listeners: list[Callable[[ModuleType], None]] = []


def on_plugin(listener: Callable[[ModuleType], None]) -> None:
    """Call the listener with the module of every plug-in that is loaded, e.g. to find the methods that it defines."""
    _listeners.append(listener)


def announce(module: ModuleType) -> None:
    """Tell the listeners that the module is a plug-in."""
    for listener in _listeners:
        listener(module)


def load_installed() -> None:
    """Import the plug-ins of installed packages, once; one that cannot be used is named in a warning."""
    global _installed
    if _installed:
        return
    _installed = True  # before importing: a plug-in may look things up
    for entry in entry_points(group=GROUP):
        try:
            _load(entry)
        except Exception as error:  # a package may fail in any way, and must not keep the others from working
            package = entry.dist.name if entry.dist is not None else "unknown"
            warnings.warn(
                f"the entry point '{entry.name} = {entry.value}' of package {package!r} gives no plug-in "
                f"({type(error).__name__}: {error}); repair, update or uninstall that package",
                stacklevel=2,
            )


def _load(entry: EntryPoint) -> None:
    module = entry.load()
    announce(module if isinstance(module, ModuleType) else sys.modules[entry.module])


def _takes(factory: Callable[..., Any], keyword: str) -> bool:
    parameters = inspect.signature(factory).parameters
    return keyword in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _path(factory: object) -> str:
    return f"{getattr(factory, '__module__', '')}.{getattr(factory, '__qualname__', repr(factory))}"
