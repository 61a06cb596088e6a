"""Offline throughput: how many tokens per second `LLM.generate` makes of a batch of random prompts.

    python benchmarks/benchmark_throughput.py --model /tmp/qwen2-0.5b --num-prompts 32 --input-len 128 --output-len 64

Every flag of the engine works as for the server, for example --max-num-seqs or --dtype.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import random
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from bandwidth import Roofline, read_bandwidth, weight_bytes

from ascend_vllm import LLM, EngineArgs, SamplingParams
from ascend_vllm.engine.arg_parser import FlexibleArgumentParser

# what the result repeats of the command line
SETTINGS = ("model", "num_prompts", "input_len", "prefix_len", "output_len", "n", "dtype", "max_num_seqs", "seed")


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = FlexibleArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument_group("benchmark").add_argument
    add("--num-prompts", type=int, default=32, help="prompts (default: %(default)s)")
    add("--input-len", type=int, default=128, help="tokens of each prompt of its own (default: %(default)s)")
    add("--prefix-len", type=int, default=0, help="tokens before them that all prompts share (default: 0)")
    add("--output-len", type=int, default=64, help="tokens to generate (default: %(default)s)")
    add("--n", type=int, default=1, help="sequences per prompt; above 1 they are sampled (default: 1)")
    add("--repeat", type=int, default=1, help="runs, of which the fastest counts (default: 1)")
    add("--roofline", action="store_true", help="measure memory and tell the limit for this model's weights")
    add("--result-json", type=pathlib.Path, help="write all figures here")
    EngineArgs.add_cli_args(parser)
    return parser.parse_args()


def random_prompts(args: argparse.Namespace, vocab_size: int) -> list[dict[str, list[int]]]:
    """Prompts of random token ids."""
    chooser = random.Random(args.seed)
    low = min(1000, vocab_size // 2)

    def ids(count: int) -> list[int]:
        return [chooser.randrange(low, vocab_size) for _ in range(count)]

    prefix = ids(args.prefix_len)
    return [{"prompt_token_ids": prefix + ids(args.input_len)} for _ in range(args.num_prompts)]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark."""
    engine_args = EngineArgs.from_cli_args(args)
    llm = LLM(**{field.name: getattr(engine_args, field.name) for field in dataclasses.fields(engine_args)})
    config = llm.llm_engine.config
    prompts = random_prompts(args, config.model.vocab_size)
    params = SamplingParams(
        n=args.n, temperature=0.0 if args.n == 1 else 1.0, max_tokens=args.output_len, ignore_eos=True
    )
    # a short warm-up
    llm.generate(prompts[:1], params.clone(max_tokens=2), use_tqdm=False)
    bandwidths = [read_bandwidth()] if args.roofline else []
    times = []
    for _ in range(args.repeat):
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        times.append(time.perf_counter() - start)
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(sequence.token_ids) for output in outputs for sequence in output.outputs)
    duration = min(times)
    result: dict[str, Any] = {
        "duration_s": duration,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "request_throughput": len(outputs) / duration,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (prompt_tokens + output_tokens) / duration,
        "settings": {name: str(value) for name, value in vars(args).items() if name in SETTINGS},
    }
    if args.roofline:
        # neighbours change what a machine can read: the better of before and after is the limit
        bandwidths.append(read_bandwidth())
        result["roofline"] = Roofline(max(bandwidths), weight_bytes(config.model.model)).as_dict()
    return result


def main() -> None:
    """Run, print, save."""
    args = parse_args()
    result = run(args)
    print(
        f"Throughput: {result['request_throughput']:.2f} requests/s, "
        f"{result['total_token_throughput']:.2f} total tokens/s, {result['output_throughput']:.2f} output tokens/s"
    )
    if "roofline" in result:
        limit = result["roofline"]
        print(Roofline(limit["bandwidth_gb_s"], int(limit["weight_bytes"])).describe())
    if args.result_json:
        args.result_json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
