"""Speculative decoding's section of the configuration, from the flags of both generations."""

from __future__ import annotations

import json
import logging
import pathlib
from typing import Any

import pytest

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.config.speculation import SpeculativeConfig, SpeculativeMethod
from ascend_vllm.errors import ConfigError, ModelLoadError, UnsupportedFlagError
from tests.eagle_heads import head_config

TARGET: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
DRAFT = TARGET | {"num_hidden_layers": 2, "max_position_embeddings": 1024}
MISTRAL = DRAFT | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 256}
HEAD = head_config(64, 100)


class Models:
    """Directories of models by name."""

    def __init__(self, root: pathlib.Path) -> None:
        self._root = root

    def make(self, name: str, config: dict[str, Any], **files: str) -> str:
        directory = self._root / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        for file, content in files.items():
            (directory / f"{file}.json").write_text(content)
        return str(directory)


@pytest.fixture
def models(tmp_path: pathlib.Path) -> Models:
    return Models(tmp_path)


def config_of(target: str, **values: Any) -> EngineConfig:
    return EngineArgs(**({"model": target, "device": "cpu"} | values)).create_engine_config()


def speculation_of(target: str, **values: Any) -> SpeculativeConfig:
    speculation = config_of(target, **values).speculation
    assert speculation is not None
    return speculation


def test_draft_model_by_both_generations_of_flags(models: Models) -> None:
    target, draft = models.make("target", TARGET), models.make("draft", DRAFT)
    old = speculation_of(target, speculative_model=draft, num_speculative_tokens=3, dtype="float16")
    new = speculation_of(
        target, speculative_config={"model": draft, "num_speculative_tokens": 3}, dtype="float16", seed=0
    )
    for found in (old, new):
        assert found.method is SpeculativeMethod.DRAFT_MODEL
        assert found.num_speculative_tokens == found.num_lookahead_tokens == 3
        assert found.max_model_len == 1024
        assert found.draft is not None
        assert (found.draft.model, found.draft.source) == (draft, draft)
        assert (found.draft.architecture, found.draft.num_layers) == ("Qwen2ForCausalLM", 2)
        # the target's, whatever the draft's files say
        assert (found.draft.dtype, found.draft.tokenizer) == ("float16", target)
    assert (old.pads_drafts, new.pads_drafts) == (True, False)


