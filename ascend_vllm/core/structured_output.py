"""Requests whose text must keep to a grammar: their grammars are compiled beside the steps, and applied in them.

A request waits here, and holds nobody up, until its grammar is there; then it goes its way through the scheduler
with an `OutputConstraint` of its own. Nothing of this is loaded before the first such request.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ascend_vllm.config.model import ModelConfig
from ascend_vllm.config.structured import StructuredOutputsConfig
from ascend_vllm.core.constraint import Constraint, ConstraintKind, make_constraint
from ascend_vllm.core.grammar import Bitmask, CompiledGrammar, Grammar, GrammarBackend, GrammarError, last_word
from ascend_vllm.core.request import Request
from ascend_vllm.core.vocabulary import Vocabulary
from ascend_vllm.errors import AscendVllmError, EngineBusyError, RequestError
from ascend_vllm.logger import init_logger
from ascend_vllm.structured_outputs import StructuredOutputsParams

logger = init_logger(__name__)

# grammars that are kept, and the memory that they may take
_MAX_CACHED = 256
_MAX_CACHED_BYTES = 512 << 20
# compilations at a time: a hostile one must not keep others from being compiled
_NUM_COMPILE_THREADS = 2
# threads that may be stuck in compilations beside them; they cannot be ended
_MAX_STUCK_THREADS = 8
# distinct constraints that may wait to be compiled
_MAX_COMPILING = 256
# seconds after which a request does not wait for its grammar any more
_COMPILE_TIMEOUT_S = 60.0

# xgrammar lets such strings hold control characters, which JSON does not, and no escapes
_STRING_LIMITS = re.compile(r'"(?:minLength|maxLength|pattern)":')


def _make_xgrammar(vocabulary: Vocabulary, num_threads: int) -> GrammarBackend:
    from ascend_vllm.core.grammar_xgrammar import XGrammarBackend

    return XGrammarBackend(vocabulary, num_threads)


def _make_guidance(vocabulary: Vocabulary, num_threads: int) -> GrammarBackend:
    from ascend_vllm.core.grammar_guidance import LLGuidanceBackend

    return LLGuidanceBackend(vocabulary, num_threads)


# name → backend for a vocabulary that may use so many threads; libraries are imported when they are needed
BACKENDS: dict[str, Callable[[Vocabulary, int], GrammarBackend]] = {
    "xgrammar": _make_xgrammar,
    "guidance": _make_guidance,
}


class OutputConstraint:
    """The grammar of one request, and how the request may end.

    A text that is complete may end, by an end-of-sequence token or a stop token; one that can only end must. That
    comes before `ignore_eos` and `min_tokens`: a token there must be.

    Args:
        grammar: of the request alone.
        backend: of the grammar.
        request: whose text it is.
        vocabulary: of the model.

    Attributes:
        grammar: as given.
        backend: as given.
        is_waiting: whether the text after which the constraint begins has not come yet.
    """

    __slots__ = (
        "_begin_after",
        "_end_ids",
        "_forced_ids",
        "_min_num_tokens",
        "_num_words",
        "_tail",
        "_vocabulary",
        "backend",
        "grammar",
        "is_waiting",
    )

    def __init__(self, grammar: Grammar, backend: GrammarBackend, request: Request, vocabulary: Vocabulary) -> None:
        self.grammar = grammar
        self.backend = backend
        self._num_words = vocabulary.num_words
        self._vocabulary = vocabulary
        self._end_ids = [id_ for id_ in request.end_token_ids if 0 <= id_ < vocabulary.size]
        # what a text ends with that can do nothing else, although its request does not want that to be its end
        self._forced_ids = self._end_ids or vocabulary.eos_token_ids[:1]
        self._min_num_tokens = request.min_num_tokens
        params = request.sampling_params.structured_outputs
        self._begin_after = (params.begin_after if params is not None else None) or ""
        self.is_waiting = bool(self._begin_after)
        # the end of the text while it waits
        self._tail = b""

    @property
    def num_words(self) -> int:
        """32-bit words of a bitmask."""
        return self._num_words

    def finish_bitmask(self, row: Bitmask, num_tokens: int) -> None:
        """Adds the tokens that may end the text to those that continue it.

        Args:
            row: [W] as the grammar filled it.
            num_tokens: of the sequence so far.
        """
        bits = row.view(np.uint32)
        if self.is_waiting:
            row[:] = -1
            row[-1] = last_word(len(self._vocabulary.tokens))
        accepting = not self.is_waiting and self.grammar.is_accepting
        if num_tokens + 1 < self._min_num_tokens:
            before = bits.copy()
            _set_bits(bits, self._end_ids, False)
            if not bits.any():
                bits[:] = before
        elif accepting:
            _set_bits(bits, self._end_ids, True)
        if accepting and not bits.any():
            _set_bits(bits, self._forced_ids, True)

    def accept(self, token_id: int) -> bool:
        """Moves on by a sampled token; False: it is not what the text goes on with."""
        if self.is_waiting:
            self._look_for_beginning(token_id)
            return True
        return bool(self._vocabulary.tokens[token_id]) and self.grammar.accept_tokens([token_id])

    def may_end_with(self, token_id: int) -> bool:
        """Whether a token may end the text here."""
        return token_id in self._forced_ids and self.grammar.is_accepting

    @property
    def must_end(self) -> bool:
        """Whether the text is complete, and there is no token to end it with."""
        return not (self._forced_ids or self.is_waiting) and self.grammar.is_terminated

    def _look_for_beginning(self, token_id: int) -> None:
        """The constraint begins with the next token: what this one holds behind the awaited text is let pass."""
        marker = self._begin_after.encode()
        self._tail += self._vocabulary.bytes_of(token_id)
        if marker in self._tail:
            self.is_waiting, self._tail = False, b""
        else:
            self._tail = self._tail[-len(marker) :]


def _set_bits(bits: np.ndarray, token_ids: Iterable[int], value: bool) -> None:
    # a handful of ids
    for id_ in token_ids:
        bit = np.uint32(1 << id_ % 32)
        if value:
            bits[id_ // 32] |= bit
        else:
            bits[id_ // 32] &= ~bit


def fill_bitmasks(requests: Sequence[Request]) -> Bitmask:
    """Which tokens some constrained requests may get next: [G, W], bit t % 32 of word t // 32 is token t's."""
    constraints = [request.constraint for request in requests if request.constraint is not None]
    bitmask = np.zeros((len(constraints), constraints[0].num_words), np.int32)
    by_backend: dict[GrammarBackend, list[int]] = {}
    for index, constraint in enumerate(constraints):
        if not constraint.is_waiting:
            by_backend.setdefault(constraint.backend, []).append(index)
    for backend, rows in by_backend.items():
        if len(rows) == 1:
            constraints[rows[0]].grammar.fill_bitmask(bitmask[rows[0]])
        else:
            backend.fill_bitmasks([constraints[row].grammar for row in rows], bitmask, rows)
    # a turn per constrained row: each ends in its own way
    for index, (constraint, request) in enumerate(zip(constraints, requests, strict=True)):
        constraint.finish_bitmask(bitmask[index], request.num_tokens)
    return bitmask


