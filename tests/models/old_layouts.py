"""Families that transformers has no class for: tiny checkpoints in their own layout, and a plain model of each.

The models are written from the code of the families' repositories, for one sequence at a time, in float32 and without
a cache. They read the tensors by the names of the checkpoint, so that nothing of the engine is in them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, normalize, silu

from ascend_vllm.config import families

VOCAB_SIZE = 384
_H, _I, _L, _N, _D = 64, 112, 3, 4, 16

Weights = Mapping[str, torch.Tensor]
# hidden states [T, H] and a layer's number → query [T, N, D], key and value [T, K, D]
Projection = Callable[[Weights, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """A family's checkpoint and its arithmetic.

    Attributes:
        config: config.json.
        embedding: name of the embedding; so with `final_norm` and `head`.
        layer: shapes by name of a layer's tensors, without its prefix.
        prefix: of a layer's names, with its number.
        project: queries, keys and values of normalised hidden states.
        norms: names of the norms in front of attention and MLP.
        output: name of attention's output projection.
        mlp: normalised hidden states → result of the MLP.
        rotate: rotates [T, heads, D] by positions; None: ALiBi.
        epsilon: of norms.
        scales: of embeddings, residuals and logits.
        normalizes_head: rows of the head have length 1.
    """

    config: dict[str, Any]
    embedding: str
    final_norm: str
    head: str
    prefix: str
    layer: dict[str, tuple[int, ...]]
    project: Projection
    norms: tuple[str, str]
    output: str
    mlp: Callable[[Weights, torch.Tensor, int], torch.Tensor]
    rotate: Callable[[torch.Tensor], torch.Tensor] | None
    epsilon: float = 1e-6
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0)
    normalizes_head: bool = False


# ---- arithmetic ------------------------------------------------------------------------------------------------


def _rotate(x: torch.Tensor, theta: float, width: int, *, neighbours: bool = False) -> torch.Tensor:
    """Rotates the first `width` elements of each head."""
    angles = torch.arange(len(x))[:, None] * theta ** (-torch.arange(0, width, 2) / width)
    turned = torch.polar(torch.ones_like(angles), angles)[:, None]
    part = x[..., :width]
    pairs = part.unflatten(-1, (-1, 2)) if neighbours else torch.stack(part.chunk(2, -1), -1)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turned)
    rotated = turned.flatten(-2) if neighbours else torch.cat(turned.unbind(-1), -1)
    return torch.cat((rotated, x[..., width:]), -1)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def _linear(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _slopes(num_heads: int) -> list[float]:
    """Of the code that Baichuan took from the paper on ALiBi."""

    def of_power(count: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(count) - 3)))
        return [start * start**index for index in range(count)]

    if math.log2(num_heads).is_integer():
        return of_power(num_heads)
    closest = 2 ** math.floor(math.log2(num_heads))
    return of_power(closest) + _slopes(2 * closest)[0::2][: num_heads - closest]


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, alibi: bool) -> torch.Tensor:
    """Causal attention of one sequence: [T, N, D], [T, K, D] → [T, N*D]."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (key, value))
    scores = query.transpose(0, 1) @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
    if alibi:
        # as in the repository: a bias by the position of the key alone, which softmax cannot tell from the distance
        scores += torch.tensor(_slopes(query.shape[1]))[:, None, None] * torch.arange(len(query))
    masked = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
    weights = scores.masked_fill(masked, -math.inf).softmax(-1)
    return (weights @ value).transpose(0, 1).flatten(1)


