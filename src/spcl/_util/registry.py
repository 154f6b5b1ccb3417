"""Things by name: our own, and those that plug-ins and installed packages add."""

import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_type_hints

from spcl.errors import SpclError, did_you_mean, is_out_of_memory

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from pydantic import TypeAdapter

GROUP = "spcl.plugins"
"""Group of the entry points by which installed packages add things: each names a module."""

OWN = (("paper", "spcl.paper"),)
"""Our own plug-ins, written here because the metadata of an editable install may be older than its source."""

PLUGIN_HINT = "load the plug-in that defines it"
"""What to do, besides choosing a known name, where a name is not known."""

Named = str | dict[str, Any]
"""A name, or a name with options: ``"adamw"`` or ``{"name": "adamw", "weight_decay": 0.01}``."""

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Mapping[str, F], Generic[F]):
    """Factories of one kind by name.

    A name that ends in a colon, such as ``timm:``, stands for all names that begin with it; its factory gets the rest
    as the argument ``model``.

    Args:
        kind: what the factories make, for error messages.
        makes: the class that factories must return; None for anything.
        positional: how many arguments the caller of :meth:`make` passes by position.
        keywords: the names of those it passes by keyword, to factories that take them; all others are options.
        module: a module of ours that adds factories when the registry is listed or lacks a name, too slow to import
            with our plug-ins.

    >>> OPTIMIZERS = Registry[Callable[..., str]]("optimizer", positional=1)
    >>> @OPTIMIZERS.register("sgd")
    ... def sgd(parameters, lr=0.1):
    ...     return f"SGD of {parameters} with {lr}"
    >>> OPTIMIZERS.make({"name": "sgd", "lr": 0.5}, "weights")
    'SGD of weights with 0.5'
    >>> OPTIMIZERS
    <optimizer: sgd>
    >>> OPTIMIZERS.make("sdg", "weights")
    Traceback (most recent call last):
    ...
    spcl._util.registry.UnknownNameError: there is no optimizer 'sdg'; did you mean 'sgd'?
    >>> OPTIMIZERS.make({"name": "sgd", "rate": 0.5}, "weights")
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: optimizer 'sgd' has no option 'rate'; choose one of lr
    """

    def __init__(
        self,
        kind: str,
        makes: type | None = None,
        *,
        positional: int = 0,
        keywords: tuple[str, ...] = (),
        module: str | None = None,
    ) -> None:
        self.kind = kind
        self._makes = makes or object
        self._positional = positional
        self._keywords = frozenset({*keywords, "model"})
        self._module = module
        self._factories: dict[str, F] = {}
        on_plugin(self._count_of)

    def __repr__(self) -> str:
        return f"<{self.kind}: {', '.join(self._factories)}>"

    def register(self, name: str) -> Callable[[F], F]:
        """Return a decorator that adds a factory under this name."""

        def add(factory: F) -> F:
            known = self._factories.get(name)
            if known is not None and not same_definition(known, factory):
                raise SpclError(
                    f"two things of the kind {self.kind} are named {name!r}, {path(known)} and {path(factory)}; "
                    f"rename one of them"
                )
            self._factories[name] = factory
            return factory

        return add

    def make(self, setting: Named, *arguments: Any, **keywords: Any) -> Any:
        """Make the thing that a setting names: call its factory with these arguments and the setting's options.

        Keywords that the factory does not name are left out.
        """
        name, options = self.check(setting)
        factory = self[name]
        taken = {key: value for key, value in keywords.items() if _takes(factory, key)}
        try:
            made = factory(*arguments, **taken, **options)
        except Exception as error:  # a plug-in may fail in any way
            if isinstance(error, SpclError) or is_out_of_memory(error):
                raise
            given = f" with {options}" if options else ""
            reason = str(error) if isinstance(error, TypeError | ValueError) else f"{type(error).__name__}: {error}"
            raise SpclError(f"{self.kind} {name!r} cannot be made{given}: {reason}") from error
        if not isinstance(made, self._makes):
            wanted = f"{self._makes.__module__}.{self._makes.__qualname__}"
            raise SpclError(f"{self.kind} {name!r} must make a {wanted}, but makes {made!r:.80}")
        return made

    def check(self, setting: Named) -> tuple[str, dict[str, Any]]:
        """Return name and options of a setting; raise an error for other names and options, and for missing options."""
        name, options = named_options(setting, self.kind)
        known = self.options(name)
        takes_any = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(self[name]).parameters.values())
        for option in options:
            if option in self._keywords or (option not in known and not takes_any):
                hint = did_you_mean(option, known) if known else "it has none"
                raise SpclError(f"{self.kind} {name!r} has no option {option!r}; {hint}")
        for option, value in options.items():
            self._check_type(name, option, value)
        for option, each in known.items():
            if each.default is each.empty and option not in options:
                raise SpclError(f"{self.kind} {name!r} needs the option {option!r}; give it with the name")
        return name, options

    def _check_type(self, name: str, option: str, value: Any) -> None:
        """Refuse an option of another type than its parameter declares, if it declares one that can be checked."""
        from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

        annotation = _annotations(self[name]).get(option)
        try:
            adapter = TypeAdapter(annotation) if annotation is not None else None
        except (PydanticSchemaGenerationError, PydanticUserError):
            adapter = None
        try:
            if adapter is not None:
                _validate(adapter, value)
        except ValidationError as error:
            raise SpclError(
                f"{self.kind} {name!r}: option {option!r} = {value!r}: {error.errors()[0]['msg']}"
            ) from None

    def options(self, name: str) -> dict[str, inspect.Parameter]:
        """Return the parameters of a factory that are options."""
        parameters = list(inspect.signature(self[name]).parameters.values())[self._positional :]
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return {each.name: each for each in parameters if each.kind in kinds and each.name not in self._keywords}

    def __getitem__(self, name: str) -> F:
        known = self._find(name)
        if known is None:
            self._load()
            known = self._find(name)
        if known is None:
            names = [f"{each}NAME" if each.endswith(":") else each for each in self._factories]
            raise UnknownNameError(f"there is no {self.kind} {name!r}; {did_you_mean(name, names, PLUGIN_HINT)}")
        return known

    def _find(self, name: str) -> F | None:
        prefix, colon, rest = name.partition(":")
        if name in self._factories:
            return self._factories[name]
        if rest and prefix + colon in self._factories:
            return partial(self._factories[prefix + colon], model=rest)  # type: ignore[return-value]
        return None

    __hash__ = object.__hash__  # it is what it is, whatever it holds

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(self._factories)

    def __len__(self) -> int:
        self._load()
        return len(self._factories)

    def _load(self) -> None:
        load_installed()
        if self._module is not None:
            import_module(self._module)

    def _count_of(self, module: ModuleType) -> int:
        """Count the factories that a module, or one inside it, has registered."""
        return sum(f"{path(factory)}.".startswith(f"{module.__name__}.") for factory in self._factories.values())


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
_versions: dict[str, str] = {}
_listeners: list[Callable[[ModuleType], int]] = []


