"""Drafts of draft models and EAGLE heads: they are what the models predict, and answers do not depend on them."""

from __future__ import annotations

import pathlib
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers

from ascend_vllm import SamplingParams
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.config.model import ModelConfig
from ascend_vllm.config.speculation import SpeculativeConfig, SpeculativeMethod
from ascend_vllm.core.draft_costs import DecodingStep
from ascend_vllm.ops import native
from ascend_vllm.ops.tape import Tapes
from ascend_vllm.types.step import NO_DRAFT, NewRow, SchedulerOutput
from ascend_vllm.worker.speculation import eagle
from ascend_vllm.worker.speculation.chain import ChainProposer
from ascend_vllm.worker.speculation.chain_tapes import ChainTapes
from ascend_vllm.worker.speculation.proposer import ComputedStep
from ascend_vllm.worker.worker import Worker
from tests.eagle_heads import (
    eagle3_reference,
    eagle3_tensors,
    eagle_reference,
    eagle_tensors,
    head_config,
    save_head,
)
from tests.models.paged_driver import make_model_config
from tests.moody_drafts import Moody
from tests.tiny_models import VOCAB_SIZE, tiny_model
from tests.worker.drafting import Answer, Asked, generate, make_prompts
from tests.worker.test_drafts import make_config, make_requests

HIDDEN, NUM_DRAFTED, NUM_DRAFTS = 64, 96, 3
LAYERS = (1, 2, 2)


def _eagle_config(directory: pathlib.Path) -> ModelConfig:
    save_head(directory, eagle_tensors(HIDDEN, VOCAB_SIZE, bias=True), head_config(HIDDEN, VOCAB_SIZE))
    return make_model_config(directory, architectures=["EagleLlamaForCausalLM"])


def _eagle3_config(directory: pathlib.Path) -> ModelConfig:
    layers = {"eagle_aux_hidden_state_layer_ids": LAYERS}
    config = head_config(HIDDEN, VOCAB_SIZE, draft_vocab_size=NUM_DRAFTED, eagle_config=layers)
    save_head(directory, eagle3_tensors(HIDDEN, VOCAB_SIZE, NUM_DRAFTED), config)
    return make_model_config(directory, architectures=["Eagle3LlamaForCausalLM"])


def _with_drafts(config: EngineConfig, method: str, draft: ModelConfig) -> EngineConfig:
    length = config.model.max_model_len
    draft = msgspec.structs.replace(draft, max_model_len=length)
    # a larger batch than any: all rows have drafts, whatever they cost
    speculation = SpeculativeConfig(
        SpeculativeMethod(method), NUM_DRAFTS, draft, max_model_len=length, disable_by_batch_size=100
    )
    return msgspec.structs.replace(config, speculation=speculation)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, ModelConfig]]:
    """Name → method and draft: the target itself, whose drafts are right, another model, and heads."""
    root = tmp_path_factory.mktemp("heads")
    return {
        "itself": ("draft_model", make_model_config(tiny_model("qwen2"))),
        "another": ("draft_model", make_model_config(tiny_model("llama"))),
        "eagle": ("eagle", _eagle_config(root / "eagle")),
        "eagle3": ("eagle3", _eagle3_config(root / "eagle3")),
    }


def _token_ids(answers: dict[str, Answer]) -> dict[str, list[int]]:
    return {name: answer.token_ids for name, answer in answers.items()}


SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "chunks and cached prefixes": {
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 16,
        "enable_prefix_caching": True,
    },
    "preemption": {"num_gpu_blocks_override": 10, "preemption_mode": "recompute"},
    "swapping": {"num_gpu_blocks_override": 10, "preemption_mode": "swap", "swap_space": 0.01},
    "eager": {"enforce_eager": True},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", ["itself", "another", "eagle", "eagle3"])
def test_answers_are_those_without_drafts(
    drafts: dict[str, tuple[str, ModelConfig]], name: str, settings: str
) -> None:
    """Greedy, sampled, penalised and stopped, token for token."""
    config = make_config(**SETTINGS[settings])
    requests = make_requests()
    expected = generate(config, requests)
    found = generate(_with_drafts(config, *drafts[name]), requests)
    assert _token_ids(found) == _token_ids(expected)
    # where blocks are short there are fewer drafts
    if name == "itself" and "num_gpu_blocks_override" not in SETTINGS[settings]:
        # its drafts are right, also of rows that sample, which are drawn with the target's own draws
        num_steps = {request: answer.num_outputs for request, answer in found.items()}
        assert num_steps["greedy"] <= 8
        assert num_steps["warm"] <= 8
        assert num_steps["long"] <= 14


