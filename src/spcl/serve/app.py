"""The web application of a service: its API, its page and its guard."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from importlib.resources import files

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer

from spcl import __version__
from spcl.errors import SpclError
from spcl.serve.api import Api
from spcl.serve.guard import Guard

__all__ = ["OPEN_PATHS", "make_app"]

OPEN_PATHS = ("/", "/page/", "/healthz", "/openapi.json")
"""What needs no token, because it says nothing about the data: the page without content, health, the API's form."""

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def make_app(api: Api, *, token: str | None, max_bytes: int) -> FastAPI:
    """Return the application.

    Args:
        api: the routes of a service.
        token: the bearer token that all but ``OPEN_PATHS`` need; None for none.
        max_bytes: the largest body of a request.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(api.watch_lags())
        yield
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching

    app = FastAPI(title="SPCL service", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.include_router(api.router(), dependencies=[] if token is None else [Depends(HTTPBearer(auto_error=False))])
    app.add_exception_handler(SpclError, _user_error)
    app.add_middleware(Guard, token=token, max_bytes=max_bytes, open_paths=OPEN_PATHS)
    _add_page(app)
    return app


async def _user_error(request: Request, error: Exception) -> JSONResponse:
    """Answer 422 with what was found and expected."""
    return JSONResponse({"detail": str(error)}, 422)


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
