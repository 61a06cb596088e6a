"""`ascend-vllm bench throughput`, and beside it what the machine's memory allows.

    python benchmarks/benchmark_throughput.py --model /tmp/qwen2-0.5b --num-prompts 32 --input-len 128 --output-len 64

Every flag of the engine works as for the server, for example --max-num-seqs or --dtype.
"""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from bandwidth import Roofline, read_bandwidth, weight_bytes

from ascend_vllm.args.parser import FlexibleArgumentParser
from ascend_vllm.tools.bench.offline import add_throughput_arguments, measure_throughput


def main() -> None:
    """Measure the engine, and the memory before and after."""
    parser = FlexibleArgumentParser()
    add_throughput_arguments(parser)
    parser.add_argument("--roofline", action="store_true", help="tell the limit that memory sets to the model")
    args = parser.parse_args()
    bandwidths = [read_bandwidth()] if args.roofline else []
    measure_throughput(args)
    if args.roofline:
        # neighbours change what a machine can read: the better of before and after is the limit
        bandwidths.append(read_bandwidth())
        print(Roofline(max(bandwidths), weight_bytes(args.model)).describe())


if __name__ == "__main__":
    main()
