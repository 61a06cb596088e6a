"""LoRA adapters: answers of a mixed batch are those of transformers' model with each adapter, as PEFT merges it."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from ascend_vllm import LLM, SamplingParams
from ascend_vllm.errors import RequestError
from ascend_vllm.lora.request import LoRARequest
from ascend_vllm.sampling_params import StructuredOutputsParams
from tests import quantized_checkpoints as formats
from tests.lora_adapters import ALL_LINEAR, VOCABULARY, Adapter, adapted, write_adapter
from tests.tiny_models import tiny_model, tiny_root

ADAPTERS = (
    Adapter("all", rank=16),
    Adapter("small", rank=4),
    Adapter("wide", rank=64, alpha=32),
    Adapter("root", rank=8, modules=(*ALL_LINEAR, "lm_head"), takes_root=True),
    Adapter("attention", modules=("q_proj", "v_proj"), as_torch=True),
    Adapter("mlp", modules=("gate_proj", "down_proj")),
    Adapter("one-layer", layers=(0,)),
    Adapter("patterns", ranks={"q_proj": 12, "down_proj": 3}, alphas={"o_proj": 40.0}),
    Adapter("words", rank=12, modules=VOCABULARY, ranks={"lm_head": 5}),
    Adapter("everything", modules=(*ALL_LINEAR, *VOCABULARY), rank=20),
)
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
LATENT_ADAPTERS = (
    Adapter("latents", rank=16, modules=_LATENT),
    Adapter("queries", rank=4, modules=("q_a_proj", "q_b_proj")),
    Adapter("both", modules=(*_LATENT, *VOCABULARY)),
)
# of a prompt for each adapter, between two for the model itself
LENGTHS = (3, 40, 17, 1, 29, 8, 60, 2, 33, 5, 21, 12)
NUM_TOKENS = 12


@dataclasses.dataclass(frozen=True)
class Row:
    """A prompt, and what an adapter's model says."""

    lora: LoRARequest | None
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models are slower on several threads, and far slower on a busy machine."""
    num_threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        yield
    torch.set_num_threads(num_threads)


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 384, (length,), generator=generator).tolist()


@torch.no_grad()
def scores(model: Any, ids: list[int]) -> torch.Tensor:
    """[T, V] log-probabilities by transformers."""
    found: torch.Tensor = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return found


def greedy(model: Any, ids: list[int], allowed: Callable[[list[int]], list[int]] | None = None) -> list[int]:
    """The most likely tokens, of those that are allowed after an output."""
    output: list[int] = []
    while len(output) < NUM_TOKENS:
        last = scores(model, ids + output)[-1]
        choices = range(len(last)) if allowed is None else allowed(output)
        if not choices:
            break
        output.append(max(choices, key=last.tolist().__getitem__))
    return output


@functools.cache
def adapters_of(model: str) -> list[LoRARequest]:
    adapters = LATENT_ADAPTERS if "deepseek" in model else ADAPTERS
    root = tiny_root() / f"adapters-of-{pathlib.Path(model).parent.name}-{pathlib.Path(model).name}"
    paths = [write_adapter(root / adapter.name, model, adapter) for adapter in adapters]
    return [
        LoRARequest(adapter.name, n + 1, path) for n, (adapter, path) in enumerate(zip(adapters, paths, strict=True))
    ]


@functools.cache
def rows_of(model: str) -> list[Row]:
    """By PEFT and transformers."""
    rows = []
    for seed, lora in enumerate([None, *adapters_of(model), None]):
        whole, ids = adapted(model, lora and lora.lora_path), prompt(LENGTHS[seed], seed)
        tokens = greedy(whole, ids)
        each = scores(whole, ids + tokens)
        found = [each[n, token].item() for n, token in enumerate((ids + tokens)[1:])]
        rows.append(Row(lora, ids, tokens, found[len(ids) - 1 :], found[: len(ids) - 1]))
    return rows


def assert_answers(model: str, rows: list[Row], bound: float = 2e-4, **options: Any) -> None:
    """One mixed batch has the rows' tokens and log-probabilities, and a second one has them with cached prefixes."""
    llm = LLM(model, dtype="float32", enable_lora=True, **{"max_loras": 10, "max_lora_rank": 64} | options)
    prompts = [{"prompt_token_ids": row.prompt} for row in rows]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    asking = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    for one in (params, asking):
        outputs = llm.generate(prompts, one, use_tqdm=False, lora_request=[row.lora for row in rows])
        for row, output in zip(rows, outputs, strict=True):
            assert output.lora_request == row.lora
            (found,) = output.outputs
            assert found.token_ids == row.tokens, row.lora
            got = [entry[token].logprob for entry, token in zip(found.logprobs or [], row.tokens, strict=True)]
            assert got == pytest.approx(row.logprobs, abs=bound), row.lora
            if one is asking:
                entries = zip((output.prompt_logprobs or [])[1:], row.prompt[1:], strict=True)
                assert [entry[token].logprob for entry, token in entries if entry] == pytest.approx(
                    row.prompt_logprobs, abs=bound
                )
    llm.shutdown()
    assert len({tuple(row.tokens) for row in rows}) == len(rows)


