"""Beam searches for tests to compare with: the algorithm fed by transformers' models, and transformers' own.

Example::

    problem = Problem(width=4, num_returned=4, num_prompt_tokens=len(prompt))
    search = run(problem, functools.partial(model_logprobs, "qwen2-tied", tuple(prompt)))
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import transformers

from ascend_vllm.core.beam.search import BeamSearch
from ascend_vllm.types.messages import BeamSearchSpec
from tests.tiny_models import tiny_model

# output so far → log-probability of each token of the vocabulary as the next one
NextLogprobs = Callable[[tuple[int, ...]], np.ndarray]
# tokens of the output, cumulative log-probability
Sequences = list[tuple[tuple[int, ...], float]]

EOS = 0


@dataclasses.dataclass
class Problem:
    """Everything a search depends on but the log-probabilities."""

    width: int
    num_returned: int
    length_penalty: float = 1.0
    early_stopping: bool | str | None = False
    num_prompt_tokens: int = 3
    max_tokens: int = 6
    end_ids: frozenset[int] = frozenset({EOS})
    eos_id: int | None = EOS
    min_tokens: int = 0
    max_model_len: int = 64

    def make(self) -> BeamSearch:
        spec = BeamSearchSpec(self.width, self.num_returned, self.length_penalty, self.early_stopping)
        return BeamSearch(
            spec,
            self.num_prompt_tokens,
            self.num_prompt_tokens + self.max_tokens,
            self.end_ids,
            self.eos_id,
            self.num_prompt_tokens + self.min_tokens,
            self.max_model_len,
        )


def most_likely(logprobs: np.ndarray, count: int) -> tuple[list[int], list[float]]:
    token_ids = np.argsort(-logprobs, kind="stable")[:count]
    return token_ids.tolist(), logprobs[token_ids].tolist()


def step(search: BeamSearch, next_logprobs: NextLogprobs) -> list[tuple[int, int]]:
    """One `advance`, checked against what it says of the live beams."""
    before = [tuple(search.output_token_ids(beam)) for beam in range(search.num_live)]
    live = search.advance([most_likely(next_logprobs(output), search.num_candidates) for output in before])
    assert search.num_live == len(live)
    assert search.is_done == (not live)
    for beam, (parent, token_id) in enumerate(live):
        assert tuple(search.output_token_ids(beam)) == (*before[parent], token_id)
        assert search.num_output_tokens == len(before[parent]) + 1
    return live


def run(problem: Problem, next_logprobs: NextLogprobs) -> BeamSearch:
    search = problem.make()
    assert search.num_live == 1
    while not search.is_done:
        step(search, next_logprobs)
    return search


def found(search: BeamSearch) -> Sequences:
    return [(tuple(sequence.token_ids), sequence.cumulative_logprob) for sequence in search.best()]


@contextlib.contextmanager
def reference_mode() -> Iterator[None]:
    """Tiny models are slower on several threads, and far slower on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(num_threads)


@functools.cache
def reference_model(name: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(name), dtype=torch.float32)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model


@functools.cache
def model_logprobs(name: str, prompt: tuple[int, ...], output: tuple[int, ...]) -> np.ndarray:
    with reference_mode():
        logits = reference_model(name)(torch.tensor([[*prompt, *output]])).logits[0, -1]
    return torch.log_softmax(logits, -1).double().numpy()


def transformers_search(name: str, prompt: list[int], problem: Problem) -> Sequences:
    """Sequences and scores of generate(num_beams=…); the scores are not divided by a length."""
    ids = torch.tensor([prompt])
    with reference_mode():
        output = reference_model(name).generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=problem.width,
            num_return_sequences=problem.num_returned, max_new_tokens=problem.max_tokens, length_penalty=0.0,
            eos_token_id=problem.eos_id, early_stopping=problem.early_stopping, return_dict_in_generate=True,
            output_scores=True,
        )  # fmt: skip
    sequences = []
    for token_ids, score in zip(output.sequences.tolist(), output.sequences_scores.tolist(), strict=True):
        generated = token_ids[len(prompt) :]
        if problem.eos_id in generated:
            generated = generated[: generated.index(problem.eos_id) + 1]
        sequences.append((tuple(generated), score))
    return sequences
