"""How each family's config.json is read: sizes, biases, windows, rotary positions, and what it may leave out."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from ascend_vllm.config import arch as arch_module
from ascend_vllm.config.arch import (
    ENTRY_POINT_GROUP,
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    ArchConfig,
    ExpertsConfig,
    LayerPlan,
    RopeConfig,
    StatedLength,
    read_decoder,
    read_rope,
    required,
)
from ascend_vllm.config.quantization import QuantizationConfig
from ascend_vllm.errors import ModelLoadError

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
GATED: dict[str, Any] = SIZES | {
    "intermediate_size": 112,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
OPT: dict[str, Any] = SIZES | {"ffn_dim": 112, "max_position_embeddings": 512}
# of families that read windows
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 32}
SOME: dict[str, Any] = {
    "max_window_layers": 0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
SLIDING = LayerPlan(SLIDING_ATTENTION, 32)


def read(architecture: str, hf_config: dict[str, Any] = GATED, **changes: Any) -> ArchConfig:
    """config.json of an architecture, as it is after its way to the engine core."""
    arch = ArchConfig.from_hf({"architectures": [architecture]} | hf_config | changes)
    sent = msgspec.json.decode(msgspec.json.encode(arch), type=ArchConfig)
    assert sent == arch
    return sent


def windows(architecture: str, **changes: Any) -> list[int | None]:
    return [plan.sliding_window for plan in read(architecture, **changes).layers]


# ---- sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_sizes_of_decoders_with_gated_mlps(name: str) -> None:
    arch = read(f"{name}ForCausalLM")
    assert (arch.vocab_size, arch.hidden_size, arch.embedding_size, arch.intermediate_size) == (100, 64, 64, 112)
    assert (arch.num_heads, arch.num_kv_heads, arch.head_size) == (4, 2, 16)
    assert (arch.activation, arch.norm_eps, arch.tie_word_embeddings) == ("silu", 1e-6, False)
    assert (arch.num_learned_positions, arch.num_experts, arch.quantization) == (None, 0, None)
    assert arch.layers == (LayerPlan(),) * 3
    assert arch.rope == RopeConfig("default", 10000.0, 16, 512, {})
    # embedding, attention with grouped queries, three matrices
    assert arch.num_parameters == 100 * 64 + 3 * (2 * 64 * 16 * (4 + 2) + 3 * 64 * 112)
    changed = {"head_dim": 24, "num_key_value_heads": None, "hidden_act": "gelu", "tie_word_embeddings": True}
    other = read(f"{name}ForCausalLM", **changed)
    assert (other.head_size, other.num_kv_heads, other.activation, other.tie_word_embeddings) == (24, 4, "gelu", True)


def test_opt() -> None:
    arch = read("OPTForCausalLM", OPT)
    assert (arch.intermediate_size, arch.embedding_size, arch.num_learned_positions) == (112, 64, 512)
    assert (arch.activation, arch.norm_eps, arch.rope) == ("relu", None, None)
    assert (arch.tie_word_embeddings, arch.norm_affine, arch.has_final_norm) == (True, True, True)
    assert (arch.qkv_bias, arch.output_bias, arch.mlp_bias) == (True, True, True)
    assert arch.layers == (LayerPlan(mlp="plain"),) * 3
    assert arch.num_parameters == 100 * 64 + 512 * 64 + 3 * (4 * 64 * 64 + 2 * 64 * 112)
    # its heads have no other numbers and widths
    assert read("OPTForCausalLM", OPT, num_key_value_heads=2, head_dim=96) == arch
    post_norm = read("OPTForCausalLM", OPT, do_layer_norm_before=False, word_embed_proj_dim=32)
    assert (post_norm.layers[0].norm_first, post_norm.has_final_norm, post_norm.embedding_size) == (False, False, 32)
    assert not read("OPTForCausalLM", OPT, _remove_final_layer_norm=True).has_final_norm
    bare = {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"}
    plain = read("OPTForCausalLM", OPT, tie_word_embeddings=False, **bare)
    assert (plain.qkv_bias, plain.output_bias, plain.mlp_bias, plain.norm_affine) == (False, False, False, False)
    assert (plain.activation, plain.tie_word_embeddings) == ("gelu", False)


def test_biases_and_norms_of_heads() -> None:
    def differences(name: str, **changes: Any) -> tuple[bool, bool, bool, bool]:
        arch = read(f"{name}ForCausalLM", **changes)
        return arch.qkv_bias, arch.output_bias, arch.mlp_bias, arch.qk_norm

    assert differences("Llama") == (False, False, False, False)
    assert differences("Llama", attention_bias=True) == (True, True, False, False)
    assert differences("Llama", mlp_bias=True) == (False, False, True, False)
    # these have what they have, whatever config.json says
    assert differences("Mistral", attention_bias=True, mlp_bias=True) == (False, False, False, False)
    assert differences("Qwen2", attention_bias=False, mlp_bias=True) == (True, False, False, False)
    assert differences("Qwen3") == (False, False, False, True)
    assert differences("Qwen3", attention_bias=True, mlp_bias=True) == (True, True, False, True)


@pytest.mark.parametrize("name", ["Qwen2Model", "Qwen2ForSequenceClassification"])
def test_models_without_a_head_are_read_as_those_with_one(name: str) -> None:
    assert read(name) == read("Qwen2ForCausalLM")


# ---- windows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3"])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [None, None, None]),
        ({"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 0}, [None, None, None]),
        # without the switch there is no window in this family
        ({"sliding_window": 32, "max_window_layers": 0}, [None, None, None]),
        # what transformers makes of a config without use_sliding_window
        ({"use_sliding_window": True, "sliding_window": None}, [None, None, None]),
        ({"use_sliding_window": True, "sliding_window": 0}, [None, None, None]),
        (WINDOW | {"max_window_layers": 2}, [None, None, 32]),
        (WINDOW | {"max_window_layers": 28}, [None, None, None]),
        (WINDOW | {"max_window_layers": None}, [32, 32, 32]),
        (WINDOW | {"max_window_layers": 2, "layer_types": None}, [None, None, 32]),
        (WINDOW | SOME, [32, None, 32]),
        # it may be that of a model with more layers
        (WINDOW | {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, [None, None, None]),
    ],
)
def test_windows_of_qwen_layers(name: str, changes: dict[str, Any], expected: list[int | None]) -> None:
    assert windows(f"{name}ForCausalLM", **changes) == expected


def test_mistral_has_one_window() -> None:
    assert windows("MistralForCausalLM", sliding_window=4096) == [4096] * 3
    assert windows("MistralForCausalLM", sliding_window=None) == [None] * 3
    assert windows("MistralForCausalLM", sliding_window=0) == [None] * 3


@pytest.mark.parametrize(("name", "hf_config"), [("Llama", GATED), ("OPT", OPT)])
def test_families_without_windows(name: str, hf_config: dict[str, Any]) -> None:
    arch = read(f"{name}ForCausalLM", hf_config | WINDOW | SOME)
    assert [plan.sliding_window for plan in arch.layers] == [None] * 3
    # prompts of such a model are not cut, whatever its layers do with it
    assert arch.sliding_window == 32


def test_kinds_of_attention_are_kept_where_there_is_a_window() -> None:
    kinds = ["linear_attention", "sliding_attention", "full_attention"]
    arch = read("Qwen2ForCausalLM", layer_types=kinds, **WINDOW)
    assert arch.layers == (LayerPlan("linear_attention"), SLIDING, LayerPlan())
    assert read("Qwen2ForCausalLM", layer_types=kinds).layers == (LayerPlan(),) * 3


def test_the_window_of_all_layers() -> None:
    assert read("MistralForCausalLM", sliding_window=32).common_window == 32
    assert read("Qwen2ForCausalLM", **WINDOW, **SOME).common_window is None
    assert read("LlamaForCausalLM", sliding_window=32).common_window is None


@pytest.mark.parametrize("kinds", [["sliding_attention"] * 3, ["linear_attention"] * 3])
def test_windows_can_be_switched_off(kinds: list[str]) -> None:
    arch = read("Qwen2ForCausalLM", layer_types=kinds, **WINDOW).without_sliding_window()
    assert arch == read("Qwen2ForCausalLM")
    opt = read("OPTForCausalLM", OPT, do_layer_norm_before=False, sliding_window=8)
    assert opt.without_sliding_window().layers == opt.layers


# ---- rotary positions ------------------------------------------------------------------------------------------


def test_both_spellings_of_rotary_positions() -> None:
    new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0}}
    old = {"rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 2.0}}
    for spelling in (new, old):
        rope = read_rope(GATED | spelling, 16)
        assert (rope.rope_type, rope.theta, rope.rotary_dim, rope.number("factor")) == ("linear", 5e4, 16, 2.0)
    # rope_scaling wins, and a theta inside over the one outside
    both = read_rope(GATED | new | {"rope_theta": 3.0, "rope_scaling": {"type": "dynamic", "rope_theta": 7.0}}, 16)
    assert (both.rope_type, both.theta) == ("dynamic", 7.0)
    assert read_rope(GATED | {"partial_rotary_factor": 0.5}, 16).rotary_dim == 8


@pytest.mark.parametrize("rope_type", ["yarn", "llama3"])
def test_the_trained_length(rope_type: str) -> None:
    def trained(**changes: Any) -> float:
        inner = {"rope_type": rope_type, "factor": 2.0} | changes.pop("inner", {})
        return read_rope(GATED | {"rope_parameters": inner} | changes, 16).number("original_max_position_embeddings")

    assert trained() == 512
    assert trained(inner={"original_max_position_embeddings": 64}) == 64
    assert trained(original_max_position_embeddings=128, inner={"original_max_position_embeddings": 64}) == 128


# ---- the longest sequence, and what else is stated -------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, StatedLength("max_position_embeddings", 512)),
        ({"seq_length": 100}, StatedLength("seq_length", 100)),
        ({"model_max_length": 1e30}, StatedLength("max_position_embeddings", 512, 1e30)),
        ({"model_max_length": 256}, StatedLength("model_max_length", 256, 256)),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.5}}, StatedLength("max_position_embeddings", 1280)),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, StatedLength("max_position_embeddings", 512)),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
            StatedLength("max_position_embeddings", 256),
        ),
        ({"max_position_embeddings": None}, None),
    ],
)
def test_the_longest_sequence(changes: dict[str, Any], expected: StatedLength | None) -> None:
    assert read("LlamaForCausalLM", **changes).max_length == expected


def test_experts_dtype_and_ids() -> None:
    arch = read("LlamaForCausalLM")
    assert (arch.num_experts, arch.dtype, arch.eos_token_ids) == (0, "float32", None)
    assert read("DbrxForCausalLM", num_local_experts=8).num_experts == 8
    assert read("DeepseekForCausalLM", n_routed_experts=64, num_experts=None).num_experts == 64
    assert read("LlamaForCausalLM", torch_dtype="float16").dtype == "float16"
    assert read("LlamaForCausalLM", torch_dtype="float16", dtype="torch.bfloat16").dtype == "bfloat16"
    assert read("LlamaForCausalLM", eos_token_id=7).eos_token_ids == (7,)
    assert read("LlamaForCausalLM", eos_token_id=[7, 8]).eos_token_ids == (7, 8)
    assert read("LlamaForCausalLM", eos_token_id=[]).eos_token_ids == ()


def test_quantization() -> None:
    declared = {"quant_method": "awq", "bits": 4}
    assert read("LlamaForCausalLM", quantization_config=declared).quantization == QuantizationConfig("awq", declared)
    # of any reader, and without a name that is one
    assert read("UnheardForCausalLM", quantization_config={"bits": 4}).quantization == QuantizationConfig(
        None, {"bits": 4}
    )
    assert read("LlamaForCausalLM", quantization_config={"quant_method": []}).quantization is not None
    assert read("LlamaForCausalLM", quantization_config={}).quantization is None
    # --quantization names it where config.json does not
    hf_config = {"architectures": ["LlamaForCausalLM"]} | SIZES
    assert ArchConfig.from_hf(hf_config, "awq").quantization == QuantizationConfig("awq")
    unnamed = hf_config | {"quantization_config": {"bits": 4}}
    assert ArchConfig.from_hf(unnamed, "awq").quantization == QuantizationConfig("awq", {"bits": 4})
    assert ArchConfig.from_hf(hf_config | {"quantization_config": declared}, "gptq").quantization == (
        QuantizationConfig("awq", declared)
    )


# ---- other architectures ---------------------------------------------------------------------------------------


def test_unknown_architectures_are_read_by_the_usual_names() -> None:
    arch = read("UnheardForCausalLM", attention_bias=True, **WINDOW, **SOME)
    assert (arch.qkv_bias, arch.output_bias, arch.intermediate_size, arch.norm_eps) == (True, True, 112, 1e-6)
    # nobody knows what its layers do
    assert arch.layers == (LayerPlan(mlp="unknown"),) * 3
    assert arch.num_parameters == 0


def test_what_is_not_stated_is_missed_where_it_is_needed() -> None:
    """Only what every model has must be there; other fields may hold anything in families that nobody has checked."""
    arch = read("UnheardForCausalLM", SIZES, intermediate_size=[112, 112, 56], rms_norm_eps="small")
    assert (arch.intermediate_size, arch.norm_eps, arch.max_length) == (None, None, None)
    with pytest.raises(KeyError, match="intermediate_size"):
        required(arch.intermediate_size, "intermediate_size")
    assert required(0, "anything") == 0


def test_unknown_architectures_are_read_as_their_model_type_is() -> None:
    derived = read("MyForCausalLM", model_type="qwen2", max_window_layers=0, **WINDOW)
    own = read("Qwen2ForCausalLM", max_window_layers=0, **WINDOW)
    assert (own.captures_graphs, derived) == (True, msgspec.structs.replace(own, captures_graphs=False))
    assert read("MyForCausalLM", OPT, model_type="opt") == read("OPTForCausalLM", OPT)
    # the architecture decides, if it is known
    assert not read("LlamaForCausalLM", model_type="qwen2").qkv_bias


PLUGIN = """
import msgspec
from ascend_vllm.config.arch import read_decoder

