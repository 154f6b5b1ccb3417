"""Checkpoints: nested plain data and tensors in one checksummed file that is replaced atomically.

The file is a standard safetensors file, so any safetensors reader opens it. Its metadata holds the format's name and
version, the JSON of the state with every tensor replaced by a reference, and a SHA-256 over that JSON and all tensors.
Nothing is pickled: reading a checkpoint runs no code from it.
"""

import glob
import hashlib
import json
import math
import os
import shutil
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spcl.errors import CheckpointError
from spcl.files import PARTIAL, scratch_path

__all__ = ["has_checkpoint", "read_checkpoint", "read_newest", "remove_checkpoint", "write_checkpoint"]

FORMAT = "spcl-checkpoint"
VERSION = 1
NO_DIGEST = "0" * 64  # placeholder in the header until every byte is hashed

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_checkpoint(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write ``state`` to ``path``, keeping the checkpoint that was there as ``<path>.previous``.

    A state is nested dicts (with ``str`` or ``int`` keys) and lists of ``None``, ``bool``, ``int``, ``float``, ``str``
    and tensors. Everything is restored bit for bit, except that tuples are read as lists, other mappings as dicts,
    tensors of other devices on the host, and tensors that share memory as separate ones.

    The file is flushed to disk before it is renamed to ``path`` (symbolic links are followed): whenever the process or
    the machine stops, ``path`` or ``<path>.previous`` is a valid checkpoint.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "run.ckpt"
    >>> write_checkpoint(path, {"step": 1, "weights": torch.tensor([0.5, -0.0])})
    >>> write_checkpoint(path, {"step": 2, "weights": torch.tensor([0.25, -0.0])})
    >>> read_checkpoint(path)
    {'step': 2, 'weights': tensor([0.2500, -0.0000])}
    >>> read_checkpoint(f"{path}.previous")["step"]
    1

    Raises:
        CheckpointError: if the state holds anything else, the disk is full, read-only or absent, or ``path`` exists
            and is not a regular file. Existing checkpoints stay unchanged.
    """
    path = _resolved(Path(path))
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_pack(state, "state", tensors))
    try:
        _check_replaceable(path)
        _remove_partial_files(path)
        with scratch_path(path) as new, scratch_path(path) as old:
            _write_file(new, structure, tensors)
            kept = _link_or_copy(path, old)
            new.replace(path)
            if kept:  # last: where `path` was damaged, `.previous` must stay until `path` is valid again
                old.replace(_previous(path))
            _sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"cannot write checkpoint {path}: {error.strerror or error}; earlier checkpoints are unchanged"
        ) from error


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the state that :func:`write_checkpoint` wrote to ``path``; its tensors are on the host.

    >>> read_checkpoint("absent.ckpt")
    Traceback (most recent call last):
    ...
    spcl.errors.CheckpointError: absent.ckpt does not exist; there is no absent.ckpt.previous to go back to

    Raises:
        CheckpointError: if the file is missing, truncated, altered, or of another format or version. The message says
            whether ``<path>.previous`` can be used instead.
    """
    path = Path(path)
    try:
        return _read_file(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_fallback(path)}") from error


def read_newest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read ``path`` or, where that is missing or damaged, ``<path>.previous``.

    Falling back to the previous checkpoint gives a :class:`RuntimeWarning` with the reason.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "run.ckpt"
    >>> write_checkpoint(path, {"step": 1})
    >>> read_newest(path)
    {'step': 1}

    Raises:
        CheckpointError: if neither is a valid checkpoint.
    """
    path = Path(path)
    try:
        return _read_file(path)
    except CheckpointError as newest:
        previous = _previous(path)
        try:
            state = _read_file(previous)
        except CheckpointError:
            raise CheckpointError(f"{newest}; {_fallback(path)}") from newest
        warnings.warn(f"{newest}; going back to {previous}", RuntimeWarning, stacklevel=2)
        return state


def has_checkpoint(path: Path) -> bool:
    """Return whether there is a file for :func:`read_newest`, valid or not."""
    return path.exists() or _previous(path).exists()


def remove_checkpoint(path: Path) -> None:
    """Remove the checkpoint, the previous one, and what writers left that were killed."""
    _remove_partial_files(_resolved(path))
    for file in (_resolved(path), _previous(path), path):
        file.unlink(missing_ok=True)


def _resolved(path: Path) -> Path:
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _previous(path: Path) -> Path:
    path = _resolved(path)
    return path.with_name(f"{path.name}.previous")


def _fallback(path: Path) -> str:
    """Describe whether the previous checkpoint can be used instead."""
    previous = _previous(path)
    if not previous.exists():
        return f"there is no {previous} to go back to"
    try:
        _read_file(previous)
    except CheckpointError as error:
        return f"nor can the previous checkpoint be used: {error}"
    return f"the previous checkpoint is valid: load {previous}, or copy it to {path}"


def _pack(value: Any, where: str, tensors: dict[str, Tensor], name: str = "") -> Any:
    """Convert ``value`` to JSON data, moving its tensors into ``tensors``, named by their keys with dots between.

    Keys that start with one ``$`` are reserved: for references, and ``$5`` for the integer key 5. Keys of ``value``
    that start with ``$`` get a second one.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Tensor):
        if value.dtype not in DTYPES or value.layout != torch.strided or value.is_meta:
            raise CheckpointError(
                f"{where} is a {value.layout} tensor of {value.dtype}; a checkpoint holds dense tensors of the types "
                f"{', '.join(DTYPES.values())}"
            )
        while name in tensors or name in ("", "__metadata__"):  # a key may have a dot, or be reserved in the file
            name += "_"
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, list | tuple):
        return [_pack(item, f"{where}[{index}]", tensors, _joined(name, index)) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {
            _pack_key(key, where): _pack(item, f"{where}[{key!r}]", tensors, _joined(name, key))
            for key, item in value.items()
        }
    raise CheckpointError(
        f"{where} is a {type(value).__name__}; a checkpoint holds dicts, lists, numbers, strings and tensors"
    )


def _joined(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _pack_key(key: Any, where: str) -> str:
    if isinstance(key, int) and not isinstance(key, bool):
        return f"${int(key)}"
    if not isinstance(key, str):
        raise CheckpointError(
            f"{where} has the key {key!r}; keys in a checkpoint must be strings or integers, so use str(key)"
        )
    return f"${key}" if key.startswith("$") else key


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    match value:
        case {"$tensor": name}:
            return tensors[name]
        case {"$float": text}:
            return float(text)
        case dict():
            return {_unpack_key(key): _unpack(item, tensors) for key, item in value.items()}
        case list():
            return [_unpack(item, tensors) for item in value]
        case _:
            return value


def _unpack_key(key: str) -> str | int:
    bare = key.removeprefix("$")
    return bare if bare == key or bare.startswith("$") else int(bare)


def _in_file_order(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Sort tensors by element size, largest first, so that every tensor is aligned in the file."""
    return sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))


def _raw(name: str, tensor: Tensor) -> tuple[bytes, memoryview]:
    """Return name, type and shape of ``tensor``, and its bytes (not copied where contiguous and on the host)."""
    identity = f"{name} {tensor.dtype} {list(tensor.shape)}".encode()
    if not tensor.numel():
        return identity, memoryview(b"")  # empty numpy arrays have strides that cannot be viewed as bytes
    return identity, tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _header(structure: str, ordered: Iterable[tuple[str, Tensor]]) -> bytes:
    entries: dict[str, Any] = {
        "__metadata__": {"format": FORMAT, "version": str(VERSION), "state": structure, "sha256": NO_DIGEST}
    }
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    return text + b" " * (-len(text) % 8)


def _write_file(path: Path, structure: str, tensors: Mapping[str, Tensor]) -> None:
    """Write and hash tensors one by one, so that at most one is copied to the host at a time."""
    ordered = _in_file_order(tensors)
    header = _header(structure, ordered)
    digest = hashlib.sha256(structure.encode())
    with path.open("xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, tensor in ordered:
            identity, raw = _raw(name, tensor)
            digest.update(identity)
            digest.update(raw)
            file.write(raw)
        file.seek(8 + header.rindex(NO_DIGEST.encode()))
        file.write(digest.hexdigest().encode())
        file.flush()
        os.fsync(file.fileno())


def _check_replaceable(path: Path) -> None:
    for target in path, _previous(path):
        if os.path.lexists(target) and not target.is_file():
            raise CheckpointError(
                f"cannot write checkpoint {path}: {target} exists and is not a regular file; choose another path"
            )


def _remove_partial_files(path: Path) -> None:
    for partial in path.parent.glob(f".{glob.escape(path.name)}.*{PARTIAL}"):
        partial.unlink(missing_ok=True)


def _link_or_copy(path: Path, target: Path) -> bool:
    """Give the file at ``path`` the second name ``target``; return whether there is a file."""
    if not path.exists():
        return False
    try:
        target.hardlink_to(path)
    except OSError:  # this file system has no hard links
        shutil.copyfile(path, target)
    return True


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":  # other systems cannot open a folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_file(path: Path) -> dict[str, Any]:
    """Read and verify one file; tensors are copied before the check, so later changes of the file do not matter."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            _check_format(path, metadata)
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} is truncated, damaged or not a checkpoint: {error}") from error
    digest = hashlib.sha256(metadata["state"].encode())
    for name, tensor in _in_file_order(tensors):
        for part in _raw(name, tensor):
            digest.update(part)
    if digest.hexdigest() != metadata["sha256"]:
        raise CheckpointError(f"{path} is damaged: its content does not match its checksum")
    state: dict[str, Any] = _unpack(json.loads(metadata["state"]), tensors)
    return state


def _check_format(path: Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT or not metadata.keys() >= {"version", "state", "sha256"}:
        raise CheckpointError(f"{path} is a safetensors file, but not an spcl checkpoint")
    if metadata["version"] != str(VERSION):
        raise CheckpointError(
            f"{path} has version {metadata['version']} of the format, and this spcl reads version {VERSION}; "
            "use the spcl version that wrote it"
        )