CHUNKS = {
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 32,
    "enable_prefix_caching": True,
    "block_size": 16,
}
FEW = {"num_scheduler_steps": 4, "max_num_seqs": 3, "max_loras": 2, "max_cpu_loras": 3}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("llama", CHUNKS),
        ("llama", FEW),
        ("llama", {"tensor_parallel_size": 2, "max_loras": 3}),
        ("llama", {"tensor_parallel_size": 2, "fully_sharded_loras": True}),
        ("qwen2", CHUNKS),
        ("qwen2", FEW),
        ("qwen2", {"pipeline_parallel_size": 2, "max_loras": 3}),
        ("qwen2-tied", {}),
        ("qwen2-tied", {"tensor_parallel_size": 2, "max_loras": 3, "enable_prefix_caching": True}),
        ("qwen2-tied", {"tensor_parallel_size": 2, "fully_sharded_loras": True, "max_loras": 3} | CHUNKS),
        ("qwen2-tied", {"pipeline_parallel_size": 2}),
    ],
)
def test_a_mixed_batch_equals_merged_models(name: str, options: dict[str, Any]) -> None:
    model = tiny_model(name, dtype="float32")
    assert_answers(model, rows_of(model), **options)


@pytest.mark.parametrize(
    ("writer", "declared"),
    [
        (
            formats.awq(32),
            {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        ),
        (
            formats.gptq(4, 32, symmetric=False, order="act"),
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
        ),
        (formats.int8(), None),
    ],
    ids=["awq", "gptq", "weight_only_int8"],
)
def test_adapters_of_quantized_models(
    tmp_path: pathlib.Path, writer: formats.Writer, declared: dict[str, Any] | None
) -> None:
    quantized, meant = formats.write(tmp_path, writer, declared)
    options = {"quantization": "weight_only_int8"} if declared is None else {}
    # rounding while loading begins with the weights that were not rounded
    model = str(formats.float_model()) if declared is None else quantized
    assert_answers(model, rows_of(meant), bound=5e-3, **options)


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2, "max_loras": 2, "fully_sharded_loras": True}])
def test_latent_attention(options: dict[str, Any]) -> None:
    model = tiny_model("deepseek-v2", dtype="float32")
    assert_answers(model, rows_of(model), **options)


