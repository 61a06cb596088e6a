"""Families beyond the first five: greedy text and log-probabilities, chunks, ranks, and what is refused."""

from __future__ import annotations

import functools
import json
import pathlib
import shutil
import tempfile
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ascend_vllm import LLM, SamplingParams
from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.args.hf_files import read_hf_config
from ascend_vllm.args.limits import resolve_max_model_len
from ascend_vllm.config.arch import READERS, ArchConfig
from ascend_vllm.config.families import alibi_slopes
from ascend_vllm.config.model import LoadConfig
from ascend_vllm.distributed.parallel_context import ParallelContext
from ascend_vllm.errors import ConfigError, ModelLoadError
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.models.loader import load_model
from ascend_vllm.models.registry import HEADS, MODELS
from ascend_vllm.ops.tape import Tapes
from tests.benchmark_modules import load_script
from tests.distributed.thread_ranks import on_ranks
from tests.models import old_layouts
from tests.models.old_layouts import LAYOUTS, PlainModel
from tests.models.paged_driver import (
    ModelInStages,
    PagedDriver,
    TransformersModel,
    load,
    make_model_config,
    random_tokens,
)
from tests.tiny_models import VOCAB_SIZE, tiny_model

NUM_GREEDY = 64
# checkpoints of transformers' classes; their log-probabilities are compared in test_models_match_transformers.py
NATIVE = (
    "deepseek-v2",
    "deepseek-v2-lite",
    "deepseek-v3",
    "falcon",
    "falcon-2",
    "falcon-new",
    "falcon-sequential",
    "gemma",
    "gemma2",
    "gemma3",
    "glm",
    "glm4",
    "granite",
    "internlm3",
    "mixtral",
    "phi3",
    "phi3-longrope",
    "qwen2-moe",
    "qwen3-moe",
    "starcoder2",
)
_NORMALISED = "baichuan-13b"


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ascend_vllm_old_layouts_")


@functools.cache
def _old(name: str) -> str:
    return old_layouts.save(name, pathlib.Path(_root().name) / name)


@pytest.fixture(autouse=True)
def _normalised_heads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(request.node, "callspec") and request.node.callspec.params.get("name") == _NORMALISED:
        old_layouts.mark_as_normalised(monkeypatch)


def _directory(name: str) -> str:
    return _old(name) if name in LAYOUTS else tiny_model(name)


def _reference(name: str) -> PlainModel | TransformersModel:
    return PlainModel(name, _directory(name)) if name in LAYOUTS else TransformersModel(_directory(name))


@pytest.mark.parametrize("name", [*NATIVE, *LAYOUTS])
def test_greedy_text_is_the_references(name: str) -> None:
    """Rows of different lengths, two of them prompts in chunks, until each has 64 tokens more.

    The reference scores the text that was generated, all of it at once: each token must be its best, too.
    """
    driver = PagedDriver(make_model_config(_directory(name)))
    texts = [random_tokens(length, VOCAB_SIZE, seed=length) for length in (1, 45, 90)]
    lengths = [len(text) for text in texts]
    # what is computed of each row in the first steps
    chunks = [[texts[0], texts[1][:20], texts[2][:33]], [[], texts[1][20:], texts[2][33:80]], [[], [], texts[2][80:]]]
    results: list[list[torch.Tensor]] = [[] for _ in texts]
    for turn in range(NUM_GREEDY + 2):
        step = {}
        for row, text in enumerate(texts):
            new = chunks[turn][row] if turn < len(chunks) else []
            if not new and sum(map(len, results[row])) >= lengths[row]:
                text.append(int(results[row][-1][-1].argmax()))
                new = text[-1:]
            step[row] = new
        for row, log_probs in driver.step({row: new for row, new in step.items() if new}).items():
            results[row].append(log_probs)
    reference = _reference(name)
    for text, length, parts in zip(texts, lengths, results, strict=True):
        assert len(text) >= length + NUM_GREEDY - 1
        expected = reference.log_probs(text)
        torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=1e-4)
        assert expected[length - 1 : -1].argmax(-1).tolist() == text[length:]


def test_rows_beside_long_prompts_with_latent_attention() -> None:
    """Long prompts get keys and values of their own; chunks and decoding rows around them do not."""
    config = make_model_config(tiny_model("deepseek-v2"))
    prompts = {row: random_tokens(300, VOCAB_SIZE, seed=row) for row in range(6)}
    expected = {row: PagedDriver(config).step({row: prompt})[row] for row, prompt in prompts.items()}
    driver = PagedDriver(config)
    parts = {row: [] for row in prompts}
    # tokens of each row in each step, few or many
    for counts in ((9, 170, 169, 130, 250, 2), (280, 1, 1, 169, 1, 180), (11, 129, 130, 1, 49, 118)):
        step = {}
        for (row, prompt), count in zip(prompts.items(), counts, strict=True):
            start = sum(map(len, parts[row]))
            step[row] = prompt[start : start + count]
        for row, log_probs in driver.step(step).items():
            parts[row].append(log_probs)
    for row, found in parts.items():
        torch.testing.assert_close(torch.cat(found), expected[row], rtol=0, atol=1e-4)