@pytest.mark.parametrize(
    ("name", "config", "asked", "method"),
    [
        ("EAGLE-Qwen2", HEAD, None, "eagle"),
        ("EAGLE3-Qwen2", HEAD, None, "eagle3"),
        ("head", HEAD | {"bias": False}, None, "eagle"),
        ("head", HEAD | {"draft_vocab_size": 30}, None, "eagle3"),
        ("head", {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": HEAD}, None, "eagle"),
        ("head", HEAD, "eagle", "eagle"),
        ("head", HEAD, "eagle3", "eagle3"),
    ],
)
def test_eagle_heads(name: str, config: dict[str, Any], asked: str | None, method: str, models: Models) -> None:
    """By method, by name or by what config.json says; a head is as long as its target."""
    target, head = models.make("target", TARGET), models.make(name, config)
    settings: dict[str, Any] = {"model": head, "num_speculative_tokens": 2}
    found = [speculation_of(target, speculative_config=settings | ({"method": asked} if asked else {}))]
    if asked is None:
        found.append(speculation_of(target, speculative_model=head, num_speculative_tokens=2))
    for speculation in found:
        assert speculation.method == method
        assert speculation.draft is not None
        assert speculation.draft.architecture == {"eagle": "Eagle", "eagle3": "Eagle3"}[method] + "LlamaForCausalLM"
        assert speculation.draft.arch.eagle is not None
        assert speculation.max_model_len == speculation.draft.max_model_len == 4096


def test_a_method_needs_a_model(models: Models) -> None:
    with pytest.raises(ConfigError, match="the method eagle needs the path of a draft model"):
        config_of(models.make("target", TARGET), speculative_config={"method": "eagle", "num_speculative_tokens": 2})


@pytest.mark.parametrize("flags", ["old", "new"])
def test_lengths(flags: str, models: Models) -> None:
    target, draft = models.make("target", TARGET), models.make("draft", DRAFT)

    def length(asked: int | None, **values: Any) -> int:
        if flags == "old":
            settings = {"speculative_model": draft, "num_speculative_tokens": 3, "speculative_max_model_len": asked}
        else:
            content = {"model": draft, "num_speculative_tokens": 3} | ({"max_model_len": asked} if asked else {})
            settings = {"speculative_config": content}
        return speculation_of(target, **settings, **values).max_model_len

    assert length(None) == 1024
    assert length(1000) == 1000
    assert length(None, max_model_len=512) == 512
    with pytest.raises(
        ConfigError, match=r"^speculative_max_model_len=1025 cannot be larger than draft_max_model_len=1024"
    ):
        length(1025)
    with pytest.raises(
        ConfigError, match=r"^speculative_max_model_len=600 cannot be larger than target_max_model_len=512"
    ):
        length(600, max_model_len=512)


def test_number_of_tokens_that_a_draft_model_states(models: Models) -> None:
    target, draft = models.make("target", TARGET), models.make("draft", DRAFT | {"n_predict": 4})
    for count, expected in ((None, 4), (2, 2)):
        assert speculation_of(target, speculative_model=draft, num_speculative_tokens=count).draft is not None
        content = {"model": draft} | ({"num_speculative_tokens": count} if count else {})
        assert speculation_of(target, speculative_config=content).num_speculative_tokens == expected
    with pytest.raises(
        ConfigError,
        match=r"^This speculative model supports a maximum of num_speculative_tokens=4, but num_speculative_tokens=5 "
        "was provided.",
    ):
        config_of(target, speculative_config={"model": draft, "num_speculative_tokens": 5})


def test_vocabularies(models: Models) -> None:
    """Another size is right where the tokenizer is the same: models of one family are padded differently."""
    tokenizer = '{"version": "1.0"}'
    target = models.make("target", TARGET | {"vocab_size": 128}, tokenizer=tokenizer)
    flags = {"num_speculative_tokens": 2}
    other = models.make("other", DRAFT, tokenizer='{"version": "2.0"}')
    text = (
        "Target and draft model should have the same vocabulary size. Target model vocab_size=128. Draft model "
        "vocab_size=100. Using models with different tokenizers can cause out-of-bounds errors during speculative "
        "decoding."
    )
    for name in (other, models.make("bare", DRAFT), models.make("EAGLE-head", HEAD, tokenizer=tokenizer)):
        with pytest.raises(ConfigError) as caught:
            config_of(target, speculative_model=name, **flags)
        assert str(caught.value) == text
    same = models.make("same", DRAFT, tokenizer=tokenizer)
    speculation = speculation_of(target, speculative_model=same, **flags)
    assert speculation.draft is not None and speculation.draft.vocab_size == 100


def test_quantization_of_the_draft(models: Models) -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    target, plain = models.make("target", TARGET), models.make("plain", DRAFT)
    draft = models.make("draft", DRAFT | {"quantization_config": awq})
    for values in (
        {"speculative_model": draft, "num_speculative_tokens": 2, "speculative_model_quantization": "awq"},
        {"speculative_model": draft, "num_speculative_tokens": 2},
        {"speculative_config": {"model": draft, "num_speculative_tokens": 2, "quantization": "awq"}},
    ):
        config = config_of(target, dtype="float16", **values)
        assert config.model.arch.quantization is None
        assert config.speculation is not None and config.speculation.draft is not None
        quantization = config.speculation.draft.arch.quantization
        assert quantization is not None and quantization.method == "awq"
    flags = {"speculative_model": draft, "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match=r"specified in the model config \(awq\) does not match"):
        config_of(target, **flags, speculative_model_quantization="gptq")
    with pytest.raises(UnsupportedFlagError, match=r"^--speculative-model-quantization bitsandbytes is not"):
        config_of(target, **flags | {"speculative_model": plain}, speculative_model_quantization="bitsandbytes")


def test_missing_draft(models: Models) -> None:
    target = models.make("target", TARGET)
    with pytest.raises(ConfigError, match=r"^--speculative-model '/no/draft': there is no such directory"):
        config_of(target, speculative_model="/no/draft", num_speculative_tokens=2)
    (pathlib.Path(target).parent / "empty").mkdir()
    with pytest.raises(ModelLoadError, match=r"empty has no config\.json"):
        config_of(target, speculative_model=f"{target}/../empty", num_speculative_tokens=2)


@pytest.mark.parametrize("size", [1, 2, None])
def test_draft_is_whole_beside_a_divided_target(
    size: int | None, models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = models.make("target", TARGET), models.make("draft", DRAFT)
    content = {"model": draft, "num_speculative_tokens": 2}
    if size is not None:
        content["draft_tensor_parallel_size"] = size
    logger = logging.getLogger("ascend_vllm")
    logger.addHandler(caplog.handler)
    try:
        assert speculation_of(target, speculative_config=content, tensor_parallel_size=2).draft is not None
    finally:
        logger.removeHandler(caplog.handler)
    assert ("is computed whole on the worker that samples" in caplog.text) is True
    with pytest.raises(ConfigError, match="=3 cannot be other value than 1 or target model tensor_parallel_size"):
        config_of(target, speculative_config=content | {"draft_tensor_parallel_size": 3}, tensor_parallel_size=2)


def test_keys_without_effect_are_named(models: Models, caplog: pytest.LogCaptureFixture) -> None:
    target = models.make("target", TARGET)
    content = {"method": "ngram", "num_speculative_tokens": 2, "attention_backend": "FLASH_ATTN"}
    logger = logging.getLogger("ascend_vllm")
    logger.addHandler(caplog.handler)
    try:
        speculation_of(target, speculative_config=content)
    finally:
        logger.removeHandler(caplog.handler)
    assert "--speculative-config: attention_backend has no effect" in caplog.text


def test_the_other_style_of_eagle_is_only_a_warning(
    models: Models, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, head = models.make("target", TARGET), models.make("EAGLE-head", HEAD)
    logger = logging.getLogger("ascend_vllm")
    logger.addHandler(caplog.handler)
    found = []
    try:
        for value in ("1", "0"):
            monkeypatch.setenv("EAGLE_USE_SAFE_AI_LAB_STYLE", value)
            found.append(speculation_of(target, speculative_model=head, num_speculative_tokens=2))
            assert ("EAGLE_USE_SAFE_AI_LAB_STYLE=0 has no effect" in caplog.text) == (value == "0")
    finally:
        logger.removeHandler(caplog.handler)
    assert found[0] == found[1]


def test_chunked_prefill_lora_and_prefix_caching_go_with_drafts(models: Models) -> None:
    """vLLM 0.6.3 refuses the first two, later versions do not."""
    target, draft = models.make("target", TARGET), models.make("draft", DRAFT)
    config = config_of(
        target,
        speculative_model=draft,
        num_speculative_tokens=2,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        enable_lora=True,
    )
    assert config.speculation is not None and config.scheduler.enable_chunked_prefill and config.lora is not None


def test_windows_of_both_models_free_blocks(models: Models) -> None:
    """Blocks that a draft model without a window still reads are kept."""
    target = models.make("target", MISTRAL)
    flags = {"num_speculative_tokens": 2}
    assert config_of(target).cache.sliding_window == 256
    same = config_of(target, speculative_model=models.make("same", MISTRAL), **flags)
    assert same.cache.sliding_window == 256
    assert config_of(target, speculative_model=models.make("draft", DRAFT), **flags).cache.sliding_window is None


def test_automatic_length_counts_the_drafts_memory(models: Models) -> None:
    target, draft = models.make("target", TARGET), models.make("draft", DRAFT)
    values: dict[str, Any] = {"max_model_len": "auto", "kv_cache_memory_bytes": 1 << 20, "block_size": 16}
    without = config_of(target, **values).model.max_model_len
    beside = config_of(target, **values, speculative_model=draft, num_speculative_tokens=2)
    # nine tenths of the memory, by blocks of 2048 bytes in each of four layers, and in two of the draft model
    assert without == 115 * 16
    assert beside.model.max_model_len == 76 * 16
    assert beside.speculation is not None
    assert beside.speculation.max_model_len == 1024


def test_the_demo_model_drafts_for_itself(models: Models) -> None:
    directory = models.make("target", TARGET)
    for flags in (
        {"speculative_model": "demo", "num_speculative_tokens": 2},
        {"speculative_config": {"model": "demo", "num_speculative_tokens": 2}},
    ):
        args = EngineArgs(model="demo", device="cpu", **flags).with_model_directory(directory)
        speculation = args.create_engine_config().speculation
        assert speculation is not None and speculation.draft is not None
        assert speculation.draft.model == directory


def test_pooling_models_are_refused(models: Models) -> None:
    target = models.make("target", TARGET)
    with pytest.raises(ConfigError, match="a pooling model generates nothing"):
        config_of(target, runner="pooling", speculative_config={"method": "ngram", "num_speculative_tokens": 2})
