"""Serialises arguments and results of calls between machines; decoding them runs no code of the sender's.

Plain values are None, bool, int (64 bits), float, str, bytes, lists, tuples and dicts of plain values, and arrays of
numbers. A function is sent as its name, `module:qualname`, and decoded only with `with_functions`, by importing the
module. The encoder refuses everything else.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import msgspec
import numpy as np

from ascend_vllm.errors import RequestError

_AS_THEY_ARE = frozenset({type(None), bool, int, float, str, bytes})
_MAX_DEPTH = 64
# kinds of msgpack extensions
_TUPLE, _ARRAY, _FUNCTION = 1, 2, 3


def encode_plain(value: Any) -> bytes:
    """A plain value, or one with functions in it.

    Raises:
        RequestError: some of it cannot be sent; the text says what.
    """
    try:
        return msgspec.msgpack.encode(_pack(value, _MAX_DEPTH))
    except OverflowError as error:
        raise RequestError("a number of more than 64 bits cannot be sent to or from other machines.") from error


def decode_plain(data: bytes | memoryview, *, with_functions: bool = False) -> Any:
    """The value.

    Args:
        data: of `encode_plain`.
        with_functions: import the modules that it names; only for senders that may run any code here.

    Raises:
        Exception: it is no such value, holds a function that cannot be imported, or one without `with_functions`.
    """

    def unpack(kind: int, contents: memoryview) -> Any:
        if kind == _TUPLE:
            return tuple(decode_plain(contents, with_functions=with_functions))
        if kind == _ARRAY:
            dtype, shape, numbers = msgspec.msgpack.decode(contents, type=tuple[str, tuple[int, ...], bytes])
            # a bytearray, so that the array may be written to; arrays of objects are refused here
            return np.frombuffer(bytearray(numbers), dtype).reshape(shape)
        if kind == _FUNCTION and with_functions:
            return _find(msgspec.msgpack.decode(contents, type=str))
        raise ValueError(f"values of kind {kind} are not taken from other machines here")

    return msgspec.msgpack.Decoder(ext_hook=unpack).decode(data)


def _pack(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if depth == 0:
        raise RequestError(
            f"a value of more than {_MAX_DEPTH} levels, one in another, cannot be sent to or from other machines."
        )
    if kind is list:
        return [_pack(item, depth - 1) for item in value]
    if kind is dict:
        return {_pack_key(key): _pack(item, depth - 1) for key, item in value.items()}
    if kind is tuple:
        return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode([_pack(item, depth - 1) for item in value]))
    if kind is np.ndarray and not value.dtype.hasobject and value.dtype.names is None:
        contents = (value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(contents))
    if kind is types.FunctionType:
        return msgspec.msgpack.Ext(_FUNCTION, msgspec.msgpack.encode(_name_of(value)))
    raise RequestError(
        f"a value of type {kind.__module__}.{kind.__qualname__} cannot be sent to or from other machines: numbers, "
        "texts, bytes, lists, tuples, dicts and arrays of numbers can, and functions of modules to the workers."
    )


def _pack_key(key: Any) -> Any:
    if type(key) not in (int, str):
        raise RequestError(f"a dict with the key {key!r} cannot be sent to or from other machines.")
    return key


def _name_of(function: types.FunctionType) -> str:
    """`module:qualname` of a function that can be found by it.

    Raises:
        RequestError: it cannot.
    """
    found: Any = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not function or function.__module__ == "__main__":
        raise RequestError(
            f"the function {function.__qualname__} cannot be sent to workers on other machines: it must be one that "
            "a module has by its name, and that they can import.",
            "method",
        )
    return f"{function.__module__}:{function.__qualname__}"


def _find(name: str) -> Any:
    module, _, qualname = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    if not isinstance(found, types.FunctionType):
        raise TypeError(f"{name} is no function")
    return found