def read_arch(hf_config):
    return read_decoder(hf_config, qkv_bias=True, extra={"logit_scale": hf_config["logit_scale"]})
"""


@pytest.fixture
def plugin(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that reads config.json of MyForCausalLM."""
    (tmp_path / "own_arch.py").write_text(PLUGIN)
    info = tmp_path / "own_arch-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-arch\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{ENTRY_POINT_GROUP}]\n"
        "MyForCausalLM = own_arch:read_arch\n"
        "LostForCausalLM = own_arch:lost\n"
        "LlamaForCausalLM = own_arch:read_arch\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_arch", raising=False)


@pytest.mark.usefixtures("plugin")
def test_a_package_reads_its_own_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    arch = read("MyForCausalLM", logit_scale=0.5, model_type="llama")
    assert (arch.qkv_bias, arch.output_bias, arch.extra) == (True, False, {"logit_scale": 0.5})
    assert read("MyModel", logit_scale=0.5) == arch
    with pytest.raises(ModelLoadError, match=r"config\.json lacks 'logit_scale'"):
        read("MyForCausalLM")
    with pytest.raises(ModelLoadError, match="'LostForCausalLM': cannot import own_arch:lost"):
        read("LostForCausalLM")
    # this package's own table comes first
    assert read("LlamaForCausalLM").extra == {}
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert read("MyForCausalLM").extra == {}