@dataclasses.dataclass(eq=False)
class _Entry:
    """A constraint on its way to a grammar; either `compiled` and `backend`, or `error`, are set in the end."""

    constraint: Constraint
    compiled: CompiledGrammar | None = None
    backend: GrammarBackend | None = None
    error: str | None = None
    is_done: bool = False
    # a thread is at it
    is_begun: bool = False
    # nobody waits for it any more, but a thread still is at it
    is_stuck: bool = False


class _Compiler:
    """Compiles constraints in threads of its own.

    The threads are daemons: one that does not come back does not keep the process from ending.

    Args:
        vocabulary: makes the vocabulary, once.
        config: of the server.
        wake: set when an entry is done.
    """

    def __init__(
        self, vocabulary: Callable[[], Vocabulary], config: StructuredOutputsConfig, wake: threading.Event
    ) -> None:
        self._load_vocabulary = vocabulary
        self._config = config
        self._wake = wake
        self._vocabulary: Vocabulary | None = None
        self._backends: dict[str, GrammarBackend] = {}
        # held while libraries and vocabularies are loaded, which takes seconds: by the compiling threads only
        self._load_lock = threading.Lock()
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Entry] = queue.SimpleQueue()
        self._num_threads = 0
        self._num_stuck = 0

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's; read at the first use."""
        if self._vocabulary is None:
            with self._load_lock:
                if self._vocabulary is None:
                    self._vocabulary = self._load_vocabulary()
        return self._vocabulary

    def submit(self, entry: _Entry) -> None:
        """Has an entry done by one of the threads."""
        self._queue.put(entry)
        self._start_threads()

    def give_up(self, entry: _Entry) -> None:
        """Nobody waits for an entry any more; if a thread is at it, another one takes its place."""
        with self._lock:
            if entry.is_begun and not entry.is_stuck and self._num_stuck < _MAX_STUCK_THREADS:
                entry.is_stuck = True
                self._num_stuck += 1
        logger.warning("%s was not compiled in time: %.200r", entry.constraint.field, entry.constraint.text)
        self._start_threads()

    def _start_threads(self) -> None:
        with self._lock:
            if self._num_threads - self._num_stuck < _NUM_COMPILE_THREADS:
                threading.Thread(target=self._work, name=f"grammar-{self._num_threads}", daemon=True).start()
                self._num_threads += 1

    def _work(self) -> None:
        is_surplus = False
        while not is_surplus:
            entry = self._queue.get()
            # nobody waits for what is done before it was begun
            if not entry.is_done:
                entry.is_begun = True
                self._try_to_compile(entry)
                entry.is_done = True
                self._wake.set()
            with self._lock:
                is_surplus = entry.is_stuck
                if is_surplus:
                    # it is back, and another has taken its place
                    self._num_stuck -= 1
                    self._num_threads -= 1

    def _try_to_compile(self, entry: _Entry) -> None:
        try:
            self._compile(entry)
        except AscendVllmError as error:
            entry.error = f"structured outputs are not available: {error}"
        except Exception as error:
            logger.exception("A constraint could not be compiled")
            entry.error = f"{entry.constraint.field} could not be compiled: {type(error).__name__}"

    def _compile(self, entry: _Entry) -> None:
        constraint = entry.constraint
        reasons = []
        for name in self._candidates(constraint):
            backend = self._backend(name)
            try:
                compiled = backend.compile(constraint)
            except GrammarError as error:
                reasons.append(f"{name}: {error}")
                continue
            # if it came too late for those who waited, it is there for others
            entry.compiled, entry.backend, entry.error = compiled, backend, None
            return
        entry.error = f"{constraint.field} cannot be compiled to a grammar. " + "; ".join(reasons)

    def _candidates(self, constraint: Constraint) -> Sequence[str]:
        """Libraries to try, one after the other."""
        if constraint.backend in BACKENDS:
            return [constraint.backend]
        names = ["xgrammar", "guidance"]
        if self._config.disable_fallback:
            return names[1:] if constraint.kind is ConstraintKind.LARK else names[:1]
        limits_strings = constraint.kind is ConstraintKind.JSON and _STRING_LIMITS.search(constraint.text)
        if constraint.kind is ConstraintKind.LARK or limits_strings:
            # llguidance's own notation, or what it does better
            names.reverse()
        return names

    def _backend(self, name: str) -> GrammarBackend:
        vocabulary = self.vocabulary
        with self._load_lock:
            backend = self._backends.get(name)
            if backend is None:
                started = time.monotonic()
                backend = self._backends[name] = BACKENDS[name](vocabulary, max(1, (os.cpu_count() or 1) // 2))
                logger.info("Structured outputs by %s are ready after %.1f s", name, time.monotonic() - started)
            return backend


class StructuredOutputManager:
    """Gives requests their grammars.

    Args:
        config: of the server.
        model: whose tokenizer has the vocabulary.
        vocabulary: makes the vocabulary; None: read from the model's tokenizer.
        compile_timeout_s: seconds after which a request does not wait for its grammar any more.
    """

    def __init__(
        self,
        config: StructuredOutputsConfig,
        model: ModelConfig,
        vocabulary: Callable[[], Vocabulary] | None = None,
        compile_timeout_s: float = _COMPILE_TIMEOUT_S,
    ) -> None:
        self._config = config
        self._has_tokenizer = vocabulary is not None or not model.skip_tokenizer_init
        self._timeout_s = compile_timeout_s
        self._wake = threading.Event()
        self._compiler = _Compiler(vocabulary or (lambda: Vocabulary.load(model)), config, self._wake)
        # least recently used first
        self._entries: collections.OrderedDict[Constraint, _Entry] = collections.OrderedDict()
        # request id → it, its entry, and seconds of time.monotonic() when it came; in the order of their coming
        self._waiting: dict[str, tuple[Request, _Entry, float]] = {}
        self._told_of_backend = False

    @property
    def waiting(self) -> list[Request]:
        """Requests whose grammars are being compiled."""
        return [request for request, _, _ in self._waiting.values()]

    @property
    def num_waiting(self) -> int:
        """Their number."""
        return len(self._waiting)

    def begin(self, request: Request, params: StructuredOutputsParams) -> bool:
        """Looks for a new request's grammar, or has it compiled.

        Returns:
            Whether the request has its constraint now; else it waits, and `take_ready` gives it in the end.

        Raises:
            RequestError: the constraint is wrong, or too many others are being compiled.
        """
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
            entry = self._entries[constraint] = _Entry(constraint)
            self._compiler.submit(entry)
        self._entries.move_to_end(constraint)
        if entry.is_done:
            # it may have been compiled just now
            self._evict()
            self._give(request, entry)
            return True
        self._waiting[request.request_id] = request, entry, time.monotonic()
        return False

    def take_ready(self) -> list[tuple[Request, RequestError | None]]:
        """Requests that wait no longer, in the order of their coming: with their constraint, or with an error."""
        self._wake.clear()
        now = time.monotonic()
        ready: list[tuple[Request, RequestError | None]] = []
        for request, entry, since in self._waiting.values():
            if not entry.is_done and now - since > self._timeout_s:
                # whatever becomes of it, nobody waits for it any more
                entry.error = f"{entry.constraint.field} was not compiled within {self._timeout_s:g} s."
                entry.is_done = True
                self._compiler.give_up(entry)
            if entry.is_done:
                try:
                    self._give(request, entry)
                    ready.append((request, None))
                except RequestError as error:
                    ready.append((request, error))
        for request, _ in ready:
            del self._waiting[request.request_id]
        if ready:
            self._evict()
        return ready

    def forget(self, request: Request) -> bool:
        """Drops a request that waits; False: it does not."""
        return self._waiting.pop(request.request_id, None) is not None

    def wait(self, timeout_s: float) -> None:
        """Waits until a grammar is compiled, but not for longer than this."""
        self._wake.wait(timeout_s)

    def _give(self, request: Request, entry: _Entry) -> None:
        if entry.error is not None or entry.compiled is None or entry.backend is None:
            raise RequestError(entry.error or "the grammar could not be compiled", "structured_outputs")
        request.constraint = OutputConstraint(
            entry.compiled.start(), entry.backend, request, self._compiler.vocabulary
        )

    def _evict(self) -> None:
        """Forgets grammars used least recently; those in use live on with their requests."""
        num_bytes = sum(entry.compiled.num_bytes for entry in self._entries.values() if entry.compiled is not None)
        while len(self._entries) > 1 and (len(self._entries) > _MAX_CACHED or num_bytes > _MAX_CACHED_BYTES):
            constraint, entry = next(iter(self._entries.items()))
            if not entry.is_done:
                return
            del self._entries[constraint]
            num_bytes -= entry.compiled.num_bytes if entry.compiled is not None else 0

    def _tell_of_backend(self, name: str) -> None:
        if name in BACKENDS or name == "auto" or self._told_of_backend:
            return
        self._told_of_backend = True
        logger.info("The guided decoding backend %s is not there; xgrammar or llguidance does its work.", name)
