"""--spec-decoding-acceptance-method typical_acceptance_sampler: the published rule, at every draft of a row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ascend_vllm import SamplingParams
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.types.step import REJECTED_TOKEN, NewRow, SchedulerOutput
from ascend_vllm.worker.sampling.acceptance import LikelyDrafts
from ascend_vllm.worker.worker import Worker
from tests.tiny_models import VOCAB_SIZE, tiny_model
from tests.worker.drafting import generate
from tests.worker.test_drafts import make_config, make_requests

NGRAM: dict[str, Any] = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 4,
    }
}


def typical(threshold: float, alpha: float, **options: Any) -> EngineConfig:
    return make_config(
        spec_decoding_acceptance_method="typical_acceptance_sampler",
        typical_acceptance_sampler_posterior_threshold=threshold,
        typical_acceptance_sampler_posterior_alpha=alpha,
        **NGRAM | options,
    )


def expected_token(logits: torch.Tensor, draft: int, temperature: float, threshold: float, alpha: float) -> int:
    """By the definition, in float64."""
    probs = (logits.double() / temperature).softmax(-1)
    entropy = -float((probs * (probs + 1e-5).log()).sum())
    return draft if float(probs[draft]) > min(threshold, alpha * math.exp(-entropy)) else int(probs.argmax())


@pytest.mark.parametrize(("threshold", "alpha"), [(0.09, 0.3), (0.02, 0.9), (1e-4, 0.5)])
def test_the_rule(threshold: float, alpha: float) -> None:
    """Of rows that have drafts; the others keep what they have drawn."""
    generator = torch.Generator().manual_seed(1)
    # from nearly flat to nearly certain
    logits = torch.randn(40, 50, generator=generator) * torch.linspace(0.2, 8, 40)[:, None]
    best = logits.argmax(-1)
    drafts = torch.where(torch.arange(40) % 2 == 0, best, torch.randint(50, (40,), generator=generator))
    rows, drawn = torch.arange(0, 40, 3), torch.full((40,), 49)
    one = torch.ones(40)
    filters = [0.7 * one, torch.zeros(40, dtype=torch.int32), one, 0 * one]
    found = LikelyDrafts(rows, drafts[rows], threshold, alpha).decide(logits, filters, drawn)
    expected = drawn.clone()
    for row in rows.tolist():
        expected[row] = expected_token(logits[row], int(drafts[row]), 0.7, threshold, alpha)
    assert found.tolist() == expected.tolist()
    others = [row for row in rows.tolist() if drafts[row] != best[row]]
    assert {bool(expected[row] == drafts[row]) for row in others} == {True, False}


def test_filtered_tokens_are_no_likely_drafts() -> None:
    """Probabilities are those behind top-k, top-p, min-p and masks."""
    logits = torch.tensor([[3.0, 2.9, 2.8, -math.inf]]).repeat(4, 1)
    ones, zeros = torch.ones(4), torch.zeros(4)
    filters = [ones, torch.tensor([2, 0, 0, 0], dtype=torch.int32), torch.tensor([1, 0.3, 1, 1]), zeros.clone()]
    filters[3][2] = 0.95
    drafts = LikelyDrafts(torch.arange(4), torch.tensor([2, 1, 1, 3]), 0.0, 0.0)
    assert drafts.decide(logits, filters, torch.full((4,), 9)).tolist() == [0, 0, 0, 0]


def test_a_step_takes_likely_drafts_up_to_the_first_that_is_not() -> None:
    """In a worker: two drafts as likely as they can be, one that is not, and one behind it."""
    prompt = np.random.default_rng(3).integers(3, VOCAB_SIZE, 20).tolist()
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("qwen2")).eval()

    def logits_of(token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0, -1]
        return logits

    worker = Worker(typical(0.05, 0.3, max_num_seqs=2))
    worker.load_model()
    worker.initialize_cache(8)
    params = SamplingParams(temperature=0.9, logprobs=0)
    row = NewRow(0, "0", prompt, len(prompt), 0, [0, 1, 2], params, 7, [])
    output = worker.execute_model(SchedulerOutput(0, [], [row], [0], [len(prompt)], []))
    text = [*prompt, *output.sampled_token_ids[0].tolist()]
    drafts = []
    # the second most likely token is likely enough
    for rank in (0, 1, 300, 0):
        drafts.append(int(logits_of(text + drafts).argsort(descending=True)[rank]))
    taken: list[int] = []
    for draft in drafts:
        taken.append(expected_token(logits_of(text + taken), draft, 0.9, 0.05, 0.3))
        if taken[-1] != draft:
            break
    assert len(taken) == 3
    output = worker.execute_model(SchedulerOutput(1, [], [], [0], [5], [], drafts=[(0, drafts)]))
    assert output.sampled_token_ids.tolist() == [[*taken, REJECTED_TOKEN, REJECTED_TOKEN]]
    # log-probabilities are those of what the row has got
    assert output.logprobs is not None
    reported = [logits_of(text + taken[:place]).log_softmax(-1)[token] for place, token in enumerate(taken)]
    assert output.logprobs.logprobs[0, :3, 0].tolist() == pytest.approx(
        [float(value) for value in reported], abs=1e-4
    )


@pytest.mark.parametrize("limits", [(0.0, 0.0), (1e9, 1e9), (0.09, 0.3)])
def test_greedy_answers_do_not_depend_on_the_rule(limits: tuple[float, float]) -> None:
    """And sampled ones do: with the first limits nearly all drafts are accepted."""
    requests = make_requests()
    plain, found = generate(make_config(), requests), generate(typical(*limits), requests)
    greedy = [name for name, asked in requests.items() if asked.params.temperature == 0]
    assert len(greedy) > 3
    for name in greedy:
        assert found[name].token_ids == plain[name].token_ids, name
    # all tokens at drafted places are the most likely ones then
    if limits[0] > 1:
        assert found["warm"].token_ids != plain["warm"].token_ids


def test_any_possible_draft_is_likely_enough_for_a_limit_of_0() -> None:
    """A text of three tokens goes on as it began."""
    requests = make_requests()
    params = SamplingParams(temperature=5.0, seed=1, max_tokens=60, ignore_eos=True, allowed_token_ids=[5, 6, 7])
    requests = {"warm": type(requests["warm"])([5, 6, 7] * 6, params)}
    plain, exact = generate(make_config(), requests), generate(make_config(**NGRAM), requests)
    found = generate(typical(0.0, 0.0), requests)
    assert exact["warm"].token_ids == plain["warm"].token_ids
    assert found["warm"].num_outputs <= 20 < exact["warm"].num_outputs
