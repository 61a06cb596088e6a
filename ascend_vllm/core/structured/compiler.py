"""Compiles constraints outside of the steps: first in limited processes, then in threads of the engine core."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import enum
import os
import queue
import re
import threading
import time
from collections.abc import Callable

from ascend_vllm.config.structured import StructuredOutputsConfig
from ascend_vllm.core.structured.backends import BACKENDS, make_backend
from ascend_vllm.core.structured.compile_pool import NUM_QUICK, NUM_SLOW, GrammarProcesses
from ascend_vllm.core.structured.compile_process import Trial
from ascend_vllm.core.structured.constraint import Constraint, ConstraintKind
from ascend_vllm.core.structured.grammar import CompiledGrammar, GrammarBackend, GrammarError
from ascend_vllm.core.structured.vocabulary import Vocabulary
from ascend_vllm.errors import AscendVllmError
from ascend_vllm.logger import init_logger
from ascend_vllm.sandbox.pool import Job, LimitExceededError, ProcessBrokenError, TooLateError, TooSlowError

logger = init_logger(__name__)

# for strings with these, xgrammar allows control characters, which JSON forbids, and no escapes
_STRING_LIMITS = re.compile(r'"(?:minLength|maxLength|pattern)":')


class _Lane(enum.Enum):
    """The queues of constraints to compile; see `GrammarCompiler`."""

    QUICK = "quick"
    SLOW = "slow"


# one thread per process
_NUM_THREADS = {_Lane.QUICK: NUM_QUICK, _Lane.SLOW: NUM_SLOW}


@dataclasses.dataclass(eq=False)
class Entry:
    """A constraint and the state of its compilation.

    Attributes:
        constraint: what is compiled.
        compiled: its grammar; when `is_done`, either this and `backend` or `error` are set.
        backend: of the grammar.
        error: why it could not be compiled.
        may_retry: whether the error may be temporary.
        is_done: whether the compilation has ended.
        is_started: whether a process has started to compile it.
        num_waiting: requests that wait for it.
        job: cancels the compilation.
        candidates: libraries that have not been tried.
        reasons: errors of the libraries that have been tried.
    """

    constraint: Constraint
    compiled: CompiledGrammar | None = None
    backend: GrammarBackend | None = None
    error: str | None = None
    may_retry: bool = False
    is_done: bool = False
    is_started: bool = False
    num_waiting: int = 0
    job: Job = dataclasses.field(default_factory=Job)
    candidates: list[str] = dataclasses.field(default_factory=list)
    reasons: list[str] = dataclasses.field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the grammar."""
        return 0 if self.compiled is None else self.compiled.num_bytes


