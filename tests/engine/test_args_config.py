"""EngineArgs.create_engine_config on directories with nothing but a config.json."""

from __future__ import annotations

import json
import logging
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import psutil
import pytest
import torch
import transformers

from ascend_vllm.args import limits
from ascend_vllm.args.checks import check_block_size, check_num_seqs
from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.args.hf_files import read_hf_config
from ascend_vllm.config.arch import LayerPlan
from ascend_vllm.config.cache import CacheConfig
from ascend_vllm.config.engine import EngineConfig, ParallelConfig
from ascend_vllm.config.lora import LoRAConfig
from ascend_vllm.config.scheduler import SchedulerConfig
from ascend_vllm.errors import ConfigError, ModelLoadError, UnsupportedFlagError
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.models.loader import load_model
from ascend_vllm.platforms.facts import CPU, NPU
from tests.plain_arch import make_arch
from tests.tiny_models import TINY_MODELS, tiny_model

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
MISTRAL = QWEN2 | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 1024}

MakeModel = Callable[..., str]


@pytest.fixture
def make_model(tmp_path: pathlib.Path) -> MakeModel:
    """Writes a model directory: `make_model(config, generation_config=None)`."""

    def make(config: dict[str, Any] | str = QWEN2, generation_config: dict[str, Any] | str | None = None) -> str:
        directory = tmp_path / "model"
        directory.mkdir(exist_ok=True)
        for name, content in (("config.json", config), ("generation_config.json", generation_config)):
            if content is not None:
                text = content if isinstance(content, str) else json.dumps(content)
                (directory / name).write_text(text)
        return str(directory)

    return make


def config_of(model: str, **values: Any) -> EngineConfig:
    return EngineArgs(model=model, device="cpu", **values).create_engine_config()


# ---- the whole -----------------------------------------------------------------------------------------------


def test_defaults(make_model: MakeModel) -> None:
    directory = make_model()
    config = config_of(directory)
    assert config.model.model == config.model.tokenizer == directory
    assert config.model.served_model_names == (directory,)
    assert (config.model.architecture, config.model.dtype) == ("Qwen2ForCausalLM", "bfloat16")
    assert config.model.max_model_len == config.scheduler.max_model_len == 4096
    assert config.scheduler.max_num_batched_tokens == 4096
    assert config.scheduler.max_num_seqs == 256
    assert config.scheduler.enable_chunked_prefill is False
    assert config.scheduler == SchedulerConfig(
        4096,
        256,
        4096,
        async_scheduling=True,
        max_decode_pause_s=0.25,
        max_scored_tokens=2**23 // config.model.vocab_size,
        mixed_steps=True,
    )
    assert config.cache == CacheConfig(CPU.default_block_size)
    assert config.device.device == "cpu"
    assert config.observability.log_stats is True
    assert config.load.ignore_patterns == ("original/**/*",)


def test_values_reach_their_section(make_model: MakeModel) -> None:
    config = config_of(
        make_model(),
        served_model_name=["a", "b"],
        max_model_len=1000,
        max_num_seqs=8,
        block_size=64,
        kv_cache_memory_bytes="1M",
        num_gpu_blocks_override=9,
        max_num_queued_reqs=5,
        seed=7,
        max_logprobs=3,
        logprobs_mode="processed_logprobs",
        load_format="dummy",
        ignore_patterns=["x*"],
        use_tqdm_on_load=False,
        quantize_lm_head=True,
        cpu_int8_activations=True,
        disable_log_stats=True,
        swap_space=0,
        gpu_memory_utilization=0.5,
        skip_tokenizer_init=True,
        enforce_eager=True,
    )
    model, cache, scheduler = config.model, config.cache, config.scheduler
    assert model.served_model_names == ("a", "b")
    assert (model.seed, model.max_logprobs, model.logprobs_mode) == (7, 3, "processed_logprobs")
    assert model.skip_tokenizer_init and model.enforce_eager
    assert (cache.block_size, cache.kv_cache_memory_bytes, cache.num_gpu_blocks_override) == (64, 2**20, 9)
    assert (cache.swap_space_gib, cache.gpu_memory_utilization) == (0.0, 0.5)
    assert (scheduler.max_num_seqs, scheduler.max_num_queued_reqs, scheduler.max_model_len) == (8, 5, 1000)
    assert scheduler.max_num_batched_tokens == 2048  # never below that without --max-num-batched-tokens
    assert (config.load.load_format, config.load.ignore_patterns, config.load.use_tqdm) == ("dummy", ("x*",), False)
    assert config.load.quantize_lm_head and config.load.cpu_int8_activations
    assert config.observability.log_stats is False