class PlainModel:
    """One of the models; as `paged_driver.TransformersModel`."""

    def __init__(self, name: str, directory: str) -> None:
        self._layout = LAYOUTS[name]
        self._weights = load_file(pathlib.Path(directory) / "model.safetensors")

    @torch.inference_mode()
    def log_probs(self, prompt: Sequence[int], continuation: Sequence[int] = ()) -> torch.Tensor:
        """Float32 log-probabilities [prompt + continuation, V]."""
        layout, weights = self._layout, self._weights
        embedding_scale, residual_scale, logit_scale = layout.scales
        x = weights[f"{layout.embedding}.weight"][torch.tensor([*prompt, *continuation])] * embedding_scale
        for index in range(_L):
            names = [layout.prefix.format(index) + norm for norm in layout.norms]
            query, key, value = layout.project(
                weights, _rms_norm(x, weights[f"{names[0]}.weight"], layout.epsilon), index
            )
            if layout.rotate is not None:
                query, key = layout.rotate(query), layout.rotate(key)
            attended = _attend(query, key, value, alibi=layout.rotate is None)
            x = x + residual_scale * _linear(weights, layout.prefix.format(index) + layout.output, attended)
            normed = _rms_norm(x, weights[f"{names[1]}.weight"], layout.epsilon)
            x = x + residual_scale * layout.mlp(weights, normed, index)
        x = _rms_norm(x, weights[f"{layout.final_norm}.weight"], layout.epsilon)
        head = weights[f"{layout.head}.weight"]
        return (linear(x, normalize(head) if layout.normalizes_head else head) * logit_scale).log_softmax(-1)


# ---- layouts ---------------------------------------------------------------------------------------------------

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": _H,
    "num_attention_heads": _N,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}
_LLAMA_SIZES = _SIZES | {"intermediate_size": _I, "num_hidden_layers": _L, "rms_norm_eps": 1e-6}
_LLAMA_MLP = {"mlp.gate_proj.weight": (_I, _H), "mlp.up_proj.weight": (_I, _H), "mlp.down_proj.weight": (_H, _I)}
_LLAMA_NORMS = {"input_layernorm.weight": (_H,), "post_attention_layernorm.weight": (_H,)}
_LLAMA = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "prefix": "model.layers.{}.",
    "norms": ("input_layernorm", "post_attention_layernorm"),
}


def _gated(prefix: str, gate: str, up: str, down: str) -> Callable[[Weights, torch.Tensor, int], torch.Tensor]:
    def mlp(weights: Weights, x: torch.Tensor, index: int) -> torch.Tensor:
        of = prefix.format(index)
        return _linear(weights, of + down, silu(_linear(weights, of + gate, x)) * _linear(weights, of + up, x))

    return mlp


def _split_projection(weights: Weights, x: torch.Tensor, index: int) -> tuple[torch.Tensor, ...]:
    names = (f"model.layers.{index}.self_attn.{name}_proj" for name in "qkv")
    return tuple(_linear(weights, name, x).unflatten(-1, (-1, _D)) for name in names)


def _fused_projection(name: str, num_heads: int, num_kv_heads: int, size: int) -> Projection:
    def project(weights: Weights, x: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = _linear(weights, name.format(index), x).unflatten(-1, (-1, size))
        query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], 1)
        return query, key, value

    return project


def _chatglm_mlp(weights: Weights, x: torch.Tensor, index: int) -> torch.Tensor:
    prefix = f"transformer.encoder.layers.{index}.mlp"
    gate, up = _linear(weights, f"{prefix}.dense_h_to_4h", x).chunk(2, -1)
    return _linear(weights, f"{prefix}.dense_4h_to_h", silu(gate) * up)


def _internlm2_projection(weights: Weights, x: torch.Tensor, index: int) -> tuple[torch.Tensor, ...]:
    # for each KV head its queries, its key, its value
    groups = _linear(weights, f"model.layers.{index}.attention.wqkv", x).view(len(x), 2, 4, _D)
    return groups[:, :, :2].reshape(len(x), _N, _D), groups[:, :, 2], groups[:, :, 3]


