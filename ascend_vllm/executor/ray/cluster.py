"""The Ray cluster that workers run in: connecting or starting one, and reserving devices.

Only Ray's public interface is used. The module is imported when it is needed: it is not installed with the server.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

from ascend_vllm import envs
from ascend_vllm.config.engine import ParallelConfig
from ascend_vllm.errors import ConfigError
from ascend_vllm.logger import init_logger
from ascend_vllm.platforms.facts import probe_npus
from ascend_vllm.platforms.host import usable_cores

logger = init_logger(__name__)

# --device → Ray's name of the resource that a worker takes
_RESOURCES = {"cpu": "CPU", "npu": "NPU"}
# steps and their outputs are small; Ray's default is a third of the memory
_OBJECT_STORE_BYTES = 256 << 20
_CONNECT_TIMEOUT_S = 10.0
# for reserved resources to become free: a server that has just ended may not have released them
RESERVE_TIMEOUT_S = 60.0
_FLAG = "--distributed-executor-backend ray"


def import_ray() -> Any:
    """The module.

    Raises:
        ConfigError: it is not installed.
    """
    # before the import, at which Ray reads the environment
    envs.prepare_ray()
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"{_FLAG}: Failed to import Ray: {error}. Please install Ray with `pip install ray`, or with this "
            "server: `pip install 'ascend-vllm[ray]'`."
        ) from error


def initialize_ray_cluster(
    parallel_config: ParallelConfig | None = None,  # noqa: ARG001 - vLLM's
    ray_address: str | None = None,
    require_gpu_on_driver: bool = True,  # noqa: ARG001 - vLLM's
) -> None:
    """Connects this process with a cluster of Ray, or starts one on this machine; engines made later use it.

    Nothing happens if Ray is initialised already. What an engine needs is reserved by the engine. The cluster is the
    program's, which may call `ray.shutdown()`.

    Args:
        parallel_config: not needed, it is in vLLM's signature.
        ray_address: of the cluster; None: RAY_ADDRESS, else the one that `ray start` started here.
        require_gpu_on_driver: not needed either.

    Raises:
        ConfigError: Ray is not installed, or the cluster does not answer.
    """
    ray = import_ray()
    if not ray.is_initialized():
        _connect(ray, {}, ray_address)


class _Connection:
    """This process's connection with Ray, shared by its engines and closed by the last one that releases it.

    A connection that the program made itself is left open.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._is_ours = False

    def acquire(self, ray: Any, own: dict[str, Any]) -> None:
        """Counts a user; the first one connects, see `_connect`."""
        with self._lock:
            if not ray.is_initialized():
                _connect(ray, own)
                # users of an earlier connection do not count
                self._num_users, self._is_ours = 0, True
            self._num_users += 1

    def release(self, ray: Any) -> None:
        """Disconnects after the last user."""
        with self._lock:
            self._num_users -= 1
            if self._is_ours and self._num_users <= 0:
                self._is_ours = False
                # does nothing if the program has shut it down already
                ray.shutdown()


_CONNECTION = _Connection()


@dataclasses.dataclass(frozen=True)
class WorkerPlacement:
    """A device reserved for a worker.

    Attributes:
        bundle: number in the placement group.
        node_id: Ray's id of the machine.
        address: the machine's.
    """

    bundle: int
    node_id: str
    address: str


