"""GET /ui: serves the page's static files, and tells the page what the server can do."""

from __future__ import annotations

import functools
import hashlib
import pathlib
from typing import TYPE_CHECKING, NamedTuple

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ascend_vllm.entrypoints.http.errors import error_body, json_response

if TYPE_CHECKING:
    from ascend_vllm.config.engine import EngineConfig
    from ascend_vllm.entrypoints.openai.serving_settings import ServingSettings

_DIRECTORY = pathlib.Path(__file__).resolve().parent / "static"
_PAGE = "index.html"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # browsers ask each time whether a file has changed, so that a new version of the server has its own page
    "Cache-Control": "no-cache",
    # images of a conversation are data: URLs; forms are never sent by the browser itself
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class _StaticFile(NamedTuple):
    """A file of the page; `etag` is a digest of its contents in quotes."""

    content: bytes
    media_type: str
    etag: str


@functools.cache
def _static_files() -> dict[str, _StaticFile]:
    """All files by name, read when the page is asked for the first time."""
    files = {}
    for path in _DIRECTORY.iterdir():
        if path.suffix in _MEDIA_TYPES:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            files[path.name] = _StaticFile(content, _MEDIA_TYPES[path.suffix], etag)
    return files


def _answer(name: str, http: Request) -> Response:
    """The file of this name: 304 if the browser has it, 404 if there is none."""
    file = _static_files().get(name)
    if file is None:
        return json_response(error_body(f"The page /ui has no file `{name}`.", "NotFoundError", 404), 404)
    headers = {**_HEADERS, "ETag": file.etag}
    # "W/" is put before it by proxies that compress
    known = {tag.strip().removeprefix("W/") for tag in http.headers.get("if-none-match", "").split(",")}
    if file.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


def add_ui_routes(app: FastAPI, settings: ServingSettings, config: EngineConfig) -> None:
    """Adds /ui, its files, and /ui/server.json, which needs a key where there is one.

    Args:
        app: of the OpenAI server.
        settings: of its answers.
        config: of the engine.
    """

    @app.get("/ui", include_in_schema=False)
    async def ui_page(http: Request) -> Response:
        return _answer(_PAGE, http)

    @app.get("/ui/server.json", include_in_schema=False)
    async def ui_server() -> Response:
        parsers = settings.parsers
        return json_response(
            {
                "generates": config.model.pooler is None,
                "input_modalities": ["text"],
                "auto_tool_choice": parsers.auto_tool_choice and parsers.tool_parser is not None,
                "max_logprobs": config.model.max_logprobs,
                "max_model_len": settings.max_model_len,
            }
        )

    @app.get("/ui/{name}", include_in_schema=False)
    async def ui_file(name: str, http: Request) -> Response:
        return _answer(name, http)
