"""Encodes vectors for answers: base64 or bytes, of a given dtype and byte order."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]


def to_bytes(vectors: Vectors, dtype: str, endianness: str) -> bytes:
    """An array's entries as bytes, in row-major order.

    Args:
        vectors: float32.
        dtype: "float32", "float16" or "bfloat16"; rounded to the nearest, ties to even.
        endianness: "native", "big" or "little".
    """
    order = {"native": "=", "big": ">", "little": "<"}[endianness]
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(vectors).view(np.uint32)
        # the upper half of a float32; NaN, which this could round to infinity, does not come from a pooler
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return rounded.astype(f"{order}u2").tobytes()
    kind = "f4" if dtype == "float32" else "f2"
    return vectors.astype(f"{order}{kind}").tobytes()


def to_base64(vectors: Vectors, dtype: str, endianness: str) -> str:
    """`to_bytes` as base64."""
    return base64.b64encode(to_bytes(vectors, dtype, endianness)).decode()


def describe(
    head: dict[str, Any],
    vectors: Sequence[Vectors],
    parts: Sequence[bytes],
    dtype: str,
    order: str,
    usage: dict[str, int],
) -> str:
    """The header "metadata" of a binary answer, with the vectors' offsets.

    Args:
        head: further fields of JSON answers, without usage.
        vectors: one array per prompt.
        parts: the vectors' bytes.
        dtype: of the encoded numbers.
        order: the byte order as requested, also "native".
        usage: `usage` of the answer.

    Example::

        describe({"id": "a"}, [np.zeros(2, np.float32)], [bytes(8)], "float32", "little", {"prompt_tokens": 3})
    """
    entries = []
    start = 0
    for index, (array, part) in enumerate(zip(vectors, parts, strict=True)):
        entries.append(
            {
                "index": index,
                "embed_dtype": dtype,
                "endianness": order,
                "start": start,
                "end": start + len(part),
                "shape": list(array.shape),
            }
        )
        start += len(part)
    return json.dumps(head | {"data": entries, "usage": usage})
