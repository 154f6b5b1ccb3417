"""A service with its HTTP interface in one process: the learner in the calling thread, requests in another.

First the server; then what every connection and request must pass before the API, and the page.
"""

import asyncio
import errno
import logging
import resource
import secrets
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from importlib.resources import files
from ipaddress import ip_address
from typing import Any, Literal
from urllib.parse import urlsplit

import uvicorn
from anyio import CapacityLimiter
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spcl import __version__
from spcl._util.signals import handling
from spcl.errors import SpclError
from spcl.serve.api import PREDICTIONS_AT_ONCE, STATUS_SECONDS, Feed, Metrics, router
from spcl.serve.events import History
from spcl.serve.service import NotRunningError, Service
from spcl.serve.session import StorageError, TaskStateError, UnknownTaskError
from spcl.serve.settings import ServeSettings

_log = logging.getLogger(__name__)

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


def _listener(host: str, port: int, connections: "Connections") -> "Listener":
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


# -- connections

CONNECTIONS = 256
"""Connections at a time, half of them at most of one address; never more than half of the process's descriptors."""

SECONDS = {"request": 10.0, "body": 60.0, "reader": 60.0}
"""How long a client may take to send the line and headers of a request, all of its body, and to read an answer."""

PERIOD_SECONDS = 0.5
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 5\r\nContent-Length: 0\r\n\r\n"
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
LOGGED, LOG_SECONDS = 5, 60.0

Awaited = Literal["request", "body", "reader"]


class _Connection:
    """An open connection, and what its client keeps the service waiting for; None while the service is at work."""

    def __init__(self, accepted: socket.socket, host: str) -> None:
        self.socket = accepted
        self.host = host
        self.is_ending = False
        self.awaits: Awaited | None = None
        self.since = 0.0

    def end(self) -> None:
        """Let the server see an end of the stream; it closes the descriptor itself."""
        self.is_ending = True
        with suppress(OSError):  # the client was faster
            self.socket.shutdown(socket.SHUT_RDWR)


