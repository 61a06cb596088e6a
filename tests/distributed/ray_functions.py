"""Functions that tests run in Ray's processes."""

from __future__ import annotations

import ray

from ascend_vllm.errors import ConfigError
from ascend_vllm.executor.ray.cluster import RayCluster


def use_own_group() -> tuple[list[int], bool, str]:
    """Finds the bundles that an engine in this process gets from the process's placement group.

    Returns:
        Bundles for one worker, whether they are of that group, and the error for two workers.
    """
    cluster = RayCluster("cpu", 1)
    is_own = cluster.group.id == ray.util.get_current_placement_group().id
    cluster.close()
    try:
        RayCluster("cpu", 2)
    except ConfigError as error:
        return [placement.bundle for placement in cluster.placements], is_own, str(error)
    return [], False, ""
