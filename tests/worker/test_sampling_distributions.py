"""Draws follow the exact distribution of their parameters, and that of no other order of the stages.

Thousands of rows with seeds 0, 1, 2, … go through the worker, the rows of all cases mixed in every batch. How often
each token was drawn is compared, by chi-square, with probabilities that numpy computes in float64 from the logits of
transformers. That the comparison can fail is tested, too: with distributions a tenth off, with each parameter left
out, and with two stages in the other order.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from scipy import special, stats

from ascend_vllm import LLM
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.structured_outputs import StructuredOutputsParams
from tests.tiny_models import draw_weights, tiny_model
from tests.worker.worker_driver import Driver, started_worker, transformers_logits

Floats = npt.NDArray[np.float64]

V = 32
STOPS = (9, 22)
PROMPT = [7, 12, 3, 28]
# what was generated before: two of its tokens are the likeliest ones to follow
OUTPUT = [7, 9, 7, 10, 7, 9]
CONTEXT = PROMPT + OUTPUT
DRAWS = 3_072
# rows of a step
BATCH = 2_048
# a correct sampler is rejected once in ten thousand times, and the seeds are fixed
SIGNIFICANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Case:
    """A distribution to draw from.

    Attributes:
        params: SamplingParams of the rows.
        bad_words: sequences of ids.
        mask: the ids that a constraint leaves; None: it has none.
        order: pairs of stages; if the first came behind the second, the distribution would be another one.
        ignored: parameters that change nothing here.
    """

    params: dict[str, Any]
    bad_words: tuple[tuple[int, ...], ...] = ()
    mask: tuple[int, ...] | None = None
    order: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()

    def get(self, name: str) -> Any:
        """A sampling parameter, or its default."""
        return getattr(SamplingParams(**self.params), name)


def doubled(_output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """A user's logits processor."""
    return logits * 2


# ---- the definition, one function per stage -------------------------------------------------------------------


def without(logits: Floats, is_out: npt.NDArray[np.bool_]) -> Floats:
    return np.where(is_out, -np.inf, logits)


def processors(logits: Floats, case: Case) -> Floats:
    for function in case.get("logits_processors") or ():
        logits = function([], torch.tensor(logits)).numpy()
    return logits


def constraint(logits: Floats, case: Case) -> Floats:
    return logits if case.mask is None else without(logits, ~np.isin(np.arange(V), case.mask))


def allowed(logits: Floats, case: Case) -> Floats:
    ids = case.get("allowed_token_ids")
    return logits if ids is None else without(logits, ~np.isin(np.arange(V), ids))


def bad_words(logits: Floats, case: Case) -> Floats:
    banned = [last for *start, last in case.bad_words if OUTPUT[max(0, len(OUTPUT) - len(start)) :] == start]
    return without(logits, np.isin(np.arange(V), banned))


def min_tokens(logits: Floats, case: Case) -> Floats:
    is_young = len(OUTPUT) < case.get("min_tokens")
    return without(logits, np.isin(np.arange(V), STOPS)) if is_young else logits


def bias(logits: Floats, case: Case) -> Floats:
    logits = logits.copy()
    for token, value in (case.get("logit_bias") or {}).items():
        logits[token] += value
    return logits


def repetition(logits: Floats, case: Case) -> Floats:
    is_there = np.isin(np.arange(V), CONTEXT)
    penalty = case.get("repetition_penalty")
    return np.where(is_there, np.where(logits > 0, logits / penalty, logits * penalty), logits)


def counts(logits: Floats, case: Case) -> Floats:
    logits = logits.copy()
    for token, count in Counter(OUTPUT).items():
        logits[token] -= case.get("frequency_penalty") * count + case.get("presence_penalty")
    return logits


def temperature(logits: Floats, case: Case) -> Floats:
    return logits / case.get("temperature")


def min_p(logits: Floats, case: Case) -> Floats:
    return without(logits, special.softmax(logits) < case.get("min_p") * special.softmax(logits).max())


def top_k(logits: Floats, case: Case) -> Floats:
    k = case.get("top_k")
    return without(logits, logits < np.sort(logits)[-k]) if k > 0 else logits


def top_p(logits: Floats, case: Case) -> Floats:
    order = np.argsort(-logits)
    above = np.cumsum(special.softmax(logits)[order]) - special.softmax(logits)[order]
    return without(logits, np.isin(np.arange(V), order[above >= case.get("top_p")]))


