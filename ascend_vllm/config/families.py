"""Readers of config.json for families beyond those of config/arch.py, which names them in `READERS`.

Formulas and names are those of transformers' classes, or of the code in the models' repositories where transformers
has none (ChatGLM, Qwen 1, Baichuan, InternLM 1 and 2, MiniCPM).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ascend_vllm.config.arch import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    ArchConfig,
    EagleConfig,
    ExpertsConfig,
    LatentConfig,
    LayerPlan,
    RopeConfig,
    layer_plans,
    max_length,
    read_decoder,
    read_rope,
    yarn_magnitude,
)
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.types.kv_cache import LATENT, KVCachePlan

# the head of Baichuan 2 is normalised, that of the first version is not; nothing else tells them apart
_BAICHUAN2_VOCAB_SIZE = 125696
# configs of Baichuan 7B state max_position_embeddings, those of 13B do not
_BAICHUAN_13B_WIDTH = 5120


def _head_size(hf_config: Mapping[str, Any]) -> int:
    return int(hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"])


def _number(hf_config: Mapping[str, Any], name: str) -> float | None:
    value = hf_config.get(name)
    return None if value is None else float(value)


def _same_window(hf_config: Mapping[str, Any]) -> tuple[LayerPlan, ...]:
    """The window in every layer, if there is one."""
    return layer_plans(hf_config, [SLIDING_ATTENTION] * int(hf_config["num_hidden_layers"]))


# ---- Gemma -------------------------------------------------------------------------------------------------


def read_gemma(hf_config: Mapping[str, Any]) -> ArchConfig:
    """Gemma 1: weights of norms without 1, embeddings times the square root of their width, GELU by tanh."""
    # "gelu" in the first configs means the approximation, too
    activation = str(hf_config.get("hidden_activation") or hf_config.get("hidden_act") or "gelu_pytorch_tanh")
    return read_decoder(
        hf_config,
        layers=layer_plans(hf_config),
        activation="gelu_pytorch_tanh" if activation == "gelu" else activation,
        norm_offset=1.0,
        embedding_scale=float(hf_config["hidden_size"]) ** 0.5,
        captures_graphs=True,
    )


def read_gemma2(hf_config: Mapping[str, Any], pattern: int = 2) -> ArchConfig:
    """Gemma 2: windows in every second layer, soft caps of attention scores and logits, norms on both sides.

    Args:
        hf_config: as in `ArchConfig.from_hf`.
        pattern: without `layer_types`, every so many layers one sees all tokens.
    """
    num_layers = int(hf_config["num_hidden_layers"])
    kinds = hf_config.get("layer_types") or [
        SLIDING_ATTENTION if (index + 1) % pattern else FULL_ATTENTION for index in range(num_layers)
    ]
    return msgspec.structs.replace(
        read_gemma(hf_config),
        layers=layer_plans(hf_config, kinds[:num_layers]),
        activation=str(hf_config.get("hidden_activation") or "gelu_pytorch_tanh"),
        sandwich_norms=True,
        attention_scale=float(hf_config.get("query_pre_attn_scalar") or _head_size(hf_config)) ** -0.5,
        attention_cap=_number(hf_config, "attn_logit_softcapping"),
        logit_cap=_number(hf_config, "final_logit_softcapping"),
    )


def read_gemma3(hf_config: Mapping[str, Any]) -> ArchConfig:
    """The text part of Gemma 3: as Gemma 2, with queries and keys normalised, and a rotary base per kind of layer.

    As in transformers there is no soft cap of attention scores, whatever config.json says.
    """
    head_size = _head_size(hf_config)
    parameters = dict(hf_config.get("rope_parameters") or {})
    # one spelling has both kinds of layers in it, the older one `rope_local_base_freq` beside it
    local = parameters.get(SLIDING_ATTENTION) or {"rope_theta": hf_config.get("rope_local_base_freq") or 10000.0}
    plain = {name: value for name, value in hf_config.items() if name not in ("rope_scaling", "rope_theta")}
    rope = read_rope(plain | {"rope_parameters": parameters.get(FULL_ATTENTION) or parameters}, head_size)
    arch = read_gemma2(hf_config, int(hf_config.get("sliding_window_pattern") or 6))
    plans = (msgspec.structs.replace(plan, is_local=plan.attention == SLIDING_ATTENTION) for plan in arch.layers)
    return msgspec.structs.replace(
        arch,
        layers=tuple(plans),
        qk_norm=True,
        attention_cap=None,
        rope=rope,
        local_rope=read_rope(plain | {"rope_parameters": local}, head_size),
        max_length=max_length(hf_config, is_scaled=False),
    )


# ---- GLM ---------------------------------------------------------------------------------------------------


def read_glm(hf_config: Mapping[str, Any]) -> ArchConfig:
    """GLM-4 as transformers has it: half of each head is rotated, in pairs of neighbours."""
    rope = msgspec.structs.replace(read_rope(hf_config, _head_size(hf_config)), is_interleaved=True)
    return read_decoder(
        hf_config,
        layers=layer_plans(hf_config),
        rope=rope,
        output_bias=False,
        mlp_bias=False,
        gate_up_fused=True,
        captures_graphs=True,
    )


def read_glm4(hf_config: Mapping[str, Any]) -> ArchConfig:
    """GLM-4-0414: with norms on both sides of attention and MLP."""
    return msgspec.structs.replace(read_glm(hf_config), sandwich_norms=True)


def read_chatglm(hf_config: Mapping[str, Any]) -> ArchConfig:
    """ChatGLM2, ChatGLM3 and GLM-4 in the layout of their own repositories."""
    head_size = _head_size(hf_config)
    has_groups = bool(hf_config.get("multi_query_attention"))
    has_bias = bool(hf_config.get("add_bias_linear"))
    rope = RopeConfig(
        "default",
        10000.0 * float(hf_config.get("rope_ratio") or 1.0),
        head_size // 2,
        hf_config.get("seq_length"),
        {},
        is_interleaved=bool(hf_config.get("original_rope", True)),
    )
    return read_decoder(
        hf_config,
        layers=layer_plans(hf_config),
        num_kv_heads=int(hf_config["multi_query_group_num" if has_groups else "num_attention_heads"]),
        rope=rope,
        qkv_bias=has_bias or bool(hf_config.get("add_qkv_bias")),
        output_bias=has_bias,
        mlp_bias=has_bias,
        qkv_layout="fused",
        gate_up_fused=True,
        captures_graphs=True,
    )


# ---- others with RMSNorm and gated MLPs --------------------------------------------------------------------


def read_phi3(hf_config: Mapping[str, Any]) -> ArchConfig:
    """Phi-3 and Phi-4: fused projections."""
    return read_decoder(
        hf_config,
        layers=_same_window(hf_config),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qkv_layout="fused",
        gate_up_fused=True,
        captures_graphs=True,
    )


def read_qwen(hf_config: Mapping[str, Any]) -> ArchConfig:
    """Qwen 1. Its logarithmic scaling of queries and its dynamic rotary base begin behind `seq_length`."""
    has_bias = not hf_config.get("no_bias", True)
    head_size = _head_size(hf_config)
    rotated = int(head_size * float(hf_config.get("rotary_pct") or 1.0))
    return read_decoder(
        hf_config,
        layers=layer_plans(hf_config),
        # of gate and up together
        intermediate_size=int(hf_config["intermediate_size"]) // 2,
        rope=msgspec.structs.replace(read_rope(hf_config, head_size), rotary_dim=rotated),
        qkv_bias=True,
        output_bias=has_bias,
        mlp_bias=has_bias,
        qkv_layout="fused",
        captures_graphs=True,
        extra={
            "changes_beyond_length": [name for name in ("use_logn_attn", "use_dynamic_ntk") if hf_config.get(name)]
        },
    )


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """The slopes of Press et al., "Train Short, Test Long", 2022.

    They are a geometric series; heads beyond the greatest power of two get every second slope of twice as many heads.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    return (*slopes, *(2.0 ** (-4.0 * (2 * head + 1) / power) for head in range(num_heads - power)))


