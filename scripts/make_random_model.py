"""Writes a model of the shape of Qwen2, Qwen2-MoE or DeepSeek-V2 with random weights, for benchmarks of that shape.

The directory has Hugging Face's layout: config.json, generation_config.json, model.safetensors in bfloat16, and a
byte-level BPE tokenizer with as many entries as the model has, so that any server can serve it::

    python scripts/make_random_model.py /tmp/qwen2-0.5b-random
    python scripts/make_random_model.py /tmp/tiny --preset tiny-5m --seed 7
    python scripts/make_random_model.py /tmp/qwen2-1.5b-w4 --preset qwen2-1.5b --weights w4a16

With --weights the same weights are rounded, and the checkpoint is one of compressed-tensors.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
import string
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen2 model, named as in config.json.

    With `num_experts` above 0 of a Qwen2-MoE model, with `kv_lora_rank` above 0 of a DeepSeek-V2 model without
    `q_lora_rank`, whose experts config.json calls `n_routed_experts`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    tie_word_embeddings: bool = True
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    first_k_dense_replace: int = 0
    n_shared_experts: int = 0


_OF_EXPERTS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
_OF_DEEPSEEK = (
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "first_k_dense_replace",
    "n_shared_experts",
)
_YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}

PRESETS = {
    "qwen2-0.5b": Shape(151936, 896, 4864, 24, 14, 2, 32768),
    # those of Qwen2.5: 3.1, 6.2 and 15.2 GB
    "qwen2-1.5b": Shape(151936, 1536, 8960, 28, 12, 2, 32768),
    "qwen2-3b": Shape(151936, 2048, 11008, 36, 16, 2, 32768),
    "qwen2-7b": Shape(152064, 3584, 18944, 28, 28, 4, 32768, False),
    "tiny-5m": Shape(8192, 256, 704, 4, 4, 2, 4096),
    # 1.5 GB, of which a token uses 0.36 GB
    "qwen2-moe-1.5g": Shape(32768, 1024, 1344, 16, 16, 4, 32768, True, 60, 4, 208, 1344),
    # 1.5 GB, of which a token uses 0.42 GB; heads and latents are as wide as those of DeepSeek-V2-Lite
    "deepseek-v2-1.5g": Shape(32768, 1024, 4096, 12, 16, 16, 163840, False, 64, 6, 256, 0, 512, 128, 64, 128, 1, 2),
    # little to compute, but a vocabulary as large as real models'
    "tiny-152k": Shape(151936, 64, 176, 2, 2, 1, 4096),
}


def _parameters(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor."""
    hidden, is_deepseek = shape.hidden_size, shape.kv_lora_rank > 0
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for index in range(shape.num_hidden_layers):
        prefix = f"model.layers.{index}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        for name, size in (_latent_attention if is_deepseek else _attention)(shape):
            yield f"{prefix}.self_attn.{name}", size
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        mlps = {"mlp": shape.intermediate_size}
        if shape.num_experts > 0 and index >= shape.first_k_dense_replace:
            yield f"{prefix}.mlp.gate.weight", (shape.num_experts, hidden)
            mlps = {f"mlp.experts.{expert}": shape.moe_intermediate_size for expert in range(shape.num_experts)}
            if is_deepseek:
                mlps["mlp.shared_experts"] = shape.moe_intermediate_size * shape.n_shared_experts
            else:
                yield f"{prefix}.mlp.shared_expert_gate.weight", (1, hidden)
                mlps["mlp.shared_expert"] = shape.shared_expert_intermediate_size
        for mlp, width in mlps.items():
            for name in ("gate", "up"):
                yield f"{prefix}.{mlp}.{name}_proj.weight", (width, hidden)
            yield f"{prefix}.{mlp}.down_proj.weight", (hidden, width)
    yield "model.norm.weight", (hidden,)
    if not shape.tie_word_embeddings:
        yield "lm_head.weight", (shape.vocab_size, hidden)


