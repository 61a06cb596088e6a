"""Workers as Ray actors on two (simulated) nodes: placement, start, missing resources, death and cleanup."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pathlib
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import psutil
import pytest

from ascend_vllm import LLM
from ascend_vllm.errors import ConfigError, EngineDeadError
from ascend_vllm.executor.base import create_executor
from ascend_vllm.executor.multiproc import MultiprocExecutor
from ascend_vllm.executor.ray import cluster as ray_cluster
from ascend_vllm.types.step import SchedulerOutput
from tests.distributed import worker_functions
from tests.distributed.conftest import OPTIONS, assert_greedy_tokens_are_equal, generate, ids_of
from tests.server import ROOT, is_alive, wait_until
from tests.worker.worker_driver import make_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'ascend-vllm[ray]'"),
]

# as `ray start` on two machines, and on one more for each line, with so many CPUs; they end when nobody writes to the
# program any more
NODES = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
print("nodes at", cluster.address, flush=True)
for line in sys.stdin:
    cluster.add_node(num_cpus=int(line))
    print("one more", flush=True)
cluster.shutdown()
"""
NODE_PROCESSES = ("gcs_server", "raylet")
# upper limits; events come within seconds
TIMEOUT_S = 180.0


def is_of_a_node(process: psutil.Process) -> bool:
    """Whether a process is one that a node of Ray cannot be without."""
    with contextlib.suppress(psutil.NoSuchProcess):  # Ray starts some that soon end
        return process.name() in NODE_PROCESSES
    return False


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[pathlib.Path]:
    """A directory for Ray's files, short enough for the names of its sockets, and a key of its own."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(directory))
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # modules of the tests, for workers that a cluster starts
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.delenv("RAY_ADDRESS", raising=False)
        yield directory
    shutil.rmtree(directory, ignore_errors=True)


class Nodes:
    """A cluster of two nodes with a CPU each: workers of theirs talk as on two machines.

    Args:
        log: a file for what goes wrong.

    Attributes:
        address: of the cluster.
        num_cpus: of all nodes.
    """

    def __init__(self, log: pathlib.Path) -> None:
        with log.open("w") as errors:
            self._program = subprocess.Popen(
                [sys.executable, "-c", NODES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.num_cpus = 2
        assert self._program.stdout is not None
        line = next((line for line in self._program.stdout if line.startswith("nodes at ")), None)
        assert line is not None, log.read_text()
        self.address = line.removeprefix("nodes at ").strip()

    def family(self) -> list[psutil.Process]:
        """Processes that the cluster cannot be without."""
        started = psutil.Process(self._program.pid).children(recursive=True)
        return [process for process in started if is_of_a_node(process)]

    def add(self, num_cpus: int) -> None:
        """One more node."""
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write(f"{num_cpus}\n")
        self._program.stdin.flush()
        assert "one more\n" in self._program.stdout
        self.num_cpus += num_cpus

    def close(self) -> None:
        """Ends all nodes."""
        self._program.communicate()


@pytest.fixture(scope="module")
def nodes(environment: pathlib.Path) -> Iterator[Nodes]:
    """A cluster; checks that each test leaves it unchanged."""
    nodes = Nodes(environment / "cluster.log")
    family = nodes.family()
    try:
        assert len(family) == 3
        yield nodes
        assert all(map(is_alive, family))
        with _joined() as ray:
            assert wait_until(lambda: ray.available_resources().get("CPU") == nodes.num_cpus, TIMEOUT_S)
            groups = ray.util.placement_group_table().values()
            assert {group["state"] for group in groups} <= {"REMOVED"}
        family = nodes.family()
    finally:
        nodes.close()
    assert wait_until(lambda: not any(map(is_alive, family)), TIMEOUT_S)


@pytest.fixture(scope="module")
def cluster(nodes: Nodes) -> str:
    """Address of the cluster."""
    return nodes.address


@contextlib.contextmanager
def _joined() -> Iterator[Any]:
    # not before its settings are in the environment, which it reads when it is imported
    ray = ray_cluster.import_ray()
    ray.init(log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def shared(cluster: str, odd_model: str) -> Iterator[LLM]:
    """Two workers, one on each node."""
    llm = LLM(odd_model, tensor_parallel_size=2, distributed_executor_backend="ray", **OPTIONS)
    yield llm
    llm.shutdown()


def _executor(llm: LLM) -> MultiprocExecutor:
    executor = llm.llm_engine.core._executor
    assert isinstance(executor, MultiprocExecutor)
    return executor


def test_greedy_tokens_are_those_of_one_process(alone: LLM, shared: LLM) -> None:
    assert_greedy_tokens_are_equal(alone, shared)
    parts = shared.collective_rpc(worker_functions.table_size)
    assert sum(parts) == alone.collective_rpc(worker_functions.table_size)[0]
    assert max(parts) < 0.55 * sum(parts)


def test_each_worker_is_an_actor_on_a_node_of_its_own(shared: LLM, cluster: str) -> None:
    actors = _executor(shared)._group._actors
    assert [actor.facts.pid for actor in actors] == shared.collective_rpc(worker_functions.process_id)
    assert len({actor.placement.node_id for actor in actors}) == 2
    # the first one is where the program is
    assert actors[0].placement.node_id == ray_cluster.import_ray().get_runtime_context().get_node_id()
    with pytest.raises(ValueError, match="the second one does not"):
        shared.collective_rpc(worker_functions.fail)


class _Reversed:
    """Collects `count` items and passes them on in reverse order.

    Args:
        target: receives the items.
        count: number of items.
    """

    def __init__(self, target: Any, count: int) -> None:
        self._target = target
        self._count = count
        self._kept: list[Any] = []
        self._lock = threading.Lock()

    def put(self, item: Any) -> None:
        with self._lock:
            self._kept.append(item)
            if len(self._kept) < self._count:
                return
            while self._kept:
                self._target.put(self._kept.pop())
            # A step is done when the first worker has answered: what the second said of the step before may have been
            # among these, and then one of them is still to come.
            self._count = 1

    def get(self) -> Any:
        return self._target.get()


def test_steps_give_what_they_gave_in_whatever_order_ray_tells_it(
    shared: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = _executor(shared)
    group = executor._group
    numbers = [7001, 7002, 7003]
    with monkeypatch.context() as patch:
        # two workers answer
        patch.setattr(group, "_answers", _Reversed(group._answers, 2 * len(numbers)))
        steps = [executor.execute_model(SchedulerOutput(number, [], [], [], [], [])) for number in numbers]
        assert [step.result(TIMEOUT_S).step_id for step in steps] == numbers


def test_too_few_devices_are_an_error_that_names_both_numbers(shared: LLM, odd_model: str) -> None:
    config = make_config(odd_model, tensor_parallel_size=4, distributed_executor_backend="ray")
    with pytest.raises(ConfigError, match=r"Required number of devices: 4\. Total number of devices: 2\."):
        create_executor(config)
    assert ids_of(generate(shared))


def test_devices_that_others_use_are_waited_for_and_then_named(
    shared: LLM, odd_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "RESERVE_TIMEOUT_S", 0.2)
    with pytest.raises(ConfigError, match=r"requiring 1 CPUs .* of 2 in the Ray cluster 0 are free"):
        create_executor(make_config(odd_model, distributed_executor_backend="ray"))


def test_a_worker_that_dies_while_nothing_happens_is_noticed(shared: LLM) -> None:
    """The last of the tests that share these workers."""
    executor = _executor(shared)
    pids = shared.collective_rpc(worker_functions.process_id)
    processes = [psutil.Process(pid) for pid in pids]
    executor.check_health()
    processes[1].kill()
    descriptor = executor.death_descriptor
    assert descriptor is not None
    assert select.select([descriptor], [], [], TIMEOUT_S)[0]
    for use in (executor.check_health, lambda: generate(shared)):
        with pytest.raises(EngineDeadError, match=rf"worker 1 \(process {pids[1]} on .*\) is gone: The actor "):
            use()
    assert wait_until(lambda: not any(map(is_alive, processes)), TIMEOUT_S)
    shared.shutdown()
    # it was this engine that had connected
    assert not ray_cluster.import_ray().is_initialized()


def test_a_program_in_a_placement_group_has_its_workers_there(cluster: str) -> None:
    with _joined() as ray:
        # imported by its name where it is called
        from tests.distributed.ray_functions import use_own_group

        # the first bundle has no device, and the program runs there
        group = ray.util.placement_group([{"memory": 1 << 20}, {"CPU": 1}], strategy="PACK")
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
        )
        call = ray.remote(num_cpus=0)(use_own_group).options(scheduling_strategy=strategy)
        bundles, is_own, error = ray.get(call.remote(), timeout=TIMEOUT_S)
        assert (bundles, is_own) == ([1], True)
        assert "Required number of devices: 2. Total number of devices: 1." in error
        # nobody has ended it
        assert ray.util.placement_group_table(group)["state"] == "CREATED"


# with what else changes how steps are made; stages make them one at a time
LAYOUTS = (
    OPTIONS | {"tensor_parallel_size": 4},
    OPTIONS | {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_scheduler_steps": 1},
)


@pytest.mark.exhaustive
def test_four_workers_on_three_nodes_have_the_tokens_of_one_process(nodes: Nodes, odd_model: str, alone: LLM) -> None:
    """The last of the tests that count the cluster's CPUs: two of the workers share a node."""
    nodes.add(2)
    with _joined() as ray:
        assert wait_until(lambda: ray.cluster_resources().get("CPU") == 4, TIMEOUT_S)
        for options in LAYOUTS:
            shared = LLM(odd_model, distributed_executor_backend="ray", **options)
            assert_greedy_tokens_are_equal(alone, shared)
            shared.shutdown()


