"""Tiny checkpoints with random weights, made with transformers' own classes, and a real tokenizer beside them.

Weights are drawn wide enough that greedy continuations vary and the best token leads clearly. Each checkpoint is
made once per process, in a temporary directory that goes away with it::

    from tests.tiny_models import tiny_model

    directory = tiny_model("qwen2-tied", dtype="bfloat16")
"""

from __future__ import annotations

import atexit
import functools
import json
import pathlib
import shutil
import tempfile
import zlib
from collections.abc import Callable
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 384
# of the models without learned or scaled positions; prompts of 300 tokens and 64 more fit
MAX_POSITIONS = 512
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CORPUS = [
    "The quick brown fox jumps over the lazy dog while the sun shines on the hills.",
    "Serving a model means answering many requests at once and keeping every stream moving.",
    "Hello! How are you today? I am fine, thank you. What does the server say?",
    "Blocks of the cache hold keys and values; a request gets more of them as it grows.",
    "1 2 3 4 5 6 7 8 9 10 one two three four five six seven eight nine ten",
]

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GATED: dict[str, Any] = _COMMON | {"intermediate_size": 112, "num_key_value_heads": 2}


def _llama(**options: Any) -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(**(_GATED | options))


def _qwen2_moe(**options: Any) -> transformers.PretrainedConfig:
    """The first layer is dense, and weights of a token's experts do not add up to 1."""
    return transformers.Qwen2MoeConfig(
        **_GATED,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=56,
        mlp_only_layers=[0],
        **options,
    )


def _qwen3_moe(**options: Any) -> transformers.PretrainedConfig:
    return transformers.Qwen3MoeConfig(
        **_GATED,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        **options,
    )


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}


_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
_YARN = _rope("yarn", factor=8.0, original_max_position_embeddings=64)