def test_a_reader_for_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(arch_module.READERS, "MyForCausalLM", lambda hf: read_decoder(hf, extra={"mine": True}))
    assert read("MyForCausalLM").extra == {"mine": True}


def test_config_json_is_read_without_torch() -> None:
    code = "import sys, ascend_vllm.config.arch; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_full_attention_is_the_default() -> None:
    assert LayerPlan() == LayerPlan(FULL_ATTENTION, None, "gated", norm_first=True)


# ---- mixtures of experts ---------------------------------------------------------------------------------------

MIXTURE: dict[str, Any] = GATED | {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "decoder_sparse_step": 1,
}


def mixtures(architecture: str, **changes: Any) -> list[int]:
    """Layers with a mixture."""
    layers = read(architecture, MIXTURE, **changes).layers
    return [index for index, plan in enumerate(layers) if plan.mlp == "experts"]


def test_mixtures_of_the_families() -> None:
    mixtral = read("MixtralForCausalLM", MIXTURE, sliding_window=32)
    assert mixtral.experts == ExpertsConfig(count=8, num_chosen=2, intermediate_size=112)
    assert [plan.sliding_window for plan in mixtral.layers] == [32] * 3
    assert mixtral.num_parameters == 100 * 64 + 3 * (2 * 64 * 16 * (4 + 2) + 8 * 3 * 64 * 112)
    qwen2 = read("Qwen2MoeForCausalLM", MIXTURE)
    assert qwen2.experts == ExpertsConfig(
        count=8, num_chosen=2, intermediate_size=24, renormalizes=False, shared_size=40, has_shared_gate=True
    )
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, False)
    assert not read("Qwen2MoeForCausalLM", MIXTURE, qkv_bias=False).qkv_bias
    assert qwen2.num_parameters == 100 * 64 + 3 * (2 * 64 * 16 * (4 + 2) + 3 * 64 * (8 * 24 + 40))
    qwen3 = read("Qwen3MoeForCausalLM", MIXTURE, norm_topk_prob=True)
    assert qwen3.experts == ExpertsConfig(count=8, num_chosen=2, intermediate_size=24)
    assert (qwen3.qkv_bias, qwen3.qk_norm) == (False, True)


def test_some_layers_are_dense() -> None:
    for name in ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"):
        assert mixtures(name) == [0, 1, 2]
        assert mixtures(name, mlp_only_layers=[0, 2]) == [1]
        assert mixtures(name, decoder_sparse_step=2) == [1]
        assert mixtures(name, num_experts=0) == []
    assert mixtures("MixtralForCausalLM", decoder_sparse_step=2) == [0, 1, 2]
    dense = read("Qwen3MoeForCausalLM", MIXTURE, mlp_only_layers=[0, 1])
    assert dense.num_parameters == 100 * 64 + 3 * 2 * 64 * 16 * (4 + 2) + 2 * 3 * 64 * 112 + 3 * 64 * 8 * 24
