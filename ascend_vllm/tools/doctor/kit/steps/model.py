"""A model with random weights: its greedy tokens beside those of the CPU, and its times, with every switch.

Its configuration is model.json; on simulated NPUs it is narrower.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.resources
import json
import pathlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ascend_vllm import envs
from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.engine.llm_engine import LLMEngine
from ascend_vllm.outputs import RequestOutput
from ascend_vllm.platforms.facts import probe_npus
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.tools.doctor.kit.rows import Status
from ascend_vllm.tools.doctor.kit.session import Case, Result, Session

_NARROW = {
    "vocab_size": 384,
    "hidden_size": 256,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_GREEDY_TOKENS = 64
_PROMPTS = 3
# requests at a time, on a card and on the simulator: the names of the numbers have those of cards
_BATCHES, _SMALL_BATCHES = (1, 32, 256), (1, 2, 4)
# tokens of a prompt, and of an answer whose times are measured
_MEASURED = ((128, 32), (8, 3))
# by which the CPU may prefer its own token, in log-probability, where an NPU takes another one
_TOLERANCE = 0.05


@dataclasses.dataclass(frozen=True)
class _Switch:
    """A way to run the model: variables and options of the engine."""

    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # needs a process of its own: what reads them does so once
    process_variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tolerance: float = _TOLERANCE


_SWITCHES: dict[str, _Switch] = {
    "captured graphs": _Switch(),
    "eager": _Switch(options={"enforce_eager": True}),
    "bfloat16": _Switch(options={"dtype": "bfloat16"}, tolerance=8 * _TOLERANCE),
    "compiled graphs": _Switch({"INFER_MODE": "PTA", "PTA_TORCHAIR_DECODE_GEAR_ENABLE": "1"}),
    "prompts in high performance": _Switch({"USE_PFA_HIGH_PRECISION_MODE": "0"}),
    "decoding in high precision": _Switch({"USE_IFA_HIGH_PRECISION_MODE": "1"}),
    "prefixes in high precision": _Switch({"USE_PREFIX_HIGH_PRECISION_MODE": "1"}, {"enable_prefix_caching": True}),
    "prefix caching": _Switch(options={"enable_prefix_caching": True}),
    "chunks of prompts": _Switch(options={"enable_chunked_prefill": True}),
    "older attention operators": _Switch({"ASCEND_VLLM_ATTENTION_OPS": "flash"}),
    "no weights in tiles": _Switch({"VLLM_ASCEND_ENABLE_NZ": "0"}),
    "all weights in tiles": _Switch({"VLLM_ASCEND_ENABLE_NZ": "2"}),
    "cache in int8": _Switch(options={"kv_cache_dtype": "int8"}, tolerance=20 * _TOLERANCE),
    "8 steps at a time": _Switch(options={"num_scheduler_steps": 8}),
    "two NPUs": _Switch(options={"tensor_parallel_size": 2}),
    "custom operators": _Switch(process_variables={"ASCEND_VLLM_CUSTOM_OPS": "all"}),
}


def cases(session: Session) -> list[Case]:
    """See `steps`."""
    return [
        Case(name, functools.partial(_run, session, switch), switch.process_variables)
        for name, switch in _SWITCHES.items()
    ]


@functools.cache
def _directory(is_simulated: bool) -> pathlib.Path:
    """With a config.json alone: weights are made of a seed."""
    text = importlib.resources.files(__package__).joinpath("../model.json").read_text(encoding="utf-8")
    config = json.loads(text) | (_NARROW if is_simulated else {})
    directory = pathlib.Path(tempfile.mkdtemp())
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


@contextlib.contextmanager
def _engine(session: Session, options: Mapping[str, Any]) -> Iterator[LLMEngine]:
    defaults: dict[str, Any] = {
        "device": "npu",
        "dtype": "float16",
        "max_num_seqs": session.size(_BATCHES, _SMALL_BATCHES)[-1],
        "max_model_len": 256,
        "max_num_batched_tokens": session.size(8192, 256),
        "num_gpu_blocks_override": session.size(1024, 24),
        "block_size": 128,
    }
    args = EngineArgs(
        model=str(_directory(session.is_simulated)),
        load_format="dummy",
        skip_tokenizer_init=True,
        swap_space=0,
        disable_log_stats=True,
        async_scheduling=False,
        **(defaults | dict(options)),
    )
    engine = LLMEngine.from_engine_args(args)
    try:
        yield engine
    finally:
        engine.shutdown()


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    before = envs.everything()
    envs.export(dict(values), {})
    try:
        yield
    finally:
        for name in values:
            if name in before:
                envs.export({name: before[name]}, {})
            else:
                envs.forget(name)


def _prompts(session: Session, count: int, length: int) -> list[list[int]]:
    """Token ids, other ones in each."""
    vocab_size = session.size(32_768, 384)
    return [[(31 * number + 7 * place + 3) % vocab_size for place in range(length)] for number in range(count)]


def _answers(
    engine: LLMEngine, prompts: Sequence[list[int]], params: SamplingParams
) -> tuple[list[RequestOutput], float]:
    """Whole answers in the order of the prompts, and the second at which all of them had begun."""
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    done: dict[str, RequestOutput] = {}
    waiting = {str(number) for number in range(len(prompts))}
    begun = 0.0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id in waiting and output.outputs[0].token_ids:
                waiting.discard(output.request_id)
                begun = time.perf_counter()
            if output.finished:
                done[output.request_id] = output
    return [done[str(number)] for number in range(len(prompts))], begun


def _greedy(engine: LLMEngine, session: Session) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=_GREEDY_TOKENS, ignore_eos=True, logprobs=8, detokenize=False)
    return _answers(engine, _prompts(session, _PROMPTS, 20), params)[0]


@functools.cache
def _on_cpu(session: Session, dtype: str) -> list[RequestOutput]:
    """Greedy answers of the CPU, which adds up in float32; in another dtype the random weights are others."""
    blocks = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 512, "max_num_seqs": 4}
    with _engine(session, {"device": "cpu", "dtype": dtype, **blocks}) as engine:
        return _greedy(engine, session)


def _run(session: Session, switch: _Switch) -> Result:
    if switch.options.get("tensor_parallel_size", 1) > (have := probe_npus().count):
        return Result(Status.SKIPPED, message=f"there are {have} NPUs")
    expected = _on_cpu(session, switch.options.get("dtype", "float16"))
    numbers: dict[str, float] = {}
    largest = session.size(_BATCHES, _SMALL_BATCHES)[-1]
    compiled = {
        "PTA_TORCHAIR_DECODE_GEAR_LIST": str(largest),
        "TORCHAIR_CACHE_HOME": str(_directory(session.is_simulated)),
    }
    with _variables({**switch.variables, **compiled} if "INFER_MODE" in switch.variables else switch.variables):
        begin = time.perf_counter()
        with _engine(session, switch.options) as engine:
            numbers["start_s"] = time.perf_counter() - begin
            got = _greedy(engine, session)
            _measure(session, engine, numbers)
    return _compared(expected, got, switch.tolerance, numbers)


def _compared(
    expected: Sequence[RequestOutput], got: Sequence[RequestOutput], tolerance: float, numbers: dict[str, float]
) -> Result:
    """Tokens are the CPU's, or where they first differ the CPU finds both nearly as likely."""
    equal, gap = _GREEDY_TOKENS, 0.0
    for mine, other in zip(expected, got, strict=True):
        ids, others = list(mine.outputs[0].token_ids), list(other.outputs[0].token_ids)
        place = next((index for index, pair in enumerate(zip(ids, others, strict=True)) if pair[0] != pair[1]), None)
        if place is None:
            continue
        equal = min(equal, place)
        likely = mine.outputs[0].logprobs[place] if mine.outputs[0].logprobs else {}
        taken = likely.get(others[place])
        gap = max(gap, likely[ids[place]].logprob - taken.logprob if taken else float("inf"))
    numbers |= {"equal_tokens": float(equal), "error": gap, "allowed": tolerance}
    return Result.of(
        gap <= tolerance, f"a token is not the CPU's, nor nearly as likely there (after {equal})", **numbers
    )


def _measure(session: Session, engine: LLMEngine, numbers: dict[str, float]) -> None:
    """Adds seconds to the first token of all, and of each further token, at several batch sizes."""
    prompt_len, answer_len = session.size(*_MEASURED)
    params = SamplingParams(temperature=0, max_tokens=answer_len, ignore_eos=True, detokenize=False)
    for size, batch in zip(_BATCHES, session.size(_BATCHES, _SMALL_BATCHES), strict=True):
        begin = time.perf_counter()
        _, begun = _answers(engine, _prompts(session, batch, prompt_len), params)
        end = time.perf_counter()
        numbers[f"first_token_{size}_s"] = begun - begin
        numbers[f"next_token_{size}_s"] = (end - begun) / (answer_len - 1)