def _attention(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The same of a layer's attention in Qwen2 models."""
    hidden = shape.hidden_size
    kv_width = hidden // shape.num_attention_heads * shape.num_key_value_heads
    for name, width in (("q", hidden), ("k", kv_width), ("v", kv_width)):
        yield f"{name}_proj.weight", (width, hidden)
        yield f"{name}_proj.bias", (width,)
    yield "o_proj.weight", (hidden, hidden)


def _latent_attention(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The same in DeepSeek-V2 models."""
    hidden, heads, rank = shape.hidden_size, shape.num_attention_heads, shape.kv_lora_rank
    yield "q_proj.weight", (heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim), hidden)
    yield "kv_a_proj_with_mqa.weight", (rank + shape.qk_rope_head_dim, hidden)
    yield "kv_a_layernorm.weight", (rank,)
    yield "kv_b_proj.weight", (heads * (shape.qk_nope_head_dim + shape.v_head_dim), rank)
    yield "o_proj.weight", (hidden, heads * shape.v_head_dim)


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of quantized matrices, one of compressed-tensors.

    Attributes:
        stored: compressed-tensors' name of the layout.
        weights: how weights are rounded, as config.json says it.
        inputs: how their inputs are; None: they are not.
        split: the tensors that a matrix [N, K] becomes, by the ends of their names.
    """

    stored: str
    weights: dict[str, Any]
    inputs: dict[str, Any] | None
    split: Callable[[torch.Tensor], dict[str, torch.Tensor]]

    def config(self) -> dict[str, Any]:
        """config.json's `quantization_config`."""
        return {
            "quant_method": "compressed-tensors",
            "format": self.stored,
            "quantization_status": "compressed",
            "ignore": ["lm_head", r"re:.*mlp\.gate$", r"re:.*shared_expert_gate$"],
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": self.weights, "input_activations": self.inputs}
            },
        }


_GROUP = 128


def _w8a8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """8 bits with a float32 scale per output [N, 1]."""
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scales).round().clamp(-128, 127).to(torch.int8), "weight_scale": scales}


