"""Plug-ins: Python files and modules that add methods, backbones, data sets and more, by name.

A plug-in is imported by every command and worker that uses it. A subclass of :class:`spcl.methods.Method` with a name
needs nothing else; functions and classes of other kinds have a decorator:

>>> import math
>>> from torch import nn
>>> from spcl.plugins import backbone
>>> @backbone("thin-mlp")
... def thin_mlp(inputs, width=8):
...     return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(inputs.shape), width), nn.ReLU())

An installed package adds its plug-ins by entry points of the group ``spcl.plugins``; each names a module.
"""

import hashlib
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
)
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict

from spcl._util.registry import add_plugin
from spcl._util.validation import validated
from spcl.data import DATA, PRESET_SETTINGS, PROTOCOL_FORMATS
from spcl.errors import SpclError
from spcl.losses import LOSSES
from spcl.memory import MEMORIES
from spcl.models import BACKBONES
from spcl.optimizers import OPTIMIZERS
from spcl.schedules import SCHEDULES
from spcl.sources import HUBS
from spcl.trackers import TRACKERS
from spcl.transforms import TRANSFORMS

__all__ = [
    "Plugin",
    "PluginError",
    "backbone",
    "data_set",
    "hub",
    "load_plugins",
    "load_recorded_plugins",
    "loss",
    "memory",
    "optimizer",
    "preset",
    "protocol_format",
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
preset = PRESET_SETTINGS.register
protocol_format = PROTOCOL_FORMATS.register
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

    The source is read once and compared with the recorded checksum before any of it runs; what runs is compiled from
    these bytes, not from a ``.pyc`` file.

    Raises:
        PluginError: if one is missing, cannot be imported, defines nothing, or is not the recorded one.
    """
    return tuple(_load(plugin) for plugin in plugins)


def load_recorded_plugins(record: Any, owner: object) -> tuple[Plugin, ...]:
    """Import the plug-ins that a record lists; each must be there with its checksum.

    Raises:
        PluginError: if a plug-in is recorded without a checksum, or :func:`load_plugins` refuses one.
    """
    if not isinstance(record, list | tuple):
        raise PluginError(f"{owner} records the plug-ins {record!r:.80}; expected a list of names with their checksums")
    for plugin in record:
        if isinstance(plugin, str | Path):
            raise PluginError(
                f"{owner} records the plug-in {plugin} without a checksum; if you trust that file, name it yourself "
                f"when you start the run again in another folder"
            )
    return load_plugins(record)


def _load(given: str | Mapping[str, Any] | Plugin) -> Plugin:
    if isinstance(given, str | Path):
        name, recorded = str(given), None
    else:
        plugin = given if isinstance(given, Plugin) else validated(Plugin, given, f"the plug-in {given!r:.80}")
        name, recorded = plugin.name, plugin.sha256
    if recorded is not None and name.endswith(".py") and not Path(name).is_absolute():
        raise PluginError(f"the plug-in {name} came with a record; if you trust that file, name it yourself")
    path = Path(name).expanduser().resolve() if name.endswith(".py") else None
    if path is not None and not path.is_file():
        raise PluginError(f"the plug-in {name} does not exist; give a Python file or the name of a module")
    files = {"": path} if path is not None else _module_files(name)
    sources = _read_sources(files, name)
    found = Plugin(name=str(path or name), sha256=hashlib.sha256(b"".join(sources.values())).hexdigest())
    if recorded not in (None, found.sha256):
        raise PluginError(
            f"the plug-in {name} has changed since it was recorded (its checksum is {found.sha256[:12]}…, and was "
            f"{str(recorded)[:12]}…); put it back, or start again in another folder"
        )
    with _import_errors(found.name):
        module = _import_file(path, sources[""]) if path is not None else _import_module(found, files, sources)
        add_plugin(module)
    _LOADED[found.name] = found.sha256
    return found


_LOADED: dict[str, str] = {}
"""The checksum of every plug-in that this process has loaded, by name."""


def _module_files(name: str) -> dict[str, Path]:
    """Find the source of a module, or all Python files of a package by the modules' names; import nothing."""
    first, *rest = name.split(".")
    with _import_errors(name):
        spec = find_spec(first)  # of a name without dots, this imports nothing
        fullname = first
        for part in rest:
            fullname = f"{fullname}.{part}"
            parent = None if spec is None else spec.submodule_search_locations
            spec = None if parent is None else PathFinder.find_spec(fullname, parent)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=first)
    places = map(Path, spec.submodule_search_locations or ())
    found = {
        ".".join([name, *path.relative_to(place).with_suffix("").parts]).removesuffix(".__init__"): path
        for path, place in sorted((path, place) for place in places for path in place.rglob("*.py"))
    }
    if not found and (spec.origin is None or not spec.origin.endswith(".py")):
        raise PluginError(f"the plug-in {name} has no Python source; give a Python file or the name of a module")
    return found or {name: Path(str(spec.origin))}