def test_scheduling_flags_reach_their_section(make_model: MakeModel) -> None:
    config = config_of(
        make_model(),
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        num_scheduler_steps=8,
        multi_step_stream_outputs=False,
        scheduling_policy="priority",
        preemption_mode="swap",
        scheduler_delay_factor=1,
        max_num_partial_prefills=4,
        max_long_partial_prefills=2,
        long_prefill_token_threshold=100,
        disable_async_output_proc=True,
        queue_timeout_s=3,
    )
    assert config.cache.enable_prefix_caching is True
    scheduler = config.scheduler
    assert (scheduler.num_scheduler_steps, scheduler.multi_step_stream_outputs) == (8, False)
    assert (scheduler.policy, scheduler.preemption_mode, scheduler.delay_factor) == ("priority", "swap", 1.0)
    assert (scheduler.max_num_partial_prefills, scheduler.max_long_partial_prefills) == (4, 2)
    assert scheduler.long_prefill_token_threshold == 100
    assert scheduler.async_scheduling is False
    assert scheduler.queue_timeout_s == 3.0


@pytest.mark.parametrize(
    ("given", "pause_s"),
    [
        # of whole prompts beside answers
        ({}, 0.25),
        ({"enable_chunked_prefill": False}, None),
        ({"enable_chunked_prefill": True}, 0.25),
        ({"enable_chunked_prefill": True, "max_decode_pause_ms": 100}, 0.1),
        ({"enable_chunked_prefill": True, "max_decode_pause_ms": 0}, None),
        # whoever chooses the size of pieces, or several steps at once, has chosen the pause
        ({"enable_chunked_prefill": True, "max_num_batched_tokens": 512}, None),
        ({"enable_chunked_prefill": True, "num_scheduler_steps": 8}, None),
        ({"enable_chunked_prefill": True, "max_num_batched_tokens": 512, "max_decode_pause_ms": 50}, 0.05),
    ],
    ids=str,
)
def test_the_pause_of_answers(make_model: MakeModel, given: dict[str, Any], pause_s: float | None) -> None:
    assert config_of(make_model(), **given).scheduler.max_decode_pause_s == pause_s


@pytest.mark.parametrize(
    ("given", "mixed"),
    [
        ({}, True),
        ({"max_num_batched_tokens": 4096}, True),
        ({"enable_chunked_prefill": False}, False),
        ({"enable_chunked_prefill": True}, False),
        ({"num_scheduler_steps": 8}, False),
    ],
    ids=str,
)
def test_whole_prompts_share_steps_unless_asked_otherwise(
    make_model: MakeModel, given: dict[str, Any], mixed: bool
) -> None:
    assert config_of(make_model(), **given).scheduler.mixed_steps is mixed


@pytest.mark.parametrize(
    ("partial", "requested", "threshold"), [(1, 0, 0), (1, 50, 50), (2, 0, 163), (2, 50, 50)], ids=str
)
def test_where_a_prompt_is_long(partial: int, requested: int, threshold: int, make_model: MakeModel) -> None:
    values = {"max_num_partial_prefills": partial, "long_prefill_token_threshold": requested}
    config = config_of(make_model(), enable_chunked_prefill=True, **values)
    # 4 percent of 4096 is 163.84
    assert config.scheduler.long_prefill_token_threshold == threshold


def test_config_survives_the_way_to_the_core(make_model: MakeModel) -> None:
    config = config_of(make_model(generation_config={"eos_token_id": [1, 2], "temperature": 0.7}))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


