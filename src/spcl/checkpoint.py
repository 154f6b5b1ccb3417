"""Checkpoints: nested plain data and tensors in one checksummed file that a crash cannot destroy.

The file is a standard safetensors file, so any safetensors reader opens it. Its metadata holds the format's name and
version, the JSON of the state with every tensor replaced by a reference, and a SHA-256 over that JSON and all tensors.
Nothing is ever pickled: reading a checkpoint runs no code from it.
"""

import glob
import hashlib
import json
import math
import os
import secrets
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spcl.errors import CheckpointError

__all__ = ["read_checkpoint", "read_newest", "write_checkpoint"]

FORMAT = "spcl-checkpoint"
VERSION = 1
NO_DIGEST = "0" * 64  # holds the digest's place in the header until every byte is written

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
    and tensors. Everything comes back bit for bit, except that tuples come back as lists, other mappings as dicts,
    tensors of other devices on the host, and tensors that share memory as separate ones.

    A link stays a link: the file it leads to is replaced, and the one before lies beside that file.

    The file is complete and on the disk before it takes the name ``path``: whenever the process or the machine stops,
    ``path`` or ``<path>.previous`` is a valid checkpoint. What a killed writer leaves behind, the next one removes.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "run.ckpt"
    >>> write_checkpoint(path, {"step": 1, "weights": torch.tensor([0.5, -0.0])})
    >>> write_checkpoint(path, {"step": 2, "weights": torch.tensor([0.25, -0.0])})
    >>> read_checkpoint(path)
    {'step': 2, 'weights': tensor([0.2500, -0.0000])}
    >>> read_checkpoint(f"{path}.previous")["step"]
    1

    Raises:
        CheckpointError: if the state holds anything else, the disk is full, read-only or absent, or what lies at
            ``path`` is no regular file. The checkpoints that were there stay as they were.
    """
    path = _behind_links(Path(path))
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_pack(state, "state", tensors))
    try:
        _check_replaceable(path)
        _remove_leftovers(path)
        with _scratch(path) as new, _scratch(path) as old:
            _write_file(new, structure, tensors)
            kept = _keep(path, old)
            new.replace(path)
            if kept:  # only now: where `path` was damaged, the one before it had to stay until `path` was good again
                old.replace(_previous(path))
            _sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"cannot write checkpoint {path}: {error.strerror or error}; earlier checkpoints are untouched"
        ) from error


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the state that :func:`write_checkpoint` wrote to ``path``; its tensors are on the host.

    >>> read_checkpoint("absent.ckpt")
    Traceback (most recent call last):
    ...
    spcl.errors.CheckpointError: absent.ckpt does not exist; there is no absent.ckpt.previous to go back to

    Raises:
        CheckpointError: if the file is missing, truncated, altered, foreign, or from another version of the format. The
            message says whether ``<path>.previous`` can be used instead.
    """
    path = Path(path)
    try:
        return _read_file(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_way_back(path)}") from error


def read_newest(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Path]:
    """Read ``path`` or, where that is missing or damaged, ``<path>.previous``; also return the path that was used.

    Going back to the previous checkpoint gives a :class:`RuntimeWarning` that says why.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "run.ckpt"
    >>> write_checkpoint(path, {"step": 1})
    >>> state, used = read_newest(path)
    >>> state, used == path
    ({'step': 1}, True)

    Raises:
        CheckpointError: if neither is a valid checkpoint.
    """
    path = Path(path)
    try:
        return _read_file(path), path
    except CheckpointError as newest:
        previous = _previous(path)
        try:
            state = _read_file(previous)
        except CheckpointError:
            raise CheckpointError(f"{newest}; {_way_back(path)}") from newest
        warnings.warn(f"{newest}; going back to {previous}", RuntimeWarning, stacklevel=2)
        return state, previous


def _behind_links(path: Path) -> Path:
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _previous(path: Path) -> Path:
    path = _behind_links(path)
    return path.with_name(f"{path.name}.previous")