def read_baichuan(hf_config: Mapping[str, Any]) -> ArchConfig:
    """Baichuan 1 and 2: fused projection, ALiBi in the models with 13B parameters."""
    hidden_size, num_heads = int(hf_config["hidden_size"]), int(hf_config["num_attention_heads"])
    has_alibi = hf_config.get("max_position_embeddings") is None or hidden_size == _BAICHUAN_13B_WIDTH
    arch = read_decoder(
        hf_config,
        layers=layer_plans(hf_config),
        num_kv_heads=num_heads,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qkv_layout="fused",
        normalizes_head=hf_config["vocab_size"] == _BAICHUAN2_VOCAB_SIZE,
        captures_graphs=True,
    )
    return msgspec.structs.replace(arch, rope=None, alibi_slopes=alibi_slopes(num_heads)) if has_alibi else arch


def read_internlm(hf_config: Mapping[str, Any]) -> ArchConfig:
    """InternLM 1: Llama with biases in attention."""
    has_bias = bool(hf_config.get("bias", True))
    biases = {"qkv_bias": has_bias, "output_bias": has_bias, "mlp_bias": False}
    rope = read_rope(hf_config, _head_size(hf_config))
    # its dynamic base begins behind max_position_embeddings, which the config does not let sequences exceed
    theta = (hf_config.get("rotary") or {}).get("base") or rope.theta
    rope = msgspec.structs.replace(rope, theta=float(theta))
    return read_decoder(hf_config, layers=layer_plans(hf_config), rope=rope, captures_graphs=True, **biases)


