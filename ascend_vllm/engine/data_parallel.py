"""What each of several engine cores gets of the configuration and of the machine."""

from __future__ import annotations

import msgspec

from ascend_vllm import envs
from ascend_vllm.config.engine import EngineConfig

VISIBLE_NPUS = "ASCEND_RT_VISIBLE_DEVICES"


def config_of_engine(config: EngineConfig, rank: int) -> EngineConfig:
    """The configuration of one engine core.

    Args:
        config: of the whole.
        rank: number of the engine core.
    """
    parallel = msgspec.structs.replace(config.parallel, data_parallel_rank=rank)
    # they would draw their bars over each other
    load = msgspec.structs.replace(config.load, use_tqdm=config.load.use_tqdm and rank == 0)
    return msgspec.structs.replace(config, parallel=parallel, load=load)


def environment_of_engine(config: EngineConfig, rank: int) -> dict[str, str]:
    """Variables that give one engine core its own NPUs: the next ones of those that are visible, in their order.

    Args:
        config: of the whole; there are as many NPUs as it needs.
        rank: number of the engine core.
    """
    parallel = config.parallel
    if config.device.device != "npu" or parallel.data_parallel_size == 1:
        return {}
    visible = envs.ascend_rt_visible_devices()
    first, count = rank * parallel.world_size, parallel.world_size
    wanted = range(first, first + count)
    cards = visible.split(",")[first : first + count] if visible else list(map(str, wanted))
    return {VISIBLE_NPUS: ",".join(cards)}