def _read_sources(files: Mapping[str, Path], name: str) -> dict[str, bytes]:
    try:
        return {module: file.read_bytes() for module, file in files.items()}
    except OSError as error:
        raise PluginError(f"the plug-in {name} cannot be read: {error.strerror or error}") from error


class _PlainLoader(SourceFileLoader):
    """Compile a module from its source; no ``.pyc`` file, which nobody reviews, is read or written."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the source."""
        return compile(self.get_data(self.path), self.path, "exec", dont_inherit=True)


class _SourceLoader(_PlainLoader):
    """Compile a module from bytes that were checked."""

    def __init__(self, fullname: str, path: str, source: bytes) -> None:
        super().__init__(fullname, path)
        self._source = source

    def get_data(self, path: str) -> bytes:
        """Return the checked source."""
        return self._source


_BESIDE: set[str] = set()
"""The folders of plug-in files, whose modules the files may import; they are in ``sys.path`` for nothing else."""


def _plain_finder(path: str) -> FileFinder:
    """Return what finds modules beside plug-in files, and in packages there: by their sources, where there are any."""
    nearest = max((each for each in sys.path if Path(path).is_relative_to(each)), key=len, default="")
    if nearest not in _BESIDE or not Path(path).is_dir():  # a program beside a plug-in file is run as a file
        raise ImportError
    return FileFinder(path, (_PlainLoader, SOURCE_SUFFIXES), (ExtensionFileLoader, EXTENSION_SUFFIXES))


class _SourceFinder(MetaPathFinder):
    """Find the modules of plug-ins among checked sources, before anything else that has their name."""

    def __init__(self) -> None:
        self._loaders: dict[str, _SourceLoader] = {}

    def add(self, files: Mapping[str, Path], sources: Mapping[str, bytes]) -> None:
        """Add modules by name."""
        self._loaders |= {name: _SourceLoader(name, str(file), sources[name]) for name, file in files.items()}
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module, if its source was checked."""
        loader = self._loaders.get(fullname)
        return None if loader is None else spec_from_file_location(fullname, loader.path, loader=loader)


_FINDER = _SourceFinder()


def _import_file(path: Path, source: bytes) -> ModuleType:
    """Import a file under a name of its own, again if it has changed; modules beside it can be imported too."""
    name = f"spcl_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules and _LOADED.get(str(path)) == hashlib.sha256(source).hexdigest():
        return sys.modules[name]
    spec = spec_from_file_location(name, path, loader=(loader := _SourceLoader(name, str(path), source)))
    assert spec is not None
    module = sys.modules[name] = module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
        _BESIDE.add(str(path.parent))
        if _plain_finder not in sys.path_hooks:
            sys.path_hooks.insert(0, _plain_finder)
        sys.path_importer_cache.pop(str(path.parent), None)
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(plugin: Plugin, files: Mapping[str, Path], sources: Mapping[str, bytes]) -> ModuleType:
    if _LOADED.get(plugin.name, plugin.sha256) != plugin.sha256:
        raise PluginError("it has changed since this process imported it; use it in a new process")
    _FINDER.add(files, sources)
    return import_module(plugin.name)


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