def test_latent_attention_can_rotate_halves(tmp_path: pathlib.Path) -> None:
    source = pathlib.Path(tiny_model("deepseek-v3"))
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text()) | {"rope_interleave": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompt = random_tokens(180, VOCAB_SIZE, seed=1)
    expected = TransformersModel(str(tmp_path)).log_probs(prompt)
    driver = PagedDriver(make_model_config(tmp_path))
    parts = [driver.step({0: prompt[:175]})[0], driver.step({0: prompt[175:]})[0]]
    torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=1e-4)


def test_longrope_of_longer_sequences_uses_the_long_factors(tmp_path: pathlib.Path) -> None:
    source = pathlib.Path(tiny_model("phi3-longrope"))
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    config["original_max_position_embeddings"] = 100
    config["rope_parameters"]["original_max_position_embeddings"] = 100
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompt = random_tokens(300, VOCAB_SIZE, seed=1)
    # transformers chooses the factors by the sequence, the engine by the longest possible one
    expected = TransformersModel(str(tmp_path)).log_probs(prompt)
    torch.testing.assert_close(
        PagedDriver(make_model_config(tmp_path)).step({0: prompt})[0], expected, rtol=0, atol=1e-4
    )
    short = PagedDriver(make_model_config(tmp_path, max_model_len=100)).step({0: prompt[:100]})[0]
    assert (short - expected[:100]).abs().max() > 0.01


def test_slopes_of_alibi() -> None:
    assert alibi_slopes(8) == tuple(2.0**-power for power in range(1, 9))
    assert alibi_slopes(40) == pytest.approx(tuple(old_layouts._slopes(40)))
    assert alibi_slopes(6) == pytest.approx(tuple(old_layouts._slopes(6)))


@pytest.mark.parametrize(
    "architecture",
    ["AquilaForCausalLM", "AquilaModel", "XverseForCausalLM", "InternLM3ForCausalLM", "LLaMAForCausalLM"],
)
def test_llama_by_other_names(architecture: str) -> None:
    config = make_model_config(tiny_model("llama"), architectures=[architecture])
    prompt = random_tokens(50, VOCAB_SIZE, seed=2)
    plain = PagedDriver(make_model_config(tiny_model("llama"))).step({0: prompt})[0]
    assert torch.equal(PagedDriver(config).step({0: prompt})[0], plain)


