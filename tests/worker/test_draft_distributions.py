"""Three sampled tokens follow their exact joint distribution, whoever drafts them.

Exact answers are compared elsewhere; this does not rely on draws being those without drafts. The joint distribution
is enumerated: by transformers, in float64, behind every possible token and pair of tokens.
"""

from __future__ import annotations

import collections
import functools
import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from scipy import stats

from ascend_vllm import SamplingParams
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.config.speculation import AcceptanceMethod
from ascend_vllm.core.engine_core import EngineCore
from ascend_vllm.executor.base import create_executor
from ascend_vllm.types.messages import EngineCoreRequest
from tests.tiny_models import tiny_model
from tests.worker.drafting import noisy_copy
from tests.worker.test_drafts import make_config

# the tokens that are allowed, which is why drafts are often right; what follows depends on what came before
ALLOWED = [50, 88, 383]
TEMPERATURE, NUM_TOKENS, DRAWS = 3.0, 3, 2_500
# a correct sampler is rejected once in ten thousand times, and the seeds are fixed
SIGNIFICANCE = 1e-4

Joint = dict[tuple[int, ...], float]


@functools.cache
def conditional(token_ids: tuple[int, ...]) -> dict[int, float]:
    """The tokens behind others, with the probabilities that sampling parameters give them."""
    model = _model()
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0, -1].double()
    return dict(zip(ALLOWED, (logits[ALLOWED] / TEMPERATURE).softmax(-1).tolist(), strict=True))


@functools.cache
def _model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_model("qwen2")).eval()


@functools.cache
def prompt() -> tuple[int, ...]:
    """Of the same tokens, so that n-grams occur again."""
    return tuple(np.random.default_rng(5).choice(ALLOWED, 20).tolist())


@functools.cache
def joint() -> Joint:
    found: Joint = {(): 1.0}
    for _ in range(NUM_TOKENS):
        found = {
            (*tokens, token): chance * share
            for tokens, chance in found.items()
            for token, share in conditional(prompt() + tokens).items()
        }
    return found


def drawn(config: EngineConfig) -> tuple[collections.Counter[tuple[int, ...]], dict[str, Any] | None]:
    """How often three tokens were answered by requests with the seeds 0, 1, 2, …, and what became of drafts."""
    core = EngineCore(config, create_executor(config))
    try:
        answers: dict[str, list[int]] = collections.defaultdict(list)
        for seed in range(DRAWS):
            # one more, so that the last of them is drafted and followed by another like any other
            params = SamplingParams(
                seed=seed,
                temperature=TEMPERATURE,
                allowed_token_ids=ALLOWED,
                max_tokens=NUM_TOKENS + 1,
                ignore_eos=True,
            )
            core.add_request(EngineCoreRequest(str(seed), list(prompt()), params, 2, arrival_time=0.0))
        while core.has_unfinished():
            for output in core.step().outputs:
                answers[output.request_id] += output.new_token_ids
        drafts = core.call_utility("stats", [])["drafts"]
    finally:
        core.shutdown()
    return collections.Counter(tuple(tokens[:NUM_TOKENS]) for tokens in answers.values()), drafts


def p_value(observed: collections.Counter[tuple[int, ...]], expected: Joint) -> float:
    """Of a chi-square test, 0 with an impossible outcome; rare ones are one."""
    if not observed.keys() <= expected.keys():
        return 0.0
    counts = np.array([[observed[tokens], chance * observed.total()] for tokens, chance in expected.items()])
    is_rare = counts[:, 1] < 5
    counts = np.concatenate((counts[~is_rare], counts[is_rare].sum(0, keepdims=True)))
    counts = counts[counts[:, 1] > 0]
    return float(stats.chisquare(counts[:, 0], counts[:, 1]).pvalue)


def make(proposer: str) -> EngineConfig:
    # always, whether they pay or not
    settings: dict[str, Any] = {"num_speculative_tokens": 3, "disable_by_batch_size": 1_000_000}
    if proposer == "draft model":
        settings |= {"model": noisy_copy(tiny_model("qwen2"), 0.1)}
    else:
        settings |= {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return make_config(
        speculative_config=settings, max_num_seqs=128, num_gpu_blocks_override=600, enable_prefix_caching=True
    )


@pytest.mark.parametrize("proposer", ["draft model", "n-grams"])
def test_three_tokens_follow_the_joint_distribution(proposer: str) -> None:
    observed, drafts = drawn(make(proposer))
    assert drafts is not None
    assert DRAWS / 20 < drafts["num_accepted_tokens"] < drafts["num_draft_tokens"]
    assert p_value(observed, joint()) > SIGNIFICANCE
    # the comparison can fail: tokens that do not depend on one another, and one answer in five that is any
    marginals = [collections.Counter[int]() for _ in range(NUM_TOKENS)]
    for tokens, chance in joint().items():
        for place, token in enumerate(tokens):
            marginals[place][token] += chance  # type: ignore[assignment]
    independent = {
        tokens: float(np.prod([marginals[place][token] for place, token in enumerate(tokens)]))
        for tokens in itertools.product(*marginals)
    }
    assert p_value(observed, independent) < SIGNIFICANCE
    flatter = {tokens: 0.8 * chance + 0.2 / len(joint()) for tokens, chance in joint().items()}
    assert p_value(observed, flatter) < SIGNIFICANCE


def test_typical_acceptance_draws_from_another_distribution() -> None:
    """Which is what it is for; a sampler that did the same by mistake would be found out."""
    config = make("draft model")
    assert config.speculation is not None
    typical = msgspec.structs.replace(config.speculation, acceptance=AcceptanceMethod.TYPICAL)
    observed, _ = drawn(msgspec.structs.replace(config, speculation=typical))
    assert observed.keys() <= joint().keys()
    assert p_value(observed, joint()) < SIGNIFICANCE
