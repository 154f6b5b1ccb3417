"""A run as one archive to send: settings, result, model, metrics, protocol and plug-ins, with their checksums."""

import hashlib
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import spcl
from spcl._util.files import atomic_write, user_errors
from spcl.errors import SpclError
from spcl.runs.records import FolderError, RunFolder, UnfinishedRunError
from spcl.runs.settings import load_settings_file

PLUGINS, PROTOCOLS = "plugins", "protocols"
MOST_COMPRESSED = 200  # times, more than any file of a run is


class BundleError(SpclError):
    """An archive that is no bundle of a run, or a damaged one."""


def bundle_run(run: str | Path, out: str | Path) -> list[str]:
    """Write a complete run to a new .zip archive; return the names of its files.

    It holds settings, result, metrics, model, the protocol file and the files of plug-ins, and ``bundle.json`` with
    their SHA-256 checksums; paths in its settings are relative. The data stays here: the result has its checksum.

    Raises:
        UnfinishedRunError: if the run is not complete.
        FolderError: if there is no run, if a plug-in has changed since, or if the archive exists.
    """
    folder, out = RunFolder(Path(run).expanduser()), Path(out)
    if not folder.settings.is_file():
        raise FolderError(f"there is no run in {folder.path}; give the folder of a run")
    if folder.read_result() is None:
        raise UnfinishedRunError(f"the run in {folder.path} is not complete; resume it first")
    if out.exists():
        raise FolderError(f"{out} exists; remove it, or write another file")
    settings = load_settings_file(folder.settings)
    with user_errors(out):
        kept = [path for path in (folder.result, folder.metrics, folder.model) if path.exists()]
        files = {path.name: path.read_bytes() for path in kept} | _attached(settings)
        files[folder.settings.name] = (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
        sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        files[folder.bundle.name] = json.dumps({"spcl": spcl.__version__, "sha256": sums}, indent=2).encode()
        with atomic_write(out) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
    return list(files)


def _attached(settings: dict[str, Any]) -> dict[str, bytes]:
    """Return the files that settings name, by their names in the archive, which replace the paths in the settings."""
    files: dict[str, bytes] = {}

    def attach(path: Path, place: str) -> str:
        name = f"{place}/{path.name}"
        if name in files:
            raise FolderError(f"two plug-ins of the run are named {path.name}; rename one, and make the run again")
        try:
            files[name] = path.read_bytes()
        except OSError as error:
            raise FolderError(
                f"cannot read {path}, which the run was made with: {error.strerror}; put it back"
            ) from error
        return name

    plugins = []
    for plugin in settings.get("plugins", ()):
        path = Path(plugin["name"])
        if path.suffix == ".py":
            plugin = {**plugin, "name": attach(path, PLUGINS)}
            if hashlib.sha256(files[plugin["name"]]).hexdigest() != plugin["sha256"]:
                raise FolderError(f"the plug-in {path} has changed since the run was made; put it back")
        plugins.append(plugin)
    settings["plugins"] = plugins
    if settings.get("protocol"):
        settings["protocol"] = f"./{attach(Path(settings['protocol']), PROTOCOLS)}"
    benchmark = str(settings["benchmark"])
    if "/" in benchmark:
        settings["benchmark"] = f"./{Path(benchmark).name}"
    settings["data_dir"] = None
    return files


def unpack_bundle(bundle: str | Path, out: str | Path) -> RunFolder:
    """Unpack an archive of :func:`bundle_run` to a new folder, and return the folder of the run.

    Nothing in it is run: its plug-ins are loaded only where they are named. Names that lead out of the folder, files of
    other kinds and files whose checksum differs are refused, and then nothing is left.

    Raises:
        BundleError: if the archive is no bundle, or a damaged or dangerous one.
        FolderError: if the folder exists and is not empty.
    """
    bundle, folder = Path(bundle), RunFolder(Path(out))
    if folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir())):
        raise FolderError(f"{folder.path} exists; choose another folder, or remove this one")
    try:
        with zipfile.ZipFile(bundle) as archive:
            files = _checked_files(archive, folder)
    except BundleError as error:
        raise BundleError(f"{bundle} {error}; ask for the bundle again") from None
    except OSError as error:
        raise BundleError(f"cannot read {bundle}: {error.strerror or error}; give an archive of a run") from error
    except Exception as error:  # zipfile raises many kinds on damaged archives
        raise BundleError(f"{bundle} is no archive of a run, or a damaged one ({error}); ask for it again") from error
    with user_errors(folder.path):
        for name, content in files.items():
            path = folder.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as file:
                file.write(content)
    return folder


def _checked_files(archive: zipfile.ZipFile, folder: RunFolder) -> dict[str, bytes]:
    """Read the files of a bundle; raise a :class:`BundleError` for anything that :func:`bundle_run` does not write."""
    plain = {path.name for path in (folder.settings, folder.result, folder.metrics, folder.model, folder.bundle)}
    files: dict[str, bytes] = {}
    for entry in archive.infolist():
        name = PurePosixPath(entry.filename)
        is_attached = len(name.parts) == 2 and name.parts[0] in (PLUGINS, PROTOCOLS) and not name.name.startswith(".")
        if {*"\\:"} & {*entry.filename} or str(name) != entry.filename or not (entry.filename in plain or is_attached):
            raise BundleError(f"holds {entry.filename!r}, which no bundle has")
        if entry.filename in files or entry.file_size > MOST_COMPRESSED * entry.compress_size + 1024:
            raise BundleError(f"holds {entry.filename!r} twice, or a file of this name that unpacks to too much")
        files[entry.filename] = archive.read(entry)
    described = _json(files, folder.bundle.name)
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items() if name != folder.bundle.name}
    if not {folder.settings.name, folder.result.name} <= sums.keys():
        raise BundleError("holds no settings or no result")
    if described.get("sha256") != sums:
        raise BundleError("holds other files than its checksums say")
    return files


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        content = json.loads(files[name])
    except (KeyError, ValueError):
        content = None
    if not isinstance(content, dict):
        raise BundleError(f"holds no readable {name}")
    return content