def test_cached_prefixes_have_kv_of_both_models(drafts: dict[str, tuple[str, ModelConfig]]) -> None:
    """A second request with the same prompt has drafts that are right at once."""
    prompt = make_prompts(10)[9]
    params = SamplingParams(temperature=0, max_tokens=13, ignore_eos=True)
    requests = {name: Asked(prompt, params) for name in ("first", "second")}
    config = make_config(enable_prefix_caching=True, max_num_seqs=1)
    found = generate(_with_drafts(config, *drafts["itself"]), requests)
    assert found["first"].token_ids == found["second"].token_ids
    assert found["second"].num_outputs <= 4


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": True, "max_num_batched_tokens": 48, "enable_chunked_prefill": True},
        {"enable_prefix_caching": True, "num_gpu_blocks_override": 12, "preemption_mode": "recompute"},
        {"num_gpu_blocks_override": 12, "preemption_mode": "swap", "swap_space": 0.01},
    ],
    ids=["cached", "preempted", "swapped"],
)
def test_a_draft_model_catches_up(
    drafts: dict[str, tuple[str, ModelConfig]], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's own copy is right about all that it drafts, also where it has computed nothing for long."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = make_prompts(10)
    # half of them begin as others end
    requests = {str(number): Asked(prompts[number], params) for number in range(4, 10)}
    plain = generate(make_config(max_num_seqs=3, **options), requests)
    again = {f"again {name}": Asked([*one.prompt, *plain[name].token_ids], params) for name, one in requests.items()}
    plain |= generate(make_config(max_num_seqs=3, **options), again)
    config = _with_drafts(make_config(max_num_seqs=3, **options), *drafts["itself"])
    assert config.speculation is not None
    config = msgspec.structs.replace(
        config, speculation=msgspec.structs.replace(config.speculation, disable_by_batch_size=None)
    )
    counts: list[tuple[int, int]] = []

    class Counting(Moody):
        """There are no drafts in the first steps, and in some later ones."""

        num_steps = num_plain_steps = 0

        def advance(self, num_rows: int, num_asked: int) -> None:
            super().advance(num_rows, num_asked)
            self.num_steps += 1
            if self.num_steps < self.num_plain_steps:
                self.num_wanted, self.decides = 0, False

        def note(self, step: DecodingStep, token_s: float) -> None:
            super().note(step, token_s)
            counts.append((step.num_drafts, step.num_accepted))

    # a request that ends has no use for its last drafts
    most_wrong = 2 * len(plain)
    monkeypatch.setattr("ascend_vllm.core.drafting.DraftCosts", Counting)
    for num_plain_steps in (0, 60):
        Counting.num_plain_steps = num_plain_steps
        found = generate(config, requests | again)
        assert _token_ids(found) == _token_ids(plain)
        num_drafts, num_accepted = np.sum(counts, axis=0)
        assert num_drafts > 60
        assert num_accepted >= num_drafts - most_wrong
        counts.clear()


# ---- what is drafted ----------------------------------------------------------------------------------------


def _states(token_ids: list[int]) -> tuple[torch.Tensor, ...]:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("qwen2")).eval()
    with torch.inference_mode():
        return tuple(layer[0] for layer in model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states)


def _expected_eagle(token_ids: list[int]) -> list[int]:
    """Drafts behind known tokens, by the plain definition of EAGLE-1."""
    tensors = eagle_tensors(HIDDEN, VOCAB_SIZE, bias=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("qwen2"))
    lm_head = model.get_output_embeddings().weight.detach()
    states, ids, drafts = _states(token_ids[:-1])[-1], token_ids[1:], []
    for _ in range(NUM_DRAFTS):
        predicted = eagle_reference(tensors, tensors["embed_tokens.weight"], torch.tensor(ids), states)[-1:]
        drafts.append(int((predicted @ lm_head.T).argmax()))
        states, ids = torch.cat((states, predicted)), [*ids, drafts[-1]]
    return drafts