def on_plugin(listener: Callable[[ModuleType], int]) -> None:
    """Call the listener with the module of every plug-in that is loaded; it returns how many things it found there."""
    _listeners.append(listener)


def add_plugin(module: ModuleType) -> None:
    """Add what an imported module defines, or raise an error if it defines nothing that has a name here."""
    found = [listener(module) for listener in _listeners]
    if not any(found):
        raise SpclError(
            "it defines nothing that can be used by name; add a subclass of spcl.methods.Method with a name, or "
            "a function with a decorator of spcl.plugins, such as @backbone"
        )


def load_installed() -> None:
    """Import our own plug-ins and the plug-ins of installed packages, once; warn about one that cannot be used.

    A registry does so when it is listed, or has nothing of a name.
    """
    global _installed
    if _installed:
        return
    _installed = True  # before importing: a plug-in may look things up
    from importlib.metadata import EntryPoint, entry_points

    own = [EntryPoint(name, module, GROUP) for name, module in OWN]
    for entry in (*own, *entry_points(group=GROUP)):
        try:
            _load(entry)
        except Exception as error:  # a package may fail in any way, and must not keep the others from working
            package = entry.dist.name if entry.dist is not None else "unknown"
            warnings.warn(
                f"the entry point '{entry.name} = {entry.value}' of package {package!r} gives no plug-in "
                f"({type(error).__name__}: {error}); repair, update or uninstall that package",
                stacklevel=2,
            )


def installed_plugins() -> dict[str, str]:
    """Return the installed packages that have plug-ins, which are loaded, with their versions."""
    from importlib.metadata import entry_points

    if entry_points(group=GROUP):
        load_installed()
    return dict(_versions)


def _load(entry: "EntryPoint") -> None:
    entry.load()
    add_plugin(sys.modules[entry.module])
    if entry.dist is not None:
        _versions[entry.dist.name] = entry.dist.version


def _annotations(factory: Any) -> dict[str, Any]:
    """Return the types of a factory's parameters, as far as they can be known."""
    factory = factory.func if isinstance(factory, partial) else factory
    try:
        return get_type_hints(inspect.unwrap(vars(factory)["__init__"]) if isinstance(factory, type) else factory)
    except (NameError, TypeError, AttributeError):
        return {}


def _validate(adapter: "TypeAdapter[Any]", value: Any) -> None:
    """Raise a ValidationError if the value has another type.

    Plain data, e.g. of a settings file, is not converted: "0.9" is not a number, but a list may be a tuple.
    """
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        adapter.validate_python(value)
    else:
        adapter.validate_json(text, strict=True)


def _takes(factory: Callable[..., Any], keyword: str) -> bool:
    return keyword in inspect.signature(factory).parameters


def same_definition(one: object, other: object) -> bool:
    """Return whether two classes or functions are the same lines of a file, imported under one or two names."""
    return one is other or (_file(one) == _file(other) is not None and _name(one) == _name(other))


def path(thing: object) -> str:
    """Return the module and name of a class or function."""
    return f"{getattr(thing, '__module__', '')}.{_name(thing)}"


def _name(thing: object) -> str:
    return getattr(thing, "__qualname__", repr(thing))


def _file(thing: object) -> str | None:
    return getattr(sys.modules.get(getattr(thing, "__module__", "")), "__file__", None)