STAGES: dict[str, Callable[[Floats, Case], Floats]] = {
    stage.__name__: stage
    for stage in (
        processors, constraint, allowed, bad_words, min_tokens, bias, repetition, counts, temperature, min_p, top_k,
        top_p,
    )
}  # fmt: skip


@functools.cache
def raw_logits(directory: str) -> Floats:
    """[V] of the token behind CONTEXT."""
    logits: Floats = transformers_logits(directory, CONTEXT)[-1].double().numpy()
    logits.flags.writeable = False
    return logits


def distribution(directory: str, case: Case, order: Sequence[str] = tuple(STAGES)) -> Floats:
    """[V] probabilities of the next token."""
    logits = raw_logits(directory)
    for name in order:
        logits = STAGES[name](logits, case)
    probabilities: Floats = special.softmax(logits)
    return probabilities


def p_value(observed: npt.NDArray[np.int64], probabilities: Floats) -> float:
    """Of Pearson's chi-square test; tokens that are expected fewer than five times count as one."""
    if observed[probabilities == 0].any():
        return 0.0
    expected = probabilities * observed.sum()
    is_common = expected >= 5
    rest = expected[~is_common].sum()
    found, wanted = observed[is_common].tolist(), expected[is_common].tolist()
    if rest > 0:
        found, wanted = [*found, observed[~is_common].sum()], [*wanted, rest]
    return float(stats.chisquare(found, wanted).pvalue) if len(found) > 1 else 1.0