class Connections:
    """Decides which connections are accepted, and ends those whose clients let the service wait.

    When there are too many, a new one takes the place of the one that has kept the service waiting longest: whoever
    opens connections without finishing a request only displaces others of the kind. Where all are being answered, the
    new one gets 503. Descriptors are left for checkpoints and the hub.
    """

    def __init__(self) -> None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = CONNECTIONS if descriptors < 0 else min(CONNECTIONS, descriptors // 2)
        self._open: dict[tuple[str, int], _Connection] = {}

    def may_accept(self) -> bool:
        """Return whether to take a connection from the kernel's queue now: not while one is ending to make room."""
        self._forget_closed()
        if len(self._open) < self._most:
            return True
        ending = any(each.is_ending for each in self._open.values())
        return not ending and not self._end_longest(None)

    def add(self, accepted: socket.socket, address: Any) -> bool:
        """Take a new connection in, or refuse it."""
        host, port = address[:2]
        same = sum(each.host == host and not each.is_ending for each in self._open.values())
        is_full = len(self._open) >= self._most or (same >= max(1, self._most // 2) and not self._end_longest(host))
        if is_full:
            _log.warning("refused a connection of %s: all that are open are being answered", host)
            return False
        self._open[host, port] = _Connection(accepted, host)
        self.wait(address, "request")
        return True

    def wait(self, client: Any, awaited: Awaited | None, since: float | None = None) -> None:
        """Note what the service awaits of a client, from now on or since a time; None while it has all it needs."""
        if client is not None and (found := self._open.get((client[0], client[1]))) is not None:
            found.awaits, found.since = awaited, time.monotonic() if since is None else since

    async def end_overdue(self) -> None:
        """End the connections of clients that take too long, until cancelled."""
        while True:
            now = time.monotonic()
            self._forget_closed()
            for each in self._open.values():
                if each.awaits is not None and not each.is_ending and now - each.since > SECONDS[each.awaits]:
                    each.end()
            await asyncio.sleep(PERIOD_SECONDS)

    def _forget_closed(self) -> None:
        self._open = {key: each for key, each in self._open.items() if each.socket.fileno() >= 0}

    def _end_longest(self, host: str | None) -> bool:
        """End what waits for a request longest, else for a client at all; return whether there was one."""
        waiting = [
            each
            for each in self._open.values()
            if each.awaits is not None and not each.is_ending and host in (None, each.host)
        ]
        if not waiting:
            return False
        min(waiting, key=lambda each: (each.awaits != "request", each.since)).end()
        return True


class Listener(socket.socket):
    """A listening socket that accepts what its connections have room for; the others wait in the kernel's queue."""

    connections: Connections

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection; raise BlockingIOError where the server shall ask again."""
        while True:
            if not self.connections.may_accept():
                raise BlockingIOError
            try:
                accepted, address = super().accept()
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    raise
                _log.warning("a connection cannot be accepted: %s", error.strerror)
                time.sleep(PERIOD_SECONDS)  # asyncio would log the error 2,048 times
                raise BlockingIOError from None
            accepted.setblocking(False)
            if self.connections.add(accepted, address):
                return accepted, address
            with accepted, suppress(OSError):
                accepted.send(BUSY)


class FewerRecords(logging.Filter):
    """Lets a few records a minute of every line of code pass: strangers must not be able to fill the disk."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged; the first after a silence says how many were not."""
        now, place = time.monotonic(), (record.pathname, record.lineno)
        since, count = self._counts.get(place, (now, 0))
        if now - since > LOG_SECONDS:
            if count > LOGGED:
                record.msg = f"{record.getMessage()} (and {count - LOGGED} more since the last one)"
                record.args = ()
            since, count = now, 0
        self._counts[place] = since, count + 1
        return count < LOGGED

    def attach(self) -> None:
        """Filter what requests and connections can cause, once a process."""
        for name in ("uvicorn.error", "asyncio", __name__):
            logger = logging.getLogger(name)
            if not any(isinstance(each, FewerRecords) for each in logger.filters):
                logger.addFilter(self)


# -- requests


def is_loopback(host: str) -> bool:
    """Return whether a host can be reached from this machine alone.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_address(host: str, token: str | None) -> None:
    """Refuse to be reached from other machines without a token.

    >>> check_address("0.0.0.0", None)
    Traceback (most recent call last):
    ...
    spcl.errors.SpclError: host is '0.0.0.0', which other machines can reach, but there is no token; set a token or use
    127.0.0.1
    """
    if token is None and not is_loopback(host):
        raise SpclError(
            f"host is {host!r}, which other machines can reach, but there is no token; set a token or use 127.0.0.1"
        )


class Guard:
    """ASGI middleware that refuses requests before anything of them is read.

    - With a token, all but the open paths need ``Authorization: Bearer TOKEN`` (401).
    - Without one, requests must be addressed to this machine and come from no other web site (403), by ``Origin`` and
      by ``Sec-Fetch-Site``, which browsers also send for images and links: a browser on this machine would otherwise
      let any page that it shows call the service.
    - A request with both Content-Length and Transfer-Encoding is refused and its connection closed (400): a proxy that
      reads its end elsewhere would take what follows for a request of another client.
    - A body of more than ``max_bytes`` is refused (413), by its announced length or when it exceeds it.

    It tells the connections for what a request makes the service wait, so that slow clients are cut off.

    Args:
        app: the application.
        token: the token; None on a loopback address.
        max_bytes: the largest body.
        open_paths: paths that need no token; one that ends with ``/`` stands for all below it.
        connections: that requests come over.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        max_bytes: int,
        open_paths: Iterable[str],
        connections: Connections,
    ) -> None:
        self.app = app
        self._connections = connections
        self._token = None if token is None else token.encode()
        self._max_bytes = max_bytes
        self._open_paths = tuple(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        client = scope["client"]
        self._connections.wait(client, None)
        try:
            refusal = self._refusal(scope["path"], Headers(scope=scope))
            app = self.app if refusal is None else refusal
            await app(scope, self._limited(receive, client), self._watched(send, client))
        except ClientDisconnect:
            pass  # nobody waits for an answer
        finally:
            self._connections.wait(client, "request")

    def _refusal(self, path: str, headers: Headers) -> JSONResponse | None:
        if "content-length" in headers and "transfer-encoding" in headers:
            text = "the request has both Content-Length and Transfer-Encoding; send one of them"
            return _error(400, text, {"Connection": "close"})
        if self._token is None:
            if not _is_local(headers):
                text = "without a token, only requests from this machine and its own page are answered"
                return _error(403, f"{text}; type the page's address instead of following a link")
        elif not self._is_open(path) and not self._is_authorised(headers):
            found = "a wrong token" if "authorization" in headers else "no token"
            text = f"the request has {found}; send the header 'Authorization: Bearer TOKEN'"
            return _error(401, text, {"WWW-Authenticate": "Bearer"})
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_bytes:
            return _error(413, self._too_large(f"{int(length):,} bytes"))
        return None

    def _is_open(self, path: str) -> bool:
        return any(
            path == each or (each.endswith("/") and path.startswith(each) and each != "/") for each in self._open_paths
        )

    def _is_authorised(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and secrets.compare_digest(given.strip().encode(), self._token or b"")

    def _limited(self, receive: Receive, client: object) -> Receive:
        """Count the bytes of a body that comes without its length, and the time that it takes."""
        count, began, is_complete = 0, time.monotonic(), False

        async def counted() -> Message:
            nonlocal count, is_complete
            if is_complete:  # it is asked whether the client is still there
                return await receive()
            self._connections.wait(client, "body", since=began)
            message = await receive()
            self._connections.wait(client, None)
            is_complete = not message.get("more_body", False)
            count += len(message.get("body", b""))
            if count > self._max_bytes:
                raise HTTPException(413, self._too_large("more"))
            return message

        return counted

    def _watched(self, send: Send, client: object) -> Send:
        """Note when a client does not read its answer."""

        async def watched(message: Message) -> None:
            self._connections.wait(client, "reader")
            await send(message)
            self._connections.wait(client, None)

        return watched

    def _too_large(self, found: str) -> str:
        return f"the body has {found}, but at most {self._max_bytes:,} bytes are read; send fewer samples at once"


def _is_local(headers: Headers) -> bool:
    """Return whether the request names this machine, and no browser says that another web site makes it."""
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return False
    host = headers.get("host", "")
    origin = headers.get("origin")
    try:
        same = origin is None or urlsplit(origin).netloc == host
        return same and is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:  # such as half an IPv6 address
        return False


def _error(status: int, text: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": text}, status, headers)


# -- the application

OPEN_PATHS = ("/", "/page/", "/healthz", "/readyz", "/openapi.json")
"""What needs no token, because it says nothing about the data: the page without content, health, the API's form."""

STATUSES = {NotRunningError: 503, UnknownTaskError: 404, TaskStateError: 409, StorageError: 507}
"""The status of the answer to a request that a service refuses; 422 for other errors."""

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def make_app(
    service: Service, history: History, settings: ServeSettings, connections: Connections, token: str | None
) -> FastAPI:
    """Return the application; its state has what the routes of the API depend on.

    Args:
        service: whose predictions, tasks and events are served.
        history: of its events.
        settings: of the service.
        connections: that requests come over.
        token: the bearer token that all but ``OPEN_PATHS`` need; None for none.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        watching = [asyncio.create_task(each) for each in (app.state.feed.run(), connections.end_overdue())]
        yield
        for each in watching:
            each.cancel()
            with suppress(asyncio.CancelledError):
                await each

    app = FastAPI(title="SPCL service", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.state.inputs = settings.inputs
    app.state.feed = Feed(service, history)
    app.state.metrics = Metrics(history.totals, partial(service.status, STATUS_SECONDS))
    app.state.limiter = CapacityLimiter(PREDICTIONS_AT_ONCE)
    app.include_router(router, dependencies=[] if token is None else [Depends(HTTPBearer(auto_error=False))])
    app.add_exception_handler(SpclError, _user_error)
    app.add_middleware(
        Guard, token=token, max_bytes=settings.http.max_bytes, open_paths=OPEN_PATHS, connections=connections
    )
    _add_page(app)
    return app


async def _user_error(request: Request, error: Exception) -> JSONResponse:
    """Answer with what was found and expected."""
    status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 422)
    return JSONResponse({"detail": str(error)}, status, {"Retry-After": "5"} if status == 503 else None)


def _add_page(app: FastAPI) -> None:
    contents = _page_files()

    @app.get("/", include_in_schema=False)
    def page() -> Response:
        return Response(contents["index.html"], media_type=TYPES[".html"], headers=HEADERS)

    @app.get("/page/{name}", include_in_schema=False)
    def part(name: str) -> Response:
        if name not in contents:
            return JSONResponse({"detail": f"the page has no part {name!r}"}, 404)
        return Response(contents[name], media_type=TYPES[name[name.rindex(".") :]], headers=HEADERS)


def _page_files() -> Mapping[str, bytes]:
    """Read the files of the page, and the style sheet that it shares with the report."""
    folder = files("spcl.serve") / "page"
    shared = files("spcl.results") / "report" / "templates" / "report.css"
    return {each.name: each.read_bytes() for each in (*folder.iterdir(), shared)}