class GrammarCompiler:
    """Compiles constraints in processes, with a thread waiting for each process.

    A constraint that exceeds the time limit of the quick lane starts again in the slow one, so that it does not delay
    others.

    Args:
        vocabulary: makes the vocabulary; called once.
        config: of the server.
        processes: that compile; None: its own.
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        config: StructuredOutputsConfig,
        processes: GrammarProcesses | None = None,
    ) -> None:
        self._load_vocabulary = vocabulary
        self._config = config
        # set when an entry is done
        self.wake = threading.Event()
        self._vocabulary: Vocabulary | None = None
        self._processes = processes
        self._owns_processes = processes is None
        self._backends: dict[str, GrammarBackend] = {}
        # held for seconds while libraries and vocabularies are loaded; taken by the compiling threads only
        self._load_lock = threading.Lock()
        self._queues: dict[_Lane, queue.SimpleQueue[Entry | None]] = {lane: queue.SimpleQueue() for lane in _Lane}
        self._lock = threading.Lock()
        self._num_threads = dict.fromkeys(_Lane, 0)
        self._is_closed = False

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary, loaded on first use."""
        if self._vocabulary is None:
            with self._load_lock:
                if self._vocabulary is None:
                    self._vocabulary = self._load_vocabulary()
        return self._vocabulary

    def submit(self, entry: Entry) -> None:
        """Queues an entry."""
        entry.candidates = self._candidates(entry.constraint)
        self._submit(entry, _Lane.QUICK)

    def close(self) -> None:
        """Ends the threads, and its own processes."""
        with self._lock:
            self._is_closed = True
            for lane, count in self._num_threads.items():
                for _ in range(count):
                    self._queues[lane].put(None)
            processes = self._processes if self._owns_processes else None
        if processes is not None:
            processes.close()

    def _submit(self, entry: Entry, lane: _Lane) -> None:
        self._queues[lane].put(entry)
        with self._lock:
            if self._num_threads[lane] < _NUM_THREADS[lane] and not self._is_closed:
                name = f"grammar-{lane.value}-{self._num_threads[lane]}"
                threading.Thread(target=self._work, args=(lane,), name=name, daemon=True).start()
                self._num_threads[lane] += 1

    def _work(self, lane: _Lane) -> None:
        while (entry := self._queues[lane].get()) is not None:
            if entry.job.is_given_up:
                continue
            entry.is_started = True
            try:
                self._compile(entry, lane)
            except TooSlowError:
                self._submit(entry, _Lane.SLOW)
                continue
            except concurrent.futures.CancelledError:
                continue
            except AscendVllmError as error:
                entry.error, entry.may_retry = f"structured outputs are not available: {error}", True
            except Exception as error:
                logger.exception("A constraint could not be compiled")
                entry.error = f"{entry.constraint.field} could not be compiled: {type(error).__name__}"
                entry.may_retry = True
            entry.is_done = True
            self.wake.set()

    def _compile(self, entry: Entry, lane: _Lane) -> None:
        """Tries one library after the other.

        Raises:
            TooSlowError: it exceeded the time limit of the quick lane.
            CancelledError: the entry was cancelled.
        """
        constraint = entry.constraint
        if constraint.kind is ConstraintKind.NONE:
            _ = self.vocabulary  # all that such requests need is that it is loaded
            return
        while entry.candidates:
            name = entry.candidates[0]
            try:
                trial = self._try_out(entry, name, lane)
                if trial.is_refused:
                    entry.error = trial.error
                    return
                if trial.error is None:
                    entry.compiled, entry.backend = self._make(name, constraint, trial)
                    return
                reason = trial.error
            except GrammarError as error:
                reason = str(error)
            entry.reasons.append(f"{name}: {reason}")
            del entry.candidates[0]
        entry.error = f"{constraint.field} cannot be compiled to a grammar. " + "; ".join(entry.reasons)

    def _try_out(self, entry: Entry, name: str, lane: _Lane) -> Trial:
        processes = self._get_processes()
        if name not in self._backends:
            # loads the library here while the processes start
            threading.Thread(target=self._preload, args=(name,), name="grammar-load", daemon=True).start()
        try:
            return processes.try_out(entry.job, name, entry.constraint, slow=lane is _Lane.SLOW)
        except (LimitExceededError, ProcessBrokenError) as error:
            if isinstance(error, TooSlowError) and lane is _Lane.QUICK:
                raise
            entry.may_retry |= isinstance(error, TooLateError | ProcessBrokenError)
            raise GrammarError(f"the compilation {error}") from None

    def _make(self, name: str, constraint: Constraint, trial: Trial) -> tuple[CompiledGrammar, GrammarBackend]:
        """Makes the grammar that a process has tried out in this process too."""
        backend = self._backend(name)
        compiled = backend.compile(constraint) if trial.packed is None else backend.unpack(trial.packed)
        compiled.set_measured_bytes(trial.num_bytes)
        return compiled, backend

    def _candidates(self, constraint: Constraint) -> list[str]:
        """Libraries to try, in order."""
        if constraint.backend in BACKENDS:
            return [constraint.backend]
        names = ["xgrammar", "guidance"]
        if self._config.disable_fallback:
            return names[1:] if constraint.kind is ConstraintKind.LARK else names[:1]
        limits_strings = constraint.kind is ConstraintKind.JSON and _STRING_LIMITS.search(constraint.text)
        if constraint.kind is ConstraintKind.LARK or limits_strings:
            # llguidance's own notation, or a schema that it supports better
            names.reverse()
        return names

    def _get_processes(self) -> GrammarProcesses:
        vocabulary = self.vocabulary
        with self._lock:
            if self._is_closed:
                raise concurrent.futures.CancelledError
            if self._processes is None:
                self._processes = GrammarProcesses(vocabulary)
            return self._processes

    def _preload(self, name: str) -> None:
        # `_make` raises the error again
        with contextlib.suppress(Exception):
            self._backend(name)

    def _backend(self, name: str) -> GrammarBackend:
        vocabulary = self.vocabulary
        with self._load_lock:
            backend = self._backends.get(name)
            if backend is None:
                started = time.monotonic()
                backend = self._backends[name] = make_backend(name, vocabulary, max(1, (os.cpu_count() or 1) // 2))
                logger.info("Structured outputs by %s are ready after %.1f s", name, time.monotonic() - started)
            return backend
