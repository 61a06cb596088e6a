"""A cluster of Ray on this machine, with room for the workers of many servers."""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from tests.server import ROOT

# it ends when nobody writes to the program any more
_PROGRAM = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 64, "include_dashboard": False})
print("nodes at", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@contextlib.contextmanager
def environment_of_cluster() -> Iterator[dict[str, str]]:
    """Environment variables for a program that is to use the cluster, which is there as long as the context."""
    # short enough for the names of Ray's sockets
    directory = pathlib.Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    environment = {
        "RAY_TMPDIR": str(directory),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        # no process for each of the places that workers may take
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        # modules of the tests, for workers
        "PYTHONPATH": str(ROOT),
    }
    log = directory / "cluster.log"
    with log.open("w") as errors:
        nodes = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert nodes.stdout is not None
        address = next((line for line in nodes.stdout if line.startswith("nodes at ")), None)
        assert address is not None, log.read_text()
        yield environment | {"RAY_ADDRESS": address.removeprefix("nodes at ").strip()}
    finally:
        nodes.communicate()
        shutil.rmtree(directory, ignore_errors=True)
