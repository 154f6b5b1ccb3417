"""Sources of live batches: iterables, and hubs in which tasks have streams that survive crashes.

A :class:`Publisher` puts batches into a hub, a :class:`FolderHub` or :class:`RedisHub`; a :class:`HubSource` reads
those of one task for a :class:`spcl.streams.LiveStream`.
"""

from spcl.sources.base import Data, Entry, HubError, Message, Rejected, ResetError, Source
from spcl.sources.folder import FolderHub
from spcl.sources.hub import HUBS, Hub, check_task_name
from spcl.sources.hub_source import Excerpt, Found, HubReader, HubSource
from spcl.sources.iterable import IterableSource, as_source
from spcl.sources.publisher import Publisher
from spcl.sources.redis_streams import RedisHub
from spcl.sources.schema import Kind, Schema
from spcl.sources.wire import Letter, decode, encode_batch, encode_end, encode_start

__all__ = [
    "HUBS",
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
    "Kind",
    "Letter",
    "Message",
    "Publisher",
    "RedisHub",
    "Rejected",
    "ResetError",
    "Schema",
    "Source",
    "as_source",
    "check_task_name",
    "decode",
    "encode_batch",
    "encode_end",
    "encode_start",
]
