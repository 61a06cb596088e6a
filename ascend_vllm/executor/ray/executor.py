"""The executor whose workers are actors of Ray, on this machine and on others."""

from __future__ import annotations

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.executor.multiproc import MultiprocExecutor
from ascend_vllm.executor.ray.group import RayGroup


class RayExecutor(MultiprocExecutor):
    """A worker for each rank, in an actor of a placement group.

    The cluster is the one that this process is connected with, or that is found, or else one that is started and
    ends with this object. Everything else is as with workers that are processes of this machine.

    Args:
        config: of the whole engine.

    Raises:
        ConfigError: Ray is not installed, its cluster does not answer or has too little, or the devices cannot be
            used.
        Exception: whatever a worker failed with; its traceback is in the log.
    """

    def _make_group(self, config: EngineConfig) -> RayGroup:
        return RayGroup(config)
