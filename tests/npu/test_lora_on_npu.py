"""LoRA adapters on simulated NPUs: products in both forms, and models with mixed adapters, eager and by graphs."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from ascend_vllm import SamplingParams
from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.engine.llm_engine import LLMEngine
from ascend_vllm.errors import ConfigError, ModelLoadError, UnsupportedFlagError
from ascend_vllm.lora.request import LoRARequest
from ascend_vllm.ops import ascend_custom
from ascend_vllm.ops.ascend_lora import CustomSlots, DenseSlots, make_slots
from ascend_vllm.ops.lora import AdapterSlots
from tests.lora_adapters import ALL_LINEAR, Adapter, write_adapter
from tests.npu.recorder import traced
from tests.tiny_models import tiny_model

NPU = torch.device("npu:0")
WIDTHS, INPUTS, MAX_RANK, NUM_SLOTS = (40, 16, 24), 64, 16, 3
# of tokens; the second slot's adapter has no part for the second slice, the third slot was emptied again
ROWS = torch.tensor([1, -1, 0, 0, 2, 1, -1])
FORMS = {"torch_npu": "", "custom": "all"}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """By whose operators adapters are multiplied."""
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False")
    monkeypatch.setenv("ASCEND_VLLM_CUSTOM_OPS", "lora_shrink,lora_expand" if request.param == "custom" else "")
    ascend_custom.enabled.cache_clear()
    yield request.param
    ascend_custom.enabled.cache_clear()


def parts_of(slot: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    generator = torch.Generator().manual_seed(slot)
    rank = 5 + 3 * slot
    found: list[tuple[torch.Tensor, torch.Tensor] | None] = []
    for index, width in enumerate(WIDTHS):
        a = torch.randn(rank, INPUTS, generator=generator).to(dtype) / 8
        b = torch.randn(width, rank, generator=generator).to(dtype) / 3
        found.append(None if (slot, index) == (1, 1) else (a, b))
    return found


def filled(dtype: torch.dtype, inputs: int = INPUTS) -> AdapterSlots:
    slots = make_slots(NUM_SLOTS, WIDTHS, inputs, MAX_RANK, dtype, NPU)
    for slot in range(NUM_SLOTS):
        slots.place(slot, slots.pack(parts_of(slot, dtype)))
    slots.place(2, None)
    return slots


def add(slots: AdapterSlots, x: torch.Tensor, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """y with the adapters' part, on the host."""
    order = rows.argsort(stable=True).to(NPU) if slots.reads_order else None
    result, numbers = y.to(NPU), rows.to(NPU)
    slots.expand(result, slots.shrink(x.to(NPU), numbers, order), numbers, order)
    return result.cpu()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_get_their_own_adapters(form: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(len(ROWS), INPUTS, generator=generator).to(dtype)
    y = torch.randn(len(ROWS), sum(WIDTHS), generator=generator).to(dtype)
    slots = filled(dtype)
    assert isinstance(slots, CustomSlots if form == "custom" else DenseSlots)
    found = add(slots, x, y, ROWS)
    exact = y.double()
    for row, slot in enumerate(ROWS.tolist()):
        column = 0
        for width, part in zip(WIDTHS, parts_of(slot, dtype) if slot in (0, 1) else [None] * 3, strict=True):
            if part is not None:
                exact[row, column : column + width] += part[1].double() @ (part[0].double() @ x[row].double())
            column += width
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=6 * torch.finfo(dtype).eps)
    untouched = (ROWS != 0) & (ROWS != 1)
    assert torch.equal(found[untouched], y[untouched])
    # a row's result does not depend on the others
    for row in range(len(ROWS)):
        assert torch.equal(add(slots, x[row : row + 1], y[row : row + 1], ROWS[row : row + 1]), found[row : row + 1])


def test_the_custom_operators_take_whole_blocks_of_inputs(form: str) -> None:
    slots = make_slots(2, WIDTHS, 40, MAX_RANK, torch.float16, NPU)
    assert isinstance(slots, DenseSlots)
    assert form in FORMS


def test_weights_that_are_not_finite_are_refused(form: str) -> None:
    slots = make_slots(1, (16,), INPUTS, MAX_RANK, torch.float16, NPU)
    with pytest.raises(ModelLoadError, match=r"weights of the adapter are not finite in torch.float16"):
        slots.pack([(torch.full((4, INPUTS), 1e6), torch.ones(16, 4))])


ADAPTERS = (
    Adapter("all", rank=16),
    Adapter("attention", modules=("q_proj", "v_proj")),
    Adapter("head", rank=3, modules=(*ALL_LINEAR, "lm_head")),
)
PROMPTS = ("The quick brown fox", "Hello!", "Blocks of the cache hold keys", "1 2 3 4 5", "Serving a model")


def make_engine(**changes: Any) -> LLMEngine:
    options: dict[str, Any] = {
        "async_scheduling": False,
        "max_num_seqs": 5,
        "max_model_len": 256,
        "num_gpu_blocks_override": 20,
        "max_loras": 2,
        "enable_lora": True,
    }
    model = tiny_model("qwen2-64", "float16")
    return LLMEngine(
        EngineArgs(
            model=model, device="npu", swap_space=0, disable_log_stats=True, **options | changes
        ).create_engine_config()
    )


