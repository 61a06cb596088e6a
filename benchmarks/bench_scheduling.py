"""Measures the effect of the scheduler's features, each with and without, in one run.

    python benchmarks/bench_scheduling.py prefix  --model /tmp/qwen2-0.5b
    python benchmarks/bench_scheduling.py chunked --model /tmp/qwen2-0.5b

prefix   time to the first token of a prompt with a cached prefix, and of a new prompt.
chunked  longest gap in running streams while a long prompt is computed, with and without chunked prefill.

Both start real servers and measure over HTTP. Prompts are random token ids; scripts/make_random_model.py
makes a model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from comparison import servers

from ascend_vllm.tools.bench.datasets import PromptMaker
from ascend_vllm.tools.bench.http_client import HttpClient

START_TIMEOUT_S = 120
# most attempts to send a long prompt while all streams run
MOST_TRIES = 20


# ---- a server and its clients --------------------------------------------------------------------------------


@contextlib.contextmanager
def server(model: str, *flags: str) -> Iterator[str]:
    """Starts a server; yields its address."""
    # variables of the user's environment apply to this server
    program = dataclasses.replace(servers.ours(), environment=dict(os.environ))
    with servers.Server(program, model, flags) as running:
        running.wait_ready(START_TIMEOUT_S)
        yield running.url


async def tokens(client: HttpClient, prompt: list[int], max_tokens: int) -> AsyncIterator[float]:
    """Arrival times of a streamed completion's tokens."""
    body = {
        "model": servers.MODEL_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    async for moment, event in client.post_stream("/v1/completions", body, b"\n\n"):
        if event.startswith(b"data: {") and b'"error"' in event:
            raise RuntimeError(event.decode())
        if event.startswith(b"data: {"):
            yield moment


async def first_token_s(client: HttpClient, prompt: list[int]) -> float:
    """Seconds from sending a prompt to its first token."""
    start = time.perf_counter()
    times = [moment async for moment in tokens(client, prompt, 1)]
    return times[0] - start


def random_ids(args: argparse.Namespace) -> Callable[[int], list[int]]:
    """Returns a function that makes lists of random token ids."""
    return PromptMaker(None, args.vocab_size, random.Random(args.seed)).ids


# ---- prefix --------------------------------------------------------------------------------------------------


def bench_prefix(args: argparse.Namespace) -> dict[str, Any]:
    """Measures cold and warm prompts alternately."""
    ids = random_ids(args)

    async def measure(url: str) -> tuple[list[float], list[float]]:
        client = HttpClient(url)
        cold, warm = [], []
        await first_token_s(client, ids(64))
        for _ in range(args.repeat):
            prefix = ids(args.prefix_len)
            cold.append(await first_token_s(client, prefix + ids(args.tail_len)))
            warm.append(await first_token_s(client, prefix + ids(args.tail_len)))
        return cold, warm

    with server(args.model, "--enable-prefix-caching", "--max-model-len", str(args.max_model_len)) as url:
        cold, warm = asyncio.run(measure(url))
    return {
        "prefix_len": args.prefix_len,
        "tail_len": args.tail_len,
        "cold_ttft_s": statistics.median(cold),
        "warm_ttft_s": statistics.median(warm),
        "ratio": statistics.median(cold) / statistics.median(warm),
    }


# ---- chunked -------------------------------------------------------------------------------------------------


async def longest_gap_s(url: str, args: argparse.Namespace) -> tuple[float, float, float]:
    """Longest gap of a running stream during a long prompt, median gap before, and the prompt's TTFT.

    Raises:
        RuntimeError: in all attempts the streams ended before the prompt was computed.
    """
    for _ in range(MOST_TRIES):
        if (found := await try_longest_gap_s(url, args)) is not None:
            return found
    raise RuntimeError("the streams end before the long prompt is computed: set --max-model-len higher")


async def try_longest_gap_s(url: str, args: argparse.Namespace) -> tuple[float, float, float] | None:
    """As `longest_gap_s`; None if a stream ended before the prompt was computed."""
    ids = random_ids(args)
    client = HttpClient(url)
    times: list[list[float]] = [[] for _ in range(args.streams)]
    running = asyncio.Event()

    async def decode(index: int) -> None:
        async for moment in tokens(client, ids(32), args.max_model_len - args.prompt_len // 2):
            times[index].append(moment)
            if all(len(seen) >= 16 for seen in times):
                running.set()
        # if the client reads slowly, an event has several tokens, and the stream may end earlier
        running.set()

    tasks = [asyncio.create_task(decode(index)) for index in range(args.streams)]
    await running.wait()
    start = time.perf_counter()
    ttft = await first_token_s(client, ids(args.prompt_len))
    counts = [len(seen) for seen in times]
    has_ended = any(task.done() for task in tasks)
    # the gap caused by the prompt ends with the first token after the prompt's
    while any(len(seen) == count and not task.done() for seen, count, task in zip(times, counts, tasks, strict=True)):
        await asyncio.sleep(0.005)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if has_ended:
        return None
    gaps = [(later, later - sooner) for seen in times for sooner, later in itertools.pairwise(seen)]
    during = max((gap for moment, gap in gaps if moment >= start), default=0.0)
    before = statistics.median(gap for moment, gap in gaps if moment < start)
    return during, before, ttft


def bench_chunked(args: argparse.Namespace) -> dict[str, Any]:
    """Measures a server without and one with chunked prefill, one after the other."""
    length = ["--max-model-len", str(args.max_model_len)]
    flags = {
        "whole": [*length, "--max-num-batched-tokens", str(args.max_model_len)],
        "chunked": [*length, "--enable-chunked-prefill", "--max-num-batched-tokens", str(args.budget)],
    }
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in flags}
    for _ in range(args.repeat):
        for name, some in flags.items():
            with server(args.model, *some, "--max-num-seqs", str(args.streams + 2)) as url:
                found[name].append(asyncio.run(longest_gap_s(url, args)))
    result: dict[str, Any] = {"prompt_len": args.prompt_len, "streams": args.streams, "budget": args.budget}
    for name, runs in found.items():
        gap, usual, ttft = (statistics.median(column) for column in zip(*runs, strict=True))
        result[name] = {"worst_gap_s": gap, "usual_gap_s": usual, "prompt_ttft_s": ttft}
    worst = {name: result[name]["worst_gap_s"] for name in flags}
    result["ratio"] = worst["whole"] / worst["chunked"] if worst["chunked"] else float("inf")
    return result


def main() -> None:
    """Prints the figures of one benchmark as JSON; writes them with --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="bench", required=True)
    for name, run, max_model_len, repeat in (
        ("prefix", bench_prefix, 2048, 5),
        ("chunked", bench_chunked, 4608, 1),
    ):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("--model", required=True, help="directory of the model")
        command.add_argument("--max-model-len", type=int, default=max_model_len)
        command.add_argument("--repeat", type=int, default=repeat, help="runs; medians are told")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--vocab-size", type=int, default=30000, help="prompts have ids below it")
        command.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    add = commands.choices["prefix"].add_argument
    add("--prefix-len", type=int, default=1000, help="tokens that prompts share")
    add("--tail-len", type=int, default=16, help="tokens of each prompt of its own")
    add = commands.choices["chunked"].add_argument
    add("--prompt-len", type=int, default=4000, help="tokens of the long prompt")
    add("--streams", type=int, default=4, help="streams that run when it comes in")
    add("--budget", type=int, default=512, help="--max-num-batched-tokens with chunked prefill")
    args = parser.parse_args()
    result = {"bench": args.bench, **args.run(args)}
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
