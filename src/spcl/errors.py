"""User errors: the command line prints them as one line, without a traceback."""

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
