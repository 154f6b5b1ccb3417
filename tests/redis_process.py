"""A Redis server of one's own, which can be killed and started again."""

import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
import redis

needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")


class RedisProcess:
    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        self._command += ["--appendonly", "yes", "--save", "", "--loglevel", "warning"]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        client = redis.Redis.from_url(self.url)
        deadline = time.monotonic() + 20.0
        while True:
            try:
                client.ping()
            except redis.RedisError:
                assert time.monotonic() < deadline, "Redis does not start"
                time.sleep(0.02)
            else:
                return

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
