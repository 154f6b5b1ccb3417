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
import re
import shutil
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spcl._util.files import remove_partial_files, scratch_path, sync_folder
from spcl.errors import CheckpointError, SpclError, is_out_of_memory

__all__ = ["has_checkpoint", "read_checkpoint", "read_newest", "remove_checkpoint", "write_checkpoint"]

FORMAT = "spcl-checkpoint"
VERSION = 1
KEPT = 2  # checkpoints, the newest included
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


def write_checkpoint(path: str | os.PathLike[str], state: Mapping[str, Any], keep: int = KEPT) -> None:
    """Write ``state`` to ``path`` and keep the ``keep`` newest checkpoints, the one written included.

    The checkpoint that was at ``path`` becomes ``<path>.previous``, the one before ``<path>.previous-2``, and so on. A
    damaged checkpoint is overwritten and never takes the place of a valid one.

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
    if keep < 1:
        raise CheckpointError(f"cannot keep {keep} checkpoints; keep at least 1")
    path = _resolved(Path(path))
    places = [path, *(_previous(path, age) for age in range(1, keep))]
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_pack(state, "state", tensors))
    try:
        _check_replaceable(places)
        remove_partial_files(path.parent, glob.escape(path.name))
        with scratch_path(path) as new, scratch_path(path) as old:
            _write_file(new, structure, tensors)
            _remember(new)
            valid = list(takewhile(_is_valid, places[:-1]))  # what is damaged is overwritten
            if valid:
                _link_or_copy(path, old)
            new.replace(path)
            for age in range(len(valid) - 1, 0, -1):
                places[age].replace(places[age + 1])
            if valid:
                old.replace(places[1])
            for surplus in set(_previous_ones(path)) - set(places):
                surplus.unlink()
            sync_folder(path.parent)
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
    """Read ``path`` or, where that is missing or damaged, the newest valid one of ``<path>.previous``, ….

    Falling back to a previous checkpoint gives a :class:`RuntimeWarning` with the reason.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "run.ckpt"
    >>> write_checkpoint(path, {"step": 1})
    >>> read_newest(path)
    {'step': 1}

    Raises:
        CheckpointError: if no checkpoint is valid.
    """
    path = Path(path)
    try:
        return _read_file(path)
    except CheckpointError as newest:
        for previous in _previous_ones(path):
            try:
                state = _read_file(previous)
            except CheckpointError:
                continue
            warnings.warn(f"{newest}; going back to {previous}", RuntimeWarning, stacklevel=2)
            return state
        raise CheckpointError(f"{newest}; {_fallback(path)}") from newest


def has_checkpoint(path: Path) -> bool:
    """Return whether there is a file for :func:`read_newest`, valid or not."""
    return path.exists() or bool(_previous_ones(path))


def remove_checkpoint(path: Path) -> None:
    """Remove the checkpoint, the previous ones, and what killed writers left."""
    real = _resolved(path)
    remove_partial_files(real.parent, glob.escape(real.name))
    for file in (real, *_previous_ones(path), path):
        file.unlink(missing_ok=True)


def _resolved(path: Path) -> Path:
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _previous(path: Path, age: int = 1) -> Path:
    path = _resolved(path)
    return path.with_name(f"{path.name}.previous" + (f"-{age}" if age > 1 else ""))


def _previous_ones(path: Path) -> list[Path]:
    """Return the previous checkpoints that exist, the newest first."""
    path = _resolved(path)
    numbered = re.compile(re.escape(path.name) + r"\.previous(?:-(\d+))?")
    names = ((each, numbered.fullmatch(each.name)) for each in path.parent.glob(f"{glob.escape(path.name)}.previous*"))
    ages = {each: int(match[1] or 1) for each, match in names if match}
    return sorted(ages, key=ages.__getitem__)


def _fallback(path: Path) -> str:
    """Describe whether a previous checkpoint can be used instead."""
    errors = []
    for previous in _previous_ones(path):
        try:
            _read_file(previous)
        except CheckpointError as error:
            errors.append(str(error))
        else:
            return f"the previous checkpoint is valid: load {previous}, or copy it to {path}"
    if errors:
        return f"nor can the previous checkpoint be used: {'; '.join(errors)}"
    return f"there is no {_previous(path)} to go back to"


# -- which files are known to be valid

_KNOWN: deque[tuple[int, ...]] = deque(maxlen=256)
"""Identity, size and time of files that this process has written, or read and found valid."""


def _identity(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _remember(path: Path) -> None:
    _KNOWN.append(_identity(path))


def _is_valid(path: Path) -> bool:
    """Return whether there is a valid checkpoint; a file is read once, and again only after it has changed."""
    try:
        if _identity(path) not in _KNOWN:
            _read_file(path)
    except (OSError, CheckpointError):
        return False
    return True


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


def _check_replaceable(places: Sequence[Path]) -> None:
    for target in places:
        if os.path.lexists(target) and not target.is_file():
            raise CheckpointError(
                f"cannot write checkpoint {places[0]}: {target} exists and is not a regular file; choose another path"
            )


def _link_or_copy(path: Path, target: Path) -> None:
    """Give the valid checkpoint at ``path`` the second name ``target``."""
    try:
        target.hardlink_to(path)
    except OSError:  # this file system has no hard links
        shutil.copyfile(path, target)
        _remember(target)


def _read_file(path: Path) -> dict[str, Any]:
    """Read and verify one file; tensors are copied before the check, so later changes of the file do not matter."""
    try:
        identity = _identity(path)
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
    with checked_content(path):
        state = _unpack(json.loads(metadata["state"]), tensors)
        if not isinstance(state, dict):
            raise CheckpointError(f"{path} holds a {type(state).__name__}, but a checkpoint holds a dict; use another")
    _KNOWN.append(identity)
    return state


@contextmanager
def checked_content(origin: object) -> Iterator[None]:
    """Raise whatever content of a wrong type, shape or structure raises in the block as a :class:`CheckpointError`.

    >>> with checked_content("run.ckpt"):
    ...     {"step": 1}["steps"]
    Traceback (most recent call last):
    ...
    spcl.errors.CheckpointError: run.ckpt has a right checksum but wrong content (KeyError: 'steps'); use another ...
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, SpclError) or is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"{origin} has a right checksum but wrong content ({type(error).__name__}: {error}); use another "
            f"checkpoint, or the version of spcl that wrote this one"
        ) from error


def _check_format(path: Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT or not metadata.keys() >= {"version", "state", "sha256"}:
        raise CheckpointError(f"{path} is a safetensors file, but not an spcl checkpoint")
    if metadata["version"] != str(VERSION):
        raise CheckpointError(
            f"{path} has version {metadata['version']} of the format, and this spcl reads version {VERSION}; "
            "use the spcl version that wrote it"
        )
