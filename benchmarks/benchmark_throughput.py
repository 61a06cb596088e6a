"""`ascend-vllm bench throughput`, with the limit set by the machine's memory bandwidth.

    python benchmarks/benchmark_throughput.py --model /tmp/qwen2-0.5b --num-prompts 32 --input-len 128 --output-len 64

Every flag of the engine works as for the server, for example --max-num-seqs or --dtype.
"""

from __future__ import annotations

from comparison.limits import beside_memory_limit

from ascend_vllm.args.parser import FlexibleArgumentParser
from ascend_vllm.tools.bench.offline import add_throughput_arguments, measure_throughput


def main() -> None:
    """Measures the engine, and memory bandwidth before and after."""
    parser = FlexibleArgumentParser()
    add_throughput_arguments(parser)
    parser.add_argument("--roofline", action="store_true", help="tell the limit that memory sets to the model")
    parser.add_argument("--gib", type=float, default=1.0, help="size of what is read for that (default: %(default)s)")
    args = parser.parse_args()
    with beside_memory_limit(args.model if args.roofline else None, args.gib):
        measure_throughput(args)


if __name__ == "__main__":
    main()
