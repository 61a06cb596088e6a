"""Requests whose text must keep to a grammar: their grammars are compiled beside the steps, and applied in them.

A request waits here, and holds nobody up, until its grammar is there; then it goes its way through the scheduler
with an `OutputConstraint` of its own. Nothing of this is loaded before the first such request.
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

# grammars that are kept, and the memory that they may take
_MAX_CACHED = 256
_MAX_CACHED_BYTES = 512 << 20
# distinct constraints that may wait to be compiled
_MAX_COMPILING = 256
# seconds after which a request does not wait for its grammar any more
_COMPILE_TIMEOUT_S = 60.0


class StructuredOutputManager(Connector):
    """Gives requests their grammars.

    Args:
        config: of the server.
        model: whose tokenizer has the vocabulary.
        vocabulary: makes the vocabulary; None: read from the model's tokenizer.
        compile_timeout_s: seconds after which a request does not wait for its grammar any more.
        processes: which compile; None: its own, which the first constraint starts.
    """

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
        # also at the interpreter's end, if nobody called close()
        self._finalizer = weakref.finalize(self, self._compiler.close)
        # least recently used first
        self._entries: collections.OrderedDict[Constraint, Entry] = collections.OrderedDict()
        # request id → it, its entry, and seconds of time.monotonic() when it came; in the order of their coming
        self._waiting: dict[str, tuple[Request, Entry, float]] = {}
        self._told_of_backend = False

    @property
    def waiting(self) -> list[Request]:
        """Requests whose grammars are being compiled."""
        return [request for request, _, _ in self._waiting.values()]

    @property
    def num_waiting(self) -> int:
        """Their number."""
        return len(self._waiting)

    def attach(self, wake: threading.Event) -> None:
        """See `Connector`."""
        self._compiler.wake = wake

    def begin(self, request: Request) -> bool:
        """Looks for a new request's grammar, or has it compiled; one without a constraint is ready.

        Returns:
            Whether the request has its constraint now; else it waits, and `take_ready` gives it in the end.

        Raises:
            RequestError: the constraint is wrong, or too many others are being compiled.
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
        self._tell_of_backend(constraint.backend)
        entry = self._entries.get(constraint)
        if entry is None:
            if sum(not other.is_done for other in self._entries.values()) >= _MAX_COMPILING:
                raise EngineBusyError(f"More than {_MAX_COMPILING} grammars wait to be compiled. Try again later.")
            entry = self._entries[constraint] = Entry(constraint)
            self._compiler.submit(entry)
        self._entries.move_to_end(constraint)
        if entry.is_done:
            # it may have been compiled just now
            self._evict()
            self._give(request, entry)
            return True
        entry.num_waiting += 1
        self._waiting[request.request_id] = request, entry, time.monotonic()
        return False

    def take_ready(self) -> list[tuple[Request, RequestError | None]]:
        """Requests that wait no longer, in the order of their coming: with their constraint, or with an error."""
        now = time.monotonic()
        ready: list[tuple[Request, RequestError | None]] = []
        for request, entry, since in self._waiting.values():
            try:
                if entry.is_done:
                    self._give(request, entry)
                elif now - since > self._timeout_s:
                    raise self._too_late(entry)
                else:
                    continue
                ready.append((request, None))
            except RequestError as error:
                ready.append((request, error))
        for request, _ in ready:
            self.forget(request)
        if ready:
            self._evict()
        return ready

    def forget(self, request: Request) -> bool:
        """Drops a request that waits; False: it does not. What nobody waits for any more is not compiled on."""
        waiting = self._waiting.pop(request.request_id, None)
        if waiting is None:
            return False
        entry = waiting[1]
        entry.num_waiting -= 1
        if not (entry.num_waiting or entry.is_done):
            entry.job.give_up()
            del self._entries[entry.constraint]
        return True

    def close(self) -> None:
        """Ends all compilations."""
        self._finalizer()

    def _give(self, request: Request, entry: Entry) -> None:
        if entry.compiled is None or entry.backend is None:
            if entry.is_passing:
                # who asks next has it tried again
                self._entries.pop(entry.constraint, None)
            raise RequestError(entry.error or "the grammar could not be compiled", "structured_outputs")
        request.kind = OutputConstraint(entry.compiled, entry.backend, request, self._compiler.vocabulary)

    def _too_late(self, entry: Entry) -> RequestError:
        late = f"{entry.constraint.field} was not compiled within {self._timeout_s:g} s"
        logger.warning("%s: %.200r", late, entry.constraint.text)
        if entry.is_begun:
            return RequestError(f"{late}.", "structured_outputs")
        return EngineBusyError(f"{late}: others are being compiled. Try again later.", "structured_outputs")

    def _evict(self) -> None:
        """Forgets grammars used least recently; those in use live on with their requests."""
        sizes = {entry: entry.num_bytes for entry in self._entries.values() if entry.is_done}
        num_bytes = sum(sizes.values())
        # the newest stays, however large
        for entry in list(sizes)[:-1]:
            if len(sizes) <= _MAX_CACHED and num_bytes <= _MAX_CACHED_BYTES:
                return
            del self._entries[entry.constraint]
            num_bytes -= sizes.pop(entry)

    def _tell_of_backend(self, name: str) -> None:
        if name in BACKENDS or name == "auto" or self._told_of_backend:
            return
        self._told_of_backend = True
        logger.info("The guided decoding backend %s is not there; xgrammar or llguidance does its work.", name)
