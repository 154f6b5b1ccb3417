"""Hubs of every kind, for tests of what all of them promise."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from list_hub import ListHub
from redis_process import RedisProcess, needs_redis
from spcl.sources import FolderHub, Hub

LASTING = ["folder", pytest.param("redis", marks=needs_redis)]


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["list", *LASTING])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Hub]]:
    """Opens the same hub, as another process would."""
    yield from opened(request, tmp_path)


@pytest.fixture(params=LASTING)
def reopen_lasting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Hub]]:
    """Opens the same hub of this package, as another process would."""
    yield from opened(request, tmp_path)


def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Hub]]:
    if request.param == "list":
        hub = ListHub()
        yield lambda: hub
    elif request.param == "folder":
        yield lambda: FolderHub(tmp_path)
    else:
        with request.getfixturevalue("redis_server").hubs(tmp_path.name) as reopen:
            yield reopen
