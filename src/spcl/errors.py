"""User errors: the command line prints them as one line, without a traceback."""

import shlex
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

__all__ = [
    "CheckpointError",
    "DataError",
    "LostRankError",
    "MissingDataError",
    "OtherRankError",
    "OutOfMemoryError",
    "SpclError",
    "TaskError",
    "TimelineError",
    "is_out_of_memory",
]


class SpclError(ValueError):
    """Base class of all user errors; the message names the value found, what was expected and what to do."""


class TaskError(SpclError):
    """A call that does not fit the learner's tasks: unknown, finished or duplicate task, wrong shape or label."""


class DataError(SpclError):
    """A data file that is missing, damaged, mislabelled, or does not fit the protocol."""


class MissingDataError(DataError):
    """A published data set whose files are not on this machine."""


class TimelineError(DataError):
    """A timeline that gives tasks more or fewer steps than their data needs."""


class CheckpointError(SpclError):
    """A checkpoint that is truncated, altered, of another format, or from another version."""


class OutOfMemoryError(SpclError):
    """The GPU or the host ran out of memory, perhaps only because other processes share it."""


class LostRankError(SpclError):
    """Another of the processes that train together has died, or hangs."""


class OtherRankError(SpclError):
    """An error of another of the processes that train together, which that process reports itself."""


def install_command(extra: str) -> str:
    """Return the command that adds an extra to this installation, which may be a checkout that no index knows."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{checkout}[{extra}]')}"
    return f'pip install "spcl[{extra}]"'


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports exhausted memory, by its type or by the wording of common libraries.

    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    True
    >>> is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(phrase in text for phrase in _OUT_OF_MEMORY_PHRASES)


_OUT_OF_MEMORY_PHRASES = ("out of memory", "alloc_failed", "can't allocate memory", "not enough memory")


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return a hint for an unknown name: the closest known name as a question, or else all known names.

    >>> did_you_mean("sorro", ["er", "soro"])
    "did you mean 'soro'?"
    >>> did_you_mean("x", ["er", "soro"])
    'choose one of er, soro'
    >>> did_you_mean("x", ["a", "A"])
    'choose one of a, A'
    >>> did_you_mean("x", ["er", "soro"], "load the plug-in that defines it")
    'choose one of er, soro, or load the plug-in that defines it'
    """
    names = list(known)
    by_lower_case = {candidate.lower(): candidate for candidate in names}
    close = get_close_matches(name.lower(), by_lower_case, n=1)
    if close:
        return f"did you mean {by_lower_case[close[0]]!r}?"
    return f"choose one of {', '.join(names)}" + (f", or {otherwise}" if otherwise else "")
