"""Routes that act on the engine for all clients: pausing, sleeping, profiling and the like.

Those of `add_development_routes` are for operators, and exist only with VLLM_SERVER_DEV_MODE; those of
`add_profiling_routes` only with VLLM_TORCH_PROFILER_DIR. JSON and error texts are those of vLLM 0.32.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from ascend_vllm.engine.async_controls import PAUSE_MODES
from ascend_vllm.entrypoints.http.errors import BodyError, json_response
from ascend_vllm.errors import AscendVllmError, EngineDeadError, RequestError, WorkerCallError

if TYPE_CHECKING:
    from ascend_vllm.engine.async_llm import AsyncLLM

# suffix of an engine's request id behind the response's: random if the client chose the id, then the prompt's index
_BEHIND_ANSWER_ID = re.compile(r"(-[0-9a-f]{8})?-\d+")
_CONFIG_FORMATS = ("text", "json")


def add_development_routes(app: FastAPI, engine: AsyncLLM) -> None:
    """Adds the routes of development mode."""

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        return json_response({"success": await engine.reset_prefix_cache()})

    _add_pausing_routes(app, engine)
    _add_sleeping_routes(app, engine)
    _add_inspection_routes(app, engine)


def add_profiling_routes(app: FastAPI, engine: AsyncLLM) -> None:
    """Adds the routes that start and stop the workers' profilers."""

    @app.post("/start_profile")
    async def start_profile() -> Response:
        await engine.start_profile()
        return Response(status_code=200)

    @app.post("/stop_profile")
    async def stop_profile() -> Response:
        await engine.stop_profile()
        return Response(status_code=200)


def _add_pausing_routes(app: FastAPI, engine: AsyncLLM) -> None:
    @app.post("/pause")
    async def pause(http: Request) -> Response:
        mode = _choice(http, "mode", PAUSE_MODES)
        await engine.pause_generation(mode=mode, clear_cache=_flag(http, "clear_cache", default=True))
        return json_response({"status": "paused"})

    @app.post("/resume")
    async def resume() -> Response:
        await engine.resume_generation()
        return json_response({"status": "resumed"})

    @app.get("/is_paused")
    async def is_paused() -> Response:
        return json_response({"is_paused": await engine.is_paused()})

    @app.post("/abort_requests")
    async def abort_requests(http: Request) -> Response:
        body = await _read_object(http)
        wanted = body.get("request_ids")
        running = await engine.request_ids_of_all()
        if wanted is None:
            await engine.abort_everywhere(running)
            return json_response({"status": "aborted", "aborted": len(running)})
        if not isinstance(wanted, list) or not all(isinstance(id_, str) for id_ in wanted):
            raise BodyError("request_ids must be a list of strings", "request_ids")
        await engine.abort_everywhere(matching_ids(running, wanted))
        return json_response({"status": "aborted", "aborted": len(wanted)})


def _add_sleeping_routes(app: FastAPI, engine: AsyncLLM) -> None:
    @app.post("/sleep")
    async def sleep(http: Request) -> Response:
        level = _integer(http, "level", default=1)
        await engine.sleep(level, _choice(http, "mode", PAUSE_MODES))
        return json_response({"status": "sleeping", "level": level})

    @app.post("/wake_up")
    async def wake_up(http: Request) -> Response:
        tags = http.query_params.getlist("tags") or None
        await engine.wake_up(tags)
        return json_response({"status": "awake", "tags": tags})

    @app.get("/is_sleeping")
    async def is_sleeping() -> Response:
        return json_response({"is_sleeping": await engine.is_sleeping()})


def _add_inspection_routes(app: FastAPI, engine: AsyncLLM) -> None:
    @app.get("/server_info")
    async def server_info(http: Request) -> Response:
        as_text = _choice(http, "config_format", _CONFIG_FORMATS) == "text"
        return json_response({"vllm_config": str(engine.config) if as_text else msgspec.to_builtins(engine.config)})

    @app.post("/collective_rpc")
    async def collective_rpc(http: Request) -> Response:
        call = await _read_object(http)
        method, args, kwargs = call.get("method"), call.get("args") or [], call.get("kwargs") or {}
        timeout = call.get("timeout")
        if not method:
            raise BodyError("Missing 'method' in request body")
        if not (isinstance(method, str) and isinstance(args, list) and isinstance(kwargs, dict)):
            raise BodyError("'method' must be a string, 'args' a list and 'kwargs' an object")
        if not (timeout is None or isinstance(timeout, int | float)):
            raise BodyError("'timeout' must be a number of seconds")
        try:
            results = await engine.collective_rpc(method, timeout, args, kwargs)
        except (RequestError, EngineDeadError):
            raise
        except AscendVllmError as error:
            raise WorkerCallError(f"Call to collective_rpc method failed: {error}") from error
        return json_response({"results": results})


def matching_ids(running: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """The engine's request ids that match the ids a client gave.

    Args:
        running: ids of running requests in the engine.
        wanted: engine ids, response ids ("cmpl-7"), or the ids that clients chose for them ("7").

    Example::

        matching_ids(["cmpl-7-0123abcd-0", "cmpl-77-0"], ["7"])  # ["cmpl-7-0123abcd-0"]
    """
    asked = set(wanted)
    found = []
    for engine_id in running:
        names = {engine_id}
        end = _BEHIND_ANSWER_ID.search(engine_id)
        while end is not None:
            if end.end() == len(engine_id):
                answer_id = engine_id[: end.start()]
                names |= {answer_id, answer_id.partition("-")[2]}
            end = _BEHIND_ANSWER_ID.search(engine_id, end.start() + 1)
        if names & asked:
            found.append(engine_id)
    return found


async def _read_object(http: Request) -> dict[str, Any]:
    """The body, a JSON object.

    Raises:
        BodyError: it is not a JSON object.
    """
    try:
        body = msgspec.json.decode(await http.body())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BodyError("Invalid JSON format") from None
    if not isinstance(body, dict):
        raise BodyError("Request body must be a JSON object")
    return body


def _choice(http: Request, name: str, choices: tuple[str, ...]) -> str:
    """A query parameter with a set of values; the first is the default."""
    value = http.query_params.get(name, choices[0])
    if value not in choices:
        quoted = [repr(choice) for choice in choices]
        listed = f"{', '.join(quoted[:-1])} or {quoted[-1]}"
        raise _wrong_query(name, "literal_error", f"Input should be {listed}", value)
    return value


def _integer(http: Request, name: str, *, default: int) -> int:
    value = http.query_params.get(name, str(default))
    if not re.fullmatch(r"-?[0-9]{1,9}", value):
        raise _wrong_query(name, "int_parsing", "Input should be a valid integer", value)
    return int(value)


def _flag(http: Request, name: str, *, default: bool) -> bool:
    value = http.query_params.get(name, str(default)).lower()
    if value not in ("true", "1", "false", "0"):
        raise _wrong_query(name, "bool_parsing", "Input should be a valid boolean", value)
    return value in ("true", "1")


def _wrong_query(name: str, kind: str, message: str, value: str) -> BodyError:
    location = f"query.{name}"
    finding = {"type": kind, "loc": location, "msg": message, "input": value[:100]}
    return BodyError(f"1 validation error:\n  {finding}", location)
