"""uvicorn on a socket that was bound before; ends when the engine dies."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import pathlib
import signal
import socket
import ssl
from collections.abc import AsyncGenerator, Collection, Generator
from typing import TYPE_CHECKING, Any, cast

import uvicorn

from ascend_vllm import envs
from ascend_vllm.args.tables.server import HttpArgs
from ascend_vllm.entrypoints.http import tls
from ascend_vllm.entrypoints.http.protocol import (
    DEFAULT_MAX_HEAD_BYTES,
    DEFAULT_MAX_HEADERS,
    HttpLimits,
    LimitedHttpProtocol,
    StartLimiter,
)
from ascend_vllm.entrypoints.http.start_page import base_url
from ascend_vllm.entrypoints.http.validation import BodyLimitMiddleware
from ascend_vllm.errors import ConfigError, ServerStoppingError
from ascend_vllm.log_lines import keep_safe
from ascend_vllm.logger import init_logger

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from ascend_vllm.engine.api_group import ApiGroup
    from ascend_vllm.engine.async_llm import AsyncLLM

logger = init_logger(__name__)

# seconds for requests that the shutdown ends to send their error, before they are cancelled
_CANCEL_GRACE_S = 2
# Idle connections are kept this much longer than configured, since clients with the same timeout (httpx: 5 s) would
# otherwise send requests on connections that are being closed.
_KEEP_ALIVE_GRACE_S = 1
# connections that may wait to be accepted: bursts of clients queue there instead of being refused
_BACKLOG = 2048
# uvloop accepts one connection per listening descriptor and iteration of the loop. With a single one, clients that
# connect and disconnect quickly could delay all others.
_NUM_LISTENERS = 8
# loggers whose lines may contain clients' data
_LOGGERS = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi", "asyncio")
_TLS_POLL_S = 1.0
# only the server's exit waits for this poll: open streams get the engine's error at once
_ENGINE_POLL_S = 0.2


class HttpServer(uvicorn.Server):
    """A uvicorn server for one application.

    Args:
        app: the application.
        args: encryption, limits, and the name of the host for the log.
        sock: a bound socket.
        log_level: of uvicorn.
        access_log: one line per request.
        example: a command to show once the server listens, with {url} for its address.
    """

    def __init__(
        self,
        app: ASGIApp,
        args: HttpArgs,
        sock: socket.socket,
        *,
        log_level: str,
        access_log: bool,
        example: str | None = None,
    ) -> None:
        limits = HttpLimits(
            max_head_bytes=args.h11_max_incomplete_event_size or DEFAULT_MAX_HEAD_BYTES,
            max_headers=args.h11_max_header_count or DEFAULT_MAX_HEADERS,
            client_timeout_s=args.client_timeout_s,
        )
        config = uvicorn.Config(
            # the outermost middleware, so that the limit applies to all that read the body
            BodyLimitMiddleware(app, args.max_body_bytes),
            host=args.host or "0.0.0.0",
            port=0 if args.uds else sock.getsockname()[1],
            uds=args.uds,
            # called by uvicorn like a protocol class
            http=cast("Any", functools.partial(LimitedHttpProtocol, limits=limits, start_limiter=StartLimiter())),
            ws="none",
            # --log-config-file was applied when the program began
            log_config=uvicorn.config.LOGGING_CONFIG if args.log_config_file is None else None,
            log_level=log_level,
            access_log=access_log,
            backlog=_BACKLOG,
            timeout_keep_alive=envs.http_timeout_keep_alive_s() + _KEEP_ALIVE_GRACE_S,
            timeout_graceful_shutdown=math.ceil(args.shutdown_timeout) + _CANCEL_GRACE_S,
            ssl_keyfile=args.ssl_keyfile,
            ssl_certfile=args.ssl_certfile,
            ssl_ca_certs=args.ssl_ca_certs,
            ssl_cert_reqs=args.ssl_cert_reqs,
            ssl_ciphers=args.ssl_ciphers or tls.DEFAULT_CIPHERS,
            server_header=False,
        )
        super().__init__(config)
        keep_safe(*_LOGGERS)
        self._app = app
        self._sock = sock
        self._args = args
        self._example = example
        self._has_started = asyncio.Event()
        self._engine: AsyncLLM | None = None
        self._tls_files = _tls_files(args) if args.enable_ssl_refresh else {}
        if args.disable_access_log_for_endpoints:
            paths = {path.strip() for path in args.disable_access_log_for_endpoints.split(",")}
            logging.getLogger("uvicorn.access").addFilter(functools.partial(_is_logged, paths))

    async def serve_engine(self, engine: AsyncLLM) -> bool:
        """Serve until a signal or the engine's death.

        Returns:
            Whether the engine is still alive.
        """
        self._engine = engine
        pollers = [asyncio.create_task(self._poll_engine(engine))]
        if self._tls_files:
            pollers.append(asyncio.create_task(self._poll_tls_files()))
        try:
            async with self._answering_others(engine.group):
                await self.serve([self._sock, *(self._sock.dup() for _ in range(_NUM_LISTENERS - 1))])
        finally:
            for poller in pollers:
                poller.cancel()
            await asyncio.gather(*pollers, return_exceptions=True)
        return not engine.errored

    @contextlib.asynccontextmanager
    async def _answering_others(self, group: ApiGroup | None) -> AsyncGenerator[None, None]:
        """Within, this API-server process answers others, if there are any.

        Only the first one logs its start, and the others listen after it.
        """
        if group is None:
            yield
            return
        if group.is_first:
            from ascend_vllm.entrypoints.http.forwarding import answering_forwarded

            group.on_http = answering_forwarded(self._app, self.server_state.tasks)
            group.handlers["wait_started"] = self._has_started.wait
        else:
            logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
            self._example = None
            await group.ask(0, "wait_started")
        async with group.answering():
            yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and log the address, which uvicorn does not do for sockets that it is passed."""
        if self.config.ssl is not None:
            # whatever the system's default is
            self.config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
        await super().startup(sockets)
        if self.started:
            self._log_started_message((sockets or [])[:1])
            self._show_example()
            self._has_started.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for open requests until --shutdown-timeout, then end them."""
        end = asyncio.create_task(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()

    async def _end_requests(self) -> None:
        await asyncio.sleep(self._args.shutdown_timeout)
        if self._engine is not None and self.server_state.tasks:
            logger.warning(
                "The %g s of --shutdown-timeout are over: %d requests end early",
                self._args.shutdown_timeout,
                len(self.server_state.tasks),
            )
            self._engine.refuse(ServerStoppingError())

    def _show_example(self) -> None:
        if self._example is None:
            return
        command = self._example.replace("{url}", base_url(self._args, self._sock))
        if self._args.uds is not None:
            command = command.replace("curl ", f"curl --unix-socket {self._args.uds} ", 1)
        print(f"\nThe demo model is ready. Try:\n\n  {command}\n", flush=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Shut down gracefully at SIGINT and SIGTERM.

        uvicorn's own method raises the signal again at the end, which would kill the process before the engine is
        shut down and change the exit code.
        """
        loop = asyncio.get_running_loop()
        handled = (signal.SIGINT, signal.SIGTERM)
        for number in handled:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    async def _poll_engine(self, engine: AsyncLLM) -> None:
        """End the server soon after the engine's death, unless VLLM_KEEP_ALIVE_ON_ENGINE_DEATH is set."""
        while not engine.errored:
            await asyncio.sleep(_ENGINE_POLL_S)
        if envs.keep_alive_on_engine_death():
            logger.error("The engine is dead; the server stays, as VLLM_KEEP_ALIVE_ON_ENGINE_DEATH says")
            return
        logger.error("The engine is dead; the server ends")
        self.should_exit = True

    async def _poll_tls_files(self) -> None:
        """Reload key and certificates when they have changed, for new connections."""
        while True:
            await asyncio.sleep(_TLS_POLL_S)
            found = {path: _modified(path) for path in self._tls_files}
            context = self.config.ssl
            if (
                context is None
                or self._args.ssl_certfile is None
                or None in found.values()
                or found == self._tls_files
            ):
                continue
            try:
                tls.load_files(context, self._args.ssl_certfile, self._args.ssl_keyfile, self._args.ssl_ca_certs)
            except (OSError, ConfigError) as error:
                # only one of the files may be new yet: try again at the next poll
                logger.warning("The TLS files have changed but cannot be used yet: %s", error)
            else:
                self._tls_files = found
                logger.info("The TLS files have changed and were read again")


def _tls_files(args: HttpArgs) -> dict[str, float | None]:
    """The TLS files of the flags, with their modification times."""
    paths = (args.ssl_keyfile, args.ssl_certfile, args.ssl_ca_certs)
    return {path: _modified(path) for path in paths if path is not None}


def _modified(path: str) -> float | None:
    try:
        return pathlib.Path(path).stat().st_mtime
    except OSError:  # it may be being replaced
        return None


def _is_logged(paths: Collection[str], record: logging.LogRecord) -> bool:
    """A filter for uvicorn's access log: false for requests to these paths."""
    arguments = record.args
    # address of the client, method, path with query, version, status
    if not isinstance(arguments, tuple) or len(arguments) < 3:
        return True
    return str(arguments[2]).partition("?")[0] not in paths