# ---- the cases ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models are slower on several threads, and far slower on a busy machine."""
    num_threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of a tiny vocabulary, in which every token is likely enough to be drawn."""
    config = transformers.Qwen2Config(
        vocab_size=V, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=48, max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw_weights(model, seed=4)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    path: pathlib.Path = tmp_path_factory.mktemp("tiny_vocabulary")
    model.save_pretrained(path)
    return str(path)


CASES = {
    "plain": Case({}),
    "cold": Case({"temperature": 0.7}),
    "hot": Case({"temperature": 1.8}),
    "top_k": Case({"top_k": 5}),
    "top_p": Case({"top_p": 0.6}),
    "min_p": Case({"min_p": 0.15}),
    "presence": Case({"presence_penalty": 1.2}),
    "negative presence": Case({"presence_penalty": -0.5}),
    "frequency": Case({"frequency_penalty": 0.6}),
    "repetition": Case({"repetition_penalty": 1.4}),
    "repetition wanted": Case({"repetition_penalty": 0.8}),
    "logit_bias": Case({"logit_bias": {7: -1.5, 30: 2.5, 0: -100.0}}),
    "allowed": Case({"allowed_token_ids": [7, 19, 22, 3, 30]}),
    # of one id, of two, and of three; one whose beginning is not the end of the output, one from before the output
    "bad_words": Case({}, bad_words=((22,), (9, 9), (7, 9, 19), (10, 7, 17), (28, 7, 9, 7, 10, 7, 9, 4))),
    "min_tokens": Case({"min_tokens": len(OUTPUT) + 1}),
    "min_tokens are there": Case({"min_tokens": len(OUTPUT)}, ignored=("min_tokens",)),
    "constraint": Case({}, mask=(9, 19, 22, 31)),
    "a user's function, bias": Case(
        {"logits_processors": [doubled], "logit_bias": {19: 1.2}, "temperature": 1.5},
        order=(("processors", "bias"),),
    ),
    "bias, repetition": Case(
        {"logit_bias": {7: 2.0, 9: -1.0}, "repetition_penalty": 1.7}, order=(("bias", "repetition"),)
    ),
    "repetition, counts": Case(
        {"repetition_penalty": 1.7, "frequency_penalty": -0.3, "presence_penalty": -0.4},
        order=(("repetition", "counts"),),
    ),
    "counts, temperature": Case(
        {"frequency_penalty": 0.3, "presence_penalty": 0.4, "temperature": 0.6}, order=(("counts", "temperature"),)
    ),
    "bias, temperature": Case({"logit_bias": {4: 1.5, 7: -1}, "temperature": 0.6}, order=(("bias", "temperature"),)),
    "temperature, min_p": Case({"temperature": 1.7, "min_p": 0.25}, order=(("temperature", "min_p"),)),
    "temperature, top_p": Case({"temperature": 0.6, "top_p": 0.75}, order=(("temperature", "top_p"),)),
    "min_p, top_p": Case({"min_p": 0.12, "top_p": 0.85}, order=(("min_p", "top_p"),)),
    "top_k, top_p": Case({"top_k": 7, "top_p": 0.8}, order=(("top_k", "top_p"),)),
    "counts, min_p": Case({"presence_penalty": 1.5, "min_p": 0.2}, order=(("counts", "min_p"),)),
    "bias, top_k": Case({"logit_bias": {31: 5.0}, "top_k": 4}, order=(("bias", "top_k"),)),
    "repetition, top_k": Case({"repetition_penalty": 2.0, "top_k": 3}, order=(("repetition", "top_k"),)),
    "constraint, top_k": Case({"top_k": 4}, mask=(7, 19, 17, 4, 2, 30), order=(("constraint", "top_k"),)),
    "allowed, min_p": Case(
        {"allowed_token_ids": [19, 22, 17, 4, 2, 10, 30], "min_p": 0.25}, order=(("allowed", "min_p"),)
    ),
    "bad_words, top_k": Case({"top_k": 5}, bad_words=((7, 9, 7), (19,)), order=(("bad_words", "top_k"),)),
    "min_tokens, top_p": Case({"min_tokens": 9, "top_p": 0.5}, order=(("min_tokens", "top_p"),)),
    "masks and biases": Case(
        {"allowed_token_ids": [2, 7, 9, 17, 19, 22], "logit_bias": {7: 6.0, 9: 7.0, 19: 1.0, 4: 9}, "min_tokens": 9},
        bad_words=((9, 7),),
        mask=(7, 9, 17, 19, 22, 4),
    ),
    "all filters": Case(
        {"temperature": 1.4, "min_p": 0.2, "top_k": 9, "top_p": 0.85},
        order=(("temperature", "min_p"), ("temperature", "top_p"), ("min_p", "top_p")),
        ignored=("top_k",),
    ),
    "all": Case(
        {
            "logit_bias": {7: 3.0, 17: 0.7}, "repetition_penalty": 1.8, "frequency_penalty": 0.2,
            "presence_penalty": 0.8, "temperature": 1.5, "min_p": 0.08, "top_k": 5, "top_p": 0.7, "min_tokens": 9,
        },
        bad_words=((9, 19),),
        mask=(7, 17, 19, 2, 10, 15, 3, 8, 14, 1, 22),
        order=(("bias", "repetition"), ("counts", "temperature")),
        ignored=("min_p",),
    ),
}  # fmt: skip
PAIRS = [(name, pair) for name, case in CASES.items() for pair in case.order]


@pytest.fixture(scope="module")
def drawn(directory: str) -> dict[str, npt.NDArray[np.int64]]:
    """How often each token was drawn, [V], by case; row i of all is of case i modulo their number."""
    worker = started_worker(
        directory,
        max_num_seqs=BATCH,
        num_gpu_blocks_override=BATCH,
        max_model_len=32,
        max_num_batched_tokens=BATCH * len(CONTEXT),
    )
    names = list(CASES)
    params = [SamplingParams(**case.params) for case in CASES.values()]
    found = {name: np.zeros(V, np.int64) for name in names}
    with Driver(worker, BATCH) as driver:
        for start in range(0, DRAWS * len(names), BATCH):
            rows = range(start, min(start + BATCH, DRAWS * len(names)))
            for row in rows:
                seed, which = divmod(row, len(names))
                driver.add(
                    str(row),
                    CONTEXT,
                    params[which],
                    seed=seed,
                    num_prompt_tokens=len(PROMPT),
                    stop_token_ids=STOPS,
                    bad_words=[list(word) for word in CASES[names[which]].bad_words],
                )
            masked = [row for row in rows if CASES[names[row % len(names)]].mask is not None]
            bits = np.zeros((len(masked), V), np.uint8)
            for bit, row in zip(bits, masked, strict=True):
                bit[list(CASES[names[row % len(names)]].mask or ())] = 1
            driver.pending.constrained_slots = [driver.rows[str(row)].slot for row in masked]
            driver.pending.bitmask = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
            driver.step()
            for row in rows:
                found[names[row % len(names)]][driver.free(str(row)).tokens[-1]] += 1
    return found


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_exact_distribution(
    directory: str, drawn: dict[str, npt.NDArray[np.int64]], name: str
) -> None:
    probabilities = distribution(directory, CASES[name])
    assert drawn[name].sum() == DRAWS
    assert p_value(drawn[name], probabilities) > SIGNIFICANCE
    # the test has power: a tenth of the probability goes from every second token to the others
    off = probabilities.copy()
    order = np.argsort(-probabilities)
    off[order[::2]] *= 1.2
    off[order[1::2]] *= 0.8
    assert p_value(drawn[name], off / off.sum()) < SIGNIFICANCE


def missing_one(case: Case) -> list[tuple[str, Case]]:
    """The case without each of its parameters."""
    cases = [
        (name, dataclasses.replace(case, params={key: value for key, value in case.params.items() if key != name}))
        for name in case.params
        if name not in case.ignored
    ]
    if case.bad_words:
        cases.append(("bad_words", dataclasses.replace(case, bad_words=())))
    if case.mask is not None:
        cases.append(("mask", dataclasses.replace(case, mask=None)))
    return cases


def test_each_parameter_counts(directory: str, drawn: dict[str, npt.NDArray[np.int64]]) -> None:
    """What was drawn is not the distribution without any one of them."""
    accepted = [
        (name, missing)
        for name, case in CASES.items()
        for missing, other in missing_one(case)
        if p_value(drawn[name], distribution(directory, other)) > SIGNIFICANCE
    ]
    assert accepted == []


@pytest.mark.parametrize(("name", "pair"), PAIRS, ids=[f"{name}: {a} before {b}" for name, (a, b) in PAIRS])
def test_the_order_of_the_stages_counts(
    directory: str, drawn: dict[str, npt.NDArray[np.int64]], name: str, pair: tuple[str, str]
) -> None:
    first, second = pair
    order = [stage for stage in STAGES if stage != first]
    order.insert(order.index(second) + 1, first)
    other = distribution(directory, CASES[name], order)
    assert other.sum() == pytest.approx(1.0)
    assert p_value(drawn[name], other) < SIGNIFICANCE


# ---- through LLM ----------------------------------------------------------------------------------------------


def test_draws_of_llm_follow_the_exact_distribution() -> None:
    """Sequences of n > 1 with seeds of their own, words and choices as texts; all in one call."""
    directory = tiny_model("qwen2")
    llm = LLM(
        directory, dtype="float32", max_model_len=64, num_gpu_blocks_override=600, block_size=16, max_num_seqs=256,
        enable_prefix_caching=True, num_scheduler_steps=2,
    )  # fmt: skip
    prompt = [40, 90, 200, 17, 6]
    logits = transformers_logits(directory, prompt)[-1].double().numpy()
    tokenizer = llm.get_tokenizer()
    letters = np.array([tokenizer.convert_tokens_to_ids(letter) for letter in "abcd"])
    n, num_prompts = 50, 30
    best = np.argsort(-logits)
    filtered = dict.fromkeys(best[2:62].tolist(), 1.0)
    common: dict[str, Any] = {"n": n, "temperature": 1.3, "ignore_eos": True}
    unlikely = {int(token): -100.0 for token in best[:2]}
    free = [
        SamplingParams(**common, max_tokens=1, seed=seed, top_k=60, logit_bias=unlikely)
        for seed in range(num_prompts)
    ]
    choices = [
        SamplingParams(
            **common, max_tokens=4, seed=seed, structured_outputs=StructuredOutputsParams(choice=list("abcd"))
        )
        for seed in range(num_prompts)
    ]
    try:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt}] * len([*free, *choices]), [*free, *choices], use_tqdm=False
        )
    finally:
        llm.shutdown()
    for ids, answers in ((np.array(list(filtered)), outputs[:num_prompts]), (letters, outputs[num_prompts:])):
        first = [sequence.token_ids[0] for answer in answers for sequence in answer.outputs]
        assert set(first) <= set(ids.tolist())
        assert len(first) == n * num_prompts
        observed = (np.array(first)[:, None] == ids).sum(0)
        assert p_value(observed, special.softmax(logits[ids] / 1.3)) > SIGNIFICANCE
        assert p_value(observed, special.softmax(logits[ids] / 0.8)) < SIGNIFICANCE
    texts = [sequence.text for answer in outputs[num_prompts:] for sequence in answer.outputs]
    assert set(texts) <= set("abcd")
