"""Pools of limited processes that compile grammars: a quick lane, and a slow one for those that take long.

`compile_process` runs in the processes, `sandbox` limits them.
"""

from __future__ import annotations

import weakref

import msgspec

from ascend_vllm.core.structured import compile_process
from ascend_vllm.core.structured.compile_process import MAX_PACKED_BYTES, Trial
from ascend_vllm.core.structured.constraint import Constraint
from ascend_vllm.core.structured.vocabulary import Vocabulary
from ascend_vllm.sandbox.child import Limits
from ascend_vllm.sandbox.pool import Job, Pool

_MEMORY_BYTES = 1 << 30
# Compilations are limited by CPU time; the limits of wall time are longer, for busy machines.
# First attempt: nearly all grammars take less than a tenth of it.
QUICK = Limits(wall_s=4.0, cpu_s=1, memory_bytes=_MEMORY_BYTES)
# second attempt, with lower priority than the machine's other processes
SLOW = Limits(wall_s=30.0, cpu_s=10, memory_bytes=_MEMORY_BYTES, niceness=10)
# processes of each lane
NUM_QUICK = 2
NUM_SLOW = 1


class GrammarProcesses:
    """Compiles constraints in limited processes, which are started for the first constraint.

    Args:
        vocabulary: of the model.
        quick: limits of the first lane.
        slow: limits of the second.
    """

    def __init__(self, vocabulary: Vocabulary, quick: Limits = QUICK, slow: Limits = SLOW) -> None:
        tokens = msgspec.msgpack.encode(vocabulary.tokens)
        prepare = f"{compile_process.__name__}:prepare"
        self._quick, self._slow = (
            Pool("grammars", prepare, limits, size, max_answer_bytes=2 * MAX_PACKED_BYTES, setup=tokens)
            for limits, size in ((quick, NUM_QUICK), (slow, NUM_SLOW))
        )
        # also at the interpreter's exit, if close() was not called
        self._finalizers = [weakref.finalize(self, pool.close) for pool in (self._quick, self._slow)]

    @property
    def pids(self) -> list[int]:
        """Ids of the running processes."""
        return [*self._quick.pids, *self._slow.pids]

    def try_out(self, job: Job, backend: str, constraint: Constraint, *, slow: bool) -> Trial:
        """Compiles a constraint with a library, and waits for the result.

        Args:
            job: lets another thread cancel the compilation.
            backend: name of the library.
            constraint: to compile.
            slow: use the lane with the higher limits.

        Raises:
            TooSlowError, LimitExceededError, ProcessBrokenError, CancelledError, RuntimeError, OSError: see
                `Pool.run`.
        """
        data = msgspec.msgpack.encode((backend, constraint))
        return msgspec.msgpack.decode((self._slow if slow else self._quick).run(job, data), type=Trial)

    def close(self) -> None:
        """Ends the processes, also those that compile."""
        for finalizer in self._finalizers:
            finalizer()