def read_internlm2(hf_config: Mapping[str, Any]) -> ArchConfig:
    """InternLM 2 and 2.5: one projection, by KV heads."""
    return msgspec.structs.replace(read_internlm(hf_config), qkv_layout="grouped")


def read_internlm3(hf_config: Mapping[str, Any]) -> ArchConfig:
    """InternLM 3: Llama with biases of other names."""
    has_bias = bool(hf_config.get("bias", hf_config.get("mlp_bias", False)))
    qkv_bias = bool(hf_config.get("qkv_bias", hf_config.get("attention_bias", False)))
    biases = {"qkv_bias": qkv_bias, "output_bias": has_bias, "mlp_bias": has_bias}
    return read_decoder(hf_config, layers=layer_plans(hf_config), captures_graphs=True, **biases)


def read_minicpm(hf_config: Mapping[str, Any]) -> ArchConfig:
    """MiniCPM 1 and 2: scaled embeddings, residuals and logits."""
    num_layers = int(hf_config["num_hidden_layers"])
    width = float(hf_config.get("dim_model_base") or hf_config["hidden_size"])
    return read_decoder(
        hf_config,
        layers=layer_plans(hf_config),
        embedding_scale=float(hf_config.get("scale_emb") or 1.0),
        residual_scale=float(hf_config.get("scale_depth") or math.sqrt(num_layers)) / math.sqrt(num_layers),
        logit_scale=width / float(hf_config["hidden_size"]),
        captures_graphs=True,
    )


def read_granite(hf_config: Mapping[str, Any]) -> ArchConfig:
    """Granite 3: the scales of MiniCPM by other names, and one of attention scores."""
    return read_decoder(
        hf_config,
        layers=layer_plans(hf_config),
        attention_scale=float(hf_config.get("attention_multiplier") or 1.0),
        embedding_scale=float(hf_config.get("embedding_multiplier") or 1.0),
        residual_scale=float(hf_config.get("residual_multiplier") or 1.0),
        logit_scale=1.0 / float(hf_config.get("logits_scaling") or 1.0),
        captures_graphs=True,
    )


# ---- with LayerNorm and plain MLPs -------------------------------------------------------------------------


def _plain(plans: tuple[LayerPlan, ...]) -> tuple[LayerPlan, ...]:
    return tuple(msgspec.structs.replace(plan, mlp="plain") for plan in plans)


def read_starcoder2(hf_config: Mapping[str, Any]) -> ArchConfig:
    """StarCoder 2."""
    has_bias = bool(hf_config.get("use_bias", True))
    return read_decoder(
        hf_config,
        layers=_plain(_same_window(hf_config)),
        layer_norm=True,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=has_bias,
    )


def read_falcon(hf_config: Mapping[str, Any]) -> ArchConfig:
    """Falcon and Falcon 2: attention beside the MLP, behind a norm each or one for both."""
    num_heads = int(hf_config["num_attention_heads"])
    is_new, is_parallel = bool(hf_config.get("new_decoder_architecture")), bool(hf_config.get("parallel_attn", True))
    num_kv_heads = 1 if hf_config.get("multi_query", True) else num_heads
    num_norms = int(hf_config.get("num_ln_in_parallel_attn") or 2) if is_new else 1
    has_bias = bool(hf_config.get("bias"))
    return read_decoder(
        hf_config,
        layers=_plain(layer_plans(hf_config)),
        num_kv_heads=int(hf_config.get("num_key_value_heads") or num_heads) if is_new else num_kv_heads,
        intermediate_size=int(hf_config.get("intermediate_size") or 4 * hf_config["hidden_size"]),
        layer_norm=True,
        parallel_norms=num_norms if is_new or is_parallel else 0,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=has_bias,
        qkv_layout="grouped",
    )