_CHATGLM = Layout(
    config=_SIZES
    | {
        "architectures": ["ChatGLMModel"],
        "model_type": "chatglm",
        "padded_vocab_size": VOCAB_SIZE,
        "num_layers": _L,
        "ffn_hidden_size": _I,
        "kv_channels": 32,
        "seq_length": 512,
        "layernorm_epsilon": 1e-5,
        "rmsnorm": True,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "add_qkv_bias": True,
        "rope_ratio": 50,
        "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"},
    },
    embedding="transformer.embedding.word_embeddings",
    final_norm="transformer.encoder.final_layernorm",
    head="transformer.output_layer",
    prefix="transformer.encoder.layers.{}.",
    layer=_LLAMA_NORMS
    | {
        "self_attention.query_key_value.weight": (8 * 32, _H),
        "self_attention.query_key_value.bias": (8 * 32,),
        "self_attention.dense.weight": (_H, 4 * 32),
        "mlp.dense_h_to_4h.weight": (2 * _I, _H),
        "mlp.dense_4h_to_h.weight": (_H, _I),
    },
    project=_fused_projection("transformer.encoder.layers.{}.self_attention.query_key_value", _N, 2, 32),
    norms=("input_layernorm", "post_attention_layernorm"),
    output="self_attention.dense",
    mlp=_chatglm_mlp,
    rotate=functools.partial(_rotate, theta=500000.0, width=16, neighbours=True),
    epsilon=1e-5,
)
_QWEN = Layout(
    config=_SIZES
    | {
        "architectures": ["QWenLMHeadModel"],
        "model_type": "qwen",
        "num_hidden_layers": _L,
        "intermediate_size": 2 * _I,
        "kv_channels": _D,
        "seq_length": 512,
        "max_position_embeddings": 2048,
        "rotary_emb_base": 20000,
        "auto_map": {"AutoConfig": "configuration_qwen.QWenConfig"},
    },
    embedding="transformer.wte",
    final_norm="transformer.ln_f",
    head="lm_head",
    prefix="transformer.h.{}.",
    layer={
        "ln_1.weight": (_H,),
        "ln_2.weight": (_H,),
        "attn.c_attn.weight": (3 * _H, _H),
        "attn.c_attn.bias": (3 * _H,),
        "attn.c_proj.weight": (_H, _H),
        "mlp.w1.weight": (_I, _H),
        "mlp.w2.weight": (_I, _H),
        "mlp.c_proj.weight": (_H, _I),
    },
    project=_fused_projection("transformer.h.{}.attn.c_attn", _N, _N, _D),
    norms=("ln_1", "ln_2"),
    output="attn.c_proj",
    mlp=_gated("transformer.h.{}.mlp.", "w2", "w1", "c_proj"),
    rotate=functools.partial(_rotate, theta=20000.0, width=_D),
)
_BAICHUAN = Layout(
    **_LLAMA,
    config=_LLAMA_SIZES
    | {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "max_position_embeddings": 512},
    layer=_LLAMA_NORMS | _LLAMA_MLP | {"self_attn.W_pack.weight": (3 * _H, _H), "self_attn.o_proj.weight": (_H, _H)},
    project=_fused_projection("model.layers.{}.self_attn.W_pack", _N, _N, _D),
    output="self_attn.o_proj",
    mlp=_gated("model.layers.{}.mlp.", "gate_proj", "up_proj", "down_proj"),
    rotate=functools.partial(_rotate, theta=10000.0, width=_D),
)
_BAICHUAN_13B = dataclasses.replace(
    _BAICHUAN,
    # six heads, which are no power of two
    config=_LLAMA_SIZES
    | {
        "architectures": ["BaichuanForCausalLM"],
        "model_type": "baichuan",
        "hidden_size": 96,
        "num_attention_heads": 6,
        "model_max_length": 512,
    },
    layer={
        name: tuple(96 if size == _H else size for size in shape)
        for name, shape in (_LLAMA_NORMS | _LLAMA_MLP).items()
    }
    | {"self_attn.W_pack.weight": (3 * 96, 96), "self_attn.o_proj.weight": (96, 96)},
    project=_fused_projection("model.layers.{}.self_attn.W_pack", 6, 6, _D),
    rotate=None,
    normalizes_head=True,
)
_SPLIT = {f"self_attn.{name}_proj.weight": (_H, _H) for name in "qkvo"}
_INTERNLM = Layout(
    **_LLAMA,
    config=_LLAMA_SIZES
    | {
        "architectures": ["InternLMForCausalLM"],
        "model_type": "internlm",
        "max_position_embeddings": 512,
        "rotary": {"base": 30000, "type": "dynamic"},
    },
    layer=_LLAMA_NORMS | _LLAMA_MLP | _SPLIT | {f"self_attn.{name}_proj.bias": (_H,) for name in "qkvo"},
    project=_split_projection,
    output="self_attn.o_proj",
    mlp=_gated("model.layers.{}.mlp.", "gate_proj", "up_proj", "down_proj"),
    rotate=functools.partial(_rotate, theta=30000.0, width=_D),
)
_INTERNLM2 = Layout(
    config=_LLAMA_SIZES
    | {
        "architectures": ["InternLM2ForCausalLM"],
        "model_type": "internlm2",
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bias": False,
        "rope_theta": 1000000,
        # of all sequences of the tests inside the trained length
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    },
    embedding="model.tok_embeddings",
    final_norm="model.norm",
    head="output",
    prefix="model.layers.{}.",
    layer={
        "attention_norm.weight": (_H,),
        "ffn_norm.weight": (_H,),
        "attention.wqkv.weight": (8 * _D, _H),
        "attention.wo.weight": (_H, _H),
        "feed_forward.w1.weight": (_I, _H),
        "feed_forward.w3.weight": (_I, _H),
        "feed_forward.w2.weight": (_H, _I),
    },
    project=_internlm2_projection,
    norms=("attention_norm", "ffn_norm"),
    output="attention.wo",
    mlp=_gated("model.layers.{}.feed_forward.", "w1", "w3", "w2"),
    rotate=functools.partial(_rotate, theta=1000000.0, width=_D),
)
_MINICPM = dataclasses.replace(
    _INTERNLM,
    config=_LLAMA_SIZES
    | {
        "architectures": ["MiniCPMForCausalLM"],
        "model_type": "minicpm",
        "max_position_embeddings": 512,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 16,
    },
    layer=_LLAMA_NORMS | _LLAMA_MLP | _SPLIT,
    rotate=functools.partial(_rotate, theta=10000.0, width=_D),
    scales=(12.0, 1.4 / math.sqrt(_L), 16 / _H),
)

