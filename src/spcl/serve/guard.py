"""What every request must pass first: the token, the size of its body, and that it comes from no other web site."""

import secrets
from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spcl.errors import SpclError

__all__ = ["Guard", "check_address", "is_loopback"]


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
    - Without one, requests must be addressed to this machine and come from no other web site (403): a browser on this
      machine would otherwise let any page that it shows call the service.
    - A body of more than ``max_bytes`` is refused (413), by its announced length or when it exceeds it.

    Args:
        app: the application.
        token: the token; None on a loopback address.
        max_bytes: the largest body.
        open_paths: paths that need no token; one that ends with ``/`` stands for all below it.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, max_bytes: int, open_paths: Iterable[str]) -> None:
        self.app = app
        self._token = None if token is None else token.encode()
        self._max_bytes = max_bytes
        self._open_paths = tuple(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self.app(scope, self._limited(receive), send)

    def _refusal(self, path: str, headers: Headers) -> JSONResponse | None:
        if self._token is None:
            if not _is_local(headers):
                return _error(403, "without a token, only requests from this machine and its own page are answered")
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

    def _limited(self, receive: Receive) -> Receive:
        """Count the bytes of a body that comes without its length."""
        count = 0

        async def counted() -> Message:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > self._max_bytes:
                raise HTTPException(413, self._too_large("more"))
            return message

        return counted

    def _too_large(self, found: str) -> str:
        return f"the body has {found}, but at most {self._max_bytes:,} bytes are read; send fewer samples at once"


def _is_local(headers: Headers) -> bool:
    """Return whether the request names this machine, and its origin, which browsers send, is the service itself."""
    host = headers.get("host", "")
    origin = headers.get("origin")
    try:
        same = origin is None or urlsplit(origin).netloc == host
        return same and is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:  # such as half an IPv6 address
        return False


def _error(status: int, text: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": text}, status, headers)