# ---- mixtures of experts -----------------------------------------------------------------------------------


def read_mixtral(hf_config: Mapping[str, Any]) -> ArchConfig:
    """Mixtral: Mistral with a mixture in every layer; the weights of a token's experts add up to 1."""
    return read_decoder(
        hf_config,
        layers=_with_experts(_same_window(hf_config)),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        captures_graphs=True,
        experts=ExpertsConfig(
            count=int(hf_config["num_experts"]),
            num_chosen=int(hf_config["num_experts_per_tok"]),
            intermediate_size=int(hf_config["intermediate_size"]),
        ),
    )


def _qwen_experts(hf_config: Mapping[str, Any], kinds: Sequence[str], **shared: Any) -> dict[str, Any]:
    """Fields of `ArchConfig` of Qwen's mixtures.

    Args:
        hf_config: as in `ArchConfig.from_hf`.
        kinds: the attention of each layer if `use_sliding_window` is set.
        shared: fields of `ExpertsConfig`.
    """
    count, step = int(hf_config["num_experts"]), int(hf_config["decoder_sparse_step"])
    dense = frozenset(hf_config.get("mlp_only_layers") or ())
    plans = tuple(
        plan if index in dense or count == 0 or (index + 1) % step else _with_experts((plan,))[0]
        for index, plan in enumerate(layer_plans(hf_config, kinds if hf_config.get("use_sliding_window") else None))
    )
    experts = ExpertsConfig(
        count=count,
        num_chosen=int(hf_config["num_experts_per_tok"]),
        intermediate_size=int(hf_config["moe_intermediate_size"]),
        renormalizes=bool(hf_config.get("norm_topk_prob")),
        **shared,
    )
    return {"layers": plans, "experts": experts, "mlp_bias": False, "captures_graphs": True}


def read_qwen2_moe(hf_config: Mapping[str, Any]) -> ArchConfig:
    """Qwen1.5-MoE and Qwen2-MoE: besides the experts an MLP for all tokens, with a gate.

    Without `layer_types`, every second one of the first `max_window_layers` layers has the window.
    """
    num_layers, num_windows = int(hf_config["num_hidden_layers"]), int(hf_config.get("max_window_layers") or 0)
    kinds = hf_config.get("layer_types") or [
        FULL_ATTENTION if index % 2 or index >= num_windows else SLIDING_ATTENTION for index in range(num_layers)
    ]
    shared = {"shared_size": int(hf_config["shared_expert_intermediate_size"]), "has_shared_gate": True}
    biases = {"qkv_bias": bool(hf_config.get("qkv_bias", True)), "output_bias": False}
    return read_decoder(hf_config, **biases, **_qwen_experts(hf_config, kinds[:num_layers], **shared))


def read_qwen3_moe(hf_config: Mapping[str, Any]) -> ArchConfig:
    """Qwen3-MoE: queries and keys normalised per head, no MLP for all tokens, windows in all layers if in any."""
    kinds = [SLIDING_ATTENTION] * int(hf_config["num_hidden_layers"])
    return read_decoder(hf_config, qk_norm=True, **_qwen_experts(hf_config, kinds))


def read_deepseek_v2(hf_config: Mapping[str, Any]) -> ArchConfig:
    """DeepSeek-V2 and V2-Lite. As in transformers, `norm_topk_prob` is without effect."""
    groups = {}
    if hf_config["topk_method"] == "group_limited_greedy":
        groups = {"num_groups": int(hf_config["n_group"]), "num_chosen_groups": int(hf_config["topk_group"])}
    return _read_deepseek(hf_config, renormalizes=False, **groups)


