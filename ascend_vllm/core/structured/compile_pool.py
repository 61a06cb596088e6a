"""The processes that compile grammars first, as the engine core sees them: a quick lane, and one for what takes long.

What runs in them, and why, is told in `compile_process`.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import weakref

import msgspec

from ascend_vllm.core.structured import compile_process
from ascend_vllm.core.structured.compile_process import MAX_PACKED_BYTES, Trial
from ascend_vllm.core.structured.constraint import Constraint
from ascend_vllm.core.structured.vocabulary import Vocabulary
from ascend_vllm.sandbox.child import Limits
from ascend_vllm.sandbox.family import Family, Job

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
    """Compiles constraints where it can be ended; started by the first one.

    Args:
        vocabulary: of the model.
        quick: limits of the first lane.
        slow: limits of the second.
    """

    def __init__(self, vocabulary: Vocabulary, quick: Limits = QUICK, slow: Limits = SLOW) -> None:
        # closed, and its processes ended, also at the interpreter's end
        stack = contextlib.ExitStack()
        self._finalizer = weakref.finalize(self, stack.close)
        tokens = msgspec.msgpack.encode(vocabulary.tokens)
        file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
        file.write(tokens)
        file.flush()
        self._quick, self._slow = (
            Family(
                "grammars",
                [
                    *(sys.executable, "-m", compile_process.__name__),
                    *(msgspec.json.encode(limits).decode(), str(file.fileno()), str(len(tokens))),
                ],
                limits,
                size,
                max_answer_bytes=2 * MAX_PACKED_BYTES,
                pass_fds=[file.fileno()],
            )
            for limits, size in ((quick, NUM_QUICK), (slow, NUM_SLOW))
        )
        stack.callback(self._quick.close)
        stack.callback(self._slow.close)

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
                `Family.ask`.
        """
        data = msgspec.msgpack.encode(compile_process.Job(backend, constraint))
        answer = (self._slow if slow else self._quick).ask(job, data)
        return msgspec.msgpack.decode(answer, type=Trial)

    def close(self) -> None:
        """Ends the processes, and with them what they compile."""
        self._finalizer()
