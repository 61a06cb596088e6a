"""Trains the demo model: a small Qwen2-architecture language model, from scratch, on the CPU.

The module below is only for training; serving uses the package's own Qwen2. Parameter names are those of
Hugging Face's Qwen2 checkpoints, so that the state dict is the checkpoint.

Letters: B samples of a step, T tokens of a sample, H hidden size, N heads, D head size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import nn
from tqdm import tqdm

from ascend_vllm.logger import init_logger
from ascend_vllm.tools.training_progress import TrainingProgress

logger = init_logger("ascend_vllm.tools.demo")


@dataclasses.dataclass(frozen=True)
class DemoShape:
    """Sizes of the demo model; about 1.2 million parameters."""

    vocab_size: int = 2048
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 5
    num_heads: int = 4
    num_kv_heads: int = 2
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_heads


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """How long and how fast to learn.

    Attributes:
        num_steps: optimiser steps.
        batch_tokens: padded tokens of a step, at most.
        matrix_lr: Muon's learning rate after the warm-up, for the layers' matrices.
        peak_lr: AdamW's, for embedding, norms and biases.
        warmup_steps: steps of linear warm-up.
        seed: of weights and order.
    """

    num_steps: int = 600
    batch_tokens: int = 1024
    matrix_lr: float = 2e-2
    peak_lr: float = 5e-3
    warmup_steps: int = 30
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Sample:
    """One conversation: token ids, and where the part to be learned starts."""

    token_ids: list[int]
    num_prompt_tokens: int


class _Attention(nn.Module):
    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.num_heads * shape.head_size
        kv_width = shape.num_kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden_size, width)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        size = self.shape.head_size
        query, key, value = (
            proj(x).unflatten(-1, (-1, size)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(
            _rotate(query, cos, sin), _rotate(key, cos, sin), value, is_causal=True, enable_gqa=True
        )
        attended: torch.Tensor = self.o_proj(out.transpose(1, 2).flatten(-2))
        return attended


class _Mlp(nn.Module):
    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = _Mlp(shape)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Backbone(nn.Module):
    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        cos, sin = _rope_tables(token_ids.shape[1], self.shape)
        x = self.embed_tokens(token_ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        hidden: torch.Tensor = self.norm(x)
        return hidden


class DemoModel(nn.Module):
    """The trainable model; tied embeddings. `forward(token_ids [B, T]) -> hidden [B, T, H]`."""

    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.model = _Backbone(shape)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02 if "embed" in name else parameter.shape[1] ** -0.5)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model(token_ids)
        return hidden

    def loss(self, token_ids: torch.Tensor, learned: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the next tokens where `learned` [B, T] is true."""
        hidden = self.model(token_ids[:, :-1])
        wanted = learned[:, 1:]
        logits = F.linear(hidden[wanted], self.model.embed_tokens.weight)
        return F.cross_entropy(logits.float(), token_ids[:, 1:][wanted])


def _rope_tables(length: int, shape: DemoShape) -> tuple[torch.Tensor, torch.Tensor]:
    half = torch.arange(0, shape.head_size, 2, dtype=torch.float32)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), shape.rope_theta ** (-half / shape.head_size))
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def batches(samples: Sequence[Sample], plan: TrainingPlan) -> Iterator[list[Sample]]:
    """Endless batches of samples of similar length, in an order drawn from the plan's seed."""
    generator = torch.Generator().manual_seed(plan.seed)
    while True:
        # jitter of a few tokens mixes neighbours anew each round, at little padding
        jitter = (torch.rand(len(samples), generator=generator) * 12).tolist()
        order = sorted(range(len(samples)), key=lambda i: len(samples[i].token_ids) + jitter[i])
        batches: list[list[Sample]] = [[]]
        for index in order:
            longest = max((len(s.token_ids) for s in (*batches[-1], samples[index])), default=0)
            if longest * (len(batches[-1]) + 1) > plan.batch_tokens:
                batches.append([])
            batches[-1].append(samples[index])
        for place in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[place]


