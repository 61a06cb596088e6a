"""Start-up data of a node of --nnodes other than node 0."""

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
        node_rank, nnodes, master_addr, master_port, tensor_parallel_size, pipeline_parallel_size: its flags of these
            names.
        secret_file: path of the secret that the nodes share; None: it is in the environment.
        config: made of its flags and its copy of the model; None: they are invalid.
        problem: the error message if they are invalid.
        exit_code: of the process if they are invalid.
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
    """Digest of a model's config.json; empty if there is none."""
    try:
        contents = read_json(pathlib.Path(directory) / "config.json", dict)
    except ModelLoadError:
        return ""
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()
