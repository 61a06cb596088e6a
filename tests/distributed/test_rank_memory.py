"""A rank never has the whole model in memory, neither as weights nor as pages of the file."""

from __future__ import annotations

import pathlib

import torch
import transformers
from safetensors.torch import save_file

from ascend_vllm.executor.base import create_executor
from tests.distributed import worker_functions
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import make_config


def large_model(directory: pathlib.Path) -> int:
    """A checkpoint of 200 MB of zeros, and the size of its file in bytes."""
    config = transformers.Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=8192,
        hidden_size=1024,
        num_hidden_layers=3,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=2816,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        dtype="float32",
    )
    config.save_pretrained(directory)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    path = directory / "model.safetensors"
    save_file({name: torch.zeros(weight.shape) for name, weight in model.named_parameters()}, str(path))
    return path.stat().st_size


def peaks(directory: str) -> list[int]:
    """Peak memory of each of two ranks that have loaded a model, in bytes."""
    executor = create_executor(make_config(directory, tensor_parallel_size=2, distributed_executor_backend="mp"))
    executor.collective_rpc("load_model")
    found: list[int] = executor.collective_rpc(worker_functions.peak_memory)
    executor.shutdown()
    return found


def test_a_rank_never_has_the_whole_model_in_memory(tmp_path: pathlib.Path) -> None:
    size = large_model(tmp_path)
    # memory for weights is written before the worker can be asked: what it has without them is that of a tiny model
    growth = [large - tiny for large, tiny in zip(peaks(str(tmp_path)), peaks(tiny_model("llama")), strict=True)]
    assert len(growth) == 2
    # half of the weights, those that are being made, and what is mapped
    assert all(0.45 * size < one < size for one in growth), (growth, size)
