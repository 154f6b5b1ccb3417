"""Plug-ins: Python files and modules that add methods, backbones, data sets and more, by name.

A plug-in is imported by every command and worker that uses it. A subclass of :class:`spcl.methods.Method` with a name
needs nothing else; functions and classes of other kinds have a decorator:

>>> import math
>>> from torch import nn
>>> from spcl.plugins import backbone
>>> @backbone("thin-mlp")
... def thin_mlp(inputs, width=8):
...     return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(inputs.shape), width), nn.ReLU())

An installed package adds its plug-ins by entry points of the group ``spcl.plugins``, each of which names a module.
"""

import hashlib
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict

from spcl.data import DATA
from spcl.errors import SpclError
from spcl.losses import LOSSES
from spcl.memory import MEMORIES
from spcl.models import BACKBONES
from spcl.optimizers import OPTIMIZERS
from spcl.registry import add_plugin
from spcl.schedules import SCHEDULES
from spcl.sources import HUBS
from spcl.trackers import TRACKERS
from spcl.transforms import TRANSFORMS
from spcl.validation import validated

__all__ = [
    "Plugin",
    "PluginError",
    "backbone",
    "data_set",
    "hub",
    "load_plugins",
    "loss",
    "memory",
    "optimizer",
    "schedule",
    "tracker",
    "transform",
]

backbone = BACKBONES.register
data_set = DATA.register
hub = HUBS.register
loss = LOSSES.register
memory = MEMORIES.register
optimizer = OPTIMIZERS.register
schedule = SCHEDULES.register
tracker = TRACKERS.register
transform = TRANSFORMS.register


class PluginError(SpclError):
    """A plug-in that cannot be loaded, or has changed."""


class Plugin(BaseModel):
    """A plug-in as settings record it.

    Attributes:
        name: the path of a Python file, or the name of a module.
        sha256: the checksum of its source: of the file, or of all Python files of a package.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    sha256: str


def load_plugins(plugins: Iterable[str | Mapping[str, Any] | Plugin]) -> tuple[Plugin, ...]:
    """Import plug-ins, given by name or as recorded, and return them with their checksums.

    Raises:
        PluginError: if one is missing, cannot be imported, defines nothing, or is not the recorded one.
    """
    return tuple(_load(plugin) for plugin in plugins)


def _load(given: str | Mapping[str, Any] | Plugin) -> Plugin:
    if isinstance(given, str | Path):
        name, recorded = str(given), None
    else:
        plugin = given if isinstance(given, Plugin) else validated(Plugin, given, f"the plug-in {given!r:.80}")
        name, recorded = plugin.name, plugin.sha256
    is_file = name.endswith(".py")
    path = Path(name).expanduser().resolve() if is_file else None
    if path is not None and not path.is_file():
        raise PluginError(f"the plug-in {name} does not exist; give a Python file or the name of a module")
    module = _import_file(path) if path is not None else _import_module(name)
    found = Plugin(name=str(path or name), sha256=_checksum(module))
    if recorded not in (None, found.sha256):
        raise PluginError(
            f"the plug-in {name} has changed since it was recorded (its checksum is {found.sha256[:12]}…, and was "
            f"{str(recorded)[:12]}…); put it back, or start again in another folder"
        )
    with _import_errors(name):
        add_plugin(module)
    return found


def _import_file(path: Path) -> ModuleType:
    """Import a file once, under a name of its own; modules beside it can be imported too."""
    name = f"spcl_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        with _import_errors(str(path)):
            spec.loader.exec_module(module)
    except SpclError:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str) -> ModuleType:
    with _import_errors(name):
        return import_module(name)


@contextmanager
def _import_errors(name: str) -> Iterator[None]:
    """Raise whatever a plug-in raises as a PluginError that names it and the line."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name == name.partition(".")[0]:
            raise PluginError(f"there is no plug-in {name!r}; give a Python file or the name of a module") from None
        raise PluginError(f"the plug-in {name} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((f" in line {frame.lineno}" for frame in reversed(frames) if frame.filename == name), "")
        kind = "" if isinstance(error, SpclError) else f"{type(error).__name__}: "
        raise PluginError(f"the plug-in {name} cannot be used{line}: {kind}{error}") from error


def _checksum(module: ModuleType) -> str:
    """Compute the SHA-256 of a module's source, or of all Python files of a package in the order of their paths."""
    spec = module.__spec__ or find_spec(module.__name__)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(path for place in places for path in Path(place).rglob("*.py")) or [Path(str(module.__file__))]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()
