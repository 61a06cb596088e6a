"""Runs a model directly on batches over a paged cache, and the same model in transformers."""

from __future__ import annotations

import inspect
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers

from ascend_vllm.args.hf_files import read_hf_config
from ascend_vllm.attention.backend import AttentionBackend, ForwardBatch, LayerCache
from ascend_vllm.attention.cpu import CpuAttention
from ascend_vllm.config.arch import ArchConfig
from ascend_vllm.config.model import LoadConfig, ModelConfig
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.models.blocks import CausalLM
from ascend_vllm.models.loader import load_model

BLOCK_SIZE = 16
MAX_MODEL_LEN = 512


def make_model_config(
    directory: str | pathlib.Path, dtype: str = "float32", max_model_len: int = MAX_MODEL_LEN, **overrides: Any
) -> ModelConfig:
    """The engine's configuration for a directory; overrides replace fields of config.json."""
    hf_config = read_hf_config(str(directory), overrides=overrides)
    return ModelConfig(
        model=str(directory),
        served_model_names=("tiny",),
        tokenizer=str(directory),
        architecture=hf_config["architectures"][0],
        arch=ArchConfig.from_hf(hf_config),
        generation_config={},
        dtype=dtype,
        max_model_len=max_model_len,
    )


def load(config: ModelConfig, load_format: str = "auto") -> CausalLM:
    """Loads without a progress bar, on the CPU."""
    context = BuildContext(getattr(torch, config.dtype), torch.device("cpu"))
    return load_model(config, LoadConfig(load_format=load_format, use_tqdm=False), context)


class ModelInStages(CausalLM):
    """Pipeline stages with their own KV caches, run as one model."""

    def __init__(self, stages: list[CausalLM]) -> None:
        self.stages = stages
        self.attention_layers = [layer for stage in stages for layer in stage.attention_layers]

    def forward(
        self,
        batch: ForwardBatch,
        kv_caches: list[LayerCache],
        backend: AttentionBackend,
        metadata: Any,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As the stages one after another."""
        start = 0
        for stage in self.stages:
            end = start + len(stage.attention_layers)
            hidden = stage.forward(batch, kv_caches[start:end], backend, metadata, hidden)
            start = end
        assert hidden is not None
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the last stage."""
        return self.stages[-1].compute_logits(hidden)


class PagedDriver:
    """Runs rows of one model with a paged cache whose blocks are in random order.

    Args:
        config: of the model.
        max_rows: maximum number of rows.
        model: loaded from the config unless given.
    """

    def __init__(self, config: ModelConfig, max_rows: int = 8, model: CausalLM | None = None) -> None:
        self.model = model or load(config)
        self.backend = CpuAttention(BLOCK_SIZE)
        blocks_per_row = -(-config.max_model_len // BLOCK_SIZE)
        order = torch.randperm(max_rows * blocks_per_row, generator=torch.Generator().manual_seed(0))
        self.block_table = order.view(max_rows, blocks_per_row).int()
        # unwritten parts of the cache must not affect results
        self.kv_caches: list[LayerCache] = []
        for layer in self.model.attention_layers:
            cache = layer.kv_cache_spec(BLOCK_SIZE)
            memory = torch.zeros(len(order) * cache.block_bytes, dtype=torch.uint8)
            self.kv_caches.append(self.backend.make_cache(memory, len(order), cache).fill_(100.0))
        self.lengths = [0] * max_rows

    def append(self, new_tokens: Mapping[int, Sequence[int]]) -> ForwardBatch:
        """Appends tokens to rows; returns the batch that computes them."""
        positions, slots = [], []
        for row, tokens in new_tokens.items():
            row_positions = torch.arange(self.lengths[row], self.lengths[row] + len(tokens))
            blocks = self.block_table[row, row_positions // BLOCK_SIZE].long()
            positions.append(row_positions)
            slots.append(blocks * BLOCK_SIZE + row_positions % BLOCK_SIZE)
            self.lengths[row] += len(tokens)
        counts = [len(tokens) for tokens in new_tokens.values()]
        rows = list(new_tokens)
        seq_lens = [self.lengths[row] for row in rows]
        return ForwardBatch(
            input_ids=torch.tensor([token for tokens in new_tokens.values() for token in tokens]),
            positions=torch.cat(positions),
            slot_mapping=torch.cat(slots),
            query_start=torch.tensor([0, *counts]).cumsum(0).int(),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_table=self.block_table[rows],
            logits_indices=torch.arange(sum(counts)),
            query_start_np=np.cumsum([0, *counts], dtype=np.int32),
            seq_lens_np=np.array(seq_lens, np.int32),
            max_query_len=max(counts),
            max_seq_len=max(seq_lens),
        )

    def hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """Computes a batch; returns what the model's forward does."""
        return self.model.forward(batch, self.kv_caches, self.backend, self.backend.prepare(batch))

    def step(self, new_tokens: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Appends tokens to rows, all in one batch; returns float32 log-probabilities [tokens, V] per row."""
        log_probs = self.model.compute_logits(self.hidden(self.append(new_tokens))).float().log_softmax(-1)
        counts = [len(tokens) for tokens in new_tokens.values()]
        return dict(zip(new_tokens, log_probs.split(counts), strict=True))


class TransformersModel:
    """transformers' own implementation of a checkpoint, one sequence at a time with its KV cache."""

    def __init__(self, directory: str, dtype: str = "float32") -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
        # of later versions, which warn of the other name
        has_new_name = "cache" in inspect.signature(self.model.forward).parameters
        self._cache_name = "cache" if has_new_name else "past_key_values"

    @torch.inference_mode()
    def log_probs(self, prompt: Sequence[int], continuation: Sequence[int] = ()) -> torch.Tensor:
        """Float32 log-probabilities [prompt + continuation, V]: the prompt at once, then token by token."""
        # a short sequence resets the state of dynamic rope
        self.model(torch.tensor([prompt[:1]]))
        output = self.model(torch.tensor([list(prompt)]), use_cache=True)
        logits = [output.logits[0]]
        for token in continuation:
            cache = {self._cache_name: output.past_key_values}
            output = self.model(torch.tensor([[token]]), use_cache=True, **cache)
            logits.append(output.logits[0])
        return torch.cat(logits).float().log_softmax(-1)


def random_tokens(count: int, vocab_size: int, seed: int) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()
