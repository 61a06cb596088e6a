"""GET /openapi.json, which describes the routes of a server, and GET /docs, a page that shows it.

All that the page loads comes from the server itself: Swagger UI's files are those in the package fastapi-offline. The
page and these files are the same on every server, so they need no key; /openapi.json does, and the page asks for it.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, Response
from starlette.concurrency import run_in_threadpool

# Swagger UI's
_ASSETS = ("swagger-ui.css", "swagger-ui-bundle.js")
# of the page and all that it loads but the document
PAGES = frozenset({"/docs", "/redoc", *(f"/docs/{name}" for name in _ASSETS)})


def add_docs(app: FastAPI, describe: Callable[[], dict[str, Any]]) -> None:
    """Adds the routes.

    Args:
        app: the application, complete when the document is first asked for.
        describe: makes the document, once.
    """

    @functools.cache
    def document() -> bytes:
        return json.dumps(describe(), ensure_ascii=False, separators=(",", ":")).encode()

    async def openapi(_http: Request) -> Response:
        # takes a while the first time
        return Response(await run_in_threadpool(document), media_type="application/json")

    async def docs(_http: Request) -> Response:
        return FileResponse(str(importlib.resources.files(__package__) / "docs.html"), media_type="text/html")

    def asset(name: str) -> Callable[[Request], Any]:
        async def answer(_http: Request) -> Response:
            return FileResponse(str(importlib.resources.files("fastapi_offline") / "static" / name))

        return answer

    # at /redoc, too: ReDoc itself loads a picture from another server
    routes = {"/openapi.json": openapi, "/docs": docs, "/redoc": docs}
    for path, answer in (routes | {f"/docs/{name}": asset(name) for name in _ASSETS}).items():
        app.add_api_route(path, answer, methods=["GET", "HEAD"], include_in_schema=False)
