"""EAGLE heads with random weights, in the layouts that SafeAILab publishes, and what they compute in plain PyTorch.

Letters: T tokens of a sequence, H width of the head, F width of the target's features, V vocabulary, D entries of it
that an EAGLE-3 head drafts.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch.nn import functional

HEAD_SIZE = 16
EPSILON = 1e-5
ROPE_THETA = 10000.0


def head_config(hidden: int, vocab: int, **others: Any) -> dict[str, Any]:
    """config.json of a head: that of a Llama with one layer."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": hidden // HEAD_SIZE,
        "num_key_value_heads": hidden // HEAD_SIZE // 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": 512,
        "rms_norm_eps": EPSILON,
        "rope_theta": ROPE_THETA,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "vocab_size": vocab,
        **others,
    }


def _matrix(generator: torch.Generator, rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=generator) * columns**-0.5


def _layer(generator: torch.Generator, prefix: str, hidden: int, inputs: int) -> dict[str, torch.Tensor]:
    key_width = hidden // 2
    rows = {"q_proj": hidden, "k_proj": key_width, "v_proj": key_width}
    attention = {name: _matrix(generator, size, inputs) for name, size in rows.items()}
    attention["o_proj"] = _matrix(generator, hidden, hidden)
    mlp = {
        "gate_proj": _matrix(generator, 2 * hidden, hidden),
        "up_proj": _matrix(generator, 2 * hidden, hidden),
        "down_proj": _matrix(generator, hidden, 2 * hidden),
    }
    return {
        **{f"{prefix}.self_attn.{name}.weight": matrix for name, matrix in attention.items()},
        **{f"{prefix}.mlp.{name}.weight": matrix for name, matrix in mlp.items()},
        f"{prefix}.post_attention_layernorm.weight": _norm(generator, hidden),
    }


def _norm(generator: torch.Generator, width: int) -> torch.Tensor:
    return 1 + 0.2 * torch.randn(width, generator=generator)


def eagle_tensors(hidden: int, vocab: int, *, bias: bool, embeds: bool = True) -> dict[str, torch.Tensor]:
    """An EAGLE-1 head: no LM head, no norm but the one before the MLP."""
    generator = torch.Generator().manual_seed(5)
    tensors = {"fc.weight": _matrix(generator, hidden, 2 * hidden), **_layer(generator, "layers.0", hidden, hidden)}
    if bias:
        tensors["fc.bias"] = 0.3 * torch.randn(hidden, generator=generator)
    if embeds:
        tensors["embed_tokens.weight"] = torch.randn(vocab, hidden, generator=generator)
    return tensors


def eagle3_tensors(hidden: int, vocab: int, num_drafted: int) -> dict[str, torch.Tensor]:
    """An EAGLE-3 head whose LM head knows every n-th token."""
    generator = torch.Generator().manual_seed(6)
    ids = torch.arange(num_drafted) * (vocab // num_drafted)
    return {
        "fc.weight": _matrix(generator, hidden, 3 * hidden),
        **_layer(generator, "midlayer", hidden, 2 * hidden),
        "midlayer.hidden_norm.weight": _norm(generator, hidden),
        "midlayer.input_layernorm.weight": _norm(generator, hidden),
        "norm.weight": _norm(generator, hidden),
        "lm_head.weight": _matrix(generator, num_drafted, hidden),
        "d2t": ids - torch.arange(num_drafted),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True),
    }


def save_head(
    directory: pathlib.Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], *, as_bin: bool = True
) -> str:
    """Writes a head; returns the name of its weight file."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if as_bin:
        torch.save(tensors, directory / "pytorch_model.bin")
        return "pytorch_model.bin"
    save_file(tensors, directory / "model.safetensors")
    return "model.safetensors"


# ---- heads that have learned some texts ----------------------------------------------------------------------


def learn_eagle(target: str, texts: Sequence[tuple[list[int], int]]) -> dict[str, torch.Tensor]:
    """An EAGLE-1 head that knows how some texts go on: the linear map from pairs to states, by least squares.

    Args:
        target: directory of the model.
        texts: tokens, and how many of the last ones are to be drafted. Of more than 2 * hidden size tokens it learns
            only some.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(target).eval()
    embedding = model.get_input_embeddings().weight.detach()
    pairs, wanted = [], []
    for token_ids, count in texts:
        state = _states_of(model, token_ids)[-1]
        pairs.append(torch.cat((embedding[token_ids[1:]], state[:-1]), 1)[-count:])
        wanted.append(state[1:][-count:])
    tensors = eagle_tensors(embedding.shape[1], len(embedding), bias=True, embeds=False)
    weight, bias = _least_squares(torch.cat(pairs), torch.cat(wanted))
    return tensors | {"fc.weight": weight, "fc.bias": bias} | _silenced(tensors)


def learn_eagle3(
    target: str, texts: Sequence[tuple[list[int], int]], layers: Sequence[int], num_drafted: int
) -> dict[str, torch.Tensor]:
    """The same of EAGLE-3, for the first draft of a step: the states of one token decide what comes after the next.

    Args:
        target: directory of the model.
        texts: as of `learn_eagle`.
        layers: of the target, whose inputs it reads.
        num_drafted: tokens in its vocabulary: those of the texts first.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(target).eval()
    lm_head = model.get_output_embeddings().weight.detach()
    hidden = lm_head.shape[1]
    inputs, wanted = [], []
    for token_ids, count in texts:
        states = _states_of(model, token_ids)
        inputs.append(torch.cat([states[layer][:-1] for layer in layers], 1)[-count:])
        wanted.append(states[-1][1:][-count:])
    weight, bias = _least_squares(torch.cat(inputs), torch.cat(wanted))
    known = {token_id for token_ids, count in texts for token_id in token_ids[-count:]}
    others = [token_id for token_id in range(len(lm_head)) if token_id not in known]
    ids = torch.tensor(sorted([*known, *others][:num_drafted]))
    tensors = eagle3_tensors(hidden, len(lm_head), num_drafted)
    return (
        tensors
        | {"fc.weight": weight, "fc.bias": bias, "norm.weight": torch.ones(hidden), "lm_head.weight": lm_head[ids]}
        | {"d2t": ids - torch.arange(num_drafted)}
        | _silenced(tensors)
    )


def _states_of(model: Any, token_ids: list[int]) -> list[torch.Tensor]:
    """[T, F] each: the inputs of all layers, and the last hidden state."""
    with torch.inference_mode():
        states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return [state[0].clone() for state in states]


def _least_squares(inputs: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, a] and [n, b] → [b, a] and [b]."""
    with_one = torch.cat((inputs, torch.ones(len(inputs), 1)), 1).double()
    solution = torch.linalg.lstsq(with_one, wanted.double(), driver="gelsd").solution.float()
    return solution[:-1].T.contiguous(), solution[-1].contiguous()


def _silenced(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of attention and MLP, without a result."""
    names = [name for name in tensors if name.endswith(("o_proj.weight", "down_proj.weight"))]
    return {name: torch.zeros_like(tensors[name]) for name in names}


# ---- reference ----------------------------------------------------------------------------------------------


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight


def _rotate(x: torch.Tensor) -> torch.Tensor:
    """x [N, T, D] at positions 0 … T-1."""
    frequencies = ROPE_THETA ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
    angles = torch.arange(x.shape[1])[:, None] * frequencies
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(len(x), -1, HEAD_SIZE).transpose(0, 1)


def _attend(tensors: dict[str, torch.Tensor], prefix: str, x: torch.Tensor) -> torch.Tensor:
    query, key, value = (_heads(x @ tensors[f"{prefix}.{name}_proj.weight"].T) for name in "qkv")
    group = len(query) // len(key)
    key, value = (part.repeat_interleave(group, 0) for part in (_rotate(key), value))
    attended = functional.scaled_dot_product_attention(_rotate(query), key, value, is_causal=True)
    return attended.transpose(0, 1).reshape(len(x), -1) @ tensors[f"{prefix}.o_proj.weight"].T


def _mlp(tensors: dict[str, torch.Tensor], prefix: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ tensors[f"{prefix}.{name}_proj.weight"].T for name in ("gate", "up"))
    return (functional.silu(gate) * up) @ tensors[f"{prefix}.down_proj.weight"].T


def eagle_reference(
    tensors: dict[str, torch.Tensor], embedding: torch.Tensor, next_ids: torch.Tensor, features: torch.Tensor
) -> torch.Tensor:
    """Features [T, H] that an EAGLE-1 head predicts of next_ids [T] and features [T, H]."""
    x = torch.cat((embedding[next_ids], features), 1) @ tensors["fc.weight"].T + tensors.get("fc.bias", 0.0)
    x = x + _attend(tensors, "layers.0.self_attn", x)
    return x + _mlp(tensors, "layers.0.mlp", _rms_norm(x, tensors["layers.0.post_attention_layernorm.weight"]))


def eagle3_reference(
    tensors: dict[str, torch.Tensor], embedding: torch.Tensor, next_ids: torch.Tensor, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of next_ids [T] and three states of the target side by side [T, 3F]: what feeds the next draft, and the logits.

    Returns:
        [T, H], and [T, D].
    """
    fused = states @ tensors["fc.weight"].T
    embedded = _rms_norm(embedding[next_ids], tensors["midlayer.input_layernorm.weight"])
    inputs = torch.cat((embedded, _rms_norm(fused, tensors["midlayer.hidden_norm.weight"])), 1)
    x = fused + _attend(tensors, "midlayer.self_attn", inputs)
    x = x + _mlp(tensors, "midlayer.mlp", _rms_norm(x, tensors["midlayer.post_attention_layernorm.weight"]))
    return x, _rms_norm(x, tensors["norm.weight"]) @ tensors["lm_head.weight"].T
