"""The exceptions of ascend-vllm::

AscendVllmError
├── ConfigError (also ValueError)       invalid flags or combination of flags; start-up ends with exit code 2
│   └── UnsupportedFlagError            the flag is known, but its feature is not implemented
├── ModelLoadError                      a model directory cannot be served; names the file and the tensor
├── RequestError (also ValueError)      invalid request; HTTP 400
│   ├── ModelNotFoundError              HTTP 404
│   ├── DuplicateRequestError (also KeyError)   a running request has the same id; HTTP 409
│   ├── EngineBusyError                 the queue is full, or too slow; HTTP 503
│   └── ServerStoppingError             the server stops before the answer is complete; HTTP 503
├── WorkerCallError                     a worker method called by a client has failed; HTTP 500
└── EngineDeadError                     the engine core or a worker has died; HTTP 500, /health answers 503
"""

from __future__ import annotations


class AscendVllmError(Exception):
    """Root of all errors raised on purpose by this package."""


class ConfigError(AscendVllmError, ValueError):
    """A command-line flag, an engine argument or a combination of them is invalid."""


class UnsupportedFlagError(ConfigError):
    """A flag that parses, but whose feature is not implemented.

    Args:
        flag: as typed on the command line, for example ``--enable-lora``.
        reason: what is missing and what to do instead.
    """

    def __init__(self, flag: str, reason: str = "its feature is not available in this version") -> None:
        super().__init__(f"{flag} is not supported: {reason}")
        self.flag = flag


class ModelLoadError(AscendVllmError):
    """A model cannot be loaded; the message names the file and, where known, the tensor."""


class RequestError(AscendVllmError, ValueError):
    """A request is invalid.

    Args:
        message: what is wrong, naming the field.
        param: name of the invalid field, if it is one field.
    """

    status_code = 400
    error_type = "BadRequestError"
    # when to retry; None: retrying does not help
    retry_after_s: int | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelNotFoundError(RequestError):
    """The request names a model that is not served."""

    status_code = 404
    error_type = "NotFoundError"


class EngineBusyError(RequestError):
    """The queue of waiting requests is full, or the request waited in it for too long."""

    status_code = 503
    error_type = "ServiceUnavailableError"


class ServerStoppingError(RequestError):
    """The server is shutting down, and the time limit for open requests is over."""

    status_code = 503
    error_type = "ServiceUnavailableError"

    def __init__(self) -> None:
        super().__init__("The server is being shut down. Please try again later or on a different instance.")


class DuplicateRequestError(RequestError, KeyError):
    """A request with the same id is running; vLLM 0.6.3 raises a KeyError."""

    status_code = 409
    error_type = "ConflictError"
    # KeyError.__str__ would put the message in quotes
    __str__ = Exception.__str__


class WorkerCallError(AscendVllmError):
    """A worker method that was called by name (`collective_rpc`) has failed."""

    status_code = 500
    error_type = "InternalServerError"


class EngineDeadError(AscendVllmError):
    """The engine core (or one of its workers) has died or never started."""

    status_code = 500
    error_type = "InternalServerError"
