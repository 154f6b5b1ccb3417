"""Archives of packed run folders."""

import shlex
import tarfile
from pathlib import Path

from spcl.errors import SpclError

__all__ = ["ARCHIVE", "check_unpacked"]

ARCHIVE = "records.tar.gz"
"""The name of an archive of run folders."""


def check_unpacked(folder: Path) -> None:
    """Raise an error with the commands that unpack them if the folder contains archives of runs."""
    archives = sorted(folder.rglob(ARCHIVE))
    if not archives:
        return
    commands = [shlex.join(["tar", "xzf", str(path), "-C", str(_target(path))]) for path in archives]
    raise SpclError("\n  ".join([f"the runs in {folder} are packed in {ARCHIVE}; unpack them first:", *commands]))


def _target(archive: Path) -> Path:
    """Return the folder to unpack into.

    The runs end up in the archive's folder: directly if the packed folder has the same name, below it otherwise.
    """
    try:
        with tarfile.open(archive) as packed:
            first = packed.next()
    except (OSError, EOFError, tarfile.TarError):
        first = None
    same_name = first is not None and Path(first.name).parts[0] == archive.parent.name
    return archive.parent.parent if same_name else archive.parent
