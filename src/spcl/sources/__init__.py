"""Sources of live batches: iterables, and hubs in which tasks have streams that survive crashes.

A :class:`Publisher` puts batches into a hub, a :class:`FolderHub` or :class:`RedisHub`; a :class:`HubSource` reads the
batches of one task for a :class:`spcl.streams.LiveStream`.
"""

from spcl.sources.base import (
    HUBS,
    Data,
    Entry,
    Hub,
    HubError,
    IterableSource,
    Message,
    Rejected,
    ResetError,
    Source,
    as_source,
    check_task_name,
)
from spcl.sources.folder import FolderHub
from spcl.sources.publisher import Publisher
from spcl.sources.reader import Excerpt, Found, HubReader, HubSource
from spcl.sources.redis import RedisHub
from spcl.sources.wire import (
    Announcement,
    Letter,
    announce,
    decode,
    encode_batch,
    encode_end,
    encode_start,
    sequence_of,
)

__all__ = [
    "HUBS",
    "Announcement",
    "Data",
    "Entry",
    "Excerpt",
    "FolderHub",
    "Found",
    "Hub",
    "HubError",
    "HubReader",
    "HubSource",
    "IterableSource",
    "Letter",
    "Message",
    "Publisher",
    "RedisHub",
    "Rejected",
    "ResetError",
    "Source",
    "announce",
    "as_source",
    "check_task_name",
    "decode",
    "encode_batch",
    "encode_end",
    "encode_start",
    "sequence_of",
]
