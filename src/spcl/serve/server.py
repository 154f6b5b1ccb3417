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

from spcl._util.signals import handling
from spcl.errors import SpclError
from spcl.serve.app import Connections, FewerRecords, Listener, check_address, make_app
from spcl.serve.events import History
from spcl.serve.service import Service
from spcl.serve.settings import ServeSettings

BACKLOG = 2048
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
        self.service = Service(settings, on_event=history.add, predicts=True, standby=standby)
        self._connections = Connections()
        # not in run, which several threads may call at once: FastAPI changes warning filters, which all threads share
        self._app = make_app(self.service, history, settings, self._connections, token)

    def run(self, on_ready: Callable[[str], object] = lambda address: None) -> None:
        """Train in this thread and answer requests in another, until stopped; then save.

        SIGTERM and Ctrl-C stop it, if this is the main thread; further signals change nothing.

        Args:
            on_ready: receives the address of the page once requests are accepted.
        """
        with handling([signal.SIGINT, signal.SIGTERM], lambda *_: self.stop()):
            listener = self._listen()
            if listener is not None:
                with listener, _answering(self._app, listener):
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
                return _listener(host, port, self._connections)
            except OSError as error:
                if not self._standby or error.errno != errno.EADDRINUSE:
                    reason = error.strerror or str(error)
                    raise SpclError(f"the service cannot listen on {host}, port {port}: {reason}") from None
            self.service.stand_by(f"port {port} of {host} is in use")
            time.sleep(RETRY_SECONDS)
        return None


@contextmanager
def _answering(app: FastAPI, listener: socket.socket) -> Iterator[None]:
    """Answer requests in a thread of its own within the block."""
    config = uvicorn.Config(
        app,
        loop="asyncio",  # others do not accept by the listener's limits
        http="h11",
        ws="none",
        proxy_headers=False,  # the guard knows connections by their real addresses
        backlog=BACKLOG,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=CLOSING_SECONDS,
    )
    FewerRecords().attach()
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http", daemon=True)
    thread.start()
    try:
        yield
    finally:
        app.state.feed.close()
        server.should_exit = True
        thread.join(2 * CLOSING_SECONDS)


def _listener(host: str, port: int, connections: Connections) -> Listener:
    """Return a listening socket that names its protocol: else asyncio leaves Nagle's algorithm on, 40 ms a request."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = Listener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.connections = connections
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"
