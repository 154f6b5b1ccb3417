"""Streams of training data: label sets, timelines, and iterables of moments.

A moment is one step of parallel learning: a batch of every task that has data. `ParallelStream` yields the moments of a
data set whose tasks overlap in time; `LiveStream` those of sources that run concurrently.
"""

from spcl.streams.labels import LabelSet, check_label_set, draw_label_set, split_by_task, task_durations
from spcl.streams.live import LiveStream
from spcl.streams.moment import Moment
from spcl.streams.parallel import ParallelStream, StreamTask, check_timeline
from spcl.streams.reader import Failure
from spcl.streams.timeline import Timeline

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
