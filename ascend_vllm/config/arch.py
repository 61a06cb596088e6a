"""What a model is like, read from config.json once; no other module needs to know how its family spells that.

config.json comes here as args/hf_files.py leaves it: the text part, with the names that transformers would fill in,
with overrides of the command line, and checked by args/hf_checks.py. A family is a function from it to an
`ArchConfig`, here or in config/families.py, in the tables `READERS` and `_MODEL_TYPE_READERS`. Packages add theirs
with entry points of the group `ascend_vllm.arch_readers`. Nothing here imports torch: the API-server process reads
config.json.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from ascend_vllm import plugins
from ascend_vllm.config.quantization import QuantizationConfig, read_quantization
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.types.kv_cache import KEYS_AND_VALUES, KVCachePlan

ENTRY_POINT_GROUP = "ascend_vllm.arch_readers"

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"

T = TypeVar("T")

# ends of names of architectures that share their decoder with XForCausalLM
_HEADLESS = ("ForSequenceClassification", "Model")
# kind of MLP → its matrices of hidden_size × intermediate_size; a mixture of experts has others
_MLP_MATRICES = {"gated": 3, "plain": 2, "experts": 0}
_DEFAULT_ROPE_THETA = 10000.0
# rope types whose max_position_embeddings is the length after scaling
_SCALED_ROPE_TYPES = frozenset({"default", "su", "longrope", "llama3", "mrope"})
# names under which configs state their longest sequence; the smallest value counts (vLLM: _get_and_verify_max_len)
_LENGTH_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# names for the number of experts
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def decoder_architecture(architecture: str) -> str:
    """The architecture that generates with the same decoder: Qwen2Model and its like become Qwen2ForCausalLM."""
    for end in _HEADLESS:
        if architecture.endswith(end):
            return f"{architecture.removesuffix(end)}ForCausalLM"
    return architecture


def required(value: T | None, name: str) -> T:
    """A value that a model cannot do without.

    Args:
        value: of a field of `ArchConfig`; None: config.json does not state it.
        name: of the field in config.json.

    Raises:
        KeyError: the value is None. The loader makes a `ModelLoadError` of it.
    """
    if value is None:
        raise KeyError(name)
    return value


# ---- records -----------------------------------------------------------------------------------------------


class RopeConfig(msgspec.Struct, frozen=True):
    """Rotary position embedding. Types and their numbers are checked where the table is built, in layers/rotary.py.

    Attributes:
        rope_type: for example "default" or "yarn".
        theta: base of the frequencies.
        rotary_dim: elements of a head that are rotated.
        max_position: longest sequence by config.json, which is the trained one for "dynamic"; None: it states none.
        parameters: the type's own numbers, by their names in config.json.
        is_interleaved: pairs are elements 2i and 2i+1 of a head; otherwise i and i+rotary_dim/2.
    """

    rope_type: str
    theta: float
    rotary_dim: int
    max_position: int | None
    parameters: dict[str, Any]
    is_interleaved: bool = False

    def number(self, name: str) -> float:
        """One of the type's numbers."""
        return float(self.parameters[name])


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """By how much YaRN (Peng et al., 2023, section 3.4) scales queries and keys of a context extended by a factor.

    Example:
        >>> round(yarn_magnitude(40.0, 0.707), 4)
        1.2608
    """
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


class StatedLength(msgspec.Struct, frozen=True):
    """The longest sequence that config.json allows.

    Attributes:
        name: of the field that states it.
        num_tokens: what it states, scaled as the rotary positions are.
        model_max_length: the field of this name, for messages.
        default: the limit if --max-model-len is not given; None: num_tokens.
    """

    name: str
    num_tokens: int
    model_max_length: int | float | None = None
    default: int | None = None


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts: gated MLPs of which each token uses a few.

    Attributes:
        count: experts of a layer.
        num_chosen: experts that a token uses.
        intermediate_size: width inside an expert.
        scoring: "softmax" or "sigmoid", which makes scores of the router's logits.
        renormalizes: the weights of a token's experts are divided by their sum.
        num_groups: groups of experts, see `ops.experts.route_tokens`.
        num_chosen_groups: groups that the experts of a token come from.
        scale: factor on the weights.
        has_wide_router: the router's product is made in float32, whatever the model's dtype.
        has_correction: a bias per expert is added to scores for the choice only.
        shared_size: width inside the MLP that all tokens use; 0: there is none.
        shared_name: its name in the checkpoint.
        has_shared_gate: its result is multiplied by the sigmoid of a projection to one number.
    """

    count: int
    num_chosen: int
    intermediate_size: int
    scoring: str = "softmax"
    renormalizes: bool = True
    num_groups: int = 1
    num_chosen_groups: int = 1
    scale: float = 1.0
    has_wide_router: bool = False
    has_correction: bool = False
    shared_size: int = 0
    shared_name: str = "shared_expert"
    has_shared_gate: bool = False


class LatentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Latent attention (MLA, DeepSeek-V2, 2024).

    Keys and values of all heads are projections of one latent, which is cached with one rotary key for all heads.

    Attributes:
        query_rank: width of the latent that queries are projected from; None: they are made in one projection.
        latent_width: of the latent of keys and values.
        nope_width: of the part of a head's query and key that is not rotated.
        rotary_width: of the rotated part.
        value_width: of a head's value.
    """

    query_rank: int | None
    latent_width: int
    nope_width: int
    rotary_width: int
    value_width: int


class EagleConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an EAGLE head has beside its decoder layer (Y. Li et al., 2024 and 2025).

    Attributes:
        draft_vocab_size: entries of the vocabulary that an EAGLE-3 head drafts.
        target_hidden_size: width of the target's residual stream.
        target_layers: layers of the target whose inputs an EAGLE-3 head reads, counted from 0; empty: the third, the
            middle one and the third last.
        norm_before_residual: the normalised state goes on in the residual, not the state itself.
    """

    draft_vocab_size: int
    target_hidden_size: int
    target_layers: tuple[int, ...] = ()
    norm_before_residual: bool = False


class LayerPlan(msgspec.Struct, frozen=True):
    """One decoder layer.

    Attributes:
        attention: "full_attention", "sliding_attention", or another kind that `layer_types` names, which models may
            refuse.
        sliding_window: tokens that a token sees, itself included; None: all.
        mlp: "gated" (three matrices), "plain" (two), "experts" (see `ArchConfig.experts`), or "unknown": what a model
            of another package has.
        norm_first: norms come before attention and MLP, not after them.
        kv_cache: what attention caches of each token.
        is_local: rotates by `ArchConfig.local_rope`.
    """

    attention: str = FULL_ATTENTION
    sliding_window: int | None = None
    mlp: str = "gated"
    norm_first: bool = True
    kv_cache: KVCachePlan = KEYS_AND_VALUES
    is_local: bool = False


class ArchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The architecture of a model: plain values, which are sent to engine core and workers.

    Attributes:
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: KV heads; fewer than query heads under grouped-query attention.
        head_size: width of a head.
        layers: one plan per decoder layer.
        embedding_size: width of the embedding and of what heads and poolers read.
        intermediate_size: width inside MLPs; None: not stated.
        activation: of MLPs, as config.json names it.
        norm_eps: of norms; None: not stated, or the family's norms have a fixed one.
        norm_affine: norms have weights.
        has_final_norm: there is a norm behind the last layer.
        layer_norm: the norms of the residual stream are LayerNorms; otherwise RMS norms.
        norm_offset: added to the weights of RMS norms, which checkpoints store without it.
        sandwich_norms: results of attention and MLP are normalised before they are added to the residual.
        parallel_norms: attention and MLP read the same residual, behind this many norms (1 or 2); 0: one after the
            other.
        qk_norm: queries and keys are RMS-normalised per head before rotation.
        qkv_layout: of the checkpoint: "split": a matrix each; "fused": one matrix, all queries, then keys, then
            values; "grouped": one matrix, for each KV head its queries, its key and its value.
        gate_up_fused: the checkpoint has one matrix of gate, then up.
        attention_scale: factor on query·key; None: head_size**-0.5.
        attention_cap: c of c·tanh(score / c), which replaces attention scores; None: they stay as they are.
        alibi_slopes: per query head, see `AttentionSpec`; empty: positions do not affect scores.
        latent: the latent attention of all layers; None: they have keys and values of their own.
        embedding_scale: factor on embeddings.
        residual_scale: factor on results of attention and MLP.
        logit_scale: factor on logits.
        logit_cap: c of c·tanh(logit / c), which replaces logits; None: they stay as they are.
        normalizes_head: rows of the head's weight are divided by their Euclidean norms.
        qkv_bias: query, key and value projections have a bias.
        output_bias: the output projection of attention has one.
        mlp_bias: the projections of MLPs have one.
        tie_word_embeddings: the embedding's weight is the head's, too.
        captures_graphs: decoding on NPUs is captured as graphs unless somebody says otherwise.
        rope: rotary positions; None: there are none.
        local_rope: those of layers whose plan `is_local`.
        num_learned_positions: learned positions; None: there are none.
        num_experts: experts of an MLP; 0: there are none.
        experts: the mixtures of the layers that have one; None: none has.
        sliding_window: what config.json states, whether or not a layer has it; None: no window.
        max_length: longest sequence; None: config.json states none.
        dtype: of the checkpoint.
        eos_token_ids: tokens that end a text; None: config.json names none.
        quantization: how the checkpoint's weights are quantized; None: they are not.
        eagle: of an EAGLE head; None: it is a whole model.
        extra: what a reader of another package keeps for its own model; plain values.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    layers: tuple[LayerPlan, ...]
    embedding_size: int
    intermediate_size: int | None = None
    activation: str = "silu"
    norm_eps: float | None = None
    norm_affine: bool = True
    has_final_norm: bool = True
    layer_norm: bool = False
    norm_offset: float = 0.0
    sandwich_norms: bool = False
    parallel_norms: int = 0
    qk_norm: bool = False
    qkv_layout: str = "split"
    gate_up_fused: bool = False
    attention_scale: float | None = None
    attention_cap: float | None = None
    alibi_slopes: tuple[float, ...] = ()
    latent: LatentConfig | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    normalizes_head: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    captures_graphs: bool = False
    rope: RopeConfig | None = None
    local_rope: RopeConfig | None = None
    num_learned_positions: int | None = None
    num_experts: int = 0
    experts: ExpertsConfig | None = None
    sliding_window: int | None = None
    max_length: StatedLength | None = None
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] | None = None
    quantization: QuantizationConfig | None = None
    eagle: EagleConfig | None = None
    extra: dict[str, Any] = {}

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any], quantization: str | None = None) -> ArchConfig:
        """Reads config.json as its family spells it.

        The architecture chooses the reader: of this package's table, then of entry points. An architecture that has
        none is read as its model type is, or else by the names that most families use.

        Args:
            hf_config: what `args.hf_files.read_hf_config` returns.
            quantization: --quantization, the format of a checkpoint whose config.json names none.

        Raises:
            ModelLoadError: the reader cannot be imported, or misses something.
        """
        try:
            arch = _reader(hf_config)(hf_config)
        except KeyError as error:
            raise ModelLoadError(f"config.json lacks {error}") from error
        stated = read_quantization(hf_config.get("quantization_config"), quantization)
        return arch if stated is None else msgspec.structs.replace(arch, quantization=stated)

    @property
    def common_window(self) -> int | None:
        """The window if every layer has it, so that KV blocks outside it are never read again; else None."""
        windows = {plan.sliding_window for plan in self.layers}
        return windows.pop() if len(windows) == 1 else None

    @property
    def num_parameters(self) -> int:
        """How many weights the model has at least; 0 if that is not known."""
        if any(plan.mlp not in _MLP_MATRICES for plan in self.layers):
            return 0
        matrix = self.hidden_size * (self.intermediate_size or 0)
        embeddings = self.vocab_size * self.embedding_size + (self.num_learned_positions or 0) * self.hidden_size
        mixture = 0
        if self.experts is not None:
            inner = self.experts.count * self.experts.intermediate_size + self.experts.shared_size
            mixture = 3 * self.hidden_size * inner * sum(plan.mlp == "experts" for plan in self.layers)
        attention = self._attention_parameters
        return embeddings + mixture + sum(attention + _MLP_MATRICES[plan.mlp] * matrix for plan in self.layers)

    @property
    def _attention_parameters(self) -> int:
        """Weights of a layer's attention."""
        latent = self.latent
        if latent is None:
            return 2 * self.hidden_size * self.head_size * (self.num_heads + self.num_kv_heads)
        # of queries, of the cached row, of keys and values of it, and of the output
        width = self.num_heads * self.head_size
        rank = latent.query_rank
        query = self.hidden_size * width if rank is None else rank * (self.hidden_size + width)
        row = self.hidden_size * (latent.latent_width + latent.rotary_width)
        heads = self.num_heads * latent.latent_width * (latent.nope_width + latent.value_width)
        return query + row + heads + self.num_heads * latent.value_width * self.hidden_size

    def without_sliding_window(self) -> ArchConfig:
        """The same model with full attention in every layer."""
        layers = tuple(
            msgspec.structs.replace(plan, attention=FULL_ATTENTION, sliding_window=None) for plan in self.layers
        )
        return msgspec.structs.replace(self, layers=layers, sliding_window=None)


