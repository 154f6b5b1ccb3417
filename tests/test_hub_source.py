"""Many tasks of a hub are read together, and messages are decoded without trust in those before."""

import json
import struct
import threading
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

import pytest
import torch

from list_hub import ListHub, batch, source_of
from spcl.errors import DataError
from spcl.sources import Entry, FolderHub, Publisher, Schema, decode, encode_batch
from spcl.streams import LiveStream

SCHEMA = Schema.of(classes=2)


class ObservedHub(ListHub):
    """Notes which threads read, how many tasks at once, and refuses to read some."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()
        self.most_tasks = 0
        self.unreadable: set[str] = set()

    def read(
        self, after: Mapping[str, str | None], count: int, wait: float, max_bytes: int = 0
    ) -> dict[str, Sequence[Entry]]:
        self.threads.add(threading.get_ident())
        self.most_tasks = max(self.most_tasks, len(after))
        if self.unreadable & after.keys():
            raise PermissionError("not for you")
        return super().read(after, count, wait)


def filled(tasks: int, batches: int) -> tuple[ObservedHub, list[str]]:
    hub, names = ObservedHub(), [f"task-{number}" for number in range(tasks)]
    publisher = Publisher(hub)
    for name in names:
        for number in range(batches):
            publisher.publish(name, *batch(number))
    return hub, names


@pytest.mark.parametrize("capacity", [1, 2, 5, 8])
def test_one_thread_reads_all_tasks_of_a_hub_at_most_capacity_ahead(capacity: int) -> None:
    hub, names = filled(16, 12)
    sources = {name: source_of(hub, name, schema=SCHEMA) for name in names}
    seen: dict[str, list[float]] = {name: [] for name in names}
    with LiveStream(sources, capacity=capacity, together=True, patience=10.0) as stream:
        for step, moment in enumerate(islice(stream, 12)):
            for name, (x, _) in moment.batches.items():
                seen[name].append(float(x[0, 0]))
            assert all(read <= step + 1 + capacity for read in hub.furthest.values())
    assert seen == {name: list(range(12)) for name in names}
    assert len(hub.threads) == 1
    assert hub.most_tasks == 16


def test_a_stream_that_cannot_be_read_does_not_stop_the_others() -> None:
    hub, names = filled(3, 4)
    hub.unreadable = {"task-1"}
    outages: list[tuple[str, type]] = []
    sources = {
        name: source_of(hub, name, schema=SCHEMA, on_outage=lambda task, error: outages.append((task, type(error))))
        for name in names
    }
    with LiveStream(sources, patience=0.5) as stream:
        assert sum(len(moment.batches) for moment in stream) == 8
        assert stream.delivered == {"task-0": 4, "task-2": 4}
        hub.unreadable = set()
        assert sum(len(moment.batches) for moment in stream) == 4
    assert outages == [("task-1", PermissionError), ("task-1", type(None))]


def test_a_known_header_lets_no_wrong_body_in() -> None:
    first = encode_batch(batch(1), SCHEMA)
    length = int.from_bytes(first[:8], "little")
    second = first.replace(torch.ones(6).numpy().tobytes(), torch.full((6,), 2.0).numpy().tobytes())
    for data, expected in ((first, 1.0), (second, 2.0), (bytearray(second), 2.0)):
        letter = decode(data)
        assert letter.batch is not None
        assert letter.batch[0].tolist() == [[expected] * 3] * 2
    for wrong in (first[:-1], first + b"\0", first[: 8 + length], first[:7], b""):
        with pytest.raises(DataError, match="no safetensors"):
            decode(wrong)


def test_tensors_may_be_changed_and_begin_at_any_byte() -> None:
    x, y = torch.arange(6, dtype=torch.float32).view(2, 3), torch.tensor([0, 1])
    for padding in range(8):
        entries = {
            "x": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "y": {"dtype": "I64", "shape": [2], "data_offsets": [24, 40]},
        }
        header = json.dumps(entries).encode() + b" " * padding
        letter = decode(struct.pack("<Q", len(header)) + header + x.numpy().tobytes() + y.numpy().tobytes())
        assert letter.batch is not None
        found = letter.batch[0]
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, x)
        assert torch.equal(letter.batch[1], y)
        assert found.data_ptr() % 4 == letter.batch[1].data_ptr() % 8 == 0
        found += 1
        assert torch.equal(found, x + 1)


def test_files_of_any_size_are_read_whole_and_apart(tmp_path: Path) -> None:
    hub = FolderHub(tmp_path)
    contents = [bytes([number]) * size for number, size in enumerate((1, 0, 2**16 - 1, 2**16, 2**16 + 1, 300_000, 7))]
    for content in contents:
        hub.append("camera", content)
    found = hub.read({"camera": None}, len(contents), 0.0, 2**20)["camera"]
    assert [bytes(data) for _, data in found] == contents