def _way_back(path: Path) -> str:
    previous = _previous(path)
    if not previous.exists():
        return f"there is no {previous} to go back to"
    try:
        _read_file(previous)
    except CheckpointError as error:
        return f"nor can the previous checkpoint be used: {error}"
    return f"the previous checkpoint is valid: load {previous}, or copy it to {path}"


def _pack(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """Turn ``value`` into what JSON can hold, moving its tensors into ``tensors``.

    A key that starts with one ``$`` is ours: of a reference, or ``$5`` for the number 5. The user's own keys that start
    with ``$`` get another one.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Tensor):
        if value.dtype not in DTYPES or value.layout != torch.strided or value.is_meta:
            raise CheckpointError(f"{place} is a {value.layout} tensor of {value.dtype}, which no checkpoint can hold")
        name = str(len(tensors))
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, list | tuple):
        return [_pack(item, f"{place}[{index}]", tensors) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {_pack_key(key, place): _pack(item, f"{place}[{key!r}]", tensors) for key, item in value.items()}
    raise CheckpointError(
        f"{place} is a {type(value).__name__}: a checkpoint holds dicts, lists, numbers, strings and tensors"
    )


def _pack_key(key: Any, place: str) -> str:
    if isinstance(key, int) and not isinstance(key, bool):
        return f"${int(key)}"
    if not isinstance(key, str):
        raise CheckpointError(
            f"{place} has the key {key!r}: keys in a checkpoint must be strings or whole numbers; use str(key)"
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
    own = key.removeprefix("$")
    return own if own == key or own.startswith("$") else int(own)


def _in_file_order(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Sort the widest types first, so that every tensor is aligned in the file."""
    return sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))


def _raw(name: str, tensor: Tensor) -> tuple[bytes, memoryview]:
    """Return what ``tensor`` is and its bytes (without a copy where it is contiguous and on the host)."""
    identity = f"{name} {tensor.dtype} {list(tensor.shape)}".encode()
    if not tensor.numel():
        return identity, memoryview(b"")  # empty arrays of numpy have strides that cannot be viewed as bytes
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
    """Write and hash one tensor after another, so that never more than one is copied to the host."""
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


@contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    """Give a new name beside ``path``; what is still there at the end is removed."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield scratch
    finally:
        scratch.unlink(missing_ok=True)


def _check_replaceable(path: Path) -> None:
    for place in path, _previous(path):
        if os.path.lexists(place) and not place.is_file():
            raise CheckpointError(
                f"cannot write checkpoint {path}: {place} exists and is no regular file; choose another path"
            )


def _remove_leftovers(path: Path) -> None:
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        leftover.unlink(missing_ok=True)


def _keep(path: Path, aside: Path) -> bool:
    if not path.exists():
        return False
    try:
        aside.hardlink_to(path)
    except OSError:  # this file system has no hard links
        shutil.copyfile(path, aside)
    return True


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_file(path: Path) -> dict[str, Any]:
    """Read and check one file; the tensors are copied before they are checked, so no later change reaches them."""
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
        raise CheckpointError(f"{path} is truncated, damaged or no checkpoint at all: {error}") from error
    digest = hashlib.sha256(metadata["state"].encode())
    for name, tensor in _in_file_order(tensors):
        for part in _raw(name, tensor):
            digest.update(part)
    if digest.hexdigest() != metadata["sha256"]:
        raise CheckpointError(f"{path} is damaged: its contents do not match its checksum")
    state: dict[str, Any] = _unpack(json.loads(metadata["state"]), tensors)
    return state


def _check_format(path: Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT or not metadata.keys() >= {"version", "state", "sha256"}:
        raise CheckpointError(f"{path} is a safetensors file, but not an spcl checkpoint")
    if metadata["version"] != str(VERSION):
        raise CheckpointError(
            f"{path} has version {metadata['version']} of the checkpoint format, this spcl reads version {VERSION}: "
            "use the spcl that wrote it"
        )
