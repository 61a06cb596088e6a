"""Tables of valid values for the fields of config.json, generation_config.json and tokenizer_config.json.

Only fields that are used are checked. Invalid values are refused by name before they are used, as a number
of layers determines a loop, and a width an allocation.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from ascend_vllm.args.quantization_files import check_quantization, stated_quantization
from ascend_vllm.args.tables.engine import EngineFlags
from ascend_vllm.config.arch import FULL_ATTENTION, SLIDING_ATTENTION, rope_by_kind, stated_window
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.config.hf_defaults import SUPPORTED
from ascend_vllm.config.model import DTYPE_BYTES
from ascend_vllm.config.quantization import ADVICE, scheme_target
from ascend_vllm.errors import ConfigError, ModelLoadError, UnsupportedFlagError
from ascend_vllm.model_files import read_json, shown

# more than any model has; `check_size` compares with the machine's memory
MAX_LAYERS = 10_000
MAX_WIDTH = 1 << 20
MAX_HEADS = 1 << 16
MAX_INTERMEDIATE = 1 << 24
MAX_VOCABULARY = 1 << 27
MAX_POSITIONS = 1 << 27
MAX_LABELS = 1 << 16
_MAX_INT = (1 << 63) - 1

# Incomplete weight files are reported where they are opened. Only a model that is far too large is refused before
# that, since memory would be allocated for it.
_SLACK = 4
# the least bits of a quantized weight are 2, and every dtype has at least 16
_QUANTIZED_SLACK = 4 * 16 // 2
_SMALL_BYTES = 1 << 30
# upper bound of an NPU's memory, above that of any today
_NPU_BYTES = 256 << 30
# bytes per element of the table of rotary angles
_TABLE_BYTES = 4
# fields that determine the number of parameters
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "ffn_dim", "vocab_size")


@dataclasses.dataclass(frozen=True)
class _Kind:
    """The valid values of a field: a description and a predicate.

    Attributes:
        most: largest valid integer, if integers are valid.
    """

    words: str
    test: Callable[[Any], bool]
    most: int | None = None

    def __or__(self, other: _Kind) -> _Kind:
        return _Kind(f"{self.words} or {other.words}", lambda value: self.test(value) or other.test(value), self.most)

    def wanted(self, value: Any) -> str:
        """What an invalid value should be instead."""
        if self.most is not None and _is_integer(value) and value > self.most:
            return f"at most {self.most}"
        return "a whole number" if self.most is not None and isinstance(value, float) else self.words


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    # an integer may be too large for a float
    return (_is_integer(value) and abs(value) <= _MAX_INT) or (isinstance(value, float) and math.isfinite(value))


def _whole(least: int, most: int) -> _Kind:
    words = "a positive number" if least == 1 else f"a whole number of at least {least}"
    return _Kind(words, lambda value: _is_integer(value) and least <= value <= most, most)


def _number(least: float, most: float = math.inf, *, above: bool = False) -> _Kind:
    end = "" if most == math.inf else f" and at most {most:g}"
    start = f"above {least:g}" if above else f"of at least {least:g}"
    return _Kind(
        f"a number {start}{end}",
        lambda value: _is_number(value) and (value > least if above else value >= least) and value <= most,
    )


def _list_of(kind: _Kind, words: str) -> _Kind:
    return _Kind(f"a list of {words}", lambda value: isinstance(value, list) and all(map(kind.test, value)))


_NULL = _Kind("null", lambda value: value is None)
_TEXT = _Kind("a text", lambda value: isinstance(value, str))
_SWITCH = _Kind("true, false", lambda value: isinstance(value, bool)) | _NULL
_OBJECT = _Kind("an object", lambda value: isinstance(value, dict))
_TEXTS = _list_of(_TEXT, "texts")
_TOKEN_ID = _whole(-1, 2**31 - 1)
_TOKEN_IDS = _TOKEN_ID | _list_of(_TOKEN_ID, "such numbers") | _NULL
_TABLE_OF_TEXTS = _Kind(
    "an object of texts", lambda value: isinstance(value, dict) and all(map(_TEXT.test, value.values()))
)
# the smallest of several lengths is used; some tokenizers have a huge number for "unlimited"
_LENGTH = _number(1) | _NULL

# fields of all models
_COMMON: Mapping[str, _Kind] = {
    "vocab_size": _whole(1, MAX_VOCABULARY),
    "hidden_size": _whole(1, MAX_WIDTH),
    "num_hidden_layers": _whole(1, MAX_LAYERS),
    "num_attention_heads": _whole(1, MAX_HEADS),
    "num_key_value_heads": _whole(1, MAX_HEADS) | _NULL,
    "head_dim": _whole(1, MAX_WIDTH) | _NULL,
    "max_position_embeddings": _whole(1, MAX_POSITIONS) | _NULL,
    "n_positions": _LENGTH,
    "max_target_positions": _LENGTH,
    "max_seq_len": _LENGTH,
    "seq_length": _LENGTH,
    "model_max_length": _LENGTH,
    "max_sequence_length": _LENGTH,
    "max_seq_length": _LENGTH,
    "seq_len": _LENGTH,
    "dtype": _TEXT | _NULL,
    "torch_dtype": _TEXT | _NULL,
    "eos_token_id": _TOKEN_IDS,
    "quantization_config": _OBJECT | _NULL,
    "tie_word_embeddings": _SWITCH,
    # 0 in Qwen2's mixture-of-experts models: no window
    "sliding_window": _whole(0, 2**31 - 1) | _NULL,
    "use_sliding_window": _SWITCH,
    "is_causal": _SWITCH,
    "use_bidirectional_attention": _SWITCH | _TEXT,
    "num_experts": _whole(0, _MAX_INT) | _NULL,
    "num_local_experts": _whole(0, _MAX_INT) | _NULL,
    "n_routed_experts": _whole(0, _MAX_INT) | _NULL,
    "num_labels": _whole(1, MAX_LABELS) | _NULL,
    "id2label": _TABLE_OF_TEXTS | _NULL,
    "problem_type": _TEXT | _NULL,
    "sentence_transformers": _OBJECT | _NULL,
    "matryoshka_dimensions": _list_of(_whole(1, MAX_WIDTH), f"positive numbers up to {MAX_WIDTH}") | _NULL,
    "rope_parameters": _OBJECT | _NULL,
    "partial_rotary_factor": _number(0, 1, above=True) | _NULL,
}
# fields of the built-in families, with the same meaning in all of them
_OF_FAMILIES: Mapping[str, _Kind] = {
    "max_position_embeddings": _whole(1, MAX_POSITIONS),
    "intermediate_size": _whole(1, MAX_INTERMEDIATE),
    "ffn_dim": _whole(1, MAX_INTERMEDIATE),
    "word_embed_proj_dim": _whole(1, MAX_WIDTH) | _NULL,
    "hidden_act": _TEXT,
    "activation_function": _TEXT,
    "rms_norm_eps": _number(0),
    "attention_bias": _SWITCH,
    "mlp_bias": _SWITCH,
    "enable_bias": _SWITCH,
    "do_layer_norm_before": _SWITCH,
    "layer_norm_elementwise_affine": _SWITCH,
    "_remove_final_layer_norm": _SWITCH,
    "max_window_layers": _whole(0, _MAX_INT) | _NULL,
    "query_pre_attn_scalar": _number(0, above=True),
    "attn_logit_softcapping": _number(0, above=True) | _NULL,
    "final_logit_softcapping": _number(0, above=True) | _NULL,
    "rope_local_base_freq": _number(1, above=True),
    "sliding_window_pattern": _whole(1, MAX_LAYERS),
    "original_max_position_embeddings": _whole(1, MAX_POSITIONS),
    "multi_query_group_num": _whole(1, MAX_HEADS),
    "rope_ratio": _number(0, above=True),
    "rotary_pct": _number(0, 1, above=True),
    "num_ln_in_parallel_attn": _whole(1, 2) | _NULL,
    "scale_emb": _number(0, above=True),
    "scale_depth": _number(0, above=True),
    "dim_model_base": _number(0, above=True),
    "embedding_multiplier": _number(0, above=True),
    "residual_multiplier": _number(0, above=True),
    "attention_multiplier": _number(0, above=True),
    "logits_scaling": _number(0, above=True),
    "rotary": _OBJECT | _NULL,
    "layer_types": _TEXTS | _NULL,
    "num_experts_per_tok": _whole(1, _MAX_INT),
    "moe_intermediate_size": _whole(1, MAX_INTERMEDIATE),
    "shared_expert_intermediate_size": _whole(0, MAX_INTERMEDIATE),
    "decoder_sparse_step": _whole(1, MAX_LAYERS),
    "mlp_only_layers": _list_of(_whole(0, MAX_LAYERS), "layers") | _NULL,
    "norm_topk_prob": _SWITCH,
    "qkv_bias": _SWITCH,
    "q_lora_rank": _whole(1, MAX_WIDTH) | _NULL,
    "kv_lora_rank": _whole(1, MAX_WIDTH),
    "qk_nope_head_dim": _whole(1, MAX_WIDTH),
    "qk_rope_head_dim": _whole(2, MAX_WIDTH),
    "v_head_dim": _whole(1, MAX_WIDTH),
    "rope_interleave": _SWITCH,
    "first_k_dense_replace": _whole(0, MAX_LAYERS),
    "moe_layer_freq": _whole(1, MAX_LAYERS),
    "n_shared_experts": _whole(0, MAX_WIDTH) | _NULL,
    "n_group": _whole(1, _MAX_INT) | _NULL,
    "topk_group": _whole(1, _MAX_INT) | _NULL,
    "routed_scaling_factor": _number(0, above=True),
}
# both spellings of rotary parameters, before they are merged
_ROPE_SPELLINGS: Mapping[str, _Kind] = {
    "rope_parameters": _OBJECT | _NULL,
    "rope_scaling": _OBJECT | _NULL,
    "rope_theta": _number(1, above=True) | _NULL,
}
_FACTOR = _number(0, 1e6, above=True) | _NULL
_FACTORS = _list_of(_number(0, above=True), "numbers above 0")
_ROPE: Mapping[str, _Kind] = {
    "rope_type": _TEXT,
    "rope_theta": _number(1, above=True),
    "partial_rotary_factor": _number(0, 1, above=True) | _NULL,
    "factor": _FACTOR,
    "original_max_position_embeddings": _number(1, MAX_POSITIONS) | _NULL,
    "beta_fast": _FACTOR,
    "beta_slow": _FACTOR,
    "low_freq_factor": _FACTOR,
    "high_freq_factor": _FACTOR,
    "mscale": _number(0, 1e6) | _NULL,
    "mscale_all_dim": _number(0, 1e6) | _NULL,
    "attention_factor": _FACTOR,
    "truncate": _SWITCH,
    "short_factor": _FACTORS,
    "long_factor": _FACTORS,
}
GENERATION: Mapping[str, _Kind] = {
    "temperature": _number(0) | _NULL,
    "top_p": _number(0, 1, above=True) | _NULL,
    "top_k": _whole(-1, _MAX_INT) | _NULL,
    "min_p": _number(0, 1) | _NULL,
    "repetition_penalty": _number(0, above=True) | _NULL,
    "max_new_tokens": _whole(1, _MAX_INT) | _NULL,
    "eos_token_id": _TOKEN_IDS,
}


def check_fields(where: object, values: Mapping[str, Any], kinds: Mapping[str, _Kind], prefix: str = "") -> None:
    """Checks the fields of a file, with overrides applied, by a table.

    Raises:
        ModelLoadError: names the file, `where`, and the first field with an invalid value.
    """
    for name, kind in kinds.items():
        if name in values and not kind.test(values[name]):
            raise ModelLoadError(
                f"{where}: '{prefix}{name}' must be {kind.wanted(values[name])}, got {shown(values[name])}"
            )


def check_rope_spellings(path: pathlib.Path, config: Mapping[str, Any]) -> None:
    """Check the rotary parameters of config.json in either spelling.

    Raises:
        ModelLoadError: names the file and the field.
    """
    check_fields(path, config, _ROPE_SPELLINGS)
    for name in ("rope_parameters", "rope_scaling"):
        check_fields(path, config.get(name) or {}, {"rope_theta": _ROPE_SPELLINGS["rope_theta"]}, f"{name}.")


def check_hf_config(path: pathlib.Path, config: Mapping[str, Any], *, is_known: bool) -> None:
    """Check the fields of config.json, with overrides applied and rotary parameters merged.

    Args:
        path: the file's path, for messages.
        config: the file's values.
        is_known: whether the model's family is built in.

    Raises:
        ModelLoadError: names the file and the field.
    """
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ModelLoadError(
            f"{path}: 'architectures' must name the model's class, for example [\"Qwen2ForCausalLM\"]"
        )
    required = dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"))
    check_fields(path, required | dict(config), _COMMON)
    if is_known:
        check_fields(path, config, _OF_FAMILIES)
        kinds, count = config.get("layer_types"), config["num_hidden_layers"]
        if kinds is not None and len(kinds) < count:
            raise ModelLoadError(f"{path}: 'layer_types' names {len(kinds)} layers of {count}")
        for kind in kinds or ():
            if kind not in (FULL_ATTENTION, SLIDING_ATTENTION):
                raise ModelLoadError(f"{path}: layer_types has {kind!r}, which is not supported")
        for name, values in SUPPORTED.get(str(config.get("model_type")), {}).items():
            if name in config and config[name] not in values:
                raise ModelLoadError(f"{path}: {name} {shown(config[name])} is not supported")
    parameters = config.get("rope_parameters") or {}
    by_kind = rope_by_kind(parameters)
    check_fields(path, by_kind, dict.fromkeys(by_kind, _OBJECT), "rope_parameters.")
    prefixed = {f"rope_parameters.{kind}.": rope for kind, rope in by_kind.items()}
    for prefix, rope in (prefixed or {"rope_parameters.": parameters}).items():
        check_fields(path, rope, _ROPE, prefix)
        # the range in which the scaling of frequencies changes; the layer reports missing values
        low, high = rope.get("low_freq_factor"), rope.get("high_freq_factor")
        if low is not None and high is not None and high <= low:
            raise ModelLoadError(f"{path}: '{prefix}high_freq_factor' ({high}) must be above low_freq_factor ({low})")


def check_size(config: EngineConfig, hf_config: Mapping[str, Any], weight_bytes: int) -> None:
    """Refuse a model much larger than its weight files or, without files, than the machine's memory.

    Args:
        config: the engine's.
        hf_config: config.json of the model, for the names in the message.
        weight_bytes: size of the weight files; 0: there are none.

    Raises:
        ModelLoadError: with the numbers of config.json that determine the size.
    """
    model, parallel = config.model, config.parallel
    declared, memory = model.arch.num_parameters, psutil.virtual_memory().total
    table = model.max_model_len * model.arch.head_size * _TABLE_BYTES
    if model.arch.rope is not None and table > memory:
        raise ModelLoadError(
            f"{model.model}/config.json: rotary positions up to max_position_embeddings or --max-model-len "
            f"({model.max_model_len}) take {table} bytes, but the machine has {memory}"
        )
    stated = ", ".join(f"{name} {hf_config[name]}" for name in _SIZES if name in hf_config)
    finding = f"{model.model}/config.json: {stated} mean {declared} parameters or more"
    if config.load.load_format != "dummy":
        # every dtype has at least two bytes
        slack = _SLACK if model.arch.quantization is None else _QUANTIZED_SLACK
        if weight_bytes and 2 * declared > max(slack * weight_bytes, _SMALL_BYTES):
            raise ModelLoadError(
                f"{finding}, but the weight files beside it hold {weight_bytes} bytes: it is another model's, or "
                "they are not complete"
            )
        return
    if config.device.device == "npu":
        room, what = parallel.world_size * _NPU_BYTES, f"{parallel.world_size} devices have no room for that"
    else:
        room, what = memory * parallel.nnodes, f"the machine has {memory} bytes of memory"
    if declared * DTYPE_BYTES[model.dtype] > room:
        raise ModelLoadError(f"{finding}, but {what}")


def check_head_size(hf_config: Mapping[str, Any]) -> None:
    """Refuse a number of heads that does not divide hidden_size.

    Raises:
        ConfigError: it does not, and config.json has no head_dim.
    """
    hidden_size, num_heads = hf_config["hidden_size"], hf_config["num_attention_heads"]
    if hidden_size % num_heads and not hf_config.get("head_dim"):
        raise ConfigError(
            f"config.json: hidden_size ({hidden_size}) must be divisible by num_attention_heads ({num_heads}) unless "
            "head_dim is given."
        )


# ---- checks of flags, before config.json is read and checked -----------------------------------------------------


def _config_at(model: str) -> dict[str, Any]:
    """config.json of a local directory; {} if it cannot be read."""
    try:
        return read_json(pathlib.Path(model).expanduser() / "config.json", dict)
    except ModelLoadError:
        return {}


def predicts(draft_model: str) -> bool:
    """Whether a draft model's config.json has its number of draft tokens."""
    return num_predicted(draft_model) is not None


