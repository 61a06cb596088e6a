"""Compares tensor-parallel workers with one worker on the same cores, in one run.

    python scripts/make_random_model.py /tmp/qwen2-0.5b
    python benchmarks/bench_tensor_parallel.py --model /tmp/qwen2-0.5b

An `LLM` for each of --sizes is loaded; then, --rounds times, each in turn completes as many prompts of random
tokens at once as in --batch-sizes, while the others sleep. The workers of each share all cores.

tokens_per_s   generated tokens per second of the whole run, including prefill: median of the rounds.
against_first  ratio of that median to the first size's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from typing import Any

from ascend_vllm import LLM, SamplingParams, TokensPrompt
from ascend_vllm.tools.bench.datasets import PromptMaker


def tokens_per_s(llm: LLM, prompts: list[TokensPrompt], output_len: int) -> float:
    """Generated tokens per second of one run."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - start
    return sum(len(output.outputs[0].token_ids) for output in outputs) / elapsed


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each size and number of prompts."""
    llms = {
        size: LLM(model=args.model, tensor_parallel_size=size, kv_cache_memory_bytes=args.kv_cache_memory_bytes)
        for size in args.sizes
    }
    rows = []
    for batch_size in args.batch_sizes:
        found: dict[int, list[float]] = {size: [] for size in llms}
        # the first round is a warm-up
        for number in range(args.rounds + 1):
            maker = PromptMaker(None, args.vocab_size, random.Random(number))
            prompts = [TokensPrompt(prompt_token_ids=maker.ids(args.input_len)) for _ in range(batch_size)]
            for size, llm in llms.items():
                rate = tokens_per_s(llm, prompts, args.output_len)
                if number:
                    found[size].append(rate)
        medians = {size: statistics.median(rates) for size, rates in found.items()}
        first = medians[args.sizes[0]]
        for size, median in medians.items():
            row = {"workers": size, "batch_size": batch_size, "tokens_per_s": median, "rounds": found[size]}
            rows.append(row | {"against_first": median / first})
    return rows


def main() -> None:
    """Prints the rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="directory of the model")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2], help="numbers of workers to compare")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32], help="prompts at once")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=64, help="tokens to generate for each")
    parser.add_argument("--vocab-size", type=int, default=8192, help="prompts have ids below this")
    parser.add_argument("--rounds", type=int, default=3, help="that count, of each size")
    parser.add_argument("--kv-cache-memory-bytes", default="512M", help="of each worker")
    args = parser.parse_args()
    print(json.dumps({"cores": os.cpu_count(), "model": args.model, "rows": measure(args)}, indent=2))


if __name__ == "__main__":
    main()
