"""The head as it is trained, in float32, and its loss (Y. Li et al., "EAGLE", 2024, and SafeAILab's trainer).

Parameter names are those of published heads, so that the state is the checkpoint. Serving uses `models.eagle`.

Letters: B samples of a step, T pairs of each, H hidden size, N heads, K KV heads, D head size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ascend_vllm.config.families import EAGLE_ARCHITECTURE
from ascend_vllm.config.model import LoadConfig
from ascend_vllm.errors import ConfigError
from ascend_vllm.models.checkpoint import open_checkpoint

# weight of the loss of tokens beside that of features
_TOKEN_WEIGHT = 0.1


@dataclasses.dataclass(frozen=True)
class HeadShape:
    """Sizes of a head.

    Attributes:
        hidden_size: H, the target's.
        intermediate_size: width inside the MLP.
        num_heads: N.
        num_kv_heads: K.
        head_size: D.
        rope_theta: base of the rotary positions.
        norm_eps: of the norm.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rope_theta: float
    norm_eps: float


class _Attention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self._shape = shape
        width, key_width = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            projection(x).view(batch, length, -1, self._shape.head_size).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        group = self._shape.num_heads // self._shape.num_kv_heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        # samples are padded at their ends, which no pair before sees
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: torch.Tensor = self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))
        return projected


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class _MLP(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class _Layer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.self_attn = _Attention(shape)
        self.mlp = _MLP(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(x, cos, sin)
        result: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class TrainedHead(nn.Module):
    """An EAGLE-1 head without the embedding, which is the target's and stays as it is."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self._shape = shape
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size)
        self.layers = nn.ModuleList([_Layer(shape)])

    def forward(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Embeddings and hidden states of pairs, [B, T, H] each → predicted hidden states [B, T, H]."""
        exponents = torch.arange(0, self._shape.head_size, 2, device=states.device) / self._shape.head_size
        angles = torch.arange(states.shape[1], device=states.device)[:, None] * self._shape.rope_theta**-exponents
        angles = torch.cat((angles, angles), -1)
        predicted: torch.Tensor = self.layers[0](
            self.fc(torch.cat((embedded, states), -1)), angles.cos(), angles.sin()
        )
        return predicted


def read_weights(head: TrainedHead, directory: str) -> None:
    """Gives a head the weights of one that was trained before, in SafeAILab's layout.

    Raises:
        ConfigError: it is a head of another kind or size.
        ModelLoadError: there is none, or it is damaged.
    """
    own = head.state_dict()
    # embedding and LM head, which some heads have, are the target's
    files = open_checkpoint(directory, LoadConfig())
    wanted = [[name for name in file.shapes if name.startswith(("fc.", "layers."))] for file in files]
    found = {
        name: tensor.clone()
        for file, names in zip(files, wanted, strict=True)
        for name, tensor in file.tensors(names)
    }
    shapes, own_shapes = ({name: one.shape for name, one in tensors.items()} for tensors in (found, own))
    if wrong := sorted(name for name in own | found if shapes.get(name) != own_shapes.get(name)):
        raise ConfigError(f"{directory}: is no EAGLE-1 head for a model of this size: {wrong[0]} is not as expected")
    head.load_state_dict(found)


@dataclasses.dataclass(frozen=True)
class TargetWeights:
    """What a head reads of its target, in float32.

    Attributes:
        embedding: [V, H].
        lm_head: [V, H].
        logit_cap: c of c·tanh(logit / c); None: logits are not capped.
    """

    embedding: torch.Tensor
    lm_head: torch.Tensor
    logit_cap: float | None

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """states [*, H] → [*, V]."""
        logits = states @ self.lm_head.T
        return logits if self.logit_cap is None else self.logit_cap * torch.tanh(logits / self.logit_cap)


@dataclasses.dataclass(frozen=True)
class Losses:
    """The losses of a step, [] each, and how many of the target's best tokens the head finds.

    Attributes:
        total: what is minimised.
        feature: smooth L1 distance of predicted hidden states, averaged over their numbers.
        token: cross entropy of predicted tokens with the target's distribution.
        accuracy: share of pairs whose best token is the target's.
    """

    total: torch.Tensor
    feature: torch.Tensor
    token: torch.Tensor
    accuracy: torch.Tensor


def losses(
    head: TrainedHead,
    target: TargetWeights,
    token_ids: torch.Tensor,
    states: torch.Tensor,
    learned: torch.Tensor,
    noise: torch.Tensor,
    num_passes: int = 1,
) -> Losses:
    """Losses of some samples.

    Of pair t, the embedding of token t+1 and the hidden state of token t, the head predicts the hidden state of token
    t+1, and thereby token t+2. In further passes the hidden states of pairs are those that the pass before has
    predicted, as in a chain of drafts (L. Zhang et al., "HASS", 2024; training-time test in Y. Li et al., "EAGLE-3",
    2025). All passes weigh the same.

    Args:
        head: that is trained.
        target: its embedding and LM head.
        token_ids: [B, T+2] int64.
        states: [B, T+2, H], the target's hidden states.
        learned: [B, T+2] bool: tokens that count; false for padding.
        noise: [B, T, H], added to the states of pairs in the first pass.
        num_passes: 1 or more.
    """
    wanted, counted = states[:, 1:-1], learned[:, 2:]
    wanted = wanted[counted]
    wanted_logits = target.logits(wanted)
    embedded, inputs = target.embedding[token_ids[:, 1:-1]], states[:, :-2] + noise
    passes = []
    for _ in range(num_passes):
        every = head(embedded, inputs)
        predicted = every[counted]
        logits = target.logits(predicted)
        feature = functional.smooth_l1_loss(predicted, wanted)
        token = functional.cross_entropy(logits, wanted_logits.softmax(-1))
        accuracy = (logits.argmax(-1) == wanted_logits.argmax(-1)).float().mean()
        passes.append(torch.stack((feature, token, accuracy)))
        inputs = torch.cat((states[:, :1], every[:, :-1].detach()), 1)
    feature, token, accuracy = torch.stack(passes).mean(0)
    return Losses(feature + _TOKEN_WEIGHT * token, feature.detach(), token.detach(), accuracy)


def head_config(shape: HeadShape, vocab_size: int, max_length: int, dtype: str) -> dict[str, Any]:
    """config.json of a head, as SafeAILab publishes them: that of a Llama with one layer."""
    return {
        "architectures": [EAGLE_ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": max_length,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "bias": True,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }
