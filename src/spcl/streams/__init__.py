"""Where the data comes from: label sets, timelines, and the streams of moments a learner is fed with.

A `ParallelStream` replays a data set as tasks that overlap in time; a `LiveStream` merges running sources, each at its
own pace. Iterating either yields `Moment`s.
"""

from spcl.streams.labels import LabelSet, check_label_set, draw_label_set, split_by_task, task_durations
from spcl.streams.live import Failure, LiveStream
from spcl.streams.moment import Moment
from spcl.streams.parallel import ParallelStream, check_timeline
from spcl.streams.timeline import Timeline

__all__ = [
    "Failure",
    "LabelSet",
    "LiveStream",
    "Moment",
    "ParallelStream",
    "Timeline",
    "check_label_set",
    "check_timeline",
    "draw_label_set",
    "split_by_task",
    "task_durations",
]