def _expected_eagle3(token_ids: list[int]) -> list[int]:
    """The same of EAGLE-3; the results of the layer are what the next pairs have in the place of combined states."""
    tensors = eagle3_tensors(HIDDEN, VOCAB_SIZE, NUM_DRAFTED)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("qwen2"))
    embedding = model.get_input_embeddings().weight.detach()
    layers = _states(token_ids[:-1])
    fused = torch.cat([layers[layer] for layer in LAYERS], 1) @ tensors["fc.weight"].T
    # the definition combines states first: here they are combined already
    combined = tensors | {"fc.weight": torch.eye(HIDDEN)}
    ids, drafts = token_ids[1:], []
    for _ in range(NUM_DRAFTS):
        predicted, logits = eagle3_reference(combined, embedding, torch.tensor(ids), fused)
        entry = int(logits[-1].argmax())
        drafts.append(entry + int(tensors["d2t"][entry]))
        fused, ids = torch.cat((fused, predicted[-1:])), [*ids, drafts[-1]]
    return drafts


def _expected_greedy(token_ids: list[int]) -> list[int]:
    """Of a draft model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("llama")).eval()
    ids = list(token_ids)
    with torch.inference_mode():
        for _ in range(NUM_DRAFTS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(token_ids) :]


EXPECTED = {"another": _expected_greedy, "eagle": _expected_eagle, "eagle3": _expected_eagle3}


class _Driven:
    """A worker with two rows, whose steps are given one by one."""

    def __init__(self, config: EngineConfig, name: str) -> None:
        self._name = name
        self._num_steps = 0
        self.worker = Worker(config)
        self.worker.load_model()
        self.worker.initialize_cache(16)
        prompts = make_prompts(8)[6:]
        self.lengths = [len(prompt) for prompt in prompts]
        params = SamplingParams(temperature=0)
        self.rows = [
            NewRow(slot, str(slot), prompt, len(prompt), 0, list(range(8 * slot, 8 * slot + 8)), params, 0, [])
            for slot, prompt in enumerate(prompts)
        ]
        self.texts = [list(prompt) for prompt in prompts]

    def run(
        self, slots: list[int], counts: list[int], max_drafts: int = NUM_DRAFTS, **fields: Any
    ) -> list[list[int]]:
        """Runs a step, and compares its drafts with the reference's; returns those of each slot."""
        step = SchedulerOutput(self._num_steps, [], fields.pop("rows", []), slots, counts, [], **fields)
        step.max_drafts = max_drafts
        self._num_steps += 1
        output = self.worker.execute_model(step)
        proposed: list[list[int]] = [[], []]
        assert (output.drafts is not None) == (max_drafts > 0 and len(output.slots) > 0)
        for index, slot in enumerate(output.slots.tolist()):
            self.texts[slot] += [token for token in output.sampled_token_ids[index].tolist() if token >= 0]
            if output.drafts is not None:
                proposed[slot] = [token for token in output.drafts[index].tolist() if token != NO_DRAFT]
                assert proposed[slot] == EXPECTED[self._name](self.texts[slot])
        return proposed


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("name", EXPECTED)
def test_drafts_are_what_the_models_predict(
    drafts: dict[str, tuple[str, ModelConfig]], name: str, enforce_eager: bool
) -> None:
    """Behind a prompt in chunks, behind right drafts, behind wrong ones and behind none, beside another row."""
    config = make_config(max_num_seqs=2, enforce_eager=enforce_eager)
    driven = _Driven(_with_drafts(config, *drafts[name]), name)
    lengths = driven.lengths
    # the first prompt at once, the second in two chunks
    driven.run([0, 1], [lengths[0], 9], rows=driven.rows)
    proposed = driven.run([1], [lengths[1] - 9])
    # the target's next tokens as drafts of one row, where it does not matter who proposed them
    right = _target_answer(driven.texts[0], 2) if name != "another" else EXPECTED[name](driven.texts[0])[:2]
    driven.run([0, 1], [3, 2], drafts=[(0, right), (1, proposed[1][:1])])
    proposed = driven.run([0, 1], [1, 1])
    driven.run([1, 0], [4, 4], drafts=[(1, proposed[1]), (0, proposed[0])])