# name of a checkpoint → its layout
LAYOUTS: dict[str, Layout] = {
    "baichuan-7b": _BAICHUAN,
    "baichuan-13b": _BAICHUAN_13B,
    "chatglm": _CHATGLM,
    "internlm": _INTERNLM,
    "internlm2": _INTERNLM2,
    "minicpm": _MINICPM,
    "qwen1": _QWEN,
}


def save(name: str, directory: pathlib.Path) -> str:
    """Writes a checkpoint with random weights; returns its directory."""
    layout = LAYOUTS[name]
    width = layout.config["hidden_size"]
    shapes = {
        f"{layout.embedding}.weight": (VOCAB_SIZE, width),
        f"{layout.head}.weight": (VOCAB_SIZE, width),
        f"{layout.final_norm}.weight": (width,),
    }
    for index in range(_L):
        shapes |= {layout.prefix.format(index) + suffix: shape for suffix, shape in layout.layer.items()}
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    weights = {}
    for tensor, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            weights[tensor] = 0.2 * noise + (0.0 if tensor.endswith("bias") else 1.0)
        elif tensor.startswith(layout.embedding):
            weights[tensor] = noise / layout.scales[0]
        elif tensor.startswith(layout.head):
            weights[tensor] = noise * 3.0 * width**-0.5 / layout.scales[2]
        else:
            weights[tensor] = noise * 1.2 * shape[1] ** -0.5
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(layout.config))
    return str(directory)


def mark_as_normalised(monkeypatch: Any) -> None:
    """Gives tiny models the head of Baichuan 2, which the reader knows by its vocabulary."""
    monkeypatch.setattr(families, "_BAICHUAN2_VOCAB_SIZE", VOCAB_SIZE)