def test_torch_is_not_imported(make_model: MakeModel) -> None:
    program = (
        "import sys\n"
        "from ascend_vllm.args.engine_args import EngineArgs\n"
        "EngineArgs(model=sys.argv[1]).create_engine_config()\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program, make_model()], check=True, timeout=60)


def test_model_directory_keeps_the_typed_name(make_model: MakeModel) -> None:
    directory = make_model()
    args = EngineArgs(model="demo", device="cpu").with_model_directory(directory)
    assert args.create_engine_config().model.served_model_names == ("demo",)
    named = EngineArgs(model="demo", served_model_name="x", device="cpu").with_model_directory(directory)
    assert named.create_engine_config().model.served_model_names == ("x",)


def test_other_tokenizer(make_model: MakeModel, tmp_path: pathlib.Path) -> None:
    other = tmp_path / "tokenizer"
    other.mkdir()
    assert config_of(make_model(), tokenizer=str(other)).model.tokenizer == str(other)


# ---- config.json ---------------------------------------------------------------------------------------------

HF_CLASSES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "opt": transformers.OPTConfig,
}
# compared by what the properties of ModelConfig make of them
DERIVED = ("sliding_window", "num_key_value_heads", "head_dim")
VARIANTS: list[dict[str, Any]] = [
    {},
    {"hidden_size": 128, "num_attention_heads": 8, "num_hidden_layers": 3, "vocab_size": 512},
    {"rope_theta": 5e5, "max_position_embeddings": 1024},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "rope_theta": 2e4},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}},
    {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
    {"sliding_window": None},
    {"num_key_value_heads": None, "head_dim": None},
    {"num_key_value_heads": 4, "head_dim": 96},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("model_type", HF_CLASSES)
def test_families_are_read_as_transformers_reads_them(
    model_type: str, variant: dict[str, Any], make_model: MakeModel
) -> None:
    variant = dict(variant)
    if model_type == "qwen3" and "head_dim" in variant:
        # transformers computes Qwen3's head size only where the file leaves it out
        variant["head_dim"] = variant["head_dim"] or 32
    if model_type == "mistral" and variant.get("num_key_value_heads", 1) is None:
        del variant["num_key_value_heads"]  # transformers refuses null for this family
    if model_type == "opt":
        # it has neither of them
        absent = ("rope", "num_key_value_heads", "head_dim")
        variant = {name: value for name, value in variant.items() if not name.startswith(absent)}
    raw = {"architectures": ["X"], "model_type": model_type} | variant
    ours = config_of(make_model(raw), hf_overrides={}).model
    filled = read_hf_config(ours.model)
    theirs = transformers.AutoConfig.from_pretrained(ours.model)
    assert isinstance(theirs, HF_CLASSES[model_type])
    for name, value in theirs.to_dict().items():
        if name in filled and name not in (*DERIVED, "rope_parameters"):
            assert filled[name] == value, name
    if model_type != "opt":
        # transformers keeps the older name of the type beside the newer one
        rope = {name: value for name, value in theirs.rope_parameters.items() if name != "type"}
        assert filled["rope_parameters"] == rope
        assert ours.arch.num_kv_heads == theirs.num_key_value_heads
    assert ours.arch.sliding_window == getattr(theirs, "sliding_window", None)
    head_size = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.arch.head_size == head_size


def test_every_name_transformers_fills_in_is_filled_in(make_model: MakeModel) -> None:
    # what only training, or the printing of a config, uses
    unused = {
        *transformers.PretrainedConfig().to_dict(),
        "initializer_range",
        "init_std",
        "attention_dropout",
        "dropout",
        "layerdrop",
        "use_cache",
        "pretraining_tp",
        "layer_types",
        "num_key_value_heads",
        "head_dim",
        "word_embed_proj_dim",
        "model_type",
    }
    for model_type, hf_class in HF_CLASSES.items():
        filled = read_hf_config(make_model({"architectures": ["X"], "model_type": model_type}))
        expected = set(hf_class().to_dict()) - unused
        if model_type == "opt":
            expected -= {"rope_parameters"}
        assert expected <= set(filled), model_type


def test_unknown_family_goes_through_transformers(make_model: MakeModel) -> None:
    raw = QWEN2 | {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
    config = config_of(make_model(raw))
    assert config.model.architecture == "Olmo2ForCausalLM"
    assert config.model.arch.norm_eps == pytest.approx(1e-5)
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{broken", "config.json is not JSON"),
        ("[1]", "config.json must hold a JSON object, not a list"),
        (QWEN2 | {"architectures": None}, "'architectures' must name the model's class"),
        (QWEN2 | {"architectures": []}, "'architectures' must name the model's class"),
        (QWEN2 | {"hidden_size": 0}, "'hidden_size' must be a positive number, got 0"),
        (QWEN2 | {"num_hidden_layers": "two"}, "'num_hidden_layers' must be a positive number, got 'two'"),
        (QWEN2 | {"model_type": "never-heard-of"}, "model type 'never-heard-of' cannot be read"),
        ({"architectures": ["X"]}, "model type None cannot be read"),
    ],
)
def test_broken_config_json(content: dict[str, Any] | str, message: str, make_model: MakeModel) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        config_of(make_model(content))
    assert "config.json" in str(caught.value)


def test_code_of_the_model_needs_trust(make_model: MakeModel) -> None:
    raw = QWEN2 | {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    directory = make_model(raw)
    marker = pathlib.Path(directory).with_name("ran")
    code = (
        f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"
        "from transformers import PretrainedConfig\n"
        "class OwnConfig(PretrainedConfig):\n"
        "    model_type = 'own'\n"
        "    def __init__(self, twice=0, **kwargs):\n"
        "        super().__init__(**kwargs)\n"
        "        self.doubled = 2 * twice\n"
    )
    (pathlib.Path(directory) / "configuration_own.py").write_text(code)
    with pytest.raises(ConfigError, match="using the `--trust-remote-code` flag in the CLI"):
        config_of(directory)
    # a built-in family is read without the code
    make_model(QWEN2 | {"auto_map": raw["auto_map"]})
    assert config_of(directory).model.architecture == "Qwen2ForCausalLM"
    assert not marker.exists()
    make_model(raw | {"twice": 21})
    trusted = config_of(directory, trust_remote_code=True)
    assert trusted.model.trust_remote_code
    assert read_hf_config(directory, trust_remote_code=True)["doubled"] == 42
    assert marker.exists()


def test_missing_files(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"--model '/no/such/dir': there is no such directory"):
        config_of("/no/such/dir")
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        config_of(str(tmp_path))
    for name, words in (("model.bin", "is a file; give the directory it is in"), ("q4.gguf", "files are for llama")):
        file = tmp_path / name
        file.write_text("")
        with pytest.raises(ConfigError, match=words):
            config_of(str(file))


def test_hub_model_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="'some/model' is not a directory, and getting it from") as caught:
        config_of("some/model", download_dir=str(tmp_path))
    assert "local directory with config.json" in str(caught.value)


def test_hub_model_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(QWEN2))
    (snapshot / "model.safetensors").write_text("")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    config = config_of("some/model", download_dir=str(tmp_path), revision="main")
    assert config.model.model == str(snapshot)
    assert config.model.served_model_names == ("some/model",)
    assert config.model.source == "some/model"


