"""The exceptions of ascend-vllm.

The tree::

    AscendVllmError
    ├── ConfigError (also ValueError)       a flag or a cross-check of flags is wrong; start-up ends with exit code 2
    │   └── UnsupportedFlagError            the flag is known, its feature is not there yet
    ├── ModelLoadError                      a model directory cannot be served; names the file and the tensor
    ├── RequestError (also ValueError)      a request is wrong; HTTP 400
    │   ├── ModelNotFoundError              HTTP 404
    │   ├── DuplicateRequestError (also KeyError)   its id is that of a request that runs; HTTP 409
    │   ├── EngineBusyError                 the queue is full, or too slow; HTTP 503
    │   └── ServerStoppingError             the server ends before the answer is complete; HTTP 503
    ├── WorkerCallError                     a method of the workers that a client called has failed; HTTP 500
    └── EngineDeadError                     the engine core or a worker is gone; HTTP 500, /health answers 503
"""

from __future__ import annotations


class AscendVllmError(Exception):
    """Root of all errors raised on purpose by this package."""


class ConfigError(AscendVllmError, ValueError):
    """A command-line flag, an engine argument or a combination of them is wrong."""


class UnsupportedFlagError(ConfigError):
    """A flag that parses, but whose feature this version does not have.

    Args:
        flag: the flag as typed on the command line, for example ``--enable-lora``.
        reason: what is missing and what to do instead.
    """

    def __init__(self, flag: str, reason: str = "its feature is not available in this version") -> None:
        super().__init__(f"{flag} is not supported: {reason}")
        self.flag = flag


class ModelLoadError(AscendVllmError):
    """A model cannot be loaded; the message names the file and, where known, the tensor."""


class RequestError(AscendVllmError, ValueError):
    """A request is wrong.

    Args:
        message: what is wrong, naming the field.
        param: the name of the request field at fault, if one is.
    """

    status_code = 400
    error_type = "BadRequestError"
    # seconds after which it may be tried again; None: it is no use
    retry_after_s: int | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelNotFoundError(RequestError):
    """The request names a model that is not served."""

    status_code = 404
    error_type = "NotFoundError"


class EngineBusyError(RequestError):
    """The queue of waiting requests is full, or the request waited in it for longer than it may."""

    status_code = 503
    error_type = "ServiceUnavailableError"


class ServerStoppingError(RequestError):
    """The server was told to stop, and the time that open requests get is over."""

    status_code = 503
    error_type = "ServiceUnavailableError"

    def __init__(self) -> None:
        super().__init__("The server is being shut down. Please try again later or on a different instance.")


class DuplicateRequestError(RequestError, KeyError):
    """A request of the same id runs; vLLM 0.6.3 raises a KeyError here."""

    status_code = 409
    error_type = "ConflictError"
    # a KeyError's would quote the sentence
    __str__ = Exception.__str__


class WorkerCallError(AscendVllmError):
    """A method of the workers, called by its name, has failed."""

    status_code = 500
    error_type = "InternalServerError"


class EngineDeadError(AscendVllmError):
    """The engine core (or one of its workers) has died or never started."""

    status_code = 500
    error_type = "InternalServerError"
