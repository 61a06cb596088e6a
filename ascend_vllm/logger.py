"""Logging in vLLM's format: ``INFO 11-21 02:24:35 engine_core.py:42] message``."""

from __future__ import annotations

import logging
import sys

from ascend_vllm import envs

_FORMAT = "%(levelname)s %(asctime)s %(filename)s:%(lineno)d] %(message)s"
_DATE_FORMAT = "%m-%d %H:%M:%S"


def _configure_root() -> None:
    root = logging.getLogger("ascend_vllm")
    if root.handlers or not envs.configure_logging():
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, _DATE_FORMAT))
    root.addHandler(handler)
    root.setLevel(envs.logging_level())
    root.propagate = False


def init_logger(name: str) -> logging.Logger:
    """The logger of a module; pass ``__name__``. The package's handler is set up once."""
    _configure_root()
    return logging.getLogger(name)
