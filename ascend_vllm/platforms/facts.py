"""What is known about the devices without touching them, or torch: the API-server process never loads torch."""

from __future__ import annotations

import dataclasses
import importlib.util


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """Facts that decide the configuration.

    Attributes:
        name: as in --device.
        dtypes: names of the dtypes a model can run in; the first is what --dtype auto makes of float32 checkpoints.
        block_sizes: allowed --block-size values.
        default_block_size: the fastest of them.
        iteration_timeout_s: seconds of a step beyond which the engine counts as hung, unless the environment says
            otherwise.
    """

    name: str
    dtypes: tuple[str, ...]
    block_sizes: tuple[int, ...]
    default_block_size: int
    iteration_timeout_s: float


# bfloat16 first on CPU: its instructions (AVX-512 BF16, AMX) are common, float16 ones are not. 60 s are vLLM's limit
# of a step; on CPU one with a prompt of some thousand tokens rightly takes minutes.
CPU = DeviceFacts("cpu", ("bfloat16", "float16", "float32"), (16, 32, 64, 128), 32, 600.0)
NPU = DeviceFacts("npu", ("bfloat16", "float16"), (64, 128), 128, 60.0)
FACTS = {facts.name: facts for facts in (CPU, NPU)}


def npu_unusable_reason() -> str | None:
    """Why no model can run on an NPU here, as a sentence; None if one can."""
    if importlib.util.find_spec("torch_npu") is None:
        return (
            "--device npu needs torch_npu, which is not installed: "
            "pip install 'ascend-vllm[npu]' on a machine with CANN, or use --device cpu."
        )
    return "--device npu: this version has no Ascend kernels yet; use --device cpu."
