"""A service with its HTTP interface in one process: the learner in the calling thread, requests in another."""

import errno
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from spcl.errors import SpclError
from spcl.serve.api import Api
from spcl.serve.app import make_app
from spcl.serve.guard import check_address
from spcl.serve.history import History
from spcl.serve.metrics import Metrics
from spcl.serve.predictor import Predictor
from spcl.serve.service import Service
from spcl.serve.settings import ServeSettings

__all__ = ["Server"]

CONNECTIONS = 256
"""Connections at a time, more get 503: a service that is flooded keeps training."""

CLOSING_SECONDS = 3
RETRY_SECONDS = 0.2


class Server:
    """A service and its HTTP interface.

    Args:
        settings: of the service.
        standby: wait while another instance uses the same state, then take over from its checkpoint.
    """

    def __init__(self, settings: ServeSettings, *, standby: bool = False) -> None:
        self._http = settings.http
        self._standby = standby
        self._is_stopped = False
        token = settings.http.token()
        check_address(self._http.host, token)
        history = History()
        self.service = Service(settings, on_event=history.add, make_predictor=Predictor.of, standby=standby)
        metrics = Metrics(history.totals, self.service.status)
        self._api = Api(self.service, settings.inputs.spec(), history, metrics)
        # not in run, which several threads may call at once: FastAPI changes warning filters, which all threads share
        self._app = make_app(self._api, token=token, max_bytes=self._http.max_bytes)

    def run(self, on_ready: Callable[[str], object] = lambda address: None) -> None:
        """Train in this thread and answer requests in another, until stopped; then save.

        SIGTERM and Ctrl-C stop it, if this is the main thread; those that follow change nothing.

        Args:
            on_ready: receives the address of the page once requests are accepted.
        """
        with _stopped_by_signals(self.stop):
            listener = self._listen()
            if listener is not None:
                with listener, _answering(self._app, listener, self._api.close):
                    on_ready(_address(listener))
                    self.service.run()

    def stop(self) -> None:
        """Let :meth:`run` save and return; may be called from any thread, and repeatedly."""
        self._is_stopped = True
        self.service.stop()

    def _listen(self) -> socket.socket | None:
        """Open the port before anything is trained; a standby waits for the port of the service that it follows."""
        host, port = self._http.host, self._http.port
        while not self._is_stopped:
            try:
                return _listener(host, port)
            except OSError as error:
                if not self._standby or error.errno != errno.EADDRINUSE:
                    reason = error.strerror or str(error)
                    raise SpclError(f"the service cannot listen on {host}, port {port}: {reason}") from None
            time.sleep(RETRY_SECONDS)
        return None


@contextmanager
def _stopped_by_signals(stop: Callable[[], object]) -> Iterator[None]:
    """Call ``stop`` on SIGINT and SIGTERM, on each one that comes; outside of the main thread do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _answering(app: FastAPI, listener: socket.socket, close: Callable[[], object]) -> Iterator[None]:
    """Answer requests in a thread of its own within the block."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=CLOSING_SECONDS,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http", daemon=True)
    thread.start()
    try:
        yield
    finally:
        close()
        server.should_exit = True
        thread.join(2 * CLOSING_SECONDS)


def _listener(host: str, port: int) -> socket.socket:
    """Return a listening socket that names its protocol: else asyncio leaves Nagle's algorithm on, 40 ms a request."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(CONNECTIONS)
    except OSError:
        listener.close()
        raise
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"
