"""config.json of published models, shortened to what is read: the sizes that come of it are those of the models."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from ascend_vllm.args.hf_files import read_hf_config
from ascend_vllm.args.limits import resolve_max_model_len
from ascend_vllm.config.arch import ArchConfig

GLM4 = {"hidden_size": 4096, "num_attention_heads": 32, "multi_query_attention": True, "multi_query_group_num": 2}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
DEEPSEEK = {
    "max_position_embeddings": 163840,
    "vocab_size": 102400,
    "scoring_func": "softmax",
    "norm_topk_prob": False,
}
# name → config.json, parameters in billions as its page says, longest sequence
PUBLISHED: dict[str, tuple[dict[str, Any], float, int]] = {
    "chatglm3-6b": (
        GLM4
        | {
            "architectures": ["ChatGLMModel"],
            "model_type": "chatglm",
            "num_layers": 28,
            "padded_vocab_size": 65024,
            "ffn_hidden_size": 13696,
            "kv_channels": 128,
            "seq_length": 8192,
            "add_qkv_bias": True,
        },
        6.24,
        8192,
    ),
    "glm-4-9b-chat": (
        GLM4
        | {
            "architectures": ["ChatGLMModel"],
            "model_type": "chatglm",
            "num_layers": 40,
            "padded_vocab_size": 151552,
            "ffn_hidden_size": 13696,
            "kv_channels": 128,
            "seq_length": 131072,
            "rope_ratio": 500,
        },
        9.4,
        131072,
    ),
    "Qwen-7B-Chat": (
        {
            "architectures": ["QWenLMHeadModel"],
            "model_type": "qwen",
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 32768,
            "seq_length": 8192,
            "vocab_size": 151936,
        },
        7.72,
        8192,
    ),
    "Baichuan2-13B-Chat": (
        {
            "architectures": ["BaichuanForCausalLM"],
            "model_type": "baichuan",
            "hidden_size": 5120,
            "intermediate_size": 13696,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "model_max_length": 4096,
            "vocab_size": 125696,
        },
        13.9,
        4096,
    ),
    "internlm2_5-7b-chat": (
        {
            "architectures": ["InternLM2ForCausalLM"],
            "model_type": "internlm2",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 32768,
            "rope_scaling": {"factor": 2.0, "type": "dynamic"},
            "vocab_size": 92544,
        },
        7.74,
        65536,
    ),
    "MiniCPM-2B-sft-bf16": (
        {
            "architectures": ["MiniCPMForCausalLM"],
            "model_type": "minicpm",
            "hidden_size": 2304,
            "intermediate_size": 5760,
            "num_hidden_layers": 40,
            "num_attention_heads": 36,
            "num_key_value_heads": 36,
            "max_position_embeddings": 4096,
            "vocab_size": 122753,
        },
        2.72,
        4096,
    ),
    "gemma-2-9b-it": (
        {
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
        },
        9.24,
        8192,
    ),
    "gemma-3-1b-it": (
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "max_position_embeddings": 32768,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "rope_local_base_freq": 10000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "vocab_size": 262144,
        },
        1.0,
        32768,
    ),
    "Phi-4-mini-instruct": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "model_type": "phi3",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
            "sliding_window": 262144,
            "tie_word_embeddings": True,
            "vocab_size": 200064,
        },
        3.84,
        4096,
    ),
    "falcon-11B": (
        {
            "architectures": ["FalconForCausalLM"],
            "model_type": "falcon",
            "hidden_size": 4096,
            "ffn_hidden_size": 16384,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_kv_heads": 8,
            "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": False,
            "new_decoder_architecture": True,
            "max_position_embeddings": 8192,
            "vocab_size": 65024,
        },
        11.1,
        8192,
    ),
    "Mixtral-8x7B-Instruct-v0.1": ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, 46.7, 131072),
    "Qwen2-57B-A14B-Instruct": (
        {
            "architectures": ["Qwen2MoeForCausalLM"],
            "model_type": "qwen2_moe",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 2560,
            "shared_expert_intermediate_size": 20480,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
        57.4,
        32768,
    ),
    "Qwen3-30B-A3B": (
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "head_dim": 128,
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "max_position_embeddings": 40960,
            "norm_topk_prob": True,
        },
        30.5,
        40960,
    ),
    "DeepSeek-V2-Lite": (
        DEEPSEEK
        | {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 6,
            "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
        15.7,
        163840,
    ),
    "DeepSeek-V2": (
        DEEPSEEK
        | {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "first_k_dense_replace": 1,
            "n_routed_experts": 160,
            "n_group": 8,
            "topk_group": 3,
            "topk_method": "group_limited_greedy",
            "num_experts_per_tok": 6,
            "routed_scaling_factor": 16.0,
            "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
        235.7,
        163840,
    ),
    "DeepSeek-R1": (
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "max_position_embeddings": 163840,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 1,
            "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
        671.0,
        163840,
    ),
    "starcoder2-3b": ({"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2"}, 3.03, 4096),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_of_the_published_model(name: str, tmp_path: pathlib.Path) -> None:
    written, billions, longest = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(written))
    arch = ArchConfig.from_hf(read_hf_config(str(tmp_path)))
    # norms, biases and, where it is not the embedding, the head are not counted
    head = 0 if arch.tie_word_embeddings else arch.vocab_size * arch.hidden_size
    assert (arch.num_parameters + head) / 1e9 == pytest.approx(billions, rel=0.02)
    assert resolve_max_model_len(None, arch) == longest


def test_what_the_published_models_differ_in(tmp_path: pathlib.Path) -> None:
    def read(name: str) -> ArchConfig:
        (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name][0]))
        return ArchConfig.from_hf(read_hf_config(str(tmp_path)))

    baichuan = read("Baichuan2-13B-Chat")
    assert (baichuan.rope, len(baichuan.alibi_slopes), baichuan.normalizes_head) == (None, 40, True)
    gemma = read("gemma-3-1b-it")
    assert [plan.sliding_window for plan in gemma.layers[:7]] == [512] * 5 + [None, 512]
    assert [plan.is_local for plan in gemma.layers[:7]] == [True] * 5 + [False, True]
    assert gemma.rope is not None
    assert gemma.local_rope is not None
    assert (gemma.rope.theta, gemma.local_rope.theta) == (1e6, 1e4)
    gemma2 = read("gemma-2-9b-it")
    assert (gemma2.attention_cap, gemma2.logit_cap, gemma2.attention_scale) == (50.0, 30.0, 256**-0.5)
    assert [plan.sliding_window for plan in gemma2.layers[:4]] == [4096, None, 4096, None]
    phi = read("Phi-4-mini-instruct")
    assert phi.rope is not None
    assert (phi.rope.rope_type, phi.rope.rotary_dim) == ("longrope", 96)
    glm = read("glm-4-9b-chat")
    assert glm.rope is not None
    assert (glm.rope.theta, glm.rope.rotary_dim, glm.rope.is_interleaved) == (5e6, 64, True)
    falcon = read("falcon-11B")
    assert (falcon.parallel_norms, falcon.num_kv_heads, falcon.qkv_layout) == (1, 8, "grouped")
    lite, deepseek, r1 = read("DeepSeek-V2-Lite"), read("DeepSeek-V2"), read("DeepSeek-R1")
    assert [plan.mlp for plan in lite.layers[:3]] == ["gated", "experts", "experts"]
    every_second = ArchConfig.from_hf(read_hf_config(str(tmp_path), overrides={"moe_layer_freq": 2}))
    assert [plan.mlp for plan in every_second.layers[:6]] == ["gated"] * 4 + ["experts", "gated"]
    assert [plan.mlp for plan in r1.layers[:5]] == ["gated"] * 3 + ["experts"] * 2
    # 192**-0.5 times the square of 0.1·0.707·ln(40) + 1, or of 0.1·ln(40) + 1
    assert lite.attention_scale == deepseek.attention_scale == pytest.approx(0.0721688 * 1.589626, rel=1e-5)
    assert r1.attention_scale == pytest.approx(0.0721688 * 1.873836, rel=1e-5)
    assert lite.latent is not None
    assert r1.latent is not None
    assert (lite.latent.query_rank, r1.latent.query_rank) == (None, 1536)
    assert lite.rope is not None
    assert (lite.rope.rotary_dim, lite.rope.is_interleaved) == (64, True)
    assert lite.experts is not None
    assert (lite.experts.num_groups, lite.experts.shared_size, lite.experts.renormalizes) == (1, 2816, False)
    assert deepseek.experts is not None
    assert (deepseek.experts.num_groups, deepseek.experts.num_chosen_groups, deepseek.experts.scale) == (8, 3, 16.0)
    assert r1.experts is not None
    assert (r1.experts.scoring, r1.experts.has_correction, r1.experts.renormalizes) == ("sigmoid", True, True)
    # of a token, in a layer
    assert [arch.layers[0].kv_cache.spec(1, 1, 192, "bfloat16").block_bytes for arch in (lite, r1)] == [1152, 1152]
    minicpm = read("MiniCPM-2B-sft-bf16")
    assert (minicpm.embedding_scale, minicpm.num_kv_heads) == (1.0, 36)
