"""`ascend-vllm bench serve`, with the limit set by the machine's memory bandwidth.

    python benchmarks/benchmark_serving.py --num-prompts 64 --max-concurrency 8 --input-len 128 --output-len 64
    python benchmarks/benchmark_serving.py --request-rate 4 --roofline /tmp/qwen2-0.5b --save-result

--roofline takes a model's directory: its weights are read once per decoding step, which bandwidth limits.
"""

from __future__ import annotations

import sys

from comparison.limits import beside_memory_limit

from ascend_vllm.args.parser import FlexibleArgumentParser
from ascend_vllm.tools.bench.serve import add_arguments, measure


def main() -> None:
    """Measures the server, and memory bandwidth before and after."""
    parser = FlexibleArgumentParser()
    add_arguments(parser)
    parser.add_argument("--roofline", metavar="MODEL_DIR", help="tell the limit that memory sets to this model")
    parser.add_argument("--gib", type=float, default=1.0, help="size of what is read for that (default: %(default)s)")
    args = parser.parse_args()
    with beside_memory_limit(args.roofline, args.gib):
        result = measure(args)
    sys.exit(1 if result["failed"] else 0)


if __name__ == "__main__":
    main()