def _deepseek(rope: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Latent attention, a dense layer and mixtures; prompts of 300 tokens are longer than the trained length."""
    sizes = {
        "intermediate_size": 112,
        "moe_intermediate_size": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "rope_parameters": _YARN | (rope or {"mscale": 0.707, "mscale_all_dim": 0.707}),
    }
    return _COMMON | sizes | options


_WIDTHS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

# name of a checkpoint → its config
_CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": _llama,
    "llama-biases": lambda: _llama(attention_bias=True, mlp_bias=True, head_dim=24, num_key_value_heads=1),
    "llama-linear": lambda: _llama(rope_parameters=_rope("linear", factor=4.0)),
    # trained for 128 tokens: longer sequences grow the base
    "llama-dynamic": lambda: _llama(rope_parameters=_rope("dynamic", factor=4.0), max_position_embeddings=128),
    "llama-yarn": lambda: _llama(rope_parameters=_YARN),
    "llama-llama3": lambda: _llama(rope_parameters=_LLAMA3),
    "llama-gelu": lambda: _llama(hidden_act="gelu"),
    "llama-gelu-tanh": lambda: _llama(hidden_act="gelu_pytorch_tanh"),
    "mistral": lambda: transformers.MistralConfig(**_GATED, sliding_window=40, head_dim=16),
    "qwen2": lambda: transformers.Qwen2Config(**_GATED, tie_word_embeddings=False),
    "qwen2-tied": lambda: transformers.Qwen2Config(**_GATED, tie_word_embeddings=True),
    "qwen2-window": lambda: transformers.Qwen2Config(
        **_GATED, use_sliding_window=True, sliding_window=24, max_window_layers=1
    ),
    # heads as large as real models have them: NPUs have kernels of their own for 64 and 128
    "qwen2-64": lambda: transformers.Qwen2Config(**_GATED, head_dim=64, tie_word_embeddings=False),
    # quickly compiled
    "qwen2-64-shallow": lambda: transformers.Qwen2Config(
        **_GATED | {"num_hidden_layers": 1}, head_dim=64, tie_word_embeddings=False
    ),
    "qwen3": lambda: transformers.Qwen3Config(**_GATED, head_dim=32),
    "qwen3-biases": lambda: transformers.Qwen3Config(**_GATED, head_dim=32, attention_bias=True),
    # heads of 32, a width that NPUs have, too, as in the next ones
    "gemma": lambda: transformers.GemmaConfig(**_GATED, head_dim=32),
    # prompts are longer than the window; scores and logits reach the caps
    "gemma2": lambda: transformers.Gemma2Config(
        **_GATED, head_dim=32, sliding_window=40, attn_logit_softcapping=2.0, query_pre_attn_scalar=20
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_GATED, head_dim=32, sliding_window=40, sliding_window_pattern=3, final_logit_softcapping=5.0
    ),
    "gemma3-linear": lambda: transformers.Gemma3TextConfig(
        **_GATED,
        head_dim=24,
        sliding_window=40,
        sliding_window_pattern=2,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "phi3": lambda: transformers.Phi3Config(**_GATED, sliding_window=40),
    # the trained length is that of the longest sequence, so the factors are the short ones
    "phi3-longrope": lambda: transformers.Phi3Config(
        **_GATED | {"max_position_embeddings": 4 * MAX_POSITIONS},
        original_max_position_embeddings=MAX_POSITIONS,
        rope_parameters=_rope(
            "longrope",
            partial_rotary_factor=0.5,
            short_factor=[1.0, 1.1, 1.3, 2.0],
            long_factor=[1.0, 2.0, 4.0, 8.0],
        ),
    ),
    "glm": lambda: transformers.GlmConfig(**_GATED, head_dim=32),
    "glm4": lambda: transformers.Glm4Config(**_GATED, head_dim=32),
    "granite": lambda: transformers.GraniteConfig(
        **_GATED, attention_multiplier=0.1, embedding_multiplier=3.0, residual_multiplier=0.6, logits_scaling=2.0
    ),
    "internlm3": lambda: transformers.InternLM3Config(**_GATED, head_dim=16, qkv_bias=True, bias=True),
    # one norm for attention and MLP, one KV head
    "falcon": lambda: transformers.FalconConfig(**_COMMON),
    "falcon-new": lambda: transformers.FalconConfig(
        **_COMMON, new_decoder_architecture=True, num_kv_heads=2, bias=True, ffn_hidden_size=112
    ),
    "falcon-2": lambda: transformers.FalconConfig(
        **_COMMON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
    ),
    "falcon-sequential": lambda: transformers.FalconConfig(**_COMMON, multi_query=False, parallel_attn=False),
    "starcoder2": lambda: transformers.Starcoder2Config(**_GATED, sliding_window=40),
    "mixtral": lambda: transformers.MixtralConfig(
        **_GATED | {"intermediate_size": 40}, num_local_experts=6, num_experts_per_tok=2
    ),
    "qwen2-moe": _qwen2_moe,
    # a window in the first layer only
    "qwen2-moe-window": lambda: _qwen2_moe(use_sliding_window=True, sliding_window=24, max_window_layers=2),
    "qwen3-moe": _qwen3_moe,
    "qwen3-moe-window": lambda: _qwen3_moe(use_sliding_window=True, sliding_window=24),
    # quickly compiled
    "qwen2-moe-64": lambda: transformers.Qwen2MoeConfig(
        **_GATED | {"num_hidden_layers": 1},
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=56,
    ),
    "deepseek-v2-lite": lambda: transformers.DeepseekV2Config(
        **_deepseek(q_lora_rank=None, n_routed_experts=8, num_experts_per_tok=3)
    ),
    # cosines and sines are scaled, too
    "deepseek-v2": lambda: transformers.DeepseekV2Config(
        **_deepseek(
            {"mscale": 1.0, "mscale_all_dim": 0.707},
            q_lora_rank=40,
            n_routed_experts=16,
            num_experts_per_tok=3,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=4.0,
        )
    ),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(
        **_deepseek(
            {"mscale": 1.0, "mscale_all_dim": 1.0},
            q_lora_rank=40,
            n_routed_experts=16,
            num_experts_per_tok=4,
            n_group=4,
            topk_group=2,
        )
    ),
    # of the widths of published models, which NPUs have operators for
    "deepseek-v2-512": lambda: transformers.DeepseekV2Config(
        **_deepseek(
            **_WIDTHS,
            q_lora_rank=None,
            n_routed_experts=16,
            num_experts_per_tok=3,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=4.0,
        )
    ),
    "deepseek-v3-512": lambda: transformers.DeepseekV3Config(
        **_deepseek(**_WIDTHS, q_lora_rank=40, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2)
    ),
    "opt": lambda: transformers.OPTConfig(**_COMMON, ffn_dim=112),
    "opt-post-norm": lambda: transformers.OPTConfig(
        **_COMMON, ffn_dim=112, do_layer_norm_before=False, word_embed_proj_dim=32
    ),
    "opt-bare": lambda: transformers.OPTConfig(
        **_COMMON,
        ffn_dim=112,
        enable_bias=False,
        layer_norm_elementwise_affine=False,
        activation_function="gelu",
        tie_word_embeddings=False,
    ),
}

# other arrangements of the same weights: name → (name of the weights, arrangement)
_ARRANGEMENTS = {
    "llama-sharded": ("llama", "sharded"),
    "llama-bin": ("llama", "bin"),
    "llama-bin-sharded": ("llama", "bin-sharded"),
}

# others repeat these with widths that NPUs have operators for
_OF_NPUS = ("deepseek-v2-512", "deepseek-v3-512", "qwen2-moe-64")
TINY_MODELS = (*(name for name in _CONFIGS if name not in _OF_NPUS), *_ARRANGEMENTS)
# one of each family
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "opt")

_OUTPUT_PROJECTIONS = (
    "o_proj.weight",
    "down_proj.weight",
    "out_proj.weight",
    "fc2.weight",
    "c_proj.weight",
    "dense.weight",
    "dense_4h_to_h.weight",
)

transformers.utils.logging.disable_progress_bar()


@functools.cache
def tiny_root() -> pathlib.Path:
    """A directory that goes away with the process."""
    root = pathlib.Path(tempfile.mkdtemp(prefix="ascend_vllm_tiny_models_"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def tiny_model(name: str, dtype: str = "float32") -> str:
    """Directory of a checkpoint above, its weights in the given dtype. Do not write to it."""
    directory = tiny_root() / f"{name}-{dtype}"
    if name in _ARRANGEMENTS:
        source, arrangement = _ARRANGEMENTS[name]
        _rearrange(pathlib.Path(tiny_model(source, dtype)), directory, arrangement)
    else:
        config = _CONFIGS[name]()
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        draw_weights(model, seed=zlib.crc32(name.encode()))
        model.to(getattr(torch, dtype)).save_pretrained(directory)
        save_tokenizer(directory)
    return str(directory)


def draw_weights(model: torch.nn.Module, seed: int) -> None:
    """Fills a model in place: outputs of layers and logits are a few units wide, norms and biases matter."""
    generator = torch.Generator().manual_seed(seed)
    tied = model.config.tie_word_embeddings
    # Gemma's norms add 1 to their weights
    norm = 0.0 if model.config.model_type.startswith("gemma") else 1.0
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("mlp.gate.weight"):
                # the router's best experts lead clearly
                parameter.copy_(noise * 3.0 * parameter.shape[1] ** -0.5)
            elif parameter.ndim == 1:
                center = 0.0 if name.endswith("bias") else norm
                parameter.copy_(center + 0.2 * noise)
            elif "embed_tokens" in name or "word_embeddings" in name:
                # a tied table is also the head, whose input is normalised
                parameter.copy_(noise * (3.0 * parameter.shape[1] ** -0.5 if tied else 1.0))
            elif "lm_head" in name:
                parameter.copy_(noise * 3.0 * parameter.shape[1] ** -0.5)
            elif "embed_positions" in name:
                parameter.copy_(noise * 0.5)
            else:
                # with a tied head a token would mostly repeat itself, if layers did not add more than the embedding
                gain = 4.0 if tied and name.endswith(_OUTPUT_PROJECTIONS) else 1.2
                parameter.copy_(noise * gain * parameter.shape[1] ** -0.5)


@functools.cache
def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_CHAT_TEMPLATE,
    )


def save_tokenizer(directory: str | pathlib.Path) -> None:
    """Writes a byte-level BPE tokenizer of VOCAB_SIZE entries with a ChatML template."""
    _tokenizer().save_pretrained(directory)


def _rearrange(source: pathlib.Path, directory: pathlib.Path, arrangement: str) -> None:
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = load_file(source / "model.safetensors")
    if arrangement == "bin":
        torch.save(weights, directory / "pytorch_model.bin")
        return
    stem, suffix = ("model", "safetensors") if arrangement == "sharded" else ("pytorch_model", "bin")
    names = sorted(weights)
    num_shards = 3
    weight_map = {}
    for shard in range(num_shards):
        # one layer's tensors lie in several shards
        part = {name: weights[name] for name in names[shard::num_shards]}
        file_name = f"{stem}-{shard + 1:05d}-of-{num_shards:05d}.{suffix}"
        weight_map |= dict.fromkeys(part, file_name)
        if arrangement == "sharded":
            save_file(part, directory / file_name, metadata={"format": "pt"})
        else:
            torch.save(part, directory / file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