@pytest.mark.parametrize("name", EXPECTED)
def test_drafts_after_steps_without_any_are_the_same(
    drafts: dict[str, tuple[str, ModelConfig]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and tokens are read when drafts are wanted; what a head reads together is limited, too."""
    monkeypatch.setattr(eagle, "_MOST_READ", 24)
    driven = _Driven(_with_drafts(make_config(max_num_seqs=2), *drafts[name]), name)
    lengths = driven.lengths
    driven.run([0, 1], [lengths[0], 9], 0, rows=driven.rows)
    driven.run([1], [lengths[1] - 9], 0)
    for _ in range(5):
        driven.run([0, 1], [1, 1], 0)
    # one row alone: the other's are kept
    proposed = driven.run([0], [1])
    driven.run([0, 1], [4, 1], 0, drafts=[(0, proposed[0])])
    driven.run([1], [1])
    driven.run([0, 1], [1, 1])


@pytest.mark.parametrize("most_kept", [12, 13])
def test_a_row_without_drafts_for_long_has_none_of_a_head_any_more(
    drafts: dict[str, tuple[str, ModelConfig]], most_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the other row has; a prompt that is longer than what is kept is read."""
    monkeypatch.setattr(eagle, "_MOST_KEPT", most_kept)
    driven = _Driven(_with_drafts(make_config(max_num_seqs=2), *drafts["eagle"]), "eagle")
    assert min(driven.lengths) > most_kept
    driven.run([0, 1], driven.lengths, 0, rows=driven.rows)
    for _ in range(13):
        driven.run([0], [1], 0)
    step = SchedulerOutput(99, [], [], [0, 1], [1, 1], [], max_drafts=NUM_DRAFTS)
    found = driven.worker.execute_model(step)
    assert found.drafts is not None
    assert (found.drafts[1] != NO_DRAFT).all()
    assert (found.drafts[0] != NO_DRAFT).all() == (most_kept == 13)


@pytest.mark.parametrize("name", EXPECTED)
def test_rows_that_never_draft_are_not_read(
    drafts: dict[str, tuple[str, ModelConfig]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside one that does, and alone."""
    steps: list[ComputedStep] = []

    def propose(self: ChainProposer, step: ComputedStep, propose: Any = ChainProposer.propose) -> Any:
        steps.append(step)
        return propose(self, step)

    monkeypatch.setattr(ChainProposer, "propose", propose)
    driven = _Driven(_with_drafts(make_config(max_num_seqs=2), *drafts[name]), name)
    driven.rows[0].may_draft = False
    # warm-up
    steps.clear()
    for wanted in (0, NUM_DRAFTS):
        output = driven.worker.execute_model(
            SchedulerOutput(0, [], driven.rows, [0, 1], driven.lengths, [], max_drafts=wanted)
        )
        assert len(steps) == 1
        assert 0 < output.read_s <= output.draft_s
        if wanted:
            assert output.drafts is not None
            assert (output.drafts != NO_DRAFT).any(axis=1).tolist() == [False, True]
            output = driven.worker.execute_model(SchedulerOutput(1, [], [], [0, 1], [1, 1], [], max_drafts=wanted))
            assert output.read_s == 0 < output.draft_s
        steps.clear()
        driven.worker.execute_model(SchedulerOutput(2, [], [], [0], [1], [], max_drafts=NUM_DRAFTS))
        assert not steps
        driven.worker.execute_model(SchedulerOutput(3, [0, 1], [], [], [], []))


def test_a_head_reads_so_much_at_a_time(
    drafts: dict[str, tuple[str, ModelConfig]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row whose hidden states wait has its drafts in a later step."""
    monkeypatch.setattr(eagle, "_MOST_READ", 12)
    driven = _Driven(_with_drafts(make_config(max_num_seqs=2), *drafts["eagle"]), "eagle")
    driven.run([0, 1], driven.lengths, rows=driven.rows)
    for slots in [[0, 1]] * 6 + [[1]]:
        driven.run(slots, [1] * len(slots), 0)
    output = driven.worker.execute_model(SchedulerOutput(99, [], [], [0, 1], [1, 1], [], max_drafts=NUM_DRAFTS))
    assert output.drafts is not None
    assert (output.drafts != NO_DRAFT).all(axis=1).tolist() == [True, False]
    for slot, token in enumerate(output.sampled_token_ids[:, 0].tolist()):
        driven.texts[slot].append(token)
    driven.run([0, 1], [1, 1])


def _target_answer(token_ids: list[int], count: int) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("qwen2")).eval()
    ids = list(token_ids)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(token_ids) :]


def test_blocks_and_lengths_limit_drafts(drafts: dict[str, tuple[str, ModelConfig]]) -> None:
    """Drafts stay within a row's blocks and within the longest sequence."""
    worker = Worker(_with_drafts(make_config(max_num_seqs=2, max_model_len=32), *drafts["itself"]))
    worker.load_model()
    worker.initialize_cache(4)
    params = SamplingParams(temperature=0)
    # 15 tokens and one sampled in a block of 16; 30 and one sampled of 32 in two
    rows = [
        NewRow(0, "0", list(range(15)), 15, 0, [0], params, 0, []),
        NewRow(1, "1", list(range(30)), 30, 0, [1, 2], params, 0, []),
    ]
    step = SchedulerOutput(0, [], rows, [0, 1], [15, 30], [], max_drafts=3)
    found = worker.execute_model(step).drafts
    assert found is not None
    assert (found != NO_DRAFT).sum(1).tolist() == [1, 1]
    assert np.array_equal(found[:, 1:], np.full((2, 2), NO_DRAFT))


@pytest.mark.skipif(not native.load_native_library(), reason="needs the compiled library")
@pytest.mark.parametrize("name", ["itself", "eagle", "eagle3"])
def test_chains_of_drafts_are_tapes(
    drafts: dict[str, tuple[str, ModelConfig]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of greedy rows and of such as sample, unless something edits their logits."""
    chains: list[ChainTapes] = []

    def run(self: ChainTapes, *arguments: Any, run: Any = ChainTapes.run) -> Any:
        chains.append(self)
        tokens = run(self, *arguments)
        assert tokens is not None
        return tokens

    monkeypatch.setattr(ChainTapes, "run", run)
    # what it records is no request's
    monkeypatch.setattr(Worker, "_warm_up_drafts", lambda *_: None)
    config = _with_drafts(make_config(max_num_seqs=1), *drafts[name])
    for params in ({"temperature": 0}, {"seed": 3, "top_k": 20, "logprobs": 1}):
        generate(config, {"one": Asked(make_prompts(3)[2], SamplingParams(max_tokens=12, ignore_eos=True, **params))})
        assert chains
    assert {shape.draws for chain in chains for shape in chain._tokens} == {False, True}
    chains.clear()
    params = SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=6)
    generate(config, {"one": Asked(make_prompts(3)[2], params)})
    assert not chains


@pytest.mark.skipif(not native.load_native_library(), reason="needs the compiled library")
@pytest.mark.parametrize("name", ["itself", "another", "eagle", "eagle3"])
def test_steps_of_a_row_alone_are_recorded_before_the_first_request(
    drafts: dict[str, tuple[str, ModelConfig]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recording would count as a cost of drafts. Only what draft models read of prompts is not."""
    recorded: list[int] = []

    def record(self: Tapes, key: int, *further: Any, record: Any = Tapes.record) -> Any:
        recorded.append(key)
        return record(self, key, *further)

    monkeypatch.setattr(Tapes, "record", record)
    config = _with_drafts(make_config(max_num_seqs=2), *drafts[name])
    graphs = msgspec.structs.replace(config.graphs, query_lens=tuple(range(1, NUM_DRAFTS + 2)))
    driven = _Driven(msgspec.structs.replace(config, graphs=graphs), "another")
    # of the model and of the drafts, and chains of each length, greedy and drawn
    assert len(recorded) == 2 * (NUM_DRAFTS + 1) + 2 * NUM_DRAFTS
    recorded.clear()
    row = driven.rows[0]
    for step in (
        SchedulerOutput(0, [], [row], [0], [len(row.token_ids)], [], max_drafts=NUM_DRAFTS),
        *(
            SchedulerOutput(0, [], [], [0], [1 + count], [], drafts=[(0, [5] * count)], max_drafts=NUM_DRAFTS)
            for count in range(1, NUM_DRAFTS + 1)
        ),
    ):
        driven.worker.execute_model(step)
    assert not recorded


def test_a_cache_too_small_for_drafts_is_not_warmed_up(drafts: dict[str, tuple[str, ModelConfig]]) -> None:
    worker = Worker(_with_drafts(make_config(max_num_seqs=1, max_model_len=8), *drafts["itself"]))
    worker.load_model()
    worker.initialize_cache(1)
    assert len(worker.execute_model(SchedulerOutput(0, [], [], [], [], [])).slots) == 0
