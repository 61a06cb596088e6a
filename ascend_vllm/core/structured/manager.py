"""Structured outputs: requests wait here, without delaying others, while their grammars are compiled.

Then they are scheduled with an `OutputConstraint`. Libraries and processes are loaded by the first such request.
"""

from __future__ import annotations

import collections
import threading
import time
import weakref
from collections.abc import Callable

from ascend_vllm.config.model import ModelConfig
from ascend_vllm.config.structured import StructuredOutputsConfig
from ascend_vllm.core.connectors import Connector
from ascend_vllm.core.request import Request
from ascend_vllm.core.structured.backends import BACKENDS
from ascend_vllm.core.structured.compile_pool import GrammarProcesses
from ascend_vllm.core.structured.compiler import Entry, GrammarCompiler
from ascend_vllm.core.structured.constraint import Constraint, make_constraint
from ascend_vllm.core.structured.output_constraint import OutputConstraint
from ascend_vllm.core.structured.vocabulary import Vocabulary
from ascend_vllm.errors import EngineBusyError, RequestError
from ascend_vllm.logger import init_logger

logger = init_logger(__name__)

# limits of the grammar cache
_MAX_CACHED = 256
_MAX_CACHED_BYTES = 512 << 20
# distinct constraints that may wait to be compiled
_MAX_COMPILING = 256
# how long a request waits for its grammar
_COMPILE_TIMEOUT_S = 60.0


class StructuredOutputManager(Connector):
    """Compiles and caches the grammars of requests.

    Args:
        config: of the server.
        model: its tokenizer has the vocabulary.
        vocabulary: makes the vocabulary; None: read from the model's tokenizer.
        compile_timeout_s: how long a request waits for its grammar.
        processes: that compile; None: its own, started by the first constraint.
    """

    field = "sampling_params.structured_outputs"

    def __init__(
        self,
        config: StructuredOutputsConfig,
        model: ModelConfig,
        vocabulary: Callable[[], Vocabulary] | None = None,
        compile_timeout_s: float = _COMPILE_TIMEOUT_S,
        processes: GrammarProcesses | None = None,
    ) -> None:
        self._config = config
        self._has_tokenizer = vocabulary is not None or not model.skip_tokenizer_init
        self._timeout_s = compile_timeout_s
        load = vocabulary or (lambda: Vocabulary.load(model))
        self._compiler = GrammarCompiler(load, config, processes)
        # at the interpreter's exit too, if close() was not called
        self._finalizer = weakref.finalize(self, self._compiler.close)
        # least recently used first
        self._entries: collections.OrderedDict[Constraint, Entry] = collections.OrderedDict()
        # request id → request, its entry, and time.monotonic() of its arrival; in arrival order
        self._waiting: dict[str, tuple[Request, Entry, float]] = {}
        self._has_logged_backend = False

    def attach(self, wake: threading.Event) -> None:
        self._compiler.wake = wake

    def begin(self, request: Request) -> bool:
        """Finds a new request's grammar in the cache, or has it compiled.

        Returns:
            True if the request is ready: it has its grammar, or needs none. Otherwise `take_ready` returns it later.

        Raises:
            RequestError: the constraint is invalid, or too many others are being compiled.
        """
        params = request.sampling_params.structured_outputs
        if params is None:
            return True
        if not self._has_tokenizer:
            raise RequestError(
                "structured_outputs need a tokenizer: the engine runs with --skip-tokenizer-init",
                "structured_outputs",
            )
        constraint = make_constraint(params, self._config)
        self._log_missing_backend(constraint.backend)
        entry = self._entries.get(constraint)
        if entry is None:
            if sum(not other.is_done for other in self._entries.values()) >= _MAX_COMPILING:
                raise EngineBusyError(f"More than {_MAX_COMPILING} grammars wait to be compiled. Try again later.")
            entry = self._entries[constraint] = Entry(constraint)
            self._compiler.submit(entry)
        self._entries.move_to_end(constraint)
        if entry.is_done:
            # its size counts from now on, if it was compiled just now
            self._evict()
            self._attach_grammar(request, entry)
            return True
        entry.num_waiting += 1
        self._waiting[request.request_id] = request, entry, time.monotonic()
        return False

    def take_ready(self) -> list[tuple[Request, RequestError | None]]:
        """Requests that wait no longer, in arrival order, each with the error that ends it, or None."""
        now = time.monotonic()
        ready: list[tuple[Request, RequestError | None]] = []
        for request, entry, since in self._waiting.values():
            try:
                if entry.is_done:
                    self._attach_grammar(request, entry)
                elif now - since > self._timeout_s:
                    raise self._timeout_error(entry)
                else:
                    continue
                ready.append((request, None))
            except RequestError as error:
                ready.append((request, error))
        for request, _ in ready:
            self.remove(request)
        if ready:
            self._evict()
        return ready

    def remove(self, request: Request) -> None:
        """Drops a waiting request. A compilation that no request needs is cancelled."""
        _, entry, _ = self._waiting.pop(request.request_id)
        entry.num_waiting -= 1
        if not (entry.num_waiting or entry.is_done):
            entry.job.give_up()
            del self._entries[entry.constraint]

    def close(self) -> None:
        """Ends all compilations."""
        self._finalizer()

    def _attach_grammar(self, request: Request, entry: Entry) -> None:
        if entry.error is not None:
            if entry.may_retry:
                # the next request with this constraint has it compiled again
                self._entries.pop(entry.constraint, None)
            raise RequestError(entry.error, "structured_outputs")
        request.kind = OutputConstraint(entry.compiled, entry.backend, request, self._compiler.vocabulary)

    def _timeout_error(self, entry: Entry) -> RequestError:
        message = f"{entry.constraint.field} was not compiled within {self._timeout_s:g} s"
        logger.warning("%s: %.200r", message, entry.constraint.text)
        if entry.is_started:
            return RequestError(f"{message}.", "structured_outputs")
        return EngineBusyError(f"{message}: others are being compiled. Try again later.", "structured_outputs")

    def _evict(self) -> None:
        """Evicts the least recently used grammars; running requests keep theirs."""
        sizes = {entry: entry.num_bytes for entry in self._entries.values() if entry.is_done}
        num_bytes = sum(sizes.values())
        # the newest stays, however large
        for entry in list(sizes)[:-1]:
            if len(sizes) <= _MAX_CACHED and num_bytes <= _MAX_CACHED_BYTES:
                return
            del self._entries[entry.constraint]
            num_bytes -= sizes.pop(entry)

    def _log_missing_backend(self, name: str) -> None:
        if name in BACKENDS or name == "auto" or self._has_logged_backend:
            return
        self._has_logged_backend = True
        logger.info("The guided decoding backend %s is not available; using xgrammar or llguidance.", name)
