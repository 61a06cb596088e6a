"""`ascend-vllm bench throughput` and `bench latency`: the engine without a server."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.args.parser import FlexibleArgumentParser
from ascend_vllm.engine.tokenizer_extension import tokenizer_of
from ascend_vllm.entrypoints.demo_model import with_demo_model
from ascend_vllm.entrypoints.interrupts import ending_at_once
from ascend_vllm.errors import ConfigError
from ascend_vllm.tools.bench.datasets import (
    SampleRequest,
    add_dataset_arguments,
    apply_general_lengths,
    sample_requests,
)

if TYPE_CHECKING:
    from ascend_vllm.entrypoints.offline.llm import LLM
    from ascend_vllm.outputs import RequestOutput
    from ascend_vllm.sampling_params import SamplingParams

_LATENCY_PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_throughput_arguments(parser: FlexibleArgumentParser) -> None:
    parser.description = "Tokens per second that the engine makes of many prompts, without a server."
    group = parser.add_argument_group("benchmark")
    backend_help = "LLM.generate with the prompts, or LLM.chat with them as messages (default: %(default)s)"
    group.add_argument("--backend", choices=("vllm", "vllm-chat"), default="vllm", help=backend_help)
    group.add_argument("--num-prompts", type=int, default=1000, help="prompts (default: %(default)s)")
    group.add_argument("--prefix-len", type=int, help="the same as --random-prefix-len")
    group.add_argument("--n", type=int, default=1, help="sequences per prompt (default: %(default)s)")
    group.add_argument("--num-warmups", type=int, default=0, help="prompts before the measurement (default: 0)")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    _add_common_arguments(group, "throughput")
    add_dataset_arguments(parser)
    EngineArgs.add_cli_args(parser)


def add_latency_arguments(parser: FlexibleArgumentParser) -> None:
    parser.description = "The time that one batch of prompts takes, again and again."
    group = parser.add_argument_group("benchmark")
    group.add_argument("--input-len", type=int, default=32, help="tokens of a prompt (default: %(default)s)")
    group.add_argument("--output-len", type=int, default=128, help="tokens to generate (default: %(default)s)")
    group.add_argument("--batch-size", type=int, default=8, help="prompts of a batch (default: %(default)s)")
    group.add_argument("--n", type=int, default=1, help="sequences per prompt (default: %(default)s)")
    group.add_argument("--use-beam-search", action="store_true", help="search with --n beams instead of sampling")
    group.add_argument("--num-iters-warmup", type=int, default=10, help="batches before (default: %(default)s)")
    group.add_argument("--num-iters", type=int, default=30, help="batches that count (default: %(default)s)")
    _add_common_arguments(group, "latency")
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(enable_prefix_caching=False)


def _add_common_arguments(group: Any, what: str) -> None:
    group.add_argument("--output-json", type=pathlib.Path, metavar="FILE", help=f"write the {what} here")
    group.add_argument("--disable-detokenize", action="store_true", help="make no text of the tokens")
    group.add_argument("--profile", action="store_true", help="run the engine's profiler during the measurement")


@ending_at_once()
def measure_throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Runs `bench throughput`: prints and saves the figures, and returns them.

    Raises:
        ConfigError: an option is wrong.
    """
    if args.prefix_len is not None:
        args.random_prefix_len = args.prefix_len
    apply_general_lengths(args)
    _check_counts(args, "n")
    llm = _make_llm(args)
    tokenizer = None if args.skip_tokenizer_init else tokenizer_of(llm.llm_engine.config.model)
    if tokenizer is None:
        args.vocab_size = llm.llm_engine.config.model.vocab_size
    requests = sample_requests(args, tokenizer, args.seed)
    for request in requests[: args.num_warmups]:
        _generate(llm, args, [request], use_tqdm=False)
    with _profiled(llm, args.profile):
        start = time.perf_counter()
        outputs = _generate(llm, args, requests, use_tqdm=not args.disable_tqdm)
        elapsed = time.perf_counter() - start
    num_input = sum(len(output.prompt_token_ids or ()) for output in outputs)
    num_output = sum(len(sequence.token_ids) for output in outputs for sequence in output.outputs)
    result = {
        "model_id": args.model,
        "elapsed_time": elapsed,
        "num_requests": len(requests),
        "total_num_tokens": num_input + num_output,
        "requests_per_second": len(requests) / elapsed,
        "tokens_per_second": (num_input + num_output) / elapsed,
    }
    print(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, {num_output / elapsed:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {num_input}")
    print(f"Total num output tokens:  {num_output}")
    _save(args.output_json, result)
    return result


def _generate(
    llm: LLM, args: argparse.Namespace, requests: Sequence[SampleRequest], *, use_tqdm: bool
) -> list[RequestOutput]:
    params = [_sampling_params(args, request.output_len) for request in requests]
    if args.backend == "vllm-chat":
        messages: Any = [[{"role": "user", "content": request.prompt}] for request in requests]
        return llm.chat(messages, params, use_tqdm=use_tqdm)
    prompts: Any = [
        request.prompt if isinstance(request.prompt, str) else {"prompt_token_ids": request.prompt}
        for request in requests
    ]
    return llm.generate(prompts, params, use_tqdm=use_tqdm)


def _sampling_params(args: argparse.Namespace, output_len: int) -> SamplingParams:
    from ascend_vllm.sampling_params import SamplingParams

    return SamplingParams(
        n=args.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=output_len,
        detokenize=not args.disable_detokenize,
    )


@ending_at_once()
def measure_latency(args: argparse.Namespace) -> dict[str, Any]:
    """Runs `bench latency`: prints and saves the figures, and returns them.

    Raises:
        ConfigError: an option is wrong.
    """
    _check_counts(args, "input_len", "output_len", "batch_size", "num_iters", "n")
    llm = _make_llm(args)
    vocab_size = llm.llm_engine.config.model.vocab_size
    chooser = np.random.default_rng(args.seed)
    ids = chooser.integers(min(1000, vocab_size // 2), vocab_size, (args.batch_size, args.input_len))
    prompts = [{"prompt_token_ids": row} for row in ids.tolist()]
    params = _sampling_params(args, args.output_len)
    for _ in tqdm(range(args.num_iters_warmup), desc="Warm-up"):
        _run_batch(llm, args, prompts, params)
    latencies = []
    with _profiled(llm, args.profile):
        for _ in tqdm(range(args.num_iters), desc="Batches"):
            start = time.perf_counter()
            _run_batch(llm, args, prompts, params)
            latencies.append(time.perf_counter() - start)
    percentiles = {str(p): float(np.percentile(latencies, p)) for p in _LATENCY_PERCENTILES}
    average = float(np.mean(latencies))
    print(f"Avg latency: {average} seconds")
    for percent, value in percentiles.items():
        print(f"{percent}% percentile latency: {value} seconds")
    result = {"avg_latency": average, "latencies": latencies, "percentiles": percentiles}
    _save(args.output_json, result)
    return result


def _run_batch(
    llm: LLM, args: argparse.Namespace, prompts: list[dict[str, list[int]]], params: SamplingParams
) -> None:
    if not args.use_beam_search:
        llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
        return
    from ascend_vllm.sampling_params import BeamSearchParams

    beams = BeamSearchParams(beam_width=args.n, max_tokens=args.output_len, ignore_eos=True)
    llm.beam_search(prompts, beams)  # type: ignore[arg-type]


@contextlib.contextmanager
def _profiled(llm: LLM, wanted: bool) -> Iterator[None]:
    """Runs the engine's profiler during a block if `wanted`."""
    if wanted:
        llm.start_profile()
    try:
        yield
    finally:
        if wanted:
            llm.stop_profile()


def _make_llm(args: argparse.Namespace) -> LLM:
    from ascend_vllm.entrypoints.offline.llm import LLM

    engine_args = with_demo_model(EngineArgs.from_cli_args(args))
    return LLM(**{field.name: getattr(engine_args, field.name) for field in dataclasses.fields(engine_args)})


def _check_counts(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}.")


def _save(path: pathlib.Path | None, result: dict[str, Any]) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(result, indent=4))
    except OSError as err:
        raise ConfigError(f"--output-json {path} cannot be written: {err.strerror}.") from err
