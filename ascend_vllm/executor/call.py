"""Calls of a worker's methods by name, in the worker's process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ascend_vllm.errors import RequestError

if TYPE_CHECKING:
    from ascend_vllm.worker.worker import Worker


def call_worker(
    worker: Worker, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Calls a public method, or a function with the worker in front of its arguments.

    Raises:
        RequestError: there is no such method.
    """
    if callable(method):
        return method(worker, *args, **kwargs)
    function = None if method.startswith("_") else getattr(worker, method, None)
    if not callable(function):
        raise RequestError(f"workers have no method {method!r}", "method")
    return function(*args, **kwargs)