# ---- config.json -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "gemma2",
            {"layer_types": ["sliding_attention", "linear_attention", "full_attention"]},
            "'linear_attention'",
        ),
        ("gemma2", {"hidden_activation": "quick_gelu"}, "hidden_act 'quick_gelu'"),
        ("starcoder2", {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu'"),
        ("glm", {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "rope type 'proportional'"),
        ("falcon", {"alibi": True}, "alibi True is not supported"),
        ("chatglm", {"position_encoding_2d": True}, "position_encoding_2d True is not supported"),
        ("chatglm", {"rmsnorm": False}, "rmsnorm False is not supported"),
        ("chatglm", {"quantization_bit": 4}, "quantization_bit 4 is not supported"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias True is not supported"),
        ("qwen1", {"visual": {}}, "visual {} is not supported"),
        ("minicpm", {"num_experts": 8}, "num_experts 8 is not supported"),
        ("mixtral", {"num_experts_per_tok": 7}, r"cannot use 7 \(num_experts_per_tok\) of 6 experts"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ("deepseek-v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
        (
            "deepseek-v2",
            {"topk_group": 5},
            r"cannot use 5 \(topk_group\) of 4 \(n_group\) equal groups of 16 experts",
        ),
        ("deepseek-v3", {"n_group": 5}, r"cannot use 2 \(topk_group\) of 5 \(n_group\) equal groups of 16 experts"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ("deepseek-v3", {"attention_bias": True}, "attention_bias True is not supported"),
        ("qwen2-moe", {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' needs factor"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope type 'linear' needs factor"),
        ("internlm2", {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope type 'ntk' is not supported"),
        (
            "phi3-longrope",
            {"rope_parameters": {"short_factor": [1.0]}},
            "short_factor of rope type 'longrope' needs 4",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load(make_model_config(_directory(name), **changes), load_format="dummy")


def test_the_layer_behind_the_last_one_is_not_loaded(tmp_path: pathlib.Path) -> None:
    """Repositories of DeepSeek-V3 have one that predicts a second token."""
    source = pathlib.Path(tiny_model("deepseek-v3"))
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    weights = load_file(source / "model.safetensors")
    further = {"eh_proj.weight": torch.zeros(64, 128), "shared_head.norm.weight": torch.zeros(64)}
    save_file(
        weights | {f"model.layers.3.{name}": one for name, one in further.items()}, tmp_path / "model.safetensors"
    )
    prompt = {0: random_tokens(40, VOCAB_SIZE, seed=2)}
    plain = PagedDriver(make_model_config(source)).step(prompt)[0]
    assert torch.equal(PagedDriver(make_model_config(tmp_path)).step(prompt)[0], plain)


def test_qwen_1_beyond_its_trained_length_is_refused() -> None:
    config = make_model_config(_old("qwen1"), max_model_len=513)
    with pytest.raises(ModelLoadError, match=r"use_logn_attn and use_dynamic_ntk begin behind seq_length \(512\)"):
        load(config, load_format="dummy")
    plain = make_model_config(_old("qwen1"), max_model_len=513, use_logn_attn=False, use_dynamic_ntk=False)
    assert len(load(plain, load_format="dummy").attention_layers) == 3


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("chatglm", {}, 512),
        ("chatglm", {"seq_length": 8192, "max_position_embeddings": 4096}, 4096),
        ("qwen1", {}, 512),
        ("baichuan-13b", {}, 512),
        ("phi3-longrope", {}, 512),
        ("gemma3-linear", {}, 512),
        ("llama-linear", {}, 2048),
    ],
)
def test_the_longest_sequence(name: str, changes: dict[str, Any], expected: int) -> None:
    arch = ArchConfig.from_hf(read_hf_config(_directory(name), overrides=changes))
    assert resolve_max_model_len(None, arch) == expected


def test_a_length_beyond_seq_length_is_refused_with_both_numbers() -> None:
    # its name ends like that of a pooling model
    config = EngineArgs(model=_old("chatglm"), skip_tokenizer_init=True).create_engine_config()
    assert (config.model.max_model_len, config.model.pooler) == (512, None)
    args = EngineArgs(model=_old("chatglm"), skip_tokenizer_init=True, max_model_len=513)
    with pytest.raises(
        ConfigError, match=r"max_model_len \(513\) is greater than the derived .* \(seq_length=512 or"
    ):
        args.create_engine_config()
    # a separate, larger statement permits longer sequences, as in vLLM
    arch = ArchConfig.from_hf(read_hf_config(_old("chatglm"), overrides={"model_max_length": 1024}))
    assert (resolve_max_model_len(None, arch), resolve_max_model_len(1024, arch)) == (512, 1024)
    longrope = ArchConfig.from_hf(read_hf_config(tiny_model("phi3-longrope")))
    assert resolve_max_model_len(2048, longrope) == 2048


def test_float16_is_refused_where_activations_exceed_it() -> None:
    def dtype(requested: str) -> str:
        args = EngineArgs(model=tiny_model("gemma2", "float16"), skip_tokenizer_init=True, dtype=requested)
        return args.create_engine_config().model.dtype

    with pytest.raises(ConfigError, match="The model type 'gemma2' does not support float16"):
        dtype("float16")
    assert dtype("auto") == "bfloat16"
    assert dtype("float32") == "float32"


def test_code_of_repositories_is_not_needed_to_read_their_config() -> None:
    for name in ("chatglm", "qwen1"):
        for trust in (False, True):
            assert read_hf_config(_old(name), trust_remote_code=trust)["num_hidden_layers"] == 3


def test_every_architecture_has_a_reader_and_a_row() -> None:
    assert MODELS.keys() | HEADS.keys() == READERS.keys()
    page = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()
    assert page == load_script("make_models_doc").render(), "run `make docs`"


# ---- ranks, stages, tapes --------------------------------------------------------------------------------------


def _two_steps(driver: PagedDriver) -> list[torch.Tensor]:
    first = driver.step({0: random_tokens(57, VOCAB_SIZE, seed=3), 1: random_tokens(5, VOCAB_SIZE, seed=4)})
    second = driver.step({row: [int(log_probs[-1].argmax())] for row, log_probs in first.items()})
    return [*first.values(), *second.values()]


# with four ranks there are fewer KV heads than ranks, so that each has a part of a group
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("baichuan-13b", 2),
        ("chatglm", 2),
        ("deepseek-v2", 4),
        ("deepseek-v2-lite", 2),
        ("deepseek-v3", 2),
        ("falcon-2", 2),
        ("gemma2", 2),
        ("internlm2", 2),
        ("internlm2", 4),
        ("mixtral", 2),
        ("phi3", 4),
        ("qwen2-moe", 2),
        ("starcoder2", 2),
    ],
)
def test_ranks_compute_what_one_computes(name: str, size: int) -> None:
    config = make_model_config(_directory(name))

    def run(context: BuildContext) -> list[torch.Tensor]:
        return _two_steps(PagedDriver(config, model=load_model(config, LoadConfig(use_tqdm=False), context)))

    (expected,) = on_ranks(1, run)
    for results in on_ranks(size, run):
        for result, one in zip(results, expected, strict=True):
            torch.testing.assert_close(result, one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["baichuan-13b", "deepseek-v3", "falcon-new", "gemma3", "minicpm", "qwen2-moe"])
def test_stages_compute_what_one_model_computes(name: str) -> None:
    config = make_model_config(_directory(name))
    stages = []
    for stage in range(2):
        context = BuildContext(torch.float32, torch.device("cpu"), ParallelContext(pp_rank=stage, pp_size=2))
        stages.append(load_model(config, LoadConfig(use_tqdm=False), context))
    whole = _two_steps(PagedDriver(config))
    for result, expected in zip(_two_steps(PagedDriver(config, model=ModelInStages(stages))), whole, strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize(
    "name",
    [
        "baichuan-13b",
        "deepseek-v2-lite",
        "deepseek-v3",
        "falcon-new",
        "gemma2",
        "gemma3",
        "glm4",
        "minicpm",
        "mixtral",
        "qwen2-moe",
        "starcoder2",
    ],
)
def test_decoding_steps_can_be_taped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = PagedDriver(make_model_config(_directory(name)))
    driver.step({0: random_tokens(57, VOCAB_SIZE, seed=3), 1: random_tokens(5, VOCAB_SIZE, seed=4)})
    forward, tapes = driver.model.forward, Tapes()

    @torch.inference_mode()
    def taped(*arguments: Any) -> torch.Tensor:
        recorded = tapes.record(0, lambda: forward(*arguments))
        result = recorded.clone()
        recorded.fill_(0.0)
        tapes.replay(0)
        assert torch.equal(recorded, result)
        return result

    monkeypatch.setattr(driver.model, "forward", taped)
    results = driver.step({0: [5], 1: [6]})
    assert tapes.length(0) > 10
    assert all(log_probs.isfinite().all() for log_probs in results.values())


# ---- the engine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["baichuan-13b", "chatglm", "deepseek-v3", "mixtral", "qwen1", "qwen2-moe", "qwen3-moe"]
)
@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": True, "enable_chunked_prefill": True, "max_num_batched_tokens": 32},
        {"num_scheduler_steps": 4, "num_gpu_blocks_override": 12, "max_model_len": 160},
    ],
    ids=["chunks behind cached prefixes", "several steps and preemptions"],
)
def test_the_engine_generates_the_references_text(name: str, options: dict[str, Any]) -> None:
    _assert_generates(name, options)


_EXPERT_PARALLEL = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "num_scheduler_steps": 4}


# in processes of their own; threads, above, stand for workers of the other families
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("deepseek-v3", _EXPERT_PARALLEL),
        *(
            pytest.param(name, options, marks=pytest.mark.exhaustive)
            for name, options in (
                ("deepseek-v2", {"pipeline_parallel_size": 2, "enable_prefix_caching": True}),
                ("deepseek-v2-lite", {"tensor_parallel_size": 2, "enable_prefix_caching": True}),
                ("deepseek-v2-lite", _EXPERT_PARALLEL),
                ("deepseek-v2", _EXPERT_PARALLEL),
                ("mixtral", _EXPERT_PARALLEL),
                ("qwen2-moe", _EXPERT_PARALLEL),
                ("qwen3-moe", _EXPERT_PARALLEL),
                ("mixtral", {"tensor_parallel_size": 2}),
                ("qwen3-moe", {"tensor_parallel_size": 2}),
            )
        ),
    ],
)
def test_workers_generate_the_references_text(name: str, options: dict[str, Any]) -> None:
    _assert_generates(name, options)


def _assert_generates(name: str, options: dict[str, Any]) -> None:
    shared = random_tokens(48, VOCAB_SIZE, seed=5)
    prompts = [shared + random_tokens(length, VOCAB_SIZE, seed=length) for length in (1, 9, 40)]
    llm = LLM(
        _directory(name),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=16,
        max_num_seqs=4,
        kv_cache_memory_bytes="16M",
        **options,
    )
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    reference = _reference(name)
    for prompt, output in zip(prompts, outputs, strict=True):
        generated = list(output.outputs[0].token_ids)
        assert len(generated) == 24
        expected = reference.log_probs([*prompt, *generated])[len(prompt) - 1 : -1]
        assert expected.argmax(-1).tolist() == generated
