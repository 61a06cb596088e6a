"""The processes that compile grammars first, as the engine core sees them: a quick lane, and one for what takes long.

`compile_process` runs in them, `sandbox` limits them.
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
# CPU time is what limits a compilation; on a machine that is busy with other things it may last longer.
# The first attempt: nearly all come to an end within a tenth of it.
QUICK = Limits(wall_s=4.0, cpu_s=1, memory_bytes=_MEMORY_BYTES)
# for those that did not, behind the other processes of the machine
SLOW = Limits(wall_s=30.0, cpu_s=10, memory_bytes=_MEMORY_BYTES, niceness=10)
# processes of each lane
NUM_QUICK = 2
NUM_SLOW = 1


class GrammarProcesses:
    """Compiles constraints in limited processes, which the first one starts.

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
        # also at the interpreter's end, if nobody called close()
        self._finalizers = [weakref.finalize(self, pool.close) for pool in (self._quick, self._slow)]

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that there are."""
        return [*self._quick.pids, *self._slow.pids]

    def try_out(self, job: Job, backend: str, constraint: Constraint, *, slow: bool) -> Trial:
        """Has a constraint compiled by a library; waits for it.

        Args:
            job: by which another thread may give it up.
            backend: name of the library.
            constraint: what is compiled.
            slow: in the lane that gives it more time.

        Raises:
            TooSlowError, LimitExceededError, ProcessBrokenError, CancelledError, RuntimeError, OSError: see
                `Pool.run`.
        """
        data = msgspec.msgpack.encode((backend, constraint))
        return msgspec.msgpack.decode((self._slow if slow else self._quick).run(job, data), type=Trial)

    def close(self) -> None:
        """Ends the processes, and with them what they compile."""
        for finalizer in self._finalizers:
            finalizer()
