"""Logging in vLLM's format: ``INFO 11-21 02:24:35 engine_core.py:42] message``."""

from __future__ import annotations

import functools
import json
import logging
import logging.config
import os
import pathlib
import sys

from ascend_vllm import envs
from ascend_vllm.errors import ConfigError
from ascend_vllm.log_lines import keep_safe

_FORMAT = "%(levelname)s %(asctime)s %(filename)s:%(lineno)d] %(message)s"
_DATE_FORMAT = "%m-%d %H:%M:%S"


@functools.cache
def _configure_root() -> None:
    root = logging.getLogger("ascend_vllm")
    path = envs.logging_config_path()
    if path is not None:
        _configure_from(path)
        return
    if root.handlers or not envs.configure_logging():
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, _DATE_FORMAT))
    root.addHandler(handler)
    level = envs.logging_level()
    try:
        root.setLevel(level)
    except ValueError as err:
        names = ", ".join(logging.getLevelNamesMapping())
        raise ConfigError(f"VLLM_LOGGING_LEVEL must be one of {names}, got {level!r}.") from err
    root.propagate = False


def _configure_from(path: pathlib.Path) -> None:
    """Configures logging from a JSON file (`logging.config.dictConfig`).

    Raises:
        ConfigError: the file is missing or invalid, or VLLM_CONFIGURE_LOGGING=0.
    """
    if not envs.configure_logging():
        raise ConfigError("VLLM_LOGGING_CONFIG_PATH is given, but VLLM_CONFIGURE_LOGGING=0 says to leave logging.")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        logging.config.dictConfig({"disable_existing_loggers": False} | settings)
    except OSError as err:
        raise ConfigError(f"VLLM_LOGGING_CONFIG_PATH={path} cannot be read: {err.strerror}") from err
    # dictConfig raises many types of exceptions
    except Exception as err:
        raise ConfigError(f"VLLM_LOGGING_CONFIG_PATH={path} does not configure logging: {err}") from err


def name_process(name: str) -> None:
    """Prefixes log lines with a name and this process's id, unless the user configures logging."""
    if envs.logging_config_path() is None and envs.configure_logging():
        for handler in logging.getLogger("ascend_vllm").handlers:
            handler.setFormatter(logging.Formatter(f"({name} pid={os.getpid()}) {_FORMAT}", _DATE_FORMAT))


def init_logger(name: str) -> logging.Logger:
    """The logger of a module; pass ``__name__``. Configures the package's handler once.

    Messages are logged as single lines, see `log_lines`; tracebacks keep their lines.
    """
    _configure_root()
    keep_safe(name)
    return logging.getLogger(name)
