"""The errors a user can mend: the command line prints them as one line, without a traceback."""

__all__ = ["CheckpointError", "DataError", "SpclError", "TaskError"]


class SpclError(ValueError):
    """Something the caller can put right; the message names the value found and what to do next."""


class TaskError(SpclError):
    """A call that does not fit the learner's tasks: unknown, finished or duplicate task, wrong shape or label."""


class DataError(SpclError):
    """A data file that is missing, damaged, mislabelled, or does not fit the protocol."""


class CheckpointError(SpclError):
    """A checkpoint that is truncated, altered, foreign, or from another version."""
