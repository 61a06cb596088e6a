"""Threads for texts: queues, cancellation, and what is refused."""

from __future__ import annotations

import asyncio
import os
import pathlib
import sys
import threading
import time

import pytest
import transformers

from ascend_vllm.engine import tokenization
from ascend_vllm.engine.text_threads import MEDIUM, SHORT, TextThread, TextThreads
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.errors import EngineBusyError, RequestError


async def wait_until(condition: threading.Event) -> None:
    """Wait without holding up the event loop."""
    assert await asyncio.to_thread(condition.wait, 60)


async def test_a_text_that_nobody_waits_for_any_more_is_not_worked_on() -> None:
    """A cancelled text is removed from the queue, and its memory is freed."""
    thread = TextThread("test", max_waiting=100)
    begun, go_on, done = threading.Event(), threading.Event(), []

    def hold() -> None:
        begun.set()
        go_on.wait(60)

    first = asyncio.ensure_future(thread.run(50, hold))
    await wait_until(begun)
    waiting = [asyncio.ensure_future(thread.run(50, done.append, number)) for number in range(2)]
    await asyncio.sleep(0)
    assert thread.num_waiting == 2
    with pytest.raises(EngineBusyError, match="2 long texts of 100 characters wait to be tokenised"):
        await thread.run(1, done.append, 2)
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    assert thread.num_waiting == 1
    last = asyncio.ensure_future(thread.run(50, done.append, 3))
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(first, waiting[1], last)
    assert done == [1, 3]
    thread.close()


async def test_the_refusal_says_what_waits() -> None:
    thread = TextThread("test", max_waiting=10, wait="bodies of {} bytes wait to be read")
    begun, go_on = threading.Event(), threading.Event()
    tasks = [asyncio.ensure_future(thread.run(8, lambda: (begun.set(), go_on.wait(60))))]
    await wait_until(begun)
    tasks.append(asyncio.ensure_future(thread.run(8, int)))
    await asyncio.sleep(0)
    with pytest.raises(EngineBusyError, match=r"overloaded: 1 bodies of 8 bytes wait to be read\. Please"):
        await thread.run(8, int)
    go_on.set()
    await asyncio.gather(*tasks)
    thread.close()


async def test_one_text_may_be_longer_than_all_that_may_wait() -> None:
    thread = TextThread("test", max_waiting=10)
    assert await thread.run(1000, lambda: 5) == 5
    with pytest.raises(ValueError, match="wrong"):
        await thread.run(1, int, "wrong")
    thread.close()


async def test_what_waits_when_the_threads_end_is_cancelled() -> None:
    thread = TextThread("test")
    begun, go_on = threading.Event(), threading.Event()
    first = asyncio.ensure_future(thread.run(1, lambda: (begun.set(), go_on.wait(60))))
    await wait_until(begun)
    second = asyncio.ensure_future(thread.run(1, int))
    await asyncio.sleep(0)
    thread.close()
    go_on.set()
    await first
    with pytest.raises(asyncio.CancelledError):
        await second


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness of their own on Linux")
async def test_texts_by_size() -> None:
    threads = TextThreads("test")
    sizes = {0: threads.short, SHORT: threads.short, SHORT + 1: threads.medium, MEDIUM + 1: threads.long}
    assert all(threads.of(size) is thread for size, thread in sizes.items())
    levels = [await thread.run(0, os.getpriority, os.PRIO_PROCESS, 0) for thread in set(sizes.values())]
    here = os.getpriority(os.PRIO_PROCESS, 0)
    assert sorted(levels) == [here, here, min(here + 10, 19)]
    threads.close()
    one = TextThreads("test", one=True)
    assert len({id(one.of(size)) for size in sizes}) == 1
    one.close()


async def longest_pause(work: asyncio.Future[object]) -> float:
    """For how long, at the most, other things had to wait while work was done, as a share of its time."""
    begin = last = time.perf_counter()
    longest = 0.0
    while not work.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest / (last - begin)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "word_level"])
async def test_a_long_text_does_not_hold_up_the_event_loop(request: pytest.FixtureRequest, kind: str) -> None:
    """The library's `Tokenizer.encode` holds the GIL for seconds, and would block all other requests."""
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    text = "The quick brown fox jumps over the lazy dog. " * 15_000
    encoding = asyncio.ensure_future(tokenizer.encode_async(text))
    assert await longest_pause(encoding) < 0.5
    ids = encoding.result()
    assert ids == tokenizer.encode(text)
    assert await tokenizer.decode_async(ids) == tokenizer.decode(ids)
    pairs = await tokenizer.encode_pair_async(text[:300_000], "the fox", 100)
    assert pairs == tokenizer.encode_pair(text[:300_000], "the fox", 100)


async def test_a_short_text_does_not_wait_for_long_ones(byte_level: Tokenizer) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 10_000
    long = [asyncio.ensure_future(byte_level.encode_async(text)) for _ in range(5)]
    await asyncio.sleep(0)
    assert await byte_level.encode_async("the fox") == byte_level.encode("the fox")
    assert not long[-1].done()
    for one in long[1:]:
        one.cancel()
    await asyncio.gather(*long, return_exceptions=True)
    assert byte_level._threads.long.num_waiting == 0


async def test_texts_that_no_prompt_holds_cost_no_tokens(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused by their characters; where these might do, by the tokens of their beginning."""
    counted: list[int] = []
    encode = Tokenizer._encode

    def counting(self: Tokenizer, text: str, special: bool) -> object:
        counted.append(len(text))
        return encode(self, text, special)

    monkeypatch.setattr(Tokenizer, "_encode", counting)
    longest = byte_level._longest_token
    with pytest.raises(RequestError, match="is the upper bound for 100 input tokens"):
        await byte_level.encode_async("a" * (100 * longest + 1), max_tokens=100)
    size = tokenization._ANY_LENGTH
    for text in ("a" * (size + 1), "日" * (size // 3 + 1)):
        with pytest.raises(RequestError, match=f"too long to be tokenised: the limit is {size} bytes of UTF-8"):
            await byte_level.encode_async(text, max_tokens=100, any_length=True)
    assert counted == []
    # as many characters as so many tokens may have, but each is several
    most = 600_000 // longest
    with pytest.raises(RequestError, match=r"600000 characters, and the first \d+ of them are more than"):
        await byte_level.encode_async("\N{GOTHIC LETTER AHSA}" * 600_000, max_tokens=most + 1)
    assert sum(counted) < 200_000
    # a text that fits is tokenised, however long it is
    monkeypatch.setattr(tokenization, "_COUNT_CHARS", 1000)
    text = "throughput " * 40_000
    ids = await byte_level.encode_async(text, max_tokens=50_000)
    assert ids == byte_level.encode(text)


def test_tokenizers_in_python_take_shorter_texts(tmp_path: pathlib.Path) -> None:
    transformers.ByT5Tokenizer().save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_directory(str(tmp_path))
    with pytest.raises(RequestError, match="the limit is 524288 bytes of UTF-8"):
        tokenizer.check_size("a" * 524_289, 1000)


def test_ids_that_no_prompt_holds(byte_level: Tokenizer) -> None:
    byte_level.check_num_ids([1] * 2_000_000, 2_000_000)
    with pytest.raises(RequestError, match="the limit is 1048576 tokens"):
        byte_level.check_num_ids([1] * 1_048_577, 100)