# ---- what families share -----------------------------------------------------------------------------------


def read_decoder(hf_config: Mapping[str, Any], **differing: Any) -> ArchConfig:
    """Reads the names that most families use: full attention in every layer, optional biases.

    Fields that only the built-in families have checked may hold anything here: what is no number counts as not
    stated.

    Args:
        hf_config: as in `ArchConfig.from_hf`.
        **differing: fields of `ArchConfig` that the family reads in its own way.
    """
    hidden_size, num_heads = int(hf_config["hidden_size"]), int(hf_config["num_attention_heads"])
    head_size = int(hf_config.get("head_dim") or hidden_size // num_heads)
    attention_bias = bool(hf_config.get("attention_bias", False))
    epsilon = hf_config.get("rms_norm_eps")
    values: dict[str, Any] = {
        "vocab_size": int(hf_config["vocab_size"]),
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": int(hf_config.get("num_key_value_heads") or num_heads),
        "head_size": head_size,
        "layers": (LayerPlan(mlp="unknown"),) * int(hf_config["num_hidden_layers"]),
        "embedding_size": hidden_size,
        "intermediate_size": _whole(hf_config, "intermediate_size"),
        "activation": str(hf_config.get("hidden_act", "silu")),
        "norm_eps": float(epsilon) if isinstance(epsilon, int | float) else None,
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": bool(hf_config.get("mlp_bias", False)),
        "tie_word_embeddings": bool(hf_config.get("tie_word_embeddings", False)),
        "rope": read_rope(hf_config, head_size),
        "num_experts": max(int(hf_config.get(name) or 0) for name in _EXPERT_COUNTS),
        "sliding_window": stated_window(hf_config),
        "max_length": max_length(hf_config),
        "dtype": str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32").removeprefix("torch."),
        "eos_token_ids": _token_ids(hf_config.get("eos_token_id")),
    }
    return ArchConfig(**values | differing)


def read_rope(hf_config: Mapping[str, Any], head_size: int) -> RopeConfig:
    """Reads config.json's spelling of today (`rope_parameters`) and of before (`rope_theta`, `rope_scaling`).

    `rope_scaling` wins over `rope_parameters`, and a `rope_theta` inside either over the one outside, as transformers
    reads them.
    """
    parameters = dict(hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {})
    rope_type = str(parameters.get("rope_type") or parameters.get("type") or "default")
    # the name before transformers 4.44
    rope_type = "longrope" if rope_type == "su" else rope_type
    theta = parameters.get("rope_theta") or hf_config.get("rope_theta") or _DEFAULT_ROPE_THETA
    partial = parameters.get("partial_rotary_factor") or hf_config.get("partial_rotary_factor") or 1.0
    max_position = _whole(hf_config, "max_position_embeddings")
    if rope_type in ("yarn", "llama3", "longrope"):
        outer = hf_config.get("original_max_position_embeddings")
        parameters.setdefault("original_max_position_embeddings", max_position)
        if outer is not None:
            parameters["original_max_position_embeddings"] = outer
    return RopeConfig(rope_type, float(theta), int(head_size * partial), max_position, parameters)


def rope_by_kind(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters by the kind of layer that they are for; {} if they are the same for all layers."""
    return {kind: parameters[kind] for kind in (FULL_ATTENTION, SLIDING_ATTENTION) if kind in parameters}


def stated_window(hf_config: Mapping[str, Any]) -> int | None:
    """The width of the attention window in tokens; None: there is none, or it is switched off."""
    if not hf_config.get("use_sliding_window", True):
        return None
    window = hf_config.get("sliding_window")
    return int(window) if window else None


def layer_plans(hf_config: Mapping[str, Any], kinds: Sequence[str] | None = None) -> tuple[LayerPlan, ...]:
    """Plans of layers with gated MLPs.

    Args:
        hf_config: as in `ArchConfig.from_hf`.
        kinds: the attention of each layer, where there is a window; None: full attention in all.
    """
    window = stated_window(hf_config)
    if kinds is None or window is None:
        return (LayerPlan(),) * int(hf_config["num_hidden_layers"])
    return tuple(LayerPlan(kind, window if kind == SLIDING_ATTENTION else None) for kind in kinds)


def _whole(hf_config: Mapping[str, Any], name: str) -> int | None:
    value = hf_config.get(name)
    return value if isinstance(value, int) else None


def _token_ids(declared: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if declared is None:
        return None
    return (declared,) if isinstance(declared, int) else tuple(declared)


def max_length(hf_config: Mapping[str, Any], *, is_scaled: bool = True) -> StatedLength | None:
    """The longest sequence: the smallest of all statements, scaled as the rotary positions are.

    Args:
        hf_config: as in `ArchConfig.from_hf`.
        is_scaled: rotary scaling counts; otherwise the statements already contain it.
    """
    stated = {name: hf_config[name] for name in _LENGTH_NAMES if isinstance(hf_config.get(name), int)}
    if not stated:
        return None
    name = min(stated, key=lambda name: stated[name])
    length: float = stated[name]
    rope = hf_config.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    default = None
    if kind in ("longrope", "su"):
        # longer sequences need other angles, which are worse for short ones
        default = hf_config.get("original_max_position_embeddings")
    if kind == "yarn":
        length = rope.get("original_max_position_embeddings") or length
    if is_scaled and kind not in _SCALED_ROPE_TYPES:
        length *= float(rope.get("factor") or 1.0)
    return StatedLength(name, int(length), hf_config.get("model_max_length"), default)


# ---- families ----------------------------------------------------------------------------------------------


def _read_llama(hf_config: Mapping[str, Any]) -> ArchConfig:
    # no windows: this family does not heed `sliding_window`
    return read_decoder(hf_config, layers=layer_plans(hf_config), captures_graphs=True)


def _read_mistral(hf_config: Mapping[str, Any]) -> ArchConfig:
    # the first models have a window in every layer, later ones a `sliding_window` of null
    layers = layer_plans(hf_config, [SLIDING_ATTENTION] * int(hf_config["num_hidden_layers"]))
    biases = {"qkv_bias": False, "output_bias": False, "mlp_bias": False}
    return read_decoder(hf_config, layers=layers, captures_graphs=True, **biases)


def _qwen_plans(hf_config: Mapping[str, Any]) -> tuple[LayerPlan, ...]:
    """Layers of Qwen models.

    `use_sliding_window` must be set for any window. `layer_types` then says which layers have it; configs from before
    that field keep full attention in the first `max_window_layers` layers.
    """
    num_layers = int(hf_config["num_hidden_layers"])
    if not hf_config.get("use_sliding_window", False):
        return layer_plans(hf_config)
    kinds = hf_config.get("layer_types")
    if kinds is None:
        num_full = min(int(hf_config.get("max_window_layers") or 0), num_layers)
        kinds = [FULL_ATTENTION] * num_full + [SLIDING_ATTENTION] * (num_layers - num_full)
    return layer_plans(hf_config, kinds[:num_layers])


def _read_qwen2(hf_config: Mapping[str, Any]) -> ArchConfig:
    # biases are not optional in this family
    biases = {"qkv_bias": True, "output_bias": False, "mlp_bias": False}
    return read_decoder(hf_config, layers=_qwen_plans(hf_config), captures_graphs=True, **biases)


def _read_qwen3(hf_config: Mapping[str, Any]) -> ArchConfig:
    return read_decoder(hf_config, layers=_qwen_plans(hf_config), captures_graphs=True, qk_norm=True, mlp_bias=False)


def _read_opt(hf_config: Mapping[str, Any]) -> ArchConfig:
    hidden_size, num_heads = int(hf_config["hidden_size"]), int(hf_config["num_attention_heads"])
    norm_first = bool(hf_config.get("do_layer_norm_before", True))
    has_bias = bool(hf_config.get("enable_bias", True))
    return read_decoder(
        hf_config,
        num_kv_heads=num_heads,
        head_size=hidden_size // num_heads,
        layers=(LayerPlan(mlp="plain", norm_first=norm_first),) * int(hf_config["num_hidden_layers"]),
        embedding_size=int(hf_config.get("word_embed_proj_dim") or hidden_size),
        intermediate_size=_whole(hf_config, "ffn_dim"),
        activation=str(hf_config.get("activation_function", "relu")),
        norm_affine=bool(hf_config.get("layer_norm_elementwise_affine", True)),
        # the second name marks checkpoints from before the final norm was part of the conversion
        has_final_norm=norm_first and not hf_config.get("_remove_final_layer_norm", False),
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=has_bias,
        tie_word_embeddings=bool(hf_config.get("tie_word_embeddings", True)),
        rope=None,
        num_learned_positions=_whole(hf_config, "max_position_embeddings"),
    )


ArchReader = Callable[[Mapping[str, Any]], ArchConfig]

_FAMILIES = "ascend_vllm.config.families"

# architecture as config.json names it → its reader, or "module:function", imported when a model needs it
READERS: dict[str, ArchReader | str] = {
    "AquilaForCausalLM": _read_llama,
    "AquilaModel": _read_llama,
    "BaiChuanForCausalLM": f"{_FAMILIES}:read_baichuan",
    "BaichuanForCausalLM": f"{_FAMILIES}:read_baichuan",
    "ChatGLMForConditionalGeneration": f"{_FAMILIES}:read_chatglm",
    "ChatGLMModel": f"{_FAMILIES}:read_chatglm",
    "DeepseekV2ForCausalLM": f"{_FAMILIES}:read_deepseek_v2",
    "DeepseekV3ForCausalLM": f"{_FAMILIES}:read_deepseek_v3",
    "Eagle3LlamaForCausalLM": f"{_FAMILIES}:read_eagle",
    "EagleLlamaForCausalLM": f"{_FAMILIES}:read_eagle",
    "FalconForCausalLM": f"{_FAMILIES}:read_falcon",
    "Gemma2ForCausalLM": f"{_FAMILIES}:read_gemma2",
    "Gemma3ForCausalLM": f"{_FAMILIES}:read_gemma3",
    "GemmaForCausalLM": f"{_FAMILIES}:read_gemma",
    "Glm4ForCausalLM": f"{_FAMILIES}:read_glm4",
    "GlmForCausalLM": f"{_FAMILIES}:read_glm",
    "GraniteForCausalLM": f"{_FAMILIES}:read_granite",
    "InternLM2ForCausalLM": f"{_FAMILIES}:read_internlm2",
    "InternLM3ForCausalLM": f"{_FAMILIES}:read_internlm3",
    "InternLMForCausalLM": f"{_FAMILIES}:read_internlm",
    "LLaMAForCausalLM": _read_llama,
    "LlamaForCausalLM": _read_llama,
    "MiniCPMForCausalLM": f"{_FAMILIES}:read_minicpm",
    "MistralForCausalLM": _read_mistral,
    "MixtralForCausalLM": f"{_FAMILIES}:read_mixtral",
    "OPTForCausalLM": _read_opt,
    "Phi3ForCausalLM": f"{_FAMILIES}:read_phi3",
    "QWenLMHeadModel": f"{_FAMILIES}:read_qwen",
    "Qwen2ForCausalLM": _read_qwen2,
    "Qwen2MoeForCausalLM": f"{_FAMILIES}:read_qwen2_moe",
    "Qwen3ForCausalLM": _read_qwen3,
    "Qwen3MoeForCausalLM": f"{_FAMILIES}:read_qwen3_moe",
    "Starcoder2ForCausalLM": f"{_FAMILIES}:read_starcoder2",
    "XverseForCausalLM": _read_llama,
}
# model type → the same, for architectures of other packages that spell config.json as one of these families does
_MODEL_TYPE_READERS: Mapping[str, ArchReader | str] = {
    architecture.removesuffix("ForCausalLM").lower(): reader for architecture, reader in READERS.items()
}


def _without_graphs(reader: ArchReader) -> ArchReader:
    """For classes of other packages: they may compute what cannot be captured."""
    return lambda hf_config: msgspec.structs.replace(reader(hf_config), captures_graphs=False)


def _imported(reader: ArchReader | str) -> ArchReader:
    if not isinstance(reader, str):
        return reader
    imported: ArchReader = plugins.import_object(reader)
    return imported


def _reader(hf_config: Mapping[str, Any]) -> ArchReader:
    architecture = str((hf_config.get("architectures") or [""])[0])
    decoder = decoder_architecture(architecture)
    own = READERS.get(architecture) or READERS.get(decoder)
    if own is not None:
        return _imported(own)
    # searched only for what the table lacks
    found = plugins.entry_points(ENTRY_POINT_GROUP)
    target = found.get(architecture) or found.get(decoder)
    if target is None:
        return _without_graphs(_imported(_MODEL_TYPE_READERS.get(str(hf_config.get("model_type")), read_decoder)))
    try:
        reader: ArchReader = plugins.import_object(target)
    except (ImportError, AttributeError) as error:
        raise ModelLoadError(f"architecture {architecture!r}: cannot import {target}: {error}") from error
    return reader
