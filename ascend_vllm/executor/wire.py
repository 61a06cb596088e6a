"""The records that an executor and workers in other processes exchange.

A record is a RecordKind in one byte, and its contents. Steps and their outputs are msgpack, with arrays as their
bytes. Calls of methods and their results are pickled between a process and its children, since they may be anything;
between machines they are plain values (`nodes.plain_values`), and pickles are refused.
"""

from __future__ import annotations

import builtins
import enum
import pickle
import struct
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ascend_vllm import errors
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.distributed.rendezvous import Rendezvous
from ascend_vllm.distributed.shm_ring import RingEnds
from ascend_vllm.errors import ConfigError, RequestError
from ascend_vllm.executor.nodes.plain_values import decode_plain, encode_plain
from ascend_vllm.types.step import SchedulerOutput, StepOutput


class RecordKind(enum.IntEnum):
    """The first byte of a record."""

    # to the workers
    STEP = 0
    CALL = 1
    STOP = 2
    # from a worker
    STEP_OUTPUT = 3
    RESULT = 4
    FAILURE = 5
    # as CALL and RESULT, without pickles
    PLAIN_CALL = 6
    PLAIN_RESULT = 7


# first bytes of the records that are accepted from another machine: by its workers, and by node 0
ORDERS_BETWEEN_MACHINES = frozenset(
    bytes((kind,)) for kind in (RecordKind.STEP, RecordKind.PLAIN_CALL, RecordKind.STOP)
)
ANSWERS_BETWEEN_MACHINES = frozenset(
    bytes((kind,)) for kind in (RecordKind.STEP_OUTPUT, RecordKind.PLAIN_RESULT, RecordKind.FAILURE)
)


class WorkerSetup(msgspec.Struct, frozen=True):
    """What a worker's process reads from its standard input.

    Attributes:
        config: of the engine.
        rank: of the worker.
        rendezvous: where the workers meet.
        orders: ring of steps and calls.
        answers: ring of outputs, results and failures.
        search_path: the parent's sys.path, for functions that it calls in workers.
    """

    config: EngineConfig
    rank: int
    rendezvous: Rendezvous
    orders: RingEnds
    answers: RingEnds
    search_path: list[str]


class Failure(msgspec.Struct, array_like=True):
    """What went wrong in a worker.

    Attributes:
        call_id: of the call that failed; None: a step did.
        kind: name of the exception's class.
        text: what it says.
        trace: the worker's traceback.
    """

    call_id: int | None
    kind: str
    text: str
    trace: str

    def error(self) -> Exception:
        """The exception, of the same class if this process has it, with the traceback as a note."""
        found: Any = getattr(errors, self.kind, None) or getattr(builtins, self.kind, None)
        if found is errors.UnsupportedFlagError:
            found = ConfigError
        is_known = isinstance(found, type) and issubclass(found, Exception)
        try:
            error: Exception = found(self.text) if is_known else RuntimeError(f"{self.kind}: {self.text}")
        except TypeError:  # a class whose constructor takes more than a text
            error = RuntimeError(f"{self.kind}: {self.text}")
        error.add_note(self.trace)
        return error


def _as_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()]
    raise RequestError(f"{value!r} cannot be sent to workers in other processes: use a single worker")


def _from_plain(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, shape, data = value
        # a bytearray, so that the array may be written to
        return np.frombuffer(bytearray(data), dtype).reshape(shape)
    raise TypeError(f"steps have no fields of type {kind}")


# kind, and number of the call
_CALL_HEADER = struct.Struct("<Bq")
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_as_plain)
_DECODERS: dict[int, msgspec.msgpack.Decoder[Any]] = {
    RecordKind.STEP: msgspec.msgpack.Decoder(SchedulerOutput, dec_hook=_from_plain),
    RecordKind.STEP_OUTPUT: msgspec.msgpack.Decoder(StepOutput, dec_hook=_from_plain),
    RecordKind.FAILURE: msgspec.msgpack.Decoder(Failure),
}
# the record that ends a worker
STOP = bytes((RecordKind.STOP,))
# id of the call whose result a worker sends unasked when it has been made, and that record
START_CALL = 0
STARTED = _CALL_HEADER.pack(RecordKind.PLAIN_RESULT, START_CALL) + encode_plain(None)


def encode(kind: RecordKind, contents: SchedulerOutput | StepOutput | Failure) -> bytes:
    """A record of kind STEP, STEP_OUTPUT or FAILURE.

    Raises:
        RequestError: a row of a step holds something that cannot be serialised, such as a function.
    """
    return bytes((kind,)) + _ENCODER.encode(contents)


def decode(record: bytes) -> Any:
    """The step, output or failure in a record that `encode` returned."""
    return _DECODERS[record[0]].decode(memoryview(record)[1:])


def encode_failure(error: BaseException, call_id: int | None) -> bytes:
    """A record of kind FAILURE, with the exception's traceback; call_id as in `Failure`."""
    trace = "".join(traceback.format_exception(error))
    return encode(RecordKind.FAILURE, Failure(call_id, type(error).__name__, str(error), trace))


def encode_call(
    call_id: int, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, is_plain: bool
) -> bytes:
    """A call of a method; is_plain: without pickles, since some workers are on other machines.

    Raises:
        RequestError: an argument, or the function, cannot be sent.
    """
    if is_plain:
        contents = encode_plain([method, list(args), dict(kwargs)])
        return _CALL_HEADER.pack(RecordKind.PLAIN_CALL, call_id) + contents
    if callable(method) and getattr(method, "__module__", None) == "__main__":
        raise RequestError(
            "a function that workers in other processes call must be in a module that they can import, not in the "
            "program itself.",
            "method",
        )
    try:
        contents = pickle.dumps((method, tuple(args), dict(kwargs)))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise RequestError(f"it cannot be sent to workers in other processes: {error}", "method") from error
    return _CALL_HEADER.pack(RecordKind.CALL, call_id) + contents


def encode_result(call: bytes, result: Any) -> bytes:
    """The record of a method's result.

    Args:
        call: the record of kind CALL or PLAIN_CALL.
        result: what the method returned.

    Raises:
        Exception: it cannot be sent.
    """
    if call[0] == RecordKind.PLAIN_CALL:
        return _CALL_HEADER.pack(RecordKind.PLAIN_RESULT, call_id_of(call)) + encode_plain(result)
    return _CALL_HEADER.pack(RecordKind.RESULT, call_id_of(call)) + pickle.dumps(result)


def decode_call(record: bytes) -> Any:
    """Method, arguments and keyword arguments of a call, or the method's result, pickled or plain.

    Raises:
        Exception: something in it cannot be imported here.
    """
    contents = memoryview(record)[_CALL_HEADER.size :]
    if record[0] in (RecordKind.PLAIN_CALL, RecordKind.PLAIN_RESULT):
        return decode_plain(contents, with_functions=record[0] == RecordKind.PLAIN_CALL)
    # from the process that started this one, or one that this one started
    return pickle.loads(contents)


def call_id_of(record: bytes) -> int:
    """Id of the call that a record of kind CALL or RESULT, plain or not, belongs to."""
    return int(_CALL_HEADER.unpack_from(record)[1])