def read_deepseek_v3(hf_config: Mapping[str, Any]) -> ArchConfig:
    """DeepSeek-V3 and R1: experts are chosen by corrected sigmoids, of the best groups."""
    return _read_deepseek(
        hf_config,
        scoring="sigmoid",
        renormalizes=bool(hf_config["norm_topk_prob"]),
        num_groups=int(hf_config["n_group"]),
        num_chosen_groups=int(hf_config["topk_group"]),
        has_correction=True,
    )


def _read_deepseek(hf_config: Mapping[str, Any], **routing: Any) -> ArchConfig:
    """Latent attention, dense MLPs in the first layers, then mixtures with an MLP for all tokens.

    Args:
        hf_config: as in `ArchConfig.from_hf`.
        **routing: fields of `ExpertsConfig`.
    """
    latent = LatentConfig(
        query_rank=hf_config["q_lora_rank"],
        latent_width=int(hf_config["kv_lora_rank"]),
        nope_width=int(hf_config["qk_nope_head_dim"]),
        rotary_width=int(hf_config["qk_rope_head_dim"]),
        value_width=int(hf_config["v_head_dim"]),
    )
    head_size = latent.nope_width + latent.rotary_width
    rope = read_rope(hf_config, latent.rotary_width)
    scale, weight = head_size**-0.5, rope.parameters.get("mscale_all_dim")
    if rope.rope_type != "default" and weight:
        # what yarn does to queries and keys, for the parts that are not rotated, too
        scale *= yarn_magnitude(rope.number("factor"), float(weight)) ** 2
    dense, frequency = int(hf_config["first_k_dense_replace"]), int(hf_config["moe_layer_freq"])
    count, width = int(hf_config["n_routed_experts"] or 0), int(hf_config["moe_intermediate_size"])
    row_width = latent.latent_width + latent.rotary_width
    cache = KVCachePlan(LATENT, num_vectors=1, num_heads=1, width=row_width, scales_per_vector=2)
    experts = ExpertsConfig(
        count=count,
        num_chosen=int(hf_config["num_experts_per_tok"]),
        intermediate_size=width,
        scale=float(hf_config["routed_scaling_factor"]),
        has_wide_router=True,
        shared_size=width * int(hf_config["n_shared_experts"] or 0),
        shared_name="shared_experts",
        **routing,
    )
    layers = (
        LayerPlan(mlp="gated" if count == 0 or index < dense or index % frequency else "experts", kv_cache=cache)
        for index in range(int(hf_config["num_hidden_layers"]))
    )
    return read_decoder(
        hf_config,
        # of queries and keys; all heads share what is cached
        head_size=head_size,
        num_kv_heads=1,
        layers=tuple(layers),
        attention_scale=scale,
        latent=latent,
        rope=msgspec.structs.replace(rope, is_interleaved=bool(hf_config.get("rope_interleave", True))),
        captures_graphs=True,
        experts=experts,
    )


def _with_experts(plans: tuple[LayerPlan, ...]) -> tuple[LayerPlan, ...]:
    return tuple(msgspec.structs.replace(plan, mlp="experts") for plan in plans)


# what config.json of a published EAGLE head names, whatever the target's family
EAGLE_ARCHITECTURE = "LlamaForCausalLM"
# of EAGLE-3.1 and other heads that compute something else
_OTHER_EAGLES = ("fc_norm", "norm_output", "norm_before_fc", "parallel_drafting")


def read_eagle(hf_config: Mapping[str, Any]) -> ArchConfig:
    """An EAGLE head: a Llama layer, whatever the target's family is."""
    unknown = [name for name in _OTHER_EAGLES if hf_config.get(name)]
    if unknown:
        raise ModelLoadError(f"config.json: EAGLE heads with {unknown[0]} are not supported")
    stated = hf_config.get("eagle_config") or {}
    eagle = EagleConfig(
        draft_vocab_size=int(hf_config.get("draft_vocab_size") or hf_config["vocab_size"]),
        target_hidden_size=int(hf_config.get("target_hidden_size") or hf_config["hidden_size"]),
        target_layers=tuple(stated.get("eagle_aux_hidden_state_layer_ids") or ()),
        norm_before_residual=bool(hf_config.get("norm_before_residual", False)),
    )
    qkv_bias = bool(hf_config.get("qkv_bias") or hf_config.get("attention_bias"))
    layers = layer_plans(hf_config)
    return read_decoder(hf_config, layers=layers, qkv_bias=qkv_bias, tie_word_embeddings=False, eagle=eagle)
