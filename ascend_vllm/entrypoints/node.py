"""A server program on a machine with --node-rank above 0: it becomes a process that runs workers for node 0."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import msgspec

from ascend_vllm import envs
from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.config.node import NodeStart
from ascend_vllm.errors import AscendVllmError, ConfigError

_EXIT_FAILURE = 1
_EXIT_USAGE = 2


def become_node(args: EngineArgs) -> NoReturn:
    """Replaces this process by the node's, which loads neither an HTTP server nor an engine.

    The new process reports invalid flags or an invalid model, also to node 0, which would otherwise wait for it.

    Args:
        args: with a --node-rank above 0, and a model that is a directory or can be found as one.
    """
    payload = msgspec.msgpack.encode(make_start(args))
    # becomes the new process's stdin
    descriptor = os.memfd_create("ascend_vllm_node")
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(payload)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.dup2(descriptor, 0)
    os.close(descriptor)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, "-m", "ascend_vllm.executor.nodes.agent"], envs.everything())


def make_start(args: EngineArgs) -> NodeStart:
    """The setup of the node's process; invalid flags or an invalid model become its `problem`."""
    config, problem, code = None, "", 0
    try:
        config = args.create_engine_config()
    except AscendVllmError as error:
        problem = str(error)
        code = _EXIT_USAGE if isinstance(error, ConfigError) else _EXIT_FAILURE
    return NodeStart(
        node_rank=args.node_rank,
        nnodes=args.nnodes,
        master_addr=args.master_addr,
        master_port=args.master_port,
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        secret_file=args.node_secret_file,
        config=config,
        problem=problem,
        exit_code=code,
    )
