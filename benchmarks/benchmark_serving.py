"""Load an OpenAI-compatible server (or vLLM's /generate) and measure what its clients see.

Requests come at a rate (--request-rate, Poisson) or as fast as a number of clients takes them
(--max-concurrency); prompts are random, all different or with a shared beginning.

    python benchmarks/benchmark_serving.py --num-prompts 64 --max-concurrency 8 --input-len 128 --output-len 64
    python benchmarks/benchmark_serving.py --request-rate 4 --prefix-len 896 --input-len 128 --result-json out.json

Times: TTFT until the first token's event; ITL between the events of a request; TPOT (end - first) / (tokens - 1);
E2E until the end. Token counts are the server's own (`usage`); /generate tells none, there they are --output-len.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import datetime
import json
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from http_client import HttpClient

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "generate": "/generate"}
PERCENTILES = (90, 99)


@dataclasses.dataclass
class Outcome:
    """What one request saw; times are seconds of perf_counter."""

    start: float
    prompt_tokens: int
    events: list[float] = dataclasses.field(default_factory=list)
    end: float = 0.0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.events[0] - self.start

    @property
    def tpot(self) -> float:
        """Seconds per token after the first."""
        return (self.events[-1] - self.events[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [b - a for a, b in zip(self.events, self.events[1:], strict=False)]


class Prompts:
    """Random prompts: token ids, or text when the endpoint or the user wants text.

    Args:
        args: the command line.
        vocab_size: ids are below it.
    """

    def __init__(self, args: argparse.Namespace, vocab_size: int) -> None:
        self._args = args
        self._random = random.Random(args.seed)
        self._vocab_size = vocab_size
        self._tokenizer = _load_tokenizer(args.tokenizer) if args.tokenizer else None
        self._prefix = self._ids(args.prefix_len)

    def make(self) -> tuple[str | list[int], int]:
        """A prompt and its (for text: approximate) number of tokens."""
        ids = self._prefix + self._ids(self._args.input_len)
        if self._args.prompt_format == "ids":
            return ids, len(ids)
        if self._tokenizer is None:
            # a number is a few tokens for any tokenizer; without one the length cannot be exact
            return " ".join(map(str, ids)), len(ids)
        return self._tokenizer.decode(ids), len(ids)

    def _ids(self, count: int) -> list[int]:
        # the lowest ids are special tokens in many vocabularies
        low = min(1000, self._vocab_size // 2)
        return [self._random.randrange(low, self._vocab_size) for _ in range(count)]


def _load_tokenizer(directory: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def request_body(args: argparse.Namespace, prompt: str | list[int]) -> dict[str, Any]:
    """The JSON of one request."""
    body: dict[str, Any] = {
        "max_tokens": args.output_len,
        "temperature": args.temperature,
        "ignore_eos": args.ignore_eos,
        "stream": True,
    }
    if args.endpoint == "generate":
        return body | {"prompt": prompt}
    body |= {"model": args.model, "stream_options": {"include_usage": True}}
    if args.endpoint == "chat":
        return body | {"messages": [{"role": "user", "content": prompt}]}
    return body | {"prompt": prompt}


async def run_request(client: HttpClient, args: argparse.Namespace, prompt: str | list[int], size: int) -> Outcome:
    """Send one request and note when its events arrive."""
    outcome = Outcome(time.perf_counter(), size)
    separator = b"\0" if args.endpoint == "generate" else b"\n\n"
    try:
        async for moment, event in client.post_stream(PATHS[args.endpoint], request_body(args, prompt), separator):
            note_event(outcome, args.endpoint, moment, event)
        if not outcome.events:
            outcome.error = "no token came"
        if args.endpoint == "generate" and args.ignore_eos:
            # frames tell no counts, and one may hold several tokens
            outcome.output_tokens = args.output_len
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.end = time.perf_counter()
    return outcome


def note_event(outcome: Outcome, endpoint: str, moment: float, event: bytes) -> None:
    """Take an event into account; only those with the usage are decoded."""
    if endpoint == "generate":
        outcome.events.append(moment)
        outcome.output_tokens += 1
        return
    if b'"usage":{' in event or b'"usage": {' in event:
        usage = json.loads(event.removeprefix(b"data: "))["usage"]
        outcome.prompt_tokens = usage["prompt_tokens"]
        outcome.output_tokens = usage["completion_tokens"]
        # some servers send the usage with every token
        if b'"choices":[]' not in event and b'"choices": []' not in event:
            outcome.events.append(moment)
    elif event.startswith(b'data: {"error"'):
        outcome.error = event.decode()
    elif event.startswith(b"data: {") and b'"role":' not in event:
        outcome.events.append(moment)


async def run_load(client: HttpClient, args: argparse.Namespace, prompts: Prompts, count: int) -> list[Outcome]:
    """All requests, begun as --request-rate and --max-concurrency say."""
    gate = asyncio.Semaphore(args.max_concurrency or count)
    clock = random.Random(args.seed + 1)
    made = [prompts.make() for _ in range(count)]
    bar = tqdm(total=count, desc="requests", unit="req", disable=args.no_progress, file=sys.stderr)

    async def one(prompt: str | list[int], size: int) -> Outcome:
        async with gate:
            outcome = await run_request(client, args, prompt, size)
        bar.update()
        return outcome

    tasks = []
    with contextlib.closing(bar):
        for prompt, size in made:
            tasks.append(asyncio.create_task(one(prompt, size)))
            if args.request_rate != float("inf"):
                await asyncio.sleep(clock.expovariate(args.request_rate))
        return await asyncio.gather(*tasks)


def percentile(values: list[float], percent: float) -> float:
    """Percentile with linear interpolation between neighbours."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(values: list[float]) -> dict[str, float]:
    """Mean, median and percentiles, in milliseconds."""
    if not values:
        return {}
    summary = {"mean": statistics.fmean(values), "median": statistics.median(values)}
    summary |= {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
    return {name: value * 1e3 for name, value in summary.items()}


def report(outcomes: list[Outcome], duration: float) -> dict[str, Any]:
    """All figures of a run."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    output_tokens = sum(outcome.output_tokens for outcome in good)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    return {
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "errors": sorted({outcome.error for outcome in outcomes if outcome.error})[:5],
        "duration_s": duration,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "request_throughput": len(good) / duration,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (prompt_tokens + output_tokens) / duration,
        "ttft_ms": summarize([outcome.ttft for outcome in good]),
        "tpot_ms": summarize([outcome.tpot for outcome in good if outcome.output_tokens > 1]),
        "itl_ms": summarize([gap for outcome in good for gap in outcome.gaps]),
        "e2e_ms": summarize([outcome.end - outcome.start for outcome in good]),
    }


def table(result: dict[str, Any]) -> Iterator[str]:
    """The figures as lines of text."""
    yield f"{'requests completed / failed':34} {result['completed']} / {result['failed']}"
    for name, unit in (
        ("duration_s", "s"),
        ("prompt_tokens", ""),
        ("output_tokens", ""),
        ("request_throughput", "req/s"),
        ("output_throughput", "tok/s"),
        ("total_token_throughput", "tok/s"),
    ):
        yield f"{name.replace('_', ' '):34} {result[name]:.2f} {unit}"
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        figures = "  ".join(f"{key} {value:.2f}" for key, value in result[name].items())
        yield f"{name.upper().replace('_MS', ' (ms)'):34} {figures}"
    if limit := result.get("roofline"):
        yield (
            f"{'memory-bandwidth limit':34} {limit['bandwidth_gb_s']:.1f} GB/s / "
            f"{limit['weight_bytes'] / 1e6:.0f} MB = {limit['decode_steps_per_s']:.1f} decode steps/s"
        )
    yield from (f"error: {error}" for error in result["errors"])


def measure_bandwidth() -> float:
    """Read bandwidth in GB/s; torch is imported only for this."""
    from bandwidth import read_bandwidth

    return read_bandwidth()


def roofline(bandwidth_gb_s: float, model_dir: str) -> dict[str, float]:
    """The limit that memory sets to a model's decoding."""
    from bandwidth import Roofline, weight_bytes

    return Roofline(bandwidth_gb_s, weight_bytes(model_dir)).as_dict()


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark."""
    client = HttpClient(args.base_url, {"Authorization": f"Bearer {args.api_key}"} if args.api_key else None)
    if args.endpoint != "generate" and args.model is None:
        args.model = (await client.get_json("/v1/models"))["data"][0]["id"]
    prompts = Prompts(args, args.vocab_size)
    bandwidths = [measure_bandwidth()] if args.roofline else []
    if args.warmup:
        await run_load(client, argparse.Namespace(**(vars(args) | {"no_progress": True})), prompts, args.warmup)
    start = time.perf_counter()
    outcomes = await run_load(client, args, prompts, args.num_prompts)
    result = report(outcomes, time.perf_counter() - start)
    client.close()
    if args.roofline:
        # neighbours change what a machine can read: the better of before and after is the limit
        bandwidths.append(measure_bandwidth())
        result["roofline"] = roofline(max(bandwidths), args.roofline)
    # infinity and paths are no JSON
    settings = {
        name: value if isinstance(value, bool | int | None) else str(value)
        for name, value in vars(args).items()
        if name != "api_key"
    }
    return result | {"date": datetime.datetime.now().isoformat(timespec="seconds"), "settings": settings}


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    add("--endpoint", choices=sorted(PATHS), default="completions", help="what is asked (default: %(default)s)")
    add("--model", help="name to request; default: the first of /v1/models")
    add("--api-key", help="sent as Authorization: Bearer")
    add("--num-prompts", type=int, default=100, help="requests (default: %(default)s)")
    add("--warmup", type=int, default=1, help="requests before the measurement (default: %(default)s)")
    add("--request-rate", type=float, default=float("inf"), help="requests per second; default: all at once")
    add("--max-concurrency", type=int, help="most requests under way at once; default: no limit")
    add("--input-len", type=int, default=128, help="tokens of each prompt of its own (default: %(default)s)")
    add("--prefix-len", type=int, default=0, help="tokens before them that all prompts share (default: 0)")
    add("--output-len", type=int, default=64, help="tokens to generate (default: %(default)s)")
    add("--no-ignore-eos", dest="ignore_eos", action="store_false", help="let the model end its answers")
    add("--temperature", type=float, default=0.0, help="(default: %(default)s)")
    add("--prompt-format", choices=("ids", "text"), help="default: ids for completions, else text")
    add("--tokenizer", help="directory of a tokenizer, to make text prompts of an exact length")
    add("--vocab-size", type=int, default=None, help="ids are below it; default: --roofline's, else 2000")
    add("--seed", type=int, default=0, help="of prompts and arrivals (default: 0)")
    add("--roofline", metavar="MODEL_DIR", help="measure memory and tell the limit for this model's weights")
    add("--result-json", type=pathlib.Path, help="write all figures here")
    add("--no-progress", action="store_true", help="no progress bar")
    args = parser.parse_args()
    if args.prompt_format is None:
        args.prompt_format = "ids" if args.endpoint == "completions" else "text"
    if args.prompt_format == "ids" and args.endpoint != "completions":
        parser.error("--prompt-format ids needs --endpoint completions")
    if args.vocab_size is None:
        args.vocab_size = _vocab_size(args.roofline or args.tokenizer)
    return args


def _vocab_size(model_dir: str | None) -> int:
    config = pathlib.Path(model_dir) / "config.json" if model_dir else None
    return int(json.loads(config.read_text())["vocab_size"]) if config and config.is_file() else 2000


def main() -> None:
    """Run, print, save."""
    args = parse_args()
    result = asyncio.run(run(args))
    print("\n".join(table(result)))
    if args.result_json:
        args.result_json.write_text(json.dumps(result, indent=1) + "\n")
    if result["failed"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