def num_predicted(draft_model: str) -> int | None:
    """The number of draft tokens in a draft model's config.json; None: it has none."""
    number = _config_at(draft_model).get("n_predict")
    return number if isinstance(number, int) else None


def model_type_of(model: str) -> str:
    """`model_type` in the config.json of a directory; "": there is none."""
    return str(_config_at(model).get("model_type", ""))


def eagle_version(model: str) -> int | None:
    """1 or 3 if the config.json of a directory is that of an EAGLE head, whatever the directory is called; else None.

    Only a head of EAGLE-3 drafts another vocabulary than it reads; only one of EAGLE-1 says whether its first layer
    has a bias.
    """
    config = _config_at(model)
    if config.get("model_type") == "eagle":
        return 1
    if "draft_vocab_size" in config:
        return 3
    return 1 if config.get("num_hidden_layers") == 1 and "bias" in config else None


def check_advice(flag: str, quantization: str | None) -> None:
    """Checks the value of a flag that names the quantization of a checkpoint.

    Raises:
        UnsupportedFlagError: a quantization of vLLM that there is not here.
    """
    if quantization in ADVICE and scheme_target(quantization) is None:
        raise UnsupportedFlagError(f"{flag} {quantization}", ADVICE[quantization])


def check_flags(args: EngineFlags) -> None:
    """Checks flags that the model's config.json contradicts.

    Raises:
        ConfigError: the devices cannot share the model's heads evenly, or its quantization is another one.
    """
    config = _config_at(args.model)
    heads = config.get("num_attention_heads")
    if isinstance(heads, int) and heads % args.tensor_parallel_size:
        raise ConfigError(
            f"Total number of attention heads ({heads}) must be divisible by tensor parallel size "
            f"({args.tensor_parallel_size})."
        )
    if args.quantization is not None:
        directory = pathlib.Path(args.model).expanduser()
        check_quantization(args.quantization, stated_quantization(directory, config))
        check_advice("--quantization", args.quantization)
    needs_no_window = (
        not args.use_v2_block_manager and args.enable_chunked_prefill and not args.disable_sliding_window
    )
    # block manager v1, if requested, does not support sliding windows with chunked prefill
    has_window = isinstance(config.get("sliding_window"), int)
    if needs_no_window and has_window and stated_window(config) is not None:
        raise ConfigError(
            "Chunked prefill is not supported with sliding window. Set --disable-sliding-window to disable sliding "
            "window."
        )