def test_a_prepared_model_is_named_as_it_was_typed(make_model: MakeModel) -> None:
    config = EngineArgs(model="demo").with_model_directory(make_model()).create_engine_config()
    assert (config.model.source, config.model.served_model_names) == ("demo", ("demo",))


def test_revisions_need_the_hub(make_model: MakeModel) -> None:
    directory = make_model()
    with pytest.raises(ConfigError, match="--revision chooses a version on the Hugging Face hub"):
        config_of(directory, revision="main")
    with pytest.raises(ConfigError, match="--tokenizer-revision needs --tokenizer"):
        config_of(directory, tokenizer_revision="main")
    with pytest.raises(ConfigError, match="--tokenizer-revision chooses a version"):
        config_of(directory, tokenizer=str(pathlib.Path(directory).parent), tokenizer_revision="main")


# ---- overrides -----------------------------------------------------------------------------------------------


def test_rope_flags(make_model: MakeModel) -> None:
    directory = make_model(QWEN2 | {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 8.0}})

    def rope(**flags: Any) -> dict[str, Any]:
        found = config_of(directory, **flags).model.arch.rope
        assert found is not None
        assert (found.rope_type, found.theta) == (found.parameters["rope_type"], found.parameters["rope_theta"])
        return found.parameters

    assert rope() == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    assert rope(rope_scaling=scaling) == {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6}
    assert config_of(directory, rope_scaling=scaling).model.max_model_len == 8192
    assert rope(rope_theta=5.0) == {"rope_type": "linear", "factor": 8.0, "rope_theta": 5.0}


def test_hf_overrides(make_model: MakeModel) -> None:
    overrides = {"max_position_embeddings": 512, "rope_theta": 3.0, "nested": {"a": 1}}
    directory = make_model(QWEN2 | {"nested": {"a": 0, "b": 2}})
    model = config_of(directory, hf_overrides=overrides).model
    assert model.max_model_len == 512
    assert model.arch.rope is not None
    assert model.arch.rope.theta == 3.0
    assert read_hf_config(directory, overrides=overrides)["nested"] == {"a": 1, "b": 2}


def test_generation_config(make_model: MakeModel, tmp_path: pathlib.Path) -> None:
    content = {"temperature": 0.6, "eos_token_id": [5, 6], "transformers_version": "5.0"}
    directory = make_model(generation_config=content)
    assert config_of(directory).model.generation_config == {"temperature": 0.6, "eos_token_id": [5, 6]}
    assert config_of(directory, generation_config="vllm").model.generation_config == {"eos_token_id": [5, 6]}
    changed = config_of(directory, override_generation_config={"temperature": 0.1, "top_k": 4}).model
    assert changed.generation_config == {"temperature": 0.1, "eos_token_id": [5, 6], "top_k": 4}
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ConfigError, match=r"--generation-config .*there is no"):
        config_of(directory, generation_config=str(other))
    (other / "generation_config.json").write_text('{"top_p": 0.5}')
    assert config_of(directory, generation_config=str(other)).model.generation_config == {"top_p": 0.5}
    make_model(generation_config="{")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json is not JSON"):
        config_of(directory)


# ---- dtype ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "requested", "dtype"),
    [
        ("float32", "auto", "bfloat16"),
        (None, "auto", "bfloat16"),
        ("float16", "auto", "float16"),
        ("bfloat16", "auto", "bfloat16"),
        ("bfloat16", "half", "float16"),
        ("bfloat16", "float", "float32"),
        ("float32", "float32", "float32"),
        ("float32", "torch.float32", "float32"),
    ],
)
def test_dtype(stored: str | None, requested: str, dtype: str, make_model: MakeModel) -> None:
    assert config_of(make_model(QWEN2 | {"torch_dtype": stored}), dtype=requested).model.dtype == dtype
    new_spelling = {key: value for key, value in QWEN2.items() if key != "torch_dtype"} | {"dtype": stored}
    assert config_of(make_model(new_spelling), dtype=requested).model.dtype == dtype


def test_dtype_of_python_callers(make_model: MakeModel) -> None:
    assert config_of(make_model(), dtype=torch.float32).model.dtype == "float32"


def test_wrong_dtype(make_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match=r"^Unknown dtype: int3$"):
        config_of(make_model(), dtype="int3")
    with pytest.raises(ConfigError, match="dtype 'float8_e4m3fn' is not supported; choose one with --dtype"):
        config_of(make_model(QWEN2 | {"torch_dtype": "float8_e4m3fn"}))
    with pytest.raises(ConfigError, match="--dtype float32 does not run on npu; possible are bfloat16, float16"):
        limits.resolve_dtype("float32", "bfloat16", NPU)


# ---- lengths and budgets -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 4096),
        ({"seq_length": 300}, 300),
        ({"model_max_length": 10_000}, 4096),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 8192),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
            4096,
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 16384),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 512,
                }
            },
            4096,
        ),
    ],
    ids=str,
)
def test_derived_max_model_len(changes: dict[str, Any], expected: int, make_model: MakeModel) -> None:
    assert config_of(make_model(QWEN2 | changes)).model.max_model_len == expected


