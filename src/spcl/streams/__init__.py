"""Streams of training data: label sets, timelines, and iterables of moments.

A moment is one step of parallel learning: a batch of every task that has data. `ParallelStream` yields the moments of a
data set whose tasks overlap in time; `LiveStream` yields the moments of sources that run concurrently.
"""

from spcl.streams.live import Failure, LiveStream
from spcl.streams.parallel import (
    LabelSet,
    Moment,
    ParallelStream,
    StreamTask,
    Timeline,
    check_label_set,
    check_timeline,
    draw_label_set,
    split_by_task,
    task_durations,
)

__all__ = [
    "Failure",
    "LabelSet",
    "LiveStream",
    "Moment",
    "ParallelStream",
    "StreamTask",
    "Timeline",
    "check_label_set",
    "check_timeline",
    "draw_label_set",
    "split_by_task",
    "task_durations",
]