def _w4a16(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """4 bits, eight values in an int32 from the lowest bits on, with a bfloat16 scale per output and 128 inputs."""
    if weight.shape[1] % _GROUP:
        raise SystemExit(f"w4a16: matrices must have a multiple of {_GROUP} inputs, and one has {weight.shape[1]}")
    groups = weight.float().unflatten(1, (-1, _GROUP))
    scales = (groups.abs().amax(2, keepdim=True) / 7.5).bfloat16()
    codes = (groups / scales).round().clamp(-8, 7).add(8).to(torch.int32)
    words = torch.zeros_like(codes.view(len(weight), -1, 8)[:, :, 0])
    for place, values in enumerate(codes.view(len(weight), -1, 8).unbind(2)):
        words |= values << 4 * place
    return {
        "weight_packed": words,
        "weight_scale": scales[:, :, 0].contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }


FORMATS = {
    "w8a8": Format(
        "int-quantized",
        {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
        {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
        _w8a8,
    ),
    "w4a16": Format(
        "pack-quantized",
        {
            "num_bits": 4,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": _GROUP,
            "dynamic": False,
        },
        None,
        _w4a16,
    ),
}
_DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int8: "I8", torch.int32: "I32", torch.int64: "I64"}


def _tensors(name: str, weight: torch.Tensor, weights: Format | None) -> dict[str, torch.Tensor]:
    """What is stored of a parameter: projections are quantized."""
    if weights is None or weight.dim() < 2 or "_proj" not in name:
        return {name: weight}
    stem = name.removesuffix("weight")
    return {stem + end: part for end, part in weights.split(weight).items()}


def write_weights(directory: pathlib.Path, shape: Shape, seed: int, weights: Format | None = None) -> None:
    """Draws all weights, each from its own random stream, and writes them to one file.

    A tensor is written as soon as it is drawn: all of them need not fit into memory.
    """
    parameters = list(_parameters(shape))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in parameters:
        # without memory: only shapes and dtypes are known
        for stored, part in _tensors(name, torch.empty(size, dtype=torch.bfloat16, device="meta"), weights).items():
            start, end = end, end + part.nbytes
            if start % part.itemsize:
                raise SystemExit(f"{stored} would not be aligned: sizes must be multiples of 8")
            header[stored] = {"dtype": _DTYPES[part.dtype], "shape": list(part.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # spaces, so that the data begin at a multiple of eight bytes
    text += b" " * (-len(text) % 8)
    print(f"Writing {end / 1e6:,.0f} MB of weights")
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, size in tqdm(parameters, desc="Drawing weights", unit="tensor"):
            for part in _tensors(name, _draw(name, size, seed), weights).values():
                file.write(part.view(torch.uint8).numpy())


def _draw(name: str, size: tuple[int, ...], seed: int) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(size, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    # 0.02 is the standard deviation of Qwen2's own initialisation
    return torch.randn(size, generator=generator).mul_(0.02).bfloat16()


def _merges() -> Iterator[tuple[str, str]]:
    """The pairs to merge, in order: two letters, then a space and two letters, then four letters, and so on."""
    letters = string.ascii_lowercase
    pairs = ["".join(pair) for pair in itertools.product(letters, repeat=2)]
    yield from itertools.product(letters, letters)
    # "Ġ" is how byte-level BPE writes a space
    yield from (("Ġ", letter) for letter in letters)
    yield from (("Ġ", pair) for pair in pairs)
    yield from itertools.product((f"Ġ{pair}" for pair in pairs), letters)
    yield from itertools.product(pairs, pairs)


def write_tokenizer(directory: pathlib.Path, vocab_size: int, model_max_length: int) -> None:
    """Writes a byte-level BPE tokenizer with exactly vocab_size entries, which encodes any text without loss."""
    vocab = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    num_learned = vocab_size - len(_SPECIAL_TOKENS)
    merges = []
    for left, right in _merges():
        if len(vocab) >= num_learned:
            break
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    if len(vocab) != num_learned:
        smallest = len(pre_tokenizers.ByteLevel.alphabet()) + len(_SPECIAL_TOKENS)
        raise SystemExit(f"--vocab-size {vocab_size} is not in {smallest} … {len(vocab) + len(_SPECIAL_TOKENS)}")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": model_max_length,
        "chat_template": _CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", tokenizer_config)


def write_configs(directory: pathlib.Path, shape: Shape, weights: Format | None = None) -> None:
    """Writes config.json and generation_config.json."""
    special = {
        "bos_token_id": shape.vocab_size - len(_SPECIAL_TOKENS),
        "eos_token_id": shape.vocab_size - 1,
        "pad_token_id": shape.vocab_size - len(_SPECIAL_TOKENS),
    }
    config = {
        **(_deepseek_config(shape) if shape.kv_lora_rank > 0 else _qwen_config(shape)),
        "torch_dtype": "bfloat16",
        **special,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-06,
        "use_cache": True,
    }
    if weights is not None:
        config["quantization_config"] = weights.config()
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"do_sample": False, **special})


def _qwen_config(shape: Shape) -> dict[str, object]:
    has_experts = shape.num_experts > 0
    omitted = _OF_DEEPSEEK if has_experts else _OF_DEEPSEEK + _OF_EXPERTS
    return {
        "architectures": ["Qwen2MoeForCausalLM" if has_experts else "Qwen2ForCausalLM"],
        "model_type": "qwen2_moe" if has_experts else "qwen2",
        **{name: size for name, size in dataclasses.asdict(shape).items() if name not in omitted},
        "max_window_layers": shape.num_hidden_layers,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    }


def _deepseek_config(shape: Shape) -> dict[str, object]:
    omitted = ("num_experts", "shared_expert_intermediate_size")
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        **{name: size for name, size in dataclasses.asdict(shape).items() if name not in omitted},
        "n_routed_experts": shape.num_experts,
        "q_lora_rank": None,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "rope_theta": 10000.0,
        "rope_scaling": _YARN,
    }


def _write_json(path: pathlib.Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=pathlib.Path, help="where to write; made if absent")
    parser.add_argument("--preset", choices=PRESETS, default="qwen2-0.5b", help="shape to start from")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    parser.add_argument(
        "--weights",
        choices=FORMATS,
        help="rounded: w8a8, to 8 bits with a scale per output, and inputs with one per token; w4a16, to 4 bits in "
        "groups of 128 inputs; default: not rounded",
    )
    for field in dataclasses.fields(Shape):
        flag = "--" + field.name.replace("_", "-")
        if field.type == "bool":
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help="overrides the preset")
        else:
            parser.add_argument(flag, type=int, help="overrides the preset")
    return parser.parse_args()


def main() -> None:
    """Writes the model described by the command line."""
    args = _parse_args()
    overrides = {field.name: getattr(args, field.name) for field in dataclasses.fields(Shape)}
    shape = dataclasses.replace(
        PRESETS[args.preset], **{name: value for name, value in overrides.items() if value is not None}
    )
    if shape.hidden_size % shape.num_attention_heads or shape.num_attention_heads % shape.num_key_value_heads:
        raise SystemExit("--hidden-size must be a multiple of the heads, and these of the KV heads")
    weights = FORMATS[args.weights] if args.weights else None
    args.directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(args.directory, shape.vocab_size, shape.max_position_embeddings)
    write_configs(args.directory, shape, weights)
    write_weights(args.directory, shape, args.seed, weights)
    print(f"Wrote {args.directory}")


if __name__ == "__main__":
    main()
