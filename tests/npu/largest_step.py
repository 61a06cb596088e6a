"""A program for `ascend-vllm sim-run`: takes a whole step's tokens beside a cache that has all memory left over.

Prints one JSON object: the number of tokens that the first row has generated.
"""

from __future__ import annotations

import json

import torch_npu

from ascend_vllm.worker.worker import Worker
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import BUSY, Driver, make_config, make_prompt

SHARE = 0.5
BLOCK_SIZE = 64
# keys and values of 3 layers with 2 heads of 16 elements in float16
BLOCK_BYTES = 3 * 2 * 2 * 16 * 2 * BLOCK_SIZE


def main() -> None:
    config = make_config(
        tiny_model("qwen2"),
        device="npu",
        dtype="float16",
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=None,
        enable_prefix_caching=True,
        gpu_memory_utilization=SHARE,
    )
    worker = Worker(config)
    worker.load_model()
    num_blocks = worker.determine_num_blocks()
    _, total = torch_npu.npu.mem_get_info(0)
    assert 0.35 * total < num_blocks * BLOCK_BYTES < SHARE * total, num_blocks
    worker.initialize_cache(num_blocks)
    # as if other processes had taken what --gpu-memory-utilization leaves to them
    torch_npu.npu.set_per_process_memory_fraction(SHARE)
    with Driver(worker) as driver:
        driver.add("first", make_prompt(400), BUSY)
        driver.add("second", make_prompt(112), BUSY)
        driver.step()
        print(json.dumps({"tokens": len(driver.output("first"))}))
    worker.shutdown()


if __name__ == "__main__":
    main()
