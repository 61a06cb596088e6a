"""What transformers, or the code in a model's repository, fills in where config.json leaves names out.

Also the names of built-in families that spell the usual ones differently, and the values that are supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LLAMA_LIKE = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
_QWEN = _LLAMA_LIKE | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "bos_token_id": None,
    "eos_token_id": None,
}
_QWEN_MOE = {name: value for name, value in _QWEN.items() if name != "max_window_layers"} | {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
    "mlp_only_layers": None,
}

_GEMMA = {
    "vocab_size": 256000,
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_GEMMA2 = _GEMMA | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GLM = _LLAMA_LIKE | {
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "pad_token_id": 151329,
}

_DEEPSEEK = _LLAMA_LIKE | {
    "attention_bias": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
}

# model_type → what is assumed for names that config.json leaves out
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA_LIKE
    | {
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mistral": _LLAMA_LIKE
    | {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128, "attention_bias": False},
    "opt": {
        "vocab_size": 50272,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "ffn_dim": 3072,
        "max_position_embeddings": 2048,
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "num_attention_heads": 12,
        "activation_function": "relu",
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True,
        "pad_token_id": 1,
        "bos_token_id": 2,
        "eos_token_id": 2,
    },
    "aquila": _LLAMA_LIKE
    | {"vocab_size": 100008, "intermediate_size": 11008, "max_position_embeddings": 2048, "eos_token_id": 2},
    # models with ALiBi state no max_position_embeddings
    "baichuan": _LLAMA_LIKE | {"vocab_size": 125696, "intermediate_size": 11008, "eos_token_id": 2},
    "chatglm": {
        "padded_vocab_size": 65024,
        "hidden_size": 4096,
        "ffn_hidden_size": 13696,
        "num_layers": 28,
        "num_attention_heads": 32,
        "kv_channels": 128,
        "seq_length": 2048,
        "hidden_act": "silu",
        "layernorm_epsilon": 1e-5,
        "multi_query_attention": False,
        "multi_query_group_num": 1,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "tie_word_embeddings": False,
    },
    "deepseek_v2": _DEEPSEEK
    | {
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "deepseek_v3": _DEEPSEEK
    | {
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_interleave": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "falcon": {
        "vocab_size": 65024,
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "layer_norm_epsilon": 1e-5,
        "activation": "gelu",
        "alibi": False,
        "new_decoder_architecture": False,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": 11,
        "eos_token_id": 11,
    },
    "gemma": _GEMMA
    | {
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "use_bidirectional_attention": False,
    },
    "glm": _GLM,
    "glm4": _GLM,
    "granite": _LLAMA_LIKE
    | {
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "internlm": _LLAMA_LIKE
    | {
        "vocab_size": 103168,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "bias": True,
        "eos_token_id": 2,
    },
    "internlm2": _LLAMA_LIKE
    | {
        "vocab_size": 103168,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "bias": True,
        "eos_token_id": 2,
    },
    "internlm3": _LLAMA_LIKE
    | {
        "vocab_size": 128512,
        "intermediate_size": 11008,
        "max_position_embeddings": 32768,
        "qkv_bias": False,
        "bias": False,
        "eos_token_id": 2,
    },
    "minicpm": _LLAMA_LIKE
    | {
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "scale_emb": 1,
        "dim_model_base": 1,
        "scale_depth": 1,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mixtral": _LLAMA_LIKE
    | {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "phi3": _LLAMA_LIKE
    | {
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 32000,
        "pad_token_id": 32000,
    },
    "qwen": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 22016,
        "kv_channels": 128,
        "seq_length": 8192,
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
        "layer_norm_epsilon": 1e-6,
        "rotary_pct": 1.0,
        "rotary_emb_base": 10000,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
        "no_bias": True,
        "tie_word_embeddings": False,
    },
    "qwen2_moe": _QWEN_MOE
    | {
        "intermediate_size": 5632,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "qkv_bias": True,
    },
    "qwen3_moe": _QWEN_MOE
    | {
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "starcoder2": {
        "vocab_size": 49152,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "sliding_window": None,
        "use_bias": True,
        "tie_word_embeddings": True,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    },
    "xverse": _LLAMA_LIKE
    | {
        "vocab_size": 100278,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "intermediate_size": 13824,
        "max_position_embeddings": 8192,
        "eos_token_id": 3,
    },
}
# model_type → the usual name → the family's own, which counts where it is given
SPELLINGS: Mapping[str, Mapping[str, str]] = {
    "chatglm": {
        "vocab_size": "padded_vocab_size",
        "num_hidden_layers": "num_layers",
        "intermediate_size": "ffn_hidden_size",
        "head_dim": "kv_channels",
        "rms_norm_eps": "layernorm_epsilon",
    },
    "falcon": {
        "num_key_value_heads": "num_kv_heads",
        "intermediate_size": "ffn_hidden_size",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation",
    },
    "gemma2": {"hidden_act": "hidden_activation"},
    "gemma3_text": {"hidden_act": "hidden_activation"},
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen": {"head_dim": "kv_channels", "rms_norm_eps": "layer_norm_epsilon", "rope_theta": "rotary_emb_base"},
    # as transformers 5 writes it
    "qwen3_moe": {"num_experts": "num_local_experts"},
    "starcoder2": {"rms_norm_eps": "norm_epsilon"},
}
# model_type → field → the values that are supported, where others would make another model
SUPPORTED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "chatglm": {
        # ChatGLM 1
        "position_encoding_2d": (False,),
        "rmsnorm": (True,),
        "post_layer_norm": (True,),
        "apply_residual_connection_post_layernorm": (False,),
        "pre_seq_len": (None,),
        "quantization_bit": (0, None),
    },
    "deepseek_v2": {
        "attention_bias": (False, None),
        "topk_method": ("greedy", "group_limited_greedy"),
        "scoring_func": ("softmax",),
    },
    "deepseek_v3": {
        "attention_bias": (False, None),
        "topk_method": ("noaux_tc",),
        "scoring_func": ("sigmoid",),
    },
    "falcon": {"alibi": (False, None)},
    "gemma": {"use_bidirectional_attention": (False, None)},
    "gemma2": {"use_bidirectional_attention": (False, None)},
    "gemma3_text": {"use_bidirectional_attention": (False, None)},
    "minicpm": {"num_experts": (0, None), "sparse_config": (None,)},
    "phi3": {"attention_bias": (False, None), "mlp_bias": (False, None), "lm_head_bias": (False, None)},
    "qwen": {"visual": (None,)},
}
# model types whose activations exceed the range of float16, as in vLLM
WITHOUT_FLOAT16 = frozenset({"gemma2", "gemma3_text", "glm4"})
# model types whose repositories have code for their config.json, which is not needed to read it
WITH_CODE = frozenset(
    {
        "aquila",
        "baichuan",
        "chatglm",
        "deepseek_v2",
        "deepseek_v3",
        "falcon",
        "internlm",
        "internlm2",
        "internlm3",
        "minicpm",
        "phi3",
        "qwen",
        "xverse",
    }
)
# model types without rotary positions
WITHOUT_ROPE = frozenset({"opt"})
