"""A service outlives what its hub, its publishers and its disk do wrong."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from list_hub import ListHub
from serving import HUB, knows, publish, running, settings_of, task, until
from spcl.serve import ServeSettings, TaskEvent
from spcl.sources import Data, HubError


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., ServeSettings]:
    return partial(settings_of, tmp_path)


class SlowlyFailingHub(ListHub):
    """Takes its time to find out that it is down."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.error = error

    def read(self, after: Mapping[str, str | None], count: int, wait: float) -> dict[str, list[tuple[str, Data]]]:
        if self.is_down:
            time.sleep(0.1)
            raise self.error("it is down")
        return super().read(after, count, wait)


@pytest.mark.parametrize("error", [HubError, PermissionError])
def test_an_outage_that_is_found_out_slowly_is_no_silence(
    error: type[Exception], tmp_path: Path, make: Callable[..., ServeSettings]
) -> None:
    hub = HUB[str(tmp_path)] = SlowlyFailingHub(error)
    names = [f"task-{number:02}" for number in range(16)]
    for name in names:
        publish(hub, name, 1)
    with running(make(tasks={"end": "silence", "silence_seconds": 0.7})) as (service, events):
        until(lambda: all(knows(service, name) and task(service, name).batches == 1 for name in names))
        hub.is_down = True
        time.sleep(1.8)
        assert all(task(service, name).state != "finished" for name in names)
        hub.is_down = False
        until(lambda: all(task(service, name).state == "finished" for name in names))
    assert sum(isinstance(event, TaskEvent) and event.kind == "recovered" for event in events) == 16
