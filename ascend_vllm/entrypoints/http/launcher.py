"""Starts an HTTP server from its flags; shared by the two server programs.

The port is bound first, so that a port in use is an error before minutes of loading. The socket listens only when the
engine is ready, so that connections are refused until then. When the engine dies the process exits with EXIT_FAILURE.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import errno
import json
import logging.config
import pathlib
import socket
import sys
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

import ascend_vllm
from ascend_vllm.args.tables.server import HttpArgs
from ascend_vllm.engine.core_process import make_core_processes
from ascend_vllm.entrypoints.demo_model import is_demo, with_demo_model
from ascend_vllm.entrypoints.http import tls
from ascend_vllm.entrypoints.http.start_page import base_url, changed_flags, start_page
from ascend_vllm.entrypoints.http.stop_signals import StopSignals
from ascend_vllm.errors import AscendVllmError, ConfigError
from ascend_vllm.logger import init_logger
from ascend_vllm.process_memory import settle

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ascend_vllm.args.engine_args import EngineArgs
    from ascend_vllm.engine.async_llm import AsyncLLM

logger = init_logger(__name__)

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2


# for sys.setswitchinterval: how long a thread with a long text or answer may hold the GIL while the event loop and
# output thread wait for it. Python's 5 ms would add tens of milliseconds to other requests' tokens.
_SWITCH_INTERVAL_S = 0.001


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


def bind_uds(path: str) -> socket.socket:
    """A Unix domain socket that owns its path but does not listen yet.

    A stale socket of an ended server at the path is removed.

    Raises:
        ConfigError: a server listens there, or the path is no socket or cannot be bound.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if pathlib.Path(path).is_socket() and not _is_listening(path):
            pathlib.Path(path).unlink()
        sock.bind(path)
        # as in vLLM: access is controlled by the directory's permissions
        pathlib.Path(path).chmod(0o666)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"--uds {path} is already in use, or is not a socket.") from error
        raise ConfigError(f"Cannot listen on --uds {path}: {error.strerror or error}") from error
    return sock


def _is_listening(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0


def _address_error(host: str | None, port: int, error: OSError) -> ConfigError:
    where = f"{host or '0.0.0.0'}:{port}"
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"The address {where} is already in use: another server runs there. Choose another --port."
        )
    return ConfigError(f"Cannot listen on {where}: {error.strerror}")


def _configure_log(path: str) -> None:
    """Set up logging by a file of --log-config-file.

    Raises:
        ConfigError: it cannot be read, or is no configuration.
    """
    try:
        logging.config.dictConfig(json.loads(pathlib.Path(path).read_text()))
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise ConfigError(f"--log-config-file {path} cannot be used: {error}") from error


@dataclasses.dataclass(frozen=True)
class Program:
    """Parameters of one of the server programs.

    Attributes:
        name: for the first line of the log.
        flags: as parsed, for the log.
        http_args: address and encryption.
        engine_args: of the engine.
        load_app: imports the web framework, which takes a while, and returns the application's factory, which is
            called once the engine is ready.
        log_level: of uvicorn.
        access_log: one line per HTTP request.
        demo_example: an example request to the demo model, with {url} for the server's address.
        api_path: the path below which clients find the API, or its only route.
        api_server_count: processes that answer requests; 1: this one does.
    """

    name: str
    flags: argparse.Namespace
    http_args: HttpArgs
    engine_args: EngineArgs
    load_app: Callable[[], Callable[[AsyncLLM], FastAPI]]
    log_level: str
    access_log: bool
    demo_example: str
    api_path: str
    api_server_count: int = 1