def test_too_long_max_model_len(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_model()
    with pytest.raises(ConfigError) as caught:
        config_of(directory, max_model_len=4097)
    assert str(caught.value) == (
        "User-specified max_model_len (4097) is greater than the derived max_model_len "
        "(max_position_embeddings=4096 or model_max_length=None in model's config.json). This may lead to incorrect "
        "model outputs or CUDA errors. To allow overriding this maximum, set the env var "
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
    )
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert config_of(directory, max_model_len=4097).model.max_model_len == 4097


def test_model_without_a_stated_length() -> None:
    assert limits.resolve_max_model_len(None, make_arch()) == 2048
    assert limits.resolve_max_model_len(9999, make_arch()) == 9999


def test_max_model_len_auto_fits_the_cache(make_model: MakeModel) -> None:
    directory = make_model()
    # K and V of 2 layers, 2 heads of 16 elements, 2 bytes each: 256 bytes per token
    for text in ("auto", -1):
        config = config_of(directory, max_model_len=text, kv_cache_memory_bytes=256 * 1000, block_size=16)
        assert config.model.max_model_len == config.scheduler.max_model_len
        assert 800 <= config.model.max_model_len <= 1000
        assert config.model.max_model_len % 16 == 0
    assert config_of(directory, max_model_len="auto").model.max_model_len == 4096
    blocks = config_of(directory, max_model_len="auto", num_gpu_blocks_override=3, block_size=32)
    assert blocks.model.max_model_len == 96
    with pytest.raises(ConfigError, match="no memory for a KV cache of even one block"):
        config_of(directory, max_model_len="auto", kv_cache_memory_bytes=1000)


@pytest.mark.parametrize(("value", "message"), [("4x", "is not a count"), (0, "--max-model-len must be at least 1")])
def test_wrong_max_model_len(value: int | str, message: str, make_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(make_model(), max_model_len=value)


@pytest.mark.parametrize(
    ("values", "budget"),
    [
        ({}, 4096),
        ({"max_model_len": 100}, 2048),
        ({"max_model_len": 100, "max_num_seqs": 3000}, 3000),
        ({"enable_chunked_prefill": True}, 512),
        ({"enable_chunked_prefill": True, "max_num_seqs": 600}, 600),
        ({"max_num_batched_tokens": "8k"}, 8000),
        ({"num_scheduler_steps": 8}, 4096),
        ({"num_scheduler_steps": 8, "enable_chunked_prefill": True}, 4096),
        ({"num_scheduler_steps": 8, "enable_chunked_prefill": True, "max_model_len": 100}, 2048),
        ({"enable_chunked_prefill": True, "enable_prefix_caching": True}, 512),
        # a budget nobody asked for is a whole number of blocks
        ({"enable_chunked_prefill": True, "enable_prefix_caching": True, "max_num_seqs": 600}, 608),
    ],
    ids=str,
)
def test_step_budget(values: dict[str, Any], budget: int, make_model: MakeModel) -> None:
    assert config_of(make_model(), **values).scheduler.max_num_batched_tokens == budget


def test_very_long_contexts_are_chunked(make_model: MakeModel) -> None:
    long = make_model(QWEN2 | {"max_position_embeddings": 65536})
    assert config_of(long).scheduler.enable_chunked_prefill is True
    assert config_of(long, enable_chunked_prefill=False).scheduler.max_num_batched_tokens == 65536
    assert config_of(long, max_model_len=32768).scheduler.enable_chunked_prefill is False
    windowed = make_model(MISTRAL | {"max_position_embeddings": 65536})
    assert config_of(windowed).scheduler.enable_chunked_prefill is False


def test_disable_sliding_window(make_model: MakeModel) -> None:
    directory = make_model(MISTRAL)
    assert config_of(directory).model.arch.common_window == 1024
    capped = config_of(directory, disable_sliding_window=True).model
    assert capped.max_model_len == 1024
    assert (capped.arch.sliding_window, capped.arch.common_window) == (None, None)
    with pytest.raises(ConfigError, match=r"derived max_model_len \(sliding_window=1024"):
        config_of(directory, disable_sliding_window=True, max_model_len=2000)
    qwen = make_model(
        QWEN2
        | {
            "use_sliding_window": True,
            "sliding_window": 256,
            "layer_types": ["full_attention", "sliding_attention"],
        }
    )
    changed = config_of(qwen, disable_sliding_window=True).model
    assert changed.arch.layers == (LayerPlan(),) * 2


@pytest.mark.parametrize("name", TINY_MODELS)
def test_windows_are_those_of_the_layers(name: str) -> None:
    """The cache frees blocks by the window that the model's attention has."""
    config = config_of(tiny_model(name), load_format="dummy", dtype="float32")
    model = load_model(config.model, config.load, BuildContext(torch.float32, torch.device("cpu")))
    windows = [layer.spec.sliding_window for layer in model.attention_layers]
    assert len(windows) == config.model.num_layers
    assert config.cache.sliding_window == (windows[0] if len(set(windows)) == 1 else None)


ALL, SOME = {"max_window_layers": 0}, {"max_window_layers": 1}


@pytest.mark.parametrize(
    ("config", "window", "is_cacheable"),
    [
        (MISTRAL, 1024, False),
        (MISTRAL | {"sliding_window": None}, None, True),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 64} | ALL, 64, False),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 64} | SOME, None, False),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, None, True),
        (QWEN2 | {"use_sliding_window": False, "sliding_window": 64} | ALL, None, True),
        (
            QWEN2
            | {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["sliding_attention"] * 2}
            | SOME,
            64,
            False,
        ),
        # a Llama does not look at it
        (QWEN2 | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "sliding_window": 64}, None, True),
    ],
    ids=range(8),
)
def test_windows(config: dict[str, Any], window: int | None, is_cacheable: bool, make_model: MakeModel) -> None:
    directory = make_model(config)
    assert config_of(directory).cache.sliding_window == window
    if is_cacheable:
        assert config_of(directory, enable_prefix_caching=True).cache.enable_prefix_caching
    else:
        with pytest.raises(ConfigError) as caught:
            config_of(directory, enable_prefix_caching=True)
        assert str(caught.value) == (
            "Prefix caching is not supported with sliding window. Run with --disable-sliding-window to use prefix "
            "caching."
        )
    disabled = config_of(directory, enable_prefix_caching=True, disable_sliding_window=True).cache
    assert (disabled.enable_prefix_caching, disabled.sliding_window) == (True, None)
    if window is not None:
        assert config_of(directory, num_scheduler_steps=window - 1).scheduler.num_scheduler_steps == window - 1
        with pytest.raises(ConfigError, match=rf"--num-scheduler-steps \({window}\) must be smaller than .*window"):
            config_of(directory, num_scheduler_steps=window)