ADDING = (
    Adapter("linear", rank=8, added=3),
    Adapter("vocabulary", modules=(*ALL_LINEAR, *VOCABULARY), rank=20, added=5),
    Adapter("copies", modules=("q_proj", "v_proj"), added=16, as_copies=True),
    Adapter("copied-tables", modules=VOCABULARY, added=1, as_copies=True),
)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("llama", FEW | {"tensor_parallel_size": 2, "fully_sharded_loras": True}),
        ("qwen2-tied", CHUNKS),
        ("qwen2-tied", {"pipeline_parallel_size": 2}),
    ],
)
def test_adapters_may_add_tokens(name: str, options: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """Rows of the model, and of adapters with fewer tokens, never get those that they do not have."""
    model = tiny_model(name, dtype="float32")
    size = json.loads((pathlib.Path(model) / "config.json").read_text())["vocab_size"]
    loras: list[LoRARequest | None] = [None]
    for number, adapter in enumerate((*ADDING, ADAPTERS[0]), 1):
        loras.append(LoRARequest(adapter.name, number, write_adapter(tmp_path / adapter.name, model, adapter)))
    counts = [0, *(adapter.added for adapter in ADDING), 0]
    rows = []
    for seed, (lora, count) in enumerate(zip(loras, counts, strict=True)):
        whole = adapted(model, lora and lora.lora_path)
        ids = prompt(20, seed) + list(range(size, size + count)) + prompt(3, seed)
        tokens = greedy(whole, ids)
        each = scores(whole, ids + tokens)
        found = [each[n, token].item() for n, token in enumerate((ids + tokens)[1:])]
        rows.append(Row(lora, ids, tokens, found[len(ids) - 1 :], found[: len(ids) - 1]))
    assert sum(max(row.tokens) >= size for row in rows) >= 2, "some of the added tokens are sampled"
    assert_answers(model, rows, **options)


@pytest.mark.parametrize(
    ("name", "module"),
    [("deepseek-v2", "self_attn.kv_b_proj"), ("mixtral", "block_sparse_moe.gate"), ("llama", "self_attn.q_norm")],
)
def test_layers_without_adapters_are_refused_by_name(tmp_path: pathlib.Path, name: str, module: str) -> None:
    layer = f"model.layers.1.{module}"
    (tmp_path / "adapter_config.json").write_text(json.dumps(Adapter("odd").config()))
    tensors = {"A": torch.zeros(8, 64), "B": torch.zeros(64, 8)}
    save_file(
        {f"base_model.model.{layer}.lora_{matrix}.weight": tensor for matrix, tensor in tensors.items()},
        tmp_path / "adapter_model.safetensors",
    )
    llm = LLM(tiny_model(name, dtype="float32"), dtype="float32", enable_lora=True)
    lora = LoRARequest("odd", 1, str(tmp_path))
    with pytest.raises(RequestError, match=rf"odd failed: .*expected target modules in .* received \['{layer}'\]"):
        llm.llm_engine.add_lora(lora)
    llm.shutdown()


def test_beams_and_structured_outputs() -> None:
    model = tiny_model("llama", dtype="float32")
    llm = LLM(model, dtype="float32", enable_lora=True, max_loras=4, max_lora_rank=64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    texts = [tokenizer.decode([token]) for token in range(384)]
    letters = {token: text for token, text in enumerate(texts) if text and set(text) <= set("ab")}
    assert len(letters) >= 2

    def allowed(output: list[int]) -> list[int]:
        rest = 8 - sum(len(letters[token]) for token in output)
        return [token for token, text in letters.items() if len(text) <= rest]

    rows = [row for row in rows_of(model) if row.lora is None or row.lora.lora_name in ("all", "words", "everything")]
    prompts = [{"prompt_token_ids": row.prompt} for row in rows]
    loras = [row.lora for row in rows]
    params = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, structured_outputs=StructuredOutputsParams(regex="[ab]{8}")
    )
    constrained = llm.generate(prompts, params, use_tqdm=False, lora_request=loras)
    beams = SamplingParams(
        temperature=0, n=3, best_of=3, use_beam_search=True, max_tokens=6, ignore_eos=True, early_stopping=False
    )
    searched = llm.generate(prompts, beams, use_tqdm=False, lora_request=loras)
    for row, chosen, found in zip(rows, constrained, searched, strict=True):
        whole = adapted(model, row.lora and row.lora.lora_path)
        tokens = [token for token in chosen.outputs[0].token_ids if token in letters]
        assert tokens == greedy(whole, row.prompt, allowed)
        sequences = whole.generate(
            torch.tensor([row.prompt]),
            attention_mask=torch.ones(1, len(row.prompt), dtype=torch.long),
            num_beams=3,
            num_return_sequences=3,
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert [output.token_ids for output in found.outputs] == sequences[:, len(row.prompt) :].tolist()
    llm.shutdown()
