"""What a server says of itself when it starts: the flags that were changed, what runs, and where to reach it."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.args.fields import flags_of
from ascend_vllm.args.hf_files import weight_bytes
from ascend_vllm.args.tables.server import HttpArgs
from ascend_vllm.config.cache import kv_cache_specs
from ascend_vllm.config.engine import EngineConfig, ParallelConfig
from ascend_vllm.platforms.facts import device_facts
from ascend_vllm.platforms.host import usable_cores

if TYPE_CHECKING:
    from ascend_vllm.engine.async_llm import AsyncLLM

_GIB, _MIB = 1 << 30, 1 << 20
# pages for people, and what else is worth knowing, where the server has them
_FURTHER_PATHS = ("/ui", "/docs", "/metrics")


def changed_flags(flags: argparse.Namespace, http_args: HttpArgs) -> dict[str, Any]:
    """The flags whose values are not their defaults, field → value, without API keys."""
    found = {}
    for item in (*flags_of(type(http_args)), *flags_of(EngineArgs)):
        value = getattr(flags, item.field, item.default)
        # None: not given; and one of two opposite switches is enough
        if value not in (None, item.default) and not (item.opposite is not None and value is False):
            found[item.field] = ["***" for _ in value] if item.field == "api_key" else value
    return found


def base_url(args: HttpArgs, sock: socket.socket) -> str:
    """The address of a server, without a path, as a client on this machine writes it."""
    scheme = "https" if args.ssl_certfile else "http"
    if args.uds is not None:
        return f"{scheme}://localhost"
    host = args.host if args.host not in (None, "", "0.0.0.0", "::") else "localhost"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"


def start_page(engine: AsyncLLM, url: str, uds: str | None, api_path: str, paths: Collection[str]) -> Iterator[str]:
    """The lines of the page.

    Args:
        engine: that is ready.
        url: of the server, without a path.
        uds: the Unix domain socket through which it is reached; None: a port.
        api_path: below which clients find the API, or its only route.
        paths: of all routes.
    """
    config = engine.config
    model, scheduler = config.model, config.scheduler
    weights = f"{_size(weight_bytes(model.model))} of weights"
    quantization = model.arch.quantization
    if quantization is not None and quantization.method:
        weights = f"{quantization.method} weights, {weights}"
    yield f"  model     {', '.join(model.served_model_names)}"
    yield f"            {model.architecture} of {model.model}"
    yield f"  dtype     {model.dtype}, {weights}"
    yield f"  device    {_device(config)}"
    yield (
        f"  limits    {engine.max_model_len:,} tokens per request, {scheduler.max_num_seqs:,} requests at a time, "
        f"{scheduler.max_num_batched_tokens:,} tokens per step"
    )
    yield f"  KV cache  {_kv_cache(engine)}"
    yield f"  address   {url}{api_path}" + (f" through {uds}" if uds else "")
    if further := [path for path in _FURTHER_PATHS if path in paths]:
        yield f"            {', '.join(url + path for path in further)}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB / 10 else f"{num_bytes / _MIB:.1f} MiB"


def _device(config: EngineConfig) -> str:
    name = config.device.device
    text = f"cpu, {usable_cores()} cores" if name == "cpu" else device_facts(name).label
    return text + _workers(config.parallel)


def _workers(parallel: ParallelConfig) -> str:
    sizes = {
        "engines": parallel.data_parallel_size,
        "pipeline stages": parallel.pipeline_parallel_size,
        "workers": parallel.tensor_parallel_size,
    }
    shares = [f"{size} {what}" for what, size in sizes.items() if size > 1]
    return f"; {' of '.join(shares)}" if shares else ""


def _kv_cache(engine: AsyncLLM) -> str:
    config = engine.config
    block_size, blocks = config.cache.block_size, engine.num_kv_blocks
    specs = kv_cache_specs(config.model, config.cache, config.parallel.tensor_parallel_size)
    num_bytes = blocks * sum(spec.block_bytes for spec in specs) * config.parallel.tensor_parallel_size
    tokens = blocks * block_size
    return (
        f"{tokens:,} tokens in {blocks:,} blocks of {block_size}, {_size(num_bytes)}: "
        f"{tokens / engine.max_model_len:.1f} requests of full length"
    )
