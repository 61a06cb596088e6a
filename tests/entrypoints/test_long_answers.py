"""Answers that are encoded in chunks, or outside the event loop."""

from __future__ import annotations

import threading

import msgspec

from ascend_vllm.entrypoints.http.long_answers import encode_list, encode_rows, make_answer


async def test_lists_in_pieces_are_the_same_json() -> None:
    for size in (0, 1, 8192, 8193, 20_000):
        ids = list(range(size))
        assert msgspec.json.encode(await encode_list(ids)) == msgspec.json.encode(ids)
    texts = ['ä"\\\n'] * 9000
    encoded = await encode_list(texts)
    assert isinstance(encoded, msgspec.Raw)
    assert msgspec.json.decode(encoded) == texts
    rows = [[0.1, 2.0], [3.5, -1e-9]]
    assert bytes(encode_rows(iter(rows))) == msgspec.json.encode(rows)
    assert bytes(encode_rows([])) == b"[]"


async def test_long_answers_are_made_in_another_thread() -> None:
    """Their texts are parsed, and their log-probabilities written, while the event loop serves the others."""
    here = threading.get_ident()
    assert await make_answer(10, threading.get_ident) == here
    assert await make_answer(100_000, threading.get_ident) != here
