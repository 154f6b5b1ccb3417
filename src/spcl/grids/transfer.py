"""Files that travel between machines which do not share them: a run's files back, plug-ins and protocols to it."""

import hashlib
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from spcl.files import atomic_write, user_errors
from spcl.runs import RunFolder, RunSettings

__all__ = ["read_files", "source_files", "with_local_sources", "write_files"]


def source_files(settings: RunSettings) -> dict[str, bytes]:
    """Return the contents of the Python files and of the protocol that the settings name, by path."""
    names = [plugin.name for plugin in settings.plugins if plugin.name.endswith(".py")]
    names += [settings.protocol] if settings.protocol is not None else []
    return {name: Path(name).read_bytes() for name in names}


def with_local_sources(settings: RunSettings, sources: Mapping[str, bytes]) -> RunSettings:
    """Return the settings with copies of those :func:`source_files` that this machine does not have as they are."""
    copies = {name: str(_copy(name, content)) for name, content in sources.items() if not _is_here(name, content)}
    plugins = tuple(
        plugin.model_copy(update={"name": copies.get(plugin.name, plugin.name)}) for plugin in settings.plugins
    )
    protocol = copies.get(settings.protocol or "", settings.protocol)
    return settings.model_copy(update={"plugins": plugins, "protocol": protocol})


def _is_here(name: str, content: bytes) -> bool:
    path = Path(name)
    return path.is_file() and path.read_bytes() == content


def _copy(name: str, content: bytes) -> Path:
    """Write a copy once per process, since a plug-in is imported once per path."""
    path = Path(_copies().name) / hashlib.sha256(content).hexdigest() / Path(name).name
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return path


@cache
def _copies() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="spcl-sources-")


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of the visible files below a folder by relative path."""
    paths = (path for path in folder.rglob("[!.]*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def write_files(out: Path, files: Mapping[str, bytes]) -> None:
    """Write the files of a complete run into its folder, the result last, unless the folder has a result already.

    Raises:
        FolderInUseError: if another process makes the same run there.
    """
    folder = RunFolder(out)
    with folder.locked(), user_errors(out):
        if folder.read_result() is None:
            for name in sorted(files, key=lambda name: name == folder.result.name):
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(out / name) as file:
                    file.write(files[name])
