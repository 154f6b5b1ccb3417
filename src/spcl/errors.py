"""The errors a user can mend: the command line prints them as one line, without a traceback."""

__all__ = ["CheckpointError", "DataError", "OutOfMemoryError", "SpclError", "TaskError", "is_out_of_memory"]

NO_MEMORY = ("out of memory", "alloc_failed", "can't allocate memory", "not enough memory")


class SpclError(ValueError):
    """Something the caller can put right; the message names the value found and what to do next."""


class TaskError(SpclError):
    """A call that does not fit the learner's tasks: unknown, finished or duplicate task, wrong shape or label."""


class DataError(SpclError):
    """A data file that is missing, damaged, mislabelled, or does not fit the protocol."""


class CheckpointError(SpclError):
    """A checkpoint that is truncated, altered, foreign, or from another version."""


class OutOfMemoryError(SpclError):
    """The GPU, or the host, has no room for a run, perhaps only as long as others share it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left; every library has its own words for it.

    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    True
    >>> is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in NO_MEMORY)