def collate(batch: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, T] int64, padded with 0, and [B, T] bool, which of them are to be learned."""
    length = max(len(sample.token_ids) for sample in batch)
    token_ids = torch.zeros(len(batch), length, dtype=torch.int64)
    learned = torch.zeros(len(batch), length, dtype=torch.bool)
    for row, sample in enumerate(batch):
        token_ids[row, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
        learned[row, sample.num_prompt_tokens : len(sample.token_ids)] = True
    return token_ids, learned


def learning_rate_factor(step: int, plan: TrainingPlan) -> float:
    """Share of the highest learning rate: a linear warm-up, then a cosine."""
    if step < plan.warmup_steps:
        return (step + 1) / plan.warmup_steps
    done = (step - plan.warmup_steps) / max(1, plan.num_steps - plan.warmup_steps)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))


class _Muon(torch.optim.Optimizer):
    """Momentum whose updates are made orthogonal (K. Jordan et al., "Muon", 2024).

    torch's own Muon computes in bfloat16, which has no fast product of two activations on most CPUs; matrices this
    small take no time in float32.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002 - torch's signature
        """One update of every matrix."""
        for group in self.param_groups:
            for matrix in group["params"]:
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 1 - group["momentum"])
                update = _orthogonal(matrix.grad.lerp(momentum, group["momentum"]))
                # the same size of change per entry for matrices of every shape
                scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
                matrix.add_(update, alpha=-group["lr"] * scale)


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Nearly the orthogonal matrix next to this one: five Newton-Schulz steps with Muon's coefficients."""
    x: torch.Tensor = matrix / (matrix.norm() + 1e-7)
    if matrix.shape[0] > matrix.shape[1]:
        x = x.T
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def _optimizers(model: DemoModel, plan: TrainingPlan) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, which learns in half the steps; AdamW for the embedding, norms and biases."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        _Muon(matrices, lr=plan.matrix_lr),
        torch.optim.AdamW(others, lr=plan.peak_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def train(
    samples: Sequence[Sample], shape: DemoShape, plan: TrainingPlan, progress_path: pathlib.Path
) -> dict[str, torch.Tensor]:
    """Trains a model from scratch, or goes on where a training was interrupted.

    Args:
        samples: conversations to learn by heart; each shorter than shape.max_position_embeddings.
        shape: sizes of the model.
        plan: steps, rates, seed; the same plan gives the same weights on the same machine.
        progress_path: file for what an interrupted training goes on from.

    Returns:
        Hugging Face's parameter names → bfloat16 tensors; the embedding serves as LM head too.

    Raises:
        ConfigError: the file is of another training.
    """
    torch.manual_seed(plan.seed)
    model = DemoModel(shape)
    optimizers = _optimizers(model, plan)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, plan))
        for optimizer in optimizers
    ]
    stateful: list[Any] = [model, *optimizers, *schedules]
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    settings = json.dumps([dataclasses.asdict(shape), dataclasses.asdict(plan), len(samples), num_tokens])
    progress = TrainingProgress(progress_path, settings)
    num_done = 0
    if kept := progress.load(torch.device("cpu")):
        num_done = kept["num_done"]
        for part, state in zip(stateful, kept["parts"], strict=True):
            part.load_state_dict(state)
        logger.info("Going on after %d of %d steps", num_done, plan.num_steps)

    def save() -> None:
        progress.save({"num_done": num_done, "parts": [part.state_dict() for part in stateful]})

    bar = tqdm(total=plan.num_steps, initial=num_done, desc="Training the demo model", unit="step", mininterval=0.5)
    try:
        for batch in itertools.islice(batches(samples, plan), num_done, plan.num_steps):
            loss = model.loss(*collate(batch))
            model.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
            num_done += 1
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            bar.update()
            if progress.is_due:
                save()
    finally:
        bar.close()
    progress.remove()
    return {name: parameter.detach().to(torch.bfloat16) for name, parameter in model.named_parameters()}
