"""Offline pooling: encode, embed, classify and score, compared with transformers."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ascend_vllm import (
    LLM,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingParams,
    PoolingRequestOutput,
    SamplingParams,
    ScoringRequestOutput,
)
from ascend_vllm.errors import ConfigError, ModelLoadError, RequestError
from tests.pooling_models import bare_model, classifier, hidden_states, scores, sentence_transformer, unit
from tests.tiny_models import tiny_model

TEXTS = ["The quick brown fox", "Hello!", "Blocks of the cache hold keys and values; a request gets more of them."]


def make(directory: str, **options: Any) -> LLM:
    return LLM(directory, dtype="float32", num_gpu_blocks_override=64, swap_space=0, **options)


@pytest.fixture(scope="module")
def embedder() -> Iterator[LLM]:
    """A generation checkpoint, made to pool."""
    llm = make(tiny_model("qwen2"), task="embed")
    yield llm
    llm.shutdown()


def ids(llm: LLM, text: str) -> list[int]:
    return list(llm.get_tokenizer()(text).input_ids)


def last(directory: str, token_ids: list[int]) -> torch.Tensor:
    return unit(hidden_states(directory, token_ids)[-1])


def close(result: Any, expected: torch.Tensor) -> bool:
    return torch.allclose(torch.as_tensor(result), expected, rtol=0, atol=1e-5)


def test_embed(embedder: LLM) -> None:
    outputs = embedder.embed(TEXTS, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [ids(embedder, text) for text in TEXTS]
    for output in outputs:
        assert isinstance(output, EmbeddingRequestOutput)
        assert output.finished
        assert output.outputs.hidden_size == 64
        assert close(output.outputs.embedding, last(tiny_model("qwen2"), output.prompt_token_ids))


@pytest.mark.parametrize(
    ("arguments", "prompt"),
    [
        ({"prompts": [5, 6, 7]}, [5, 6, 7]),
        ({"prompts": [[5, 6, 7]]}, [5, 6, 7]),
        ({"prompts": {"prompt_token_ids": [5, 6, 7]}}, [5, 6, 7]),
        ({"prompt_token_ids": [[5, 6, 7]]}, [5, 6, 7]),
        ({"prompts": [[5, 6, 7]], "pooling_task": "embed"}, [5, 6, 7]),
        ({"prompts": [[5, 6, 7, 8]], "pooling_params": PoolingParams(truncate_prompt_tokens=3)}, [5, 6, 7]),
        ({"prompts": [[5, 6, 7]], "pooling_params": [PoolingParams(truncate_prompt_tokens=-1)]}, [5, 6, 7]),
    ],
)
def test_encode(embedder: LLM, arguments: dict[str, Any], prompt: list[int]) -> None:
    (output,) = embedder.encode(**arguments, use_tqdm=False)
    assert isinstance(output, PoolingRequestOutput)
    assert output.prompt_token_ids == prompt
    assert isinstance(output.outputs.data, torch.Tensor)
    assert close(output.outputs.data, last(tiny_model("qwen2"), prompt))


def test_encode_without_activation(embedder: LLM) -> None:
    (output,) = embedder.encode([5, 6, 7], PoolingParams(use_activation=False), use_tqdm=False)
    assert close(output.outputs.data, hidden_states(tiny_model("qwen2"), [5, 6, 7])[-1])


def test_score_of_an_embedding_model_is_a_cosine(embedder: LLM) -> None:
    vectors = [last(tiny_model("qwen2"), ids(embedder, text)) for text in TEXTS]
    outputs = embedder.score(TEXTS[0], TEXTS, use_tqdm=False)
    assert all(isinstance(output, ScoringRequestOutput) for output in outputs)
    assert close([output.outputs.score for output in outputs], torch.stack([vectors[0] @ other for other in vectors]))
    paired = embedder.score(TEXTS[:2], TEXTS[1:], use_tqdm=False)
    expected = torch.stack([vectors[0] @ vectors[1], vectors[1] @ vectors[2]])
    assert close([output.outputs.score for output in paired], expected)
    assert len(paired[0].prompt_token_ids) == sum(len(ids(embedder, text)) for text in TEXTS[:2])


def test_wrong_calls_name_what_is_wrong(embedder: LLM) -> None:
    for call, words in (
        (lambda: embedder.generate("a", SamplingParams()), "generates no text"),
        (lambda: embedder.classify("a"), "serves 'embed'"),
        (lambda: embedder.score(["a", "b"], ["a", "b", "c"]), "Input lengths must be either 1:1, 1:N or N:N"),
        (lambda: embedder.score([], ["a"]), "At least one text element must be given"),
        (lambda: embedder.score("a", []), "At least one text_pair element must be given"),
        (lambda: embedder.encode("a", pooling_task="classify"), "Unsupported task: 'classify'"),
        (lambda: embedder.encode("a", pooling_task="token_embed"), "--pooler-config.task token_embed"),
        (lambda: embedder.encode("a", PoolingParams(task="classify")), "Unsupported task: 'classify'"),
        (lambda: embedder.encode("a", PoolingParams(dimensions=8)), "does not support Matryoshka"),
        (lambda: embedder.encode("a", PoolingParams(truncate_prompt_tokens=600)), "greater than max_model_len"),
        (lambda: embedder.encode("a", [PoolingParams()] * 2), "lengths of prompts and params"),
        (lambda: embedder.encode(""), "Prompt cannot be empty"),
        (lambda: embedder.encode([5] * 513), "maximum context length is 512 tokens"),
        (lambda: embedder.encode([999]), "out of vocabulary"),
        (lambda: embedder.embed("a", lora_request=object()), "lora_request must be a LoRARequest"),
        (lambda: PoolingParams(task="zzz"), "task must be one of"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=words):
            call()
    assert len(embedder.embed([[5] * 512], use_tqdm=False)) == 1


def test_a_generation_model_does_not_pool() -> None:
    llm = make(tiny_model("llama"))
    try:
        words = r"LLM.encode\(\) is only supported for embedding models \(XModel\)."
        with pytest.raises(ValueError, match=words):
            llm.encode("a")
        with pytest.raises(RequestError, match="generates text"):
            llm.llm_engine.add_request("0", "a", PoolingParams())
    finally:
        llm.shutdown()


def test_classify_and_labels() -> None:
    directory = classifier("llama")
    llm = make(directory)
    try:
        pooler = llm.llm_engine.config.model.pooler
        assert pooler is not None
        assert (pooler.task, pooler.labels, pooler.activation) == ("classify", ("cat", "dog", "fox"), "softmax")
        outputs = llm.classify(TEXTS, use_tqdm=False)
        for output in outputs:
            assert isinstance(output, ClassificationRequestOutput)
            assert output.outputs.num_classes == 3
            expected = torch.softmax(scores(directory, output.prompt_token_ids), -1)
            assert close(output.outputs.probs, expected)
        with pytest.raises(ValueError, match="a classifier of one label"):
            llm.score("a", "b")
    finally:
        llm.shutdown()


def test_a_cross_encoder_reads_both_texts() -> None:
    directory = classifier("qwen3", num_labels=1)
    llm = make(directory)
    try:
        outputs = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
        plain = llm.score(TEXTS[0], TEXTS, pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
        for text, output, raw in zip(TEXTS, outputs, plain, strict=True):
            assert output.prompt_token_ids == [*ids(llm, TEXTS[0]), *ids(llm, text)]
            expected = scores(directory, output.prompt_token_ids)
            assert close([raw.outputs.score], expected)
            assert close([output.outputs.score], torch.sigmoid(expected))
    finally:
        llm.shutdown()


def test_matryoshka_and_embeddings_of_every_token() -> None:
    directory = bare_model("mistral")
    options = {"is_matryoshka": True, "matryoshka_dimensions": [16, 32]}
    llm = make(directory, hf_overrides=options, override_pooler_config={"pooling_type": "MEAN", "dimensions": 32})
    try:
        state = hidden_states(directory, [5, 6, 7]).mean(0)
        (cut,) = llm.embed([5, 6, 7], pooling_params=PoolingParams(dimensions=16), use_tqdm=False)
        (usual,) = llm.embed([5, 6, 7], use_tqdm=False)
        assert close(cut.outputs.embedding, unit(state[:16]))
        assert close(usual.outputs.embedding, unit(state[:32]))
        for size, words in ((17, r"Matryoshka dimensions \[16, 32\], got 17"), (0, r"range \[1, 64\], got 0")):
            with pytest.raises(RequestError, match=words):
                llm.embed("a", pooling_params=PoolingParams(dimensions=size))
    finally:
        llm.shutdown()
    llm = make(directory, pooler_config={"task": "token_embed"})
    try:
        (every,) = llm.encode([5, 6, 7], use_tqdm=False)
        assert close(every.outputs.data, unit(hidden_states(directory, [5, 6, 7])))
        # ColBERT's sum over the first text's tokens
        first, second = [unit(hidden_states(directory, ids(llm, text))) for text in TEXTS[:2]]
        (score,) = llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)
        assert close([score.outputs.score / len(first)], (first @ second.T).max(1).values.sum()[None] / len(first))
    finally:
        llm.shutdown()


def test_sentence_transformers_files_decide(tmp_path: pathlib.Path) -> None:
    directory = sentence_transformer(tmp_path / "a", {"pooling_mode_mean_tokens": True}, normalize=False)
    llm = make(directory)
    try:
        (output,) = llm.embed([5, 6, 7], use_tqdm=False)
        assert close(output.outputs.embedding, hidden_states(tiny_model("qwen2"), [5, 6, 7]).mean(0))
    finally:
        llm.shutdown()


def config_of(directory: str, **options: Any) -> Any:
    from ascend_vllm.args.engine_args import EngineArgs

    return EngineArgs(model=directory, dtype="float32", **options).create_engine_config().model.pooler


def test_how_a_model_pools_is_decided_by_flags_then_files(tmp_path: pathlib.Path) -> None:
    by_files = sentence_transformer(tmp_path / "a", {"pooling_mode": "cls"}, normalize=True)
    assert config_of(tiny_model("qwen2")) is None
    assert config_of(tiny_model("qwen2"), runner="generate") is None
    assert config_of(by_files, runner="generate") is None
    assert config_of(by_files).seq_pooling_type == "CLS"
    assert config_of(by_files).use_activation
    assert config_of(by_files, pooler_config={"pooling_type": "LAST"}).seq_pooling_type == "LAST"
    assert config_of(tiny_model("qwen2"), runner="pooling").convert == "embed"
    assert config_of(bare_model("opt")).convert == "embed"
    assert config_of(classifier("opt"), convert="embed").convert == "embed"
    assert config_of(classifier("opt"), task="score").task == "classify"
    assert config_of(classifier("opt", problem_type="multi_label_classification")).activation == "sigmoid"
    assert config_of(classifier("opt", num_labels=1)).activation == "sigmoid"
    assert config_of(classifier("opt", num_labels=1, problem_type="regression")).activation == "identity"
    assert not config_of(bare_model("opt"), pooler_config={"normalize": False}).use_activation


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("qwen2", {"pooler_config": {"pooling_type": "MEAN"}}, "--pooler-config needs a pooling model"),
        ("qwen2", {"convert": "none", "runner": "pooling"}, "does not support `--runner pooling`"),
        ("qwen2", {"convert": "embed", "runner": "generate"}, "--convert embed"),
        ("qwen2", {"task": "embed", "convert": "classify"}, "--task embed contradicts"),
        ("qwen2", {"task": "generate", "runner": "pooling"}, "--task generate contradicts"),
        ("qwen2", {"task": "reward"}, "--task reward is not supported"),
        ("qwen2", {"runner": "draft"}, "--runner draft is not supported"),
        ("bare", {"runner": "generate"}, "does not support `--runner generate`"),
        ("bare", {"pooler_config": {"zzz": 1}}, "zzz cannot be set"),
        ("bare", {"pooler_config": {"pooling_type": "STEP"}}, "pooling_type must be one of"),
        ("bare", {"override_pooler_config": {"pooling_type": "mean"}}, "--override-pooler-config: pooling_type"),
        ("bare", {"pooler_config": {"task": "classify"}}, "task 'classify' is none of this model's"),
        ("bare", {"pooler_config": {"task": "zzz"}}, "task must be one of"),
        ("bare", {"pooler_config": {"dimensions": 0}}, "dimensions must be a positive number"),
        ("bare", {"pooler_config": {"use_activation": 1}}, "use_activation must be true or false"),
        ("bare", {"pooler_config": {}, "override_pooler_config": {}}, "give one of them"),
        ("bare", {"num_scheduler_steps": 4}, "--num-scheduler-steps 4"),
        ("bare", {"preemption_mode": "swap"}, "--preemption-mode swap"),
    ],
)
def test_flags_that_do_not_fit_are_refused_by_name(family: str, options: dict[str, Any], words: str) -> None:
    directory = bare_model("qwen2") if family == "bare" else tiny_model(family)
    with pytest.raises(ConfigError, match=words):
        config_of(directory, **options)


def test_kinds_of_pooling_that_do_not_exist_are_refused(tmp_path: pathlib.Path) -> None:
    directory = sentence_transformer(tmp_path / "a", {"pooling_mode_max_tokens": True}, normalize=True)
    with pytest.raises(ModelLoadError, match="pooling mode max is not supported"):
        config_of(directory)
    modules = tmp_path / "a" / "modules.json"
    modules.write_text(modules.read_text().replace("Normalize", "Dense"))
    with pytest.raises(ModelLoadError, match="module Dense is not supported"):
        config_of(directory)
    with pytest.raises(ModelLoadError, match="tokens see those behind them"):
        config_of(bare_model("qwen2"), hf_overrides={"is_causal": False})
