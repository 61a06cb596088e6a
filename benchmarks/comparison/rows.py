"""The rows of the table: how to measure each, its target, and the machine's limit."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from comparison.client import Client
from comparison.limits import ModelFacts
from comparison.peaks import Reading
from comparison.report import Line
from comparison.servers import Server


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Numbers and lengths of the requests.

    Attributes:
        input_len: tokens of a prompt.
        output_len: tokens of an answer.
        waves: prompts of a row, as a multiple of its concurrency.
        long_len: tokens of a long prompt.
        long_prompts: number of long prompts.
        mixed_output_len: tokens of the answers streamed while long prompts arrive.
        prefix_len: tokens of a shared prefix.
        tiny_input_len: tokens of a prompt for the tiny model.
        tiny_concurrency: requests for the tiny model running at a time.
        long8k_len: tokens of a prompt of the rows long8k.
        long8k_streams: answers streamed while such prompts arrive.
        long8k_prompts: such prompts computed at a time meanwhile.
        open_s: seconds in which the requests of the open loop arrive.
        open_saturation: requests running at a time when its saturation is measured.
    """

    input_len: int = 128
    output_len: int = 64
    waves: int = 3
    long_len: int = 1024
    long_prompts: int = 3
    mixed_output_len: int = 64
    prefix_len: int = 896
    tiny_input_len: int = 32
    tiny_concurrency: int = 64
    long8k_len: int = 8192
    long8k_streams: int = 8
    long8k_prompts: int = 4
    open_s: int = 300
    open_saturation: int = 32


@dataclasses.dataclass(frozen=True)
class Subject:
    """The subject of a measurement.

    Attributes:
        server: a running server.
        client: of the server.
        model: facts of its model.
        sizes: of the requests.
        seed: of the prompts; different in every round, so that nothing is cached.
        rate: requests per second of the open loop, the same for both servers; 0 in other setups.
    """

    server: Server
    client: Client
    model: ModelFacts
    sizes: Sizes
    seed: int
    rate: float = 0.0


