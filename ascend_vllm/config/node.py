"""What a node of --nnodes that has no engine of its own is started with."""

from __future__ import annotations

import hashlib
import json
import pathlib

import msgspec

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.model_files import read_json


class NodeStart(msgspec.Struct, frozen=True):
    """What the process of a node above 0 reads from its standard input.

    Attributes:
        node_rank: its number.
        nnodes: how many nodes there are.
        master_addr: name or address of node 0.
        master_port: where node 0 listens.
        tensor_parallel_size: as its flags say.
        pipeline_parallel_size: as its flags say.
        secret_file: path of the secret that the nodes share; None: it is in the environment.
        config: what its flags and its copy of the model make; None: they cannot be used.
        problem: why not, for people.
        exit_code: of the process if they cannot.
    """

    node_rank: int
    nnodes: int
    master_addr: str
    master_port: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    secret_file: str | None
    config: EngineConfig | None
    problem: str = ""
    exit_code: int = 0


def model_digest(directory: str) -> str:
    """A text that is the same for the same config.json, whatever directory it is in; empty if there is none."""
    try:
        contents = read_json(pathlib.Path(directory) / "config.json", dict)
    except ModelLoadError:
        return ""
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()