# ---- programs ----------------------------------------------------------------------------------------------

# starts the workers and says who they are
PROGRAM = """
import json, sys
import msgspec, ray
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.executor.base import create_executor
from ascend_vllm.types.step import SchedulerOutput
from tests.distributed import worker_functions
from tests.distributed.conftest import OPTIONS, assert_greedy_tokens_are_equal, generate, ids_of

executor = create_executor(msgspec.json.decode(sys.stdin.readline(), type=EngineConfig))
pids = executor.collective_rpc(worker_functions.process_id)
print(json.dumps(pids), flush=True)
sys.stdin.readline()
"""


class Program:
    """A process with workers.

    Attributes:
        process: it.
        workers: of it.
        family: everything that it started, the workers among them.
        nodes: those of the family that a cluster cannot be without.
    """

    def __init__(self, directory: str, **env: str) -> None:
        config = make_config(directory, distributed_executor_backend="ray")
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            cwd=ROOT,
            env=os.environ | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(config).decode() + "\n")
        self.process.stdin.flush()
        assert self.process.stdout is not None
        line = next(line for line in self.process.stdout if line.startswith("["))
        self.workers = [psutil.Process(pid) for pid in json.loads(line)]
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        self.nodes = [process for process in self.family if is_of_a_node(process)]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        for process in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