# a reading, and all figures of the measurement
Measured = tuple[float, dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(Line):
    """One line of the table, and how it is measured.

    Attributes:
        setup: which servers it is measured on: "fresh" ones each time, the same "cold", with files that are not in
            the file cache, or resident ones: "main", "shared", "open", or one of `OTHER_MODELS`.
        measure: returns a reading.
        along: name of a row before it in the setup; if that one is measured, its figures have this row's reading.
        read: the reading in those figures, for rows with `along`.
        warm_up: runs everything once; None: not needed.
        limit: what the machine allows; None: it is not computed from the machine's limits.
        null_ratio: the target where the peer is the null device; None: it is not compared with that.
    """

    setup: str
    measure: Callable[[Subject], Measured]
    along: str | None = None
    read: Callable[[dict[str, Any]], float] | None = None
    warm_up: Callable[[Subject], object] | None = None
    limit: Callable[[ModelFacts, Sizes, Reading], float] | None = None
    null_ratio: float | None = None


# the lengths of the open loop are from a tenth of the row's lengths to almost twice as much
_OPEN_RANGE = 0.9

# setup with a model of its own → what it is
OTHER_MODELS = {
    "tiny": "a tiny model",
    "moe": "a mixture of experts",
    "mla": "a model with latent attention",
    "w8a8": "a model in W8A8",
    "w4": "a model in W4A16",
}


def _start(subject: Subject) -> Measured:
    return subject.server.start_s, {}


def _load(subject: Subject) -> Measured:
    """Then answers some prompts, which would need what was swapped out."""
    server, sizes = subject.server, subject.sizes
    subject.client.load(seed=subject.seed, num_prompts=2, concurrency=1, input_len=sizes.input_len, output_len=4)
    megabytes = {"resident_mb": server.resident_bytes() / 1e6, "swapped_mb": server.swapped_bytes() / 1e6}
    return server.load_s(), {"start_s": server.start_s, "weights_mb": subject.model.file_bytes / 1e6} | megabytes


def _memory(subject: Subject) -> Measured:
    """Fills the whole KV cache with prompts first: memory that was never written is not resident."""
    sizes, kv_tokens = subject.sizes, subject.server.kv_cache_tokens()
    count = -(-kv_tokens // sizes.long_len) + 1
    subject.client.load(seed=subject.seed, num_prompts=count, concurrency=4, input_len=sizes.long_len, output_len=2)
    resident, kv_bytes = subject.server.resident_bytes(), kv_tokens * subject.model.kv_bytes_per_token
    above = resident - subject.model.resident_bytes - kv_bytes
    return above / 1e6, {
        "resident_mb": resident / 1e6,
        "weights_mb": subject.model.resident_bytes / 1e6,
        "kv_cache_mb": kv_bytes / 1e6,
    }


def _throughput(subject: Subject, concurrency: int, **lengths: int) -> Measured:
    waves = subject.sizes.waves
    figures = subject.client.load(
        seed=subject.seed, num_prompts=waves * concurrency, concurrency=concurrency, **lengths
    )
    return figures["output_throughput"], figures


def _lengths(sizes: Sizes) -> dict[str, int]:
    return {"input_len": sizes.input_len, "output_len": sizes.output_len}


def _prefix_lengths(sizes: Sizes) -> dict[str, int]:
    return _lengths(sizes) | {"prefix_len": sizes.prefix_len}


def _tiny_lengths(sizes: Sizes) -> dict[str, int]:
    return {"input_len": sizes.tiny_input_len, "output_len": sizes.output_len}


def _first_token(subject: Subject, input_len: int) -> Measured:
    count = subject.sizes.long_prompts
    figures = subject.client.load(
        seed=subject.seed, num_prompts=count, concurrency=1, input_len=input_len, output_len=1
    )
    return figures["median_ttft_ms"] / 1e3, figures


def _open_lengths(sizes: Sizes) -> dict[str, Any]:
    return _lengths(sizes) | {"range_ratio": _OPEN_RANGE}


def saturation(subject: Subject) -> float:
    """Requests per second that a server answers at most, of the lengths of the open loop."""
    concurrency = subject.sizes.open_saturation
    figures = subject.client.load(
        seed=subject.seed,
        num_prompts=subject.sizes.waves * concurrency,
        concurrency=concurrency,
        **_open_lengths(subject.sizes),
    )
    return figures["request_throughput"]


def _open(subject: Subject, read: Callable[[dict[str, Any]], float]) -> Measured:
    """Requests that arrive whether or not those before them are answered."""
    count = max(1, round(subject.rate * subject.sizes.open_s))
    figures = subject.client.load(
        seed=subject.seed, num_prompts=count, concurrency=None, rate=subject.rate, **_open_lengths(subject.sizes)
    )
    return read(figures), figures | {"rate": subject.rate}


def _p99_ttft_s(figures: dict[str, Any]) -> float:
    return float(figures["p99_ttft_ms"]) / 1e3


def _p99_gap_s(figures: dict[str, Any]) -> float:
    return float(figures["p99_itl_ms"]) / 1e3


def _mixed(subject: Subject, streams: int, long_len: int, long_prompts: int) -> Measured:
    gaps, ttfts = subject.client.mixed(
        seed=subject.seed,
        streams=streams,
        input_len=subject.sizes.input_len,
        output_len=subject.sizes.mixed_output_len,
        long_len=long_len,
        long_prompts=long_prompts,
    )
    found = {
        "gaps": len(gaps),
        "p50_gap_s": float(np.percentile(gaps, 50)),
        "p99_gap_s": float(np.percentile(gaps, 99)),
        "max_gap_s": max(gaps),
        "long_prompts": len(ttfts),
        "median_long_ttft_s": statistics.median(ttfts),
    }
    return found["p99_gap_s"], found


def _warm(subject: Subject, concurrency: int, **lengths: Any) -> None:
    """Sends as many prompts at a time as the row does, with short answers."""
    short = lengths | {"output_len": min(4, lengths["output_len"])}
    subject.client.load(seed=subject.seed + 900_000, num_prompts=concurrency, concurrency=concurrency, **short)


def _named(name: str, title: str, setup: str) -> dict[str, Any]:
    """Name and title of a row that several setups have."""
    if setup == "main":
        return {"name": name, "title": title, "setup": setup}
    return {"name": f"{setup}-{name}", "title": f"{OTHER_MODELS[setup]}: {title}", "setup": setup}


def _long_prompt(target_ratio: float, setup: str = "main") -> Row:
    return Row(
        **_named("ttft", "first token of a long prompt, idle server", setup),
        unit="s",
        higher_is_better=False,
        target_ratio=target_ratio,
        measure=lambda subject: _first_token(subject, subject.sizes.long_len),
        warm_up=lambda subject: _warm(subject, 1, input_len=subject.sizes.long_len, output_len=1),
        limit=lambda model, sizes, limits: model.prefill_s(limits, 1, sizes.long_len),
        limit_text="peak",
    )


def _concurrent(concurrency: int, target_ratio: float, setup: str = "main") -> Row:
    return Row(
        **_named(f"c{concurrency}", f"output tokens, concurrency {concurrency}", setup),
        unit="tok/s",
        higher_is_better=True,
        target_ratio=target_ratio,
        measure=lambda subject: _throughput(subject, concurrency, **_lengths(subject.sizes)),
        warm_up=lambda subject: _warm(subject, concurrency, **_lengths(subject.sizes)),
        limit=lambda model, sizes, limits: model.output_tok_s(limits, concurrency, sizes.input_len, sizes.output_len),
        limit_text="bandwidth and peak, prompts included",
    )


# a row's place decides about its prompts: new ones come last
ROWS = (
    Row(
        name="start",
        title="process start to the first 200 of /health",
        unit="s",
        setup="fresh",
        higher_is_better=False,
        target_ratio=0.1,
        measure=_start,
        limit_text="reading the weights' files, which are in the file cache",
    ),
    Row(
        name="memory",
        title="resident memory above the weights and the KV cache",
        unit="MB",
        setup="fresh",
        higher_is_better=False,
        target_ratio=0.5,
        most=400.0,
        measure=_memory,
    ),
    _concurrent(1, 1.5),
    _concurrent(8, 1.7),
    _concurrent(32, 1.7),
    _long_prompt(0.55),
    Row(
        name="mixed",
        title="gap between tokens of 4 streams while long prompts arrive, p99",
        unit="s",
        setup="shared",
        higher_is_better=False,
        target_ratio=0.5,
        measure=lambda subject: _mixed(subject, 4, subject.sizes.long_len, 1),
        warm_up=lambda subject: _warm(subject, 2, input_len=subject.sizes.long_len, output_len=4),
    ),
    Row(
        name="prefix",
        title="output tokens, shared prefix, concurrency 8",
        unit="tok/s",
        setup="shared",
        higher_is_better=True,
        target_ratio=2.0,
        measure=lambda subject: _throughput(subject, 8, **_prefix_lengths(subject.sizes)),
        warm_up=lambda subject: _warm(subject, 8, **_prefix_lengths(subject.sizes)),
        limit=lambda model, sizes, limits: model.output_tok_s(
            limits, 8, sizes.prefix_len + sizes.input_len, sizes.output_len, cached=sizes.prefix_len
        ),
        limit_text="bandwidth and peak, the prefix computed before",
    ),
    Row(
        name="long8k",
        title="first token of a prompt of 8,192 tokens, idle server",
        unit="s",
        setup="long8k",
        higher_is_better=False,
        target_ratio=0.5,
        measure=lambda subject: _first_token(subject, subject.sizes.long8k_len),
        warm_up=lambda subject: _warm(subject, 1, input_len=subject.sizes.long8k_len, output_len=1),
        limit=lambda model, sizes, limits: model.prefill_s(limits, 1, sizes.long8k_len),
        limit_text="peak",
    ),
    Row(
        name="long8k-mixed",
        title="gap between tokens of 8 streams while four such prompts are computed, p99",
        unit="s",
        setup="long8k",
        higher_is_better=False,
        target_ratio=0.5,
        measure=lambda subject: _mixed(
            subject, subject.sizes.long8k_streams, subject.sizes.long8k_len, subject.sizes.long8k_prompts
        ),
        warm_up=lambda subject: _warm(subject, 2, input_len=subject.sizes.long8k_len, output_len=4),
    ),
    Row(
        name="open-ttft",
        title="first token at 80% of the peer's saturation, requests of mixed lengths arriving at random, p99",
        unit="s",
        setup="open",
        higher_is_better=False,
        target_ratio=0.5,
        measure=lambda subject: _open(subject, _p99_ttft_s),
        warm_up=lambda subject: _warm(subject, subject.sizes.open_saturation, **_open_lengths(subject.sizes)),
    ),
    Row(
        name="open-gap",
        title="gap between tokens at this rate, p99",
        unit="s",
        setup="open",
        higher_is_better=False,
        target_ratio=0.5,
        measure=lambda subject: _open(subject, _p99_gap_s),
        along="open-ttft",
        read=_p99_gap_s,
        warm_up=lambda subject: _warm(subject, subject.sizes.open_saturation, **_open_lengths(subject.sizes)),
    ),
    Row(
        name="tiny",
        title="output tokens of a tiny model: the engine and the front end alone",
        unit="tok/s",
        setup="tiny",
        higher_is_better=True,
        target_ratio=4.0,
        null_ratio=0.6,
        measure=lambda subject: _throughput(subject, subject.sizes.tiny_concurrency, **_tiny_lengths(subject.sizes)),
        warm_up=lambda subject: _warm(subject, subject.sizes.tiny_concurrency, **_tiny_lengths(subject.sizes)),
    ),
    *(_concurrent(concurrency, 1.5, setup) for setup in ("moe", "mla", "w8a8") for concurrency in (1, 8, 32)),
    _long_prompt(0.7, "w8a8"),
    *(_concurrent(concurrency, 2.0 if concurrency == 1 else 1.5, "w4") for concurrency in (1, 8, 32)),
    Row(
        name="load",
        title="loading of a model whose files are not in the file cache",
        unit="s",
        setup="cold",
        higher_is_better=False,
        target_ratio=1.0,
        measure=_load,
        limit_text="reading the weights' files from the disk",
    ),
)
SETUPS = ("fresh", "cold", "main", "shared", "long8k", "open", *OTHER_MODELS)