def serve(program: Program) -> int:
    """Run a server until a signal stops it or its engine dies.

    Returns:
        The process's exit code.

    Raises:
        ConfigError: a flag is wrong, or the port is taken.
        ModelLoadError: the model cannot be served.
    """
    start = time.monotonic()
    if program.http_args.log_config_file is not None:
        _configure_log(program.http_args.log_config_file)
    logger.info("%s version %s", program.name, ascend_vllm.__version__)
    logger.info("non-default args: %s", changed_flags(program.flags, program.http_args))
    http_args = program.http_args
    http_args.check()
    tls.check_files(http_args)
    stop = StopSignals()
    if program.engine_args.node_rank > 0:
        with stop.raising():
            from ascend_vllm.entrypoints.node import become_node

            become_node(with_demo_model(program.engine_args))
    with stop.raising(), _bound(http_args) as sock:
        example = program.demo_example if is_demo(program.engine_args) else None
        engine_args = with_demo_model(program.engine_args)
        if program.api_server_count > 1:
            from ascend_vllm.entrypoints.http.api_processes import serve_by_processes

            return serve_by_processes(
                program.api_server_count,
                engine_args.create_engine_config(),
                sock,
                stop,
                lambda engine: _open(program, engine, sock, stop, example, start),
                # a log that the user configures stays as it is
                with_names=http_args.log_config_file is None,
            )
        config = engine_args.create_engine_config()
        with stop.held_back():
            # the engine cores start here, in their own processes; meanwhile this one imports what it needs
            cores = make_core_processes(config)
            try:
                for core in cores:
                    core.launch()
                from ascend_vllm.engine.async_llm import AsyncLLM

                engine = AsyncLLM(config, cores=cores)
            except BaseException:
                for core in cores:
                    core.stop(0)
                raise
        try:
            return _open(program, engine, sock, stop, example, start)
        finally:
            stop.hold_back()
            engine.shutdown()


@contextlib.contextmanager
def _bound(args: HttpArgs) -> Generator[socket.socket, None, None]:
    """The socket of the flags; a Unix domain socket's path is removed at the end."""
    if args.uds is None:
        with contextlib.closing(bind(args.host, args.port)) as sock:
            yield sock
        return
    with contextlib.closing(bind_uds(args.uds)) as sock:
        try:
            yield sock
        finally:
            pathlib.Path(args.uds).unlink(missing_ok=True)


def exit_code_of(program: Callable[[], int]) -> int:
    """Run a program; turns this package's own errors into a log line and an exit code."""
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


def _open(
    program: Program, engine: AsyncLLM, sock: socket.socket, stop: StopSignals, example: str | None, start: float
) -> int:
    """Serves a program while its engine loads the model, and after that; returns the process's exit code.

    Args:
        program: what is served.
        engine: started.
        sock: bound.
        stop: handles signals until the server has its own handlers.
        example: a command to show once the server is ready.
        start: time.monotonic() at the program's start.
    """
    import uvloop

    from ascend_vllm.entrypoints.http.server import HttpServer

    make_app = program.load_app()

    async def serve_app() -> int:
        try:
            with stop.cancelling():
                # most of the work is done while the engine core loads the model
                settle()
                await engine.ready()
                app = make_app(engine)
                if engine.group is None or engine.group.is_first:
                    _describe(program, engine, app, sock)
                server = HttpServer(
                    app,
                    program.http_args,
                    sock,
                    log_level=program.log_level,
                    access_log=program.access_log,
                    example=example,
                )
                settle()
                sys.setswitchinterval(_SWITCH_INTERVAL_S)
                if engine.group is None or engine.group.is_first:
                    logger.info("server launch time cost: %.2f s", time.monotonic() - start)
                return EXIT_OK if await server.serve_engine(engine) else EXIT_FAILURE
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # another server bound the same port before either of them listened
            raise _address_error(program.http_args.host, program.http_args.port, error) from error
        finally:
            # here, since it must run on the loop
            engine.shutdown()

    stop.hold_back()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve_app())


def _describe(program: Program, engine: AsyncLLM, app: FastAPI, sock: socket.socket) -> None:
    """Logs what runs and where to reach it; all routes at level DEBUG."""
    paths = set()
    for route in app.routes:
        methods = getattr(route, "methods", None)
        path = getattr(route, "path", None)
        if methods and path:
            paths.add(path)
            logger.debug("Route: %s, Methods: %s", path, ", ".join(sorted(methods)))
    logger.info("%s is ready:", program.name)
    args = program.http_args
    for line in start_page(engine, base_url(args, sock), args.uds, program.api_path, paths):
        logger.info("%s", line)