# ---- checks --------------------------------------------------------------------------------------------------

MEMORY_GIB = psutil.virtual_memory().total / (1 << 30)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"max_num_batched_tokens": 100},
            "max_num_batched_tokens (100) is smaller than max_model_len (4096). This effectively limits the maximum "
            "sequence length to max_num_batched_tokens and makes vLLM reject longer sequences. Please increase "
            "max_num_batched_tokens or decrease max_model_len.",
        ),
        (
            {"max_num_batched_tokens": 100, "enable_chunked_prefill": True},
            "max_num_batched_tokens (100) must be greater than or equal to max_num_seqs (256).",
        ),
        ({"num_scheduler_steps": 0}, "num_scheduler_steps (0) must be greater than or equal to 1."),
        (
            {"num_scheduler_steps": 2, "speculative_model": "[ngram]"},
            "Speculative decoding is not supported with multi-step (--num-scheduler-steps > 1)",
        ),
        (
            {"enable_chunked_prefill": True, "enable_prefix_caching": True, "max_num_batched_tokens": 1000},
            "When enabling chunked prefill and prefix caching, max_num_batched_tokens (chunk size) must be dividable "
            "by block size, but got chunk_size (1000) % block_size (32) = 8",
        ),
        ({"max_num_partial_prefills": 0}, "max_num_partial_prefills (0) must be greater than or equal to 1."),
        ({"max_num_partial_prefills": 2}, "Chunked prefill must be enabled to set max_num_partial_prefills > 1."),
        (
            {"max_num_partial_prefills": 2, "enable_chunked_prefill": True, "long_prefill_token_threshold": 4097},
            "long_prefill_token_threshold (4097) cannot be greater than the max_model_len (4096).",
        ),
        (
            {"max_long_partial_prefills": 2},
            "max_long_partial_prefills (2) must be greater than or equal to 1 and less than or equal to "
            "max_num_partial_prefills (1).",
        ),
        (
            {"max_long_partial_prefills": 0},
            "max_long_partial_prefills (0) must be greater than or equal to 1 and less than or equal to "
            "max_num_partial_prefills (1).",
        ),
        (
            {"long_prefill_token_threshold": -1},
            "--long-prefill-token-threshold must be at least 0, got -1.",
        ),
        ({"scheduler_delay_factor": -0.5}, "--scheduler-delay-factor must be at least 0, got -0.5."),
        ({"preemption_mode": "drop"}, "--preemption-mode must be one of ['recompute', 'swap'], got 'drop'."),
        ({"preemption_mode": "swap", "swap_space": 0}, "--preemption-mode swap needs --swap-space above 0."),
        ({"max_decode_pause_ms": -1}, "--max-decode-pause-ms must be a number of at least 0, got -1."),
        ({"max_decode_pause_ms": float("inf")}, "--max-decode-pause-ms must be a number of at least 0, got inf."),
        ({"max_decode_pause_ms": float("nan")}, "--max-decode-pause-ms must be a number of at least 0, got nan."),
        (
            {"max_decode_pause_ms": 100},
            "--max-decode-pause-ms needs --enable-chunked-prefill: prompts that stay whole have no chunks.",
        ),
        ({"queue_timeout_s": 0}, "--queue-timeout-s must be above 0, got 0."),
        ({"queue_timeout_s": float("nan")}, "--queue-timeout-s must be above 0, got nan."),
        ({"num_lookahead_slots": -1}, "num_lookahead_slots (-1) must be greater than or equal to 0."),
        ({"gpu_memory_utilization": 1.5}, "GPU memory utilization must be less than 1.0. Got 1.5."),
        ({"gpu_memory_utilization": 0}, "--gpu-memory-utilization must be above 0, got 0."),
        ({"kv_cache_dtype": "int3"}, "Unknown kv cache dtype: int3"),
        (
            {"quantization_param_path": "scales.json"},
            "--quantization-param-path has scales that --kv-cache-dtype auto does not use; use int8, fp8, "
            "fp8_e4m3 or fp8_e5m2, or leave the file out.",
        ),
        (
            {"distributed_executor_backend": "mpi"},
            "Unrecognized distributed executor backend mpi. Supported values are 'ray', 'mp' or custom "
            "ExecutorBase subclass.",
        ),
        ({"scheduling_policy": "lifo"}, "--scheduling-policy must be one of ['fcfs', 'priority'], got 'lifo'."),
        ({"max_num_seqs": 0}, "--max-num-seqs must be at least 1, got 0."),
        ({"max_num_seqs": "8"}, "--max-num-seqs (max_num_seqs) cannot be '8' of type str."),
        ({"max_num_seqs": True}, "--max-num-seqs (max_num_seqs) cannot be True of type bool."),
        ({"enforce_eager": 1.5}, "--enforce-eager (enforce_eager) cannot be 1.5 of type float."),
        ({"num_gpu_blocks_override": 0}, "--num-gpu-blocks-override must be at least 1, got 0."),
        ({"max_num_queued_reqs": 0}, "--max-num-queued-reqs must be at least 1, got 0."),
        ({"max_logprobs": -1}, "--max-logprobs must be at least 0, got -1."),
        ({"swap_space": -1}, "--swap-space must be at least 0, got -1."),
        ({"rope_theta": 0.0}, "--rope-theta must be above 0, got 0.0."),
        ({"seed": 2**64}, f"--seed must fit in 64 bits, got {2**64}."),
        ({"kv_cache_memory_bytes": -1}, "--kv-cache-memory-bytes must be at least 1, got -1."),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens must be at least 1, got 0."),
        ({"block_size": 8}, "--block-size must be one of 16, 32, 64, 128 on cpu, got 8."),
        (
            {"swap_space": MEMORY_GIB},
            f"Too large swap space. {MEMORY_GIB:.2f} GiB out of the {MEMORY_GIB:.2f} GiB total CPU memory is "
            "allocated for the swap space.",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_checks(values: dict[str, Any], message: str, make_model: MakeModel) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(make_model(), **values)
    assert str(caught.value) == message


def test_unknown_quantization(make_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match=r"^Unknown quantization method: int3\. Must be one of \['aqlm', 'awq', "):
        config_of(make_model(), quantization="int3")


def test_head_size_must_be_whole(make_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match=r"hidden_size \(64\) must be divisible by num_attention_heads \(3\)"):
        config_of(make_model(QWEN2 | {"num_attention_heads": 3}))
    assert config_of(make_model(QWEN2 | {"num_attention_heads": 3, "head_dim": 16})).model.arch.head_size == 16


def test_block_sizes_of_the_devices() -> None:
    assert [check_block_size(None, facts) for facts in (CPU, NPU)] == [32, 128]
    assert check_block_size(64, NPU) == 64
    with pytest.raises(ConfigError, match="--block-size must be one of 64, 128 on npu, got 16"):
        check_block_size(16, NPU)


def test_sequences_are_those_that_a_call_of_attention_takes() -> None:
    check_num_seqs(4096, NPU)
    check_num_seqs(5000, CPU)
    with pytest.raises(ConfigError, match=r"--max-num-seqs must be at most 4096 on npu, .* got 4097"):
        check_num_seqs(4097, NPU)


def test_unusable_device(make_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match="--device npu"):
        EngineArgs(model=make_model(), device="npu").create_engine_config()


def test_refusals_come_before_files_are_read() -> None:
    with pytest.raises(UnsupportedFlagError, match=r"^--enable-prompt-adapter is not supported"):
        config_of("/no/such/dir", enable_prompt_adapter=True)
    with pytest.raises(
        UnsupportedFlagError, match=r"^--long-lora-scaling-factors 4.0 is not supported: adapters for"
    ):
        config_of("/no/such/dir", long_lora_scaling_factors="4.0")
    with pytest.raises(UnsupportedFlagError, match=r"^--default-mm-loras is not supported: no kind of input"):
        config_of("/no/such/dir", default_mm_loras={"audio": "/adapters/audio"})
    with pytest.raises(UnsupportedFlagError, match=r"^--ray-workers-use-nsight is not supported"):
        config_of("/no/such/dir", distributed_executor_backend="ray", ray_workers_use_nsight=True)
    with pytest.raises(UnsupportedFlagError, match=r"^--num-lookahead-slots 1 is not supported"):
        config_of("/no/such/dir", num_lookahead_slots=1)


def test_adapters(make_model: MakeModel) -> None:
    directory = make_model()
    assert config_of(directory).lora is None
    config = config_of(directory, enable_lora=True, max_loras=2, max_lora_rank=64, fully_sharded_loras=True)
    assert config.lora == LoRAConfig(2, 64, 2, "bfloat16", fully_sharded=True, max_added_tokens=256)
    assert config.model.vocab_size == config.model.arch.vocab_size + 256
    config = config_of(directory, enable_lora=True, lora_extra_vocab_size=0, lora_dtype="float32", max_cpu_loras=5)
    assert config.lora == LoRAConfig(1, 16, 5, "float32")
    drafting = {"speculative_model": "[ngram]", "num_speculative_tokens": 2, "ngram_prompt_lookup_max": 2}
    config = config_of(directory, enable_lora=True, **drafting)
    assert config.lora is not None and config.lora.max_added_tokens == config.model.num_added_tokens == 0


def test_expert_parallelism(make_model: MakeModel) -> None:
    mixture = make_model(QWEN2 | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"})
    config = config_of(mixture, tensor_parallel_size=2, enable_expert_parallel=True)
    assert config.parallel.enable_expert_parallel
    assert not config_of(mixture, tensor_parallel_size=2).parallel.enable_expert_parallel
    with pytest.raises(ConfigError, match=r"^Number of experts in the model must be greater than 0"):
        config_of(make_model(QWEN2), enable_expert_parallel=True)


def test_stages(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(QWEN2 | {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 6})
    monkeypatch.setattr(logging.getLogger("ascend_vllm"), "propagate", True)
    config = config_of(model, pipeline_parallel_size=4, num_scheduler_steps=2)
    assert "--num-scheduler-steps 2: with --pipeline-parallel-size 4 steps are made one at a time" in caplog.text
    assert config.parallel == ParallelConfig(1, "mp", pipeline_parallel_size=4, stage_layers=(1, 2, 2, 1))
    both = config_of(model, pipeline_parallel_size=2, tensor_parallel_size=2).parallel
    assert (both.stage_layers, both.world_size, both.output_rank) == ((3, 3), 4, 2)
    with pytest.raises(ConfigError, match=r"^--pipeline-parallel-size 7 is more than the model has layers \(6\)"):
        config_of(model, pipeline_parallel_size=7)
    with pytest.raises(ConfigError, match=r"uni runs one worker, and .* --pipeline-parallel-size 2 needs 2: use mp"):
        config_of(model, pipeline_parallel_size=2, distributed_executor_backend="uni")
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,3,2")
    assert config_of(model, pipeline_parallel_size=3).parallel.stage_layers == (1, 3, 2)
    assert config_of(model).parallel == ParallelConfig(1, "uni")
    for wrong, message in (
        ("1,x", "Invalid partition string: 1,x"),
        ("3,3", r"len\(partitions\)=2 does not match pp_size=3\."),
        ("1,2,2", r"sum\(partitions\)=5 does not match num_hidden_layers=6\."),
        ("0,4,2", "VLLM_PP_LAYER_PARTITION=0,4,2: each stage needs one layer"),
    ):
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", wrong)
        with pytest.raises(ConfigError, match=message):
            config_of(model, pipeline_parallel_size=3)


def test_several_workers(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(QWEN2 | {"num_attention_heads": 4, "num_key_value_heads": 2})
    assert config_of(model).parallel == ParallelConfig(1, "uni")
    assert config_of(model, distributed_executor_backend="mp").parallel == ParallelConfig(1, "uni")
    for backend in (None, "mp"):
        config = config_of(model, tensor_parallel_size=4, distributed_executor_backend=backend)
        assert config.parallel == ParallelConfig(4, "mp")
    for ray in ({"distributed_executor_backend": "ray"}, {"worker_use_ray": True}):
        assert config_of(model, **ray).parallel == ParallelConfig(1, distributed_executor_backend="ray")
        config = config_of(model, tensor_parallel_size=2, **ray)
        assert config.parallel == ParallelConfig(2, distributed_executor_backend="ray")
    with pytest.raises(ConfigError, match=r"^--data-parallel-size 2 is not supported with .* ray"):
        config_of(model, worker_use_ray=True, data_parallel_size=2)
    with pytest.raises(ConfigError, match=r"^worker-use-ray can't be used with distributed executor backend 'mp'\.$"):
        config_of(model, worker_use_ray=True, distributed_executor_backend="mp")
    monkeypatch.setattr("ascend_vllm.plugins.entry_points", lambda _: {"null": "null_device:NullExecutor"})
    assert config_of(model, distributed_executor_backend="null").parallel == ParallelConfig(1, "null")
    with pytest.raises(ConfigError, match=r"uni runs one worker, and --tensor-parallel-size is 2"):
        config_of(model, tensor_parallel_size=2, distributed_executor_backend="uni")
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 2 and the model's 3 KV heads"):
        config_of(make_model(QWEN2 | {"num_attention_heads": 6, "num_key_value_heads": 3}), tensor_parallel_size=2)
