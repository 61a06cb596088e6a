"""From flags to a listening HTTP server: what the two server programs have in common.

The order matters to those who start servers: the port is bound first, so that a taken port is an error before
minutes of loading; nobody can connect until the engine is ready, since only then the socket listens; and the
process ends, with an exit code that tells, when the engine dies.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import gc
import signal
import socket
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import ascend_vllm
from ascend_vllm.engine.args_server import HttpArgs
from ascend_vllm.errors import AscendVllmError, ConfigError
from ascend_vllm.logger import init_logger

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ascend_vllm.engine.args import EngineArgs
    from ascend_vllm.engine.async_llm import AsyncLLM

logger = init_logger(__name__)

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2


def bind(host: str | None, port: int) -> socket.socket:
    """A socket that owns the address but does not listen yet.

    Args:
        host: address or name; None: all addresses of the machine.
        port: 0 lets the system choose.

    Raises:
        ConfigError: the port is taken, or the address is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"--host {host} is not an address of this machine: {error}") from error
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _address_error(host, port, error) from error
    return sock


def _address_error(host: str | None, port: int, error: OSError) -> ConfigError:
    where = f"{host or '0.0.0.0'}:{port}"
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"The address {where} is already in use: another server runs there. Choose another --port."
        )
    return ConfigError(f"Cannot listen on {where}: {error.strerror}")


def serve(
    program: str,
    args: argparse.Namespace,
    http_args: HttpArgs,
    engine_args: EngineArgs,
    make_app: Callable[[AsyncLLM], FastAPI],
    **uvicorn_options: Any,
) -> int:
    """Run a server until it is told to stop or its engine dies.

    Args:
        program: what the first line of the log calls it.
        args: all flags, for the log.
        http_args: address and encryption.
        engine_args: of the engine.
        make_app: makes the application once the engine is ready.
        uvicorn_options: `log_level`, `access_log`.

    Returns:
        The process's exit code.
    """
    start = time.monotonic()
    logger.info("%s version %s", program, ascend_vllm.__version__)
    logger.info("args: %s", args)
    http_args.check()
    sock = bind(http_args.host, http_args.port)
    with contextlib.closing(sock), asyncio.Runner(loop_factory=_new_event_loop) as runner:
        return runner.run(_serve(start, sock, http_args, engine_args, make_app, uvicorn_options))


def exit_code_of(program: Callable[[], int]) -> int:
    """Run a program; what this package raises on purpose becomes one line of the log and an exit code."""
    try:
        return program()
    except ConfigError as error:
        logger.error("%s", error)
        return EXIT_USAGE
    except AscendVllmError as error:
        logger.error("%s", error)
        return EXIT_FAILURE
    except (KeyboardInterrupt, asyncio.CancelledError):
        logger.info("Stopped before the server was ready")
        return EXIT_FAILURE


def _new_event_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


async def _serve(
    start: float,
    sock: socket.socket,
    http_args: HttpArgs,
    engine_args: EngineArgs,
    make_app: Callable[[AsyncLLM], FastAPI],
    uvicorn_options: dict[str, Any],
) -> int:
    from ascend_vllm.engine.async_llm import AsyncLLM

    # the engine core starts here, in its own process; meanwhile this one imports the web framework
    engine = AsyncLLM.from_engine_args(engine_args)
    try:
        from ascend_vllm.entrypoints.http_server import HttpServer

        with _cancelled_by(signal.SIGTERM):
            await engine.ready()
        server = HttpServer(make_app(engine), http_args, sock, **uvicorn_options)
        # what is alive now stays alive: the collector need not look at it again and again
        gc.collect()
        gc.freeze()
        logger.info("server launch time cost: %.2f s", time.monotonic() - start)
        return EXIT_OK if await server.serve_engine(engine) else EXIT_FAILURE
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        # another server bound the same port before either of them listened
        raise _address_error(http_args.host, http_args.port, error) from error
    finally:
        engine.shutdown()


@contextlib.contextmanager
def _cancelled_by(number: signal.Signals) -> Generator[None, None, None]:
    """Make a signal cancel the current task, as Ctrl-C does already."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    if task is not None:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(number)