def generate(engine: LLMEngine, adapters: Sequence[LoRARequest | None]) -> list[tuple[int, ...]]:
    """Ids of the answers to the prompts, each with its adapter."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for number, (prompt, lora) in enumerate(zip(PROMPTS, adapters, strict=True)):
        engine.add_request(str(number), prompt, params, lora_request=lora)
    answers: dict[str, tuple[int, ...]] = {}
    while engine.has_unfinished_requests():
        answers |= {o.request_id: tuple(o.outputs[0].token_ids) for o in engine.step() if o.finished}
    return [answers[str(number)] for number in range(len(PROMPTS))]


def scores(engine: LLMEngine, adapters: Sequence[LoRARequest | None]) -> list[list[float]]:
    """Log-probabilities of the prompts' tokens, each prompt with its adapter."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for number, (prompt, lora) in enumerate(zip(PROMPTS, adapters, strict=True)):
        engine.add_request(str(number), prompt, params, lora_request=lora)
    answers: dict[str, list[float]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                positions = zip((output.prompt_logprobs or [])[1:], output.prompt_token_ids[1:], strict=True)
                answers[output.request_id] = [entry[token].logprob for entry, token in positions if entry]
    return [answers[str(number)] for number in range(len(PROMPTS))]


@pytest.mark.parametrize("num_scheduler_steps", [1, 4])
def test_mixed_batches_by_graphs_equal_eager_steps(
    form: str,
    num_scheduler_steps: int,
    tmp_path: pathlib.Path,
) -> None:
    model = tiny_model("qwen2-64", "float16")
    loras: list[LoRARequest | None] = [None]
    for number, adapter in enumerate(ADAPTERS):
        loras.append(LoRARequest(adapter.name, number + 1, write_adapter(tmp_path / adapter.name, model, adapter)))
    chosen = [loras[number % len(loras)] for number in range(len(PROMPTS))]
    eager = make_engine(enforce_eager=True)
    base = generate(eager, [None] * len(PROMPTS))
    # each prompt alone among base rows
    alone = []
    for number, lora in enumerate(chosen):
        others: list[LoRARequest | None] = [None] * len(PROMPTS)
        others[number] = lora
        answers = generate(eager, others)
        assert answers[:number] + answers[number + 1 :] == base[:number] + base[number + 1 :]
        alone.append(answers[number])
    assert alone != base
    graphs = make_engine(num_scheduler_steps=num_scheduler_steps)
    assert generate(graphs, chosen) == alone
    # the plain graphs
    assert generate(graphs, [None] * len(PROMPTS)) == base
    assert generate(graphs, chosen[::-1]) == generate(eager, chosen[::-1])


@pytest.mark.parametrize("fully_sharded_loras", [False, True])
def test_two_devices_share_adapters(form: str, fully_sharded_loras: bool, tmp_path: pathlib.Path) -> None:
    model = tiny_model("qwen2-64", "float16")
    loras: list[LoRARequest | None] = [None]
    for number, adapter in enumerate(ADAPTERS[:2]):
        loras.append(LoRARequest(adapter.name, number + 1, write_adapter(tmp_path / adapter.name, model, adapter)))
    chosen = [loras[number % len(loras)] for number in range(len(PROMPTS))]
    alone = make_engine(enforce_eager=True)
    both = make_engine(tensor_parallel_size=2, fully_sharded_loras=fully_sharded_loras)
    found, wanted, base = scores(both, chosen), scores(alone, chosen), scores(alone, [None] * len(PROMPTS))
    both.shutdown()
    for row, lora in enumerate(chosen):
        # sums of float16 in another order
        assert found[row] == pytest.approx(wanted[row], abs=0.03), (form, row)
        assert (lora is None) == (wanted[row] == pytest.approx(base[row], abs=0.03))


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_prompts_and_decoding_replay(form: str, enforce_eager: bool, tmp_path: pathlib.Path) -> None:
    lora = LoRARequest("all", 1, write_adapter(tmp_path / "all", tiny_model("qwen2-64", "float16"), ADAPTERS[0]))
    engine = make_engine(enforce_eager=enforce_eager)
    engine.add_request(
        "0", PROMPTS[0], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), lora_request=lora
    )
    adds = {"custom": "lora_expand_f16", "torch_npu": "aclnnInplaceAddmm"}[form]
    with traced() as prompt:
        while not engine.step():
            pass
    with traced() as decoding:
        engine.step()
    for calls in (prompt, decoding):
        assert (adds in {call["op"] for call in calls}) == enforce_eager


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedFlagError, match=r"--lora-dtype float32.*NPUs multiply adapters in the model's"):
        make_engine(lora_dtype="float32")
    latent = EngineArgs(tiny_model("deepseek-v2-512", "float16"), device="npu", swap_space=0, enable_lora=True)
    with pytest.raises(UnsupportedFlagError, match="adapters for latent attention are not available on --device npu"):
        latent.create_engine_config()
    monkeypatch.setenv("INFER_MODE", "PTA")
    with pytest.raises(ConfigError, match="INFER_MODE=PTA does not go with --enable-lora"):
        make_engine()