# that a worker ends with its program and with its parent is seen below
@pytest.mark.exhaustive
def test_the_worker_of_a_program_that_is_killed_ends(cluster: str, odd_model: str) -> None:
    """One worker is an actor, too."""
    program = Program(odd_model, RAY_ADDRESS=cluster)
    try:
        (worker,) = program.workers
        assert program.family == []
        program.process.kill()
        assert wait_until(lambda: not is_alive(worker), TIMEOUT_S)
    finally:
        program.close()


def test_a_cluster_that_was_started_ends_with_the_program_that_is_killed(odd_model: str) -> None:
    program = Program(odd_model, RAY_ADDRESS="local")
    try:
        assert set(program.workers) < set(program.family)
        program.process.kill()
        # Ray's own agents, which hold nothing, look for their cluster for another minute
        assert len(program.nodes) == 2
        assert wait_until(lambda: not any(map(is_alive, [*program.workers, *program.nodes])), TIMEOUT_S)
    finally:
        program.close()


# as Ray's process on a machine does, without Ray
PARENT = """
import subprocess, sys
worker = "import os; from ascend_vllm.executor.ray.worker import RayWorker; actor = RayWorker(); "
worker += "print(os.getpid(), flush=True); actor.watch()"
worker = subprocess.Popen([sys.executable, "-c", worker])
sys.stdin.read()
"""


def test_a_worker_ends_with_its_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not is_alive(worker), TIMEOUT_S)
    parent.communicate()


WITHOUT_RAY = """
import sys
sys.modules["ray"] = None
from ascend_vllm.args.engine_args import EngineArgs
try:
    EngineArgs(model=sys.argv[1], distributed_executor_backend="ray").create_engine_config()
except ValueError as error:
    print(error)
from ascend_vllm import initialize_ray_cluster
try:
    initialize_ray_cluster(None)
except ValueError as error:
    print(error)
"""


def test_without_ray_the_error_says_what_to_install(odd_model: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY, odd_model],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    first, second = done.stdout.splitlines()
    for text in (first, second):
        assert text.startswith("--distributed-executor-backend ray: ")
        assert "Please install Ray with `pip install ray`" in text
        assert "'ascend-vllm[ray]'" in text


def test_an_address_at_which_nobody_answers_is_an_error(odd_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(odd_model, distributed_executor_backend="ray")
    for address, text in (
        ("127.0.0.1:1", "no Ray cluster answers at RAY_ADDRESS=127.0.0.1:1"),
        ("ray://127.0.0.1:10001", "must be host:port of a Ray cluster"),
    ):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=text):
            create_executor(config)