class RayCluster:
    """An engine's share of a cluster: a connection, and a device for each worker.

    Args:
        device: "cpu" or "npu".
        num_workers: of the engine.

    Attributes:
        ray: the module.
        resource: Ray's name of the device.
        group: the placement group.
        placements: of the workers by rank: this machine's first, then machine by machine.

    Raises:
        ConfigError: Ray is not installed, the cluster does not answer, or it has too few free devices.
    """

    def __init__(self, device: str, num_workers: int) -> None:
        self.ray = import_ray()
        self.resource = _RESOURCES[device]
        self._num_workers = num_workers
        self._is_group_ours = False
        self.group: Any = None
        # a cluster that is started here offers no devices of other kinds
        own: dict[str, Any] = {"num_gpus": 0, "object_store_memory": _OBJECT_STORE_BYTES}
        if device == "npu":
            own["resources"] = {"NPU": probe_npus().count}
        _CONNECTION.acquire(self.ray, own)
        try:
            self.group = self._existing_group() or self._make_group()
            self.placements = self._find_placements()
        except BaseException:
            self.close()
            raise

    def _existing_group(self) -> Any:
        """The placement group that this process runs in; None: it runs in none."""
        group = self.ray.util.get_current_placement_group()
        if group is None:
            return None
        count = sum(bundle.get(self.resource, 0) >= 1 for bundle in group.bundle_specs)
        if count < self._num_workers:
            raise ConfigError(self._too_little(count))
        logger.info("Using the existing placement group")
        return group

    def _make_group(self) -> Any:
        count = int(self.ray.cluster_resources().get(self.resource, 0))
        if count < self._num_workers:
            raise ConfigError(self._too_little(count))
        bundles = [{self.resource: 1}] * self._num_workers
        group = self.ray.util.placement_group(bundles, strategy="PACK")
        self._is_group_ours = True
        self.group = group
        if not group.wait(timeout_seconds=RESERVE_TIMEOUT_S):
            available = self.ray.available_resources().get(self.resource, 0)
            raise ConfigError(
                f"{_FLAG}: Cannot provide a placement group requiring {self._num_workers} {self.resource}s "
                f"(placement_group_specs={bundles}) within {RESERVE_TIMEOUT_S:g} seconds: of {count} in the Ray "
                f"cluster {available:g} are free. Check resources with `ray status` and `ray list nodes`."
            )
        return group

    def _too_little(self, count: int) -> str:
        return (
            f"{_FLAG}: The number of required {self.resource}s exceeds the total number of available "
            f"{self.resource}s in the placement group. Required number of devices: {self._num_workers}. Total number "
            f"of devices: {count}. Lower --tensor-parallel-size or --pipeline-parallel-size, or add machines to the "
            "Ray cluster; `ray status` shows what it has."
        )

    def _find_placements(self) -> list[WorkerPlacement]:
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in self.ray.nodes() if node["Alive"]}
        node_ids = self.ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        here = self.ray.get_runtime_context().get_node_id()
        bundles = [
            number for number, bundle in enumerate(self.group.bundle_specs) if bundle.get(self.resource, 0) >= 1
        ]
        bundles.sort(key=lambda number: (node_ids[number] != here, node_ids[number], number))
        return [
            WorkerPlacement(bundle, node_ids[bundle], addresses[node_ids[bundle]])
            for bundle in bundles[: self._num_workers]
        ]

    def close(self) -> None:
        """Releases the devices and the connection; a cluster that was started here ends with the connection."""
        if self._is_group_ours and self.ray.is_initialized():
            self.ray.util.remove_placement_group(self.group)
        _CONNECTION.release(self.ray)


def _connect(ray: Any, own: dict[str, Any], address: str | None = None) -> None:
    """Connects with a cluster, else starts one.

    Args:
        ray: the module.
        own: resources of a cluster that is started.
        address: of the cluster to find; None: see `initialize_ray_cluster`.

    Raises:
        ConfigError: it does not answer.
    """
    target = address or envs.ray_address()
    _check_address(target)
    level = max(logging.INFO, logger.getEffectiveLevel())
    options = {"address": address, "include_dashboard": False, "logging_level": level}
    own = {"num_cpus": usable_cores()} | own
    try:
        with _same_signal_handlers():
            if not _start(ray, options | own):
                ray.init(**options)
                logger.info("Connected to the Ray cluster at %s", ray.get_runtime_context().gcs_address)
    except Exception as error:  # Ray has no common class for its errors here
        where = f"the Ray cluster at {target}" if target else "the Ray cluster of this machine"
        raise ConfigError(
            f"{_FLAG}: {where} cannot be used: {error}. See `ray status`; RAY_ADDRESS says which cluster is taken, "
            "RAY_AUTH_MODE=token is needed for one that wants a token."
        ) from error


def _start(ray: Any, options: dict[str, Any]) -> bool:
    """Starts a cluster on this machine; false if there is one already to connect to."""
    try:
        ray.init(**options)
    except ValueError as error:
        # resources can be given to a new cluster only
        if "existing cluster" not in str(error):
            raise
        return False
    logger.info("Started a Ray cluster on this machine")
    return True


def _check_address(address: str | None) -> None:
    """Checks that a cluster answers; Ray itself would try for a minute.

    Raises:
        ConfigError: nothing listens at the address, or it is not host:port.
    """
    if address is None or address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdecimal():
        raise ConfigError(f"{_FLAG}: RAY_ADDRESS must be host:port of a Ray cluster, got {address!r}.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(f"{_FLAG}: no Ray cluster answers at RAY_ADDRESS={address}: {error}.") from error


@contextlib.contextmanager
def _same_signal_handlers() -> Iterator[None]:
    """Restores the handler of SIGTERM, which Ray replaces."""
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if is_main and handler is not None:
            signal.signal(signal.SIGTERM, handler)
