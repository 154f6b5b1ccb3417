"""A Redis server of one's own, which can be killed and started again."""

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Self

import pytest
import redis

from spcl.sources import RedisHub

needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")


class RedisProcess:
    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        self._command += ["--appendonly", "yes", "--appendfsync", "always", "--save", "", "--loglevel", "warning"]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 20.0
        while not self._answers():
            assert time.monotonic() < deadline, "Redis does not start"
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with redis.Redis.from_url(self.url) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def protect(self, password: str) -> None:
        """Let nobody in without a password."""
        with redis.Redis.from_url(self.url) as client:
            client.config_set("requirepass", password)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @contextmanager
    def hubs(self, prefix: str = "spcl") -> Iterator[Callable[[], RedisHub]]:
        """Opens hubs, as other processes would; at the end they are closed, and nothing else may be connected."""
        with self.unused_at_the_end(), ExitStack() as stack:
            yield lambda: stack.enter_context(closing(RedisHub(self.url, prefix)))

    @contextmanager
    def unused_at_the_end(self) -> Iterator[None]:
        """Fail if connections are left open: the garbage collector would warn of them in any later test."""
        yield
        deadline = time.monotonic() + 5.0
        with redis.Redis.from_url(self.url) as client:
            while len(left := client.client_list()) > 1:
                assert time.monotonic() < deadline, f"connections are left open: {left}"
                time.sleep(0.01)
