"""The OpenAI-compatible server on a simulated NPU, started as the sources start it, answers as on the CPU.

It serves the demo model, in float16. Both are asked what the suite of recorded requests asks of a model by way of
/v1/completions; and with `--all` the rest of it, of which the API server makes requests like those.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ascend_vllm.args.engine_args import all_flags
from tests.compat import requests_agents, requests_chat, requests_completions, requests_routes, requests_structured
from tests.compat.requests_common import Case
from tests.npu.same_answers import Pair, Side, differences, is_tie
from tests.server import OPENAI_SERVER, client_of_many, running

# of the pages on Ascend-vLLM, where --max-model-len is 4096: the demo model has 2048 positions and refuses more
SOURCES_FLAGS = [
    "--max-num-seqs=256",
    "--max-model-len=2048",
    "--max-num-batched-tokens=4096",
    "--tensor-parallel-size=1",
    "--block-size=128",
    "--gpu-memory-utilization=0.9",
    "--num-scheduler-steps=8",
    "--trust-remote-code",
]
CPU_FLAGS = ["--device", "cpu", "--kv-cache-memory-bytes", "64M"]
NUM_LAYERS = 5
STORES_KEYS, ATTENDS = "aclnnScatterPaKvCache", "aclnnFusedInferAttentionScoreV3"

CHAT = "/v1/chat/completions"
COUNT = {"prompt": "1 2 3 4 5 6", "max_tokens": 24, "temperature": 0}
# of Ascend-vLLM's pages
SOURCES_CHAT = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 100,
    "top_k": -1,
    "top_p": 1,
    "temperature": 0,
    "ignore_eos": False,
    "stream": False,
}
BLOCK_SIZE = [{"role": "user", "content": "What does --block-size do?"}]
OWN_CASES = [
    Case("sources-chat", CHAT, SOURCES_CHAT),
    Case("question", CHAT, SOURCES_CHAT | {"messages": BLOCK_SIZE}),
    Case("guided-choice", "/v1/completions", COUNT | {"guided_choice": ["yes, please", "no, thanks"]}),
    Case("guided-regex", "/v1/completions", COUNT | {"guided_regex": "[0-9]{3}-[a-f]+", "max_tokens": 12}),
    Case("long-prompt", "/v1/completions", COUNT | {"prompt": "a long prompt " * 300, "max_tokens": 3, "echo": True}),
]


def _reaches_the_model(case: Case) -> bool:
    """Whether a request of the tables is answered by the model, and with the same tokens each time.

    Refusals come from the API server, which knows nothing of devices. One request asks for as much as the model's
    context has room for, of which there is more here than where it was recorded.
    """
    is_answered = case.body is not None and "-bad-" not in case.name and "-count" not in case.name
    return is_answered and not case.sampled and case.name != "completion-clamped-to-room"


_COMPLETIONS = [*filter(_reaches_the_model, requests_completions.CASES)]
# how a beam search ends is the engine core's: on devices one is as good as another
_MORE_BEAMS = [case for case in _COMPLETIONS if case.name.startswith("completion-beams-")]
# and so are the ways to show the end of the same 40 tokens
_MORE_ENDS = (
    *("second-eos-stream", "batch-different-ends", "eos-included", "eos-as-stop-token", "ignore-eos-special-tokens"),
    *("special-tokens-shown", "return-token-ids-eos", "stream-ends-by-itself"),
)
_OF_THE_CORE = [*_MORE_BEAMS, *(case for case in _COMPLETIONS if case.name.removeprefix("completion-") in _MORE_ENDS)]
CASES = [*OWN_CASES, *(case for case in _COMPLETIONS if case not in _OF_THE_CORE)]
EXHAUSTIVE_CASES = [
    *_OF_THE_CORE,
    *filter(_reaches_the_model, requests_chat.CASES),
    *filter(_reaches_the_model, requests_structured.CASES),
    *filter(_reaches_the_model, requests_agents.CASES),
    *(case for case in requests_routes.CASES if case.name in ("invocations-chat", "chat-batch")),
]


@pytest.fixture(scope="module")
def model(demo_model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo model as a checkpoint in float16: --dtype is not among the sources' flags."""
    directory = tmp_path_factory.mktemp("demo") / "demo-float16"
    shutil.copytree(demo_model_dir, directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    assert config["num_hidden_layers"] == NUM_LAYERS
    (directory / "config.json").write_text(json.dumps(config | {"torch_dtype": "float16"}), encoding="utf-8")
    return str(directory)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """What the NPU's server launched."""
    return tmp_path_factory.mktemp("trace") / "trace.jsonl"


@pytest.fixture(scope="module")
def pair(model: str, trace: pathlib.Path) -> Iterator[Pair]:
    """On the NPU, as --device auto finds it, and on the CPU."""

    def start(flags: list[str], stack: contextlib.ExitStack, **env: str) -> Side:
        # one thread: the operators of a step of this model are too small for more
        env["OMP_NUM_THREADS"] = "1"
        server = stack.enter_context(running(OPENAI_SERVER, ["--model", model, *flags], env, timeout_s=300))
        return Side(server, stack.enter_context(client_of_many(server, timeout_s=300)))

    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        npu = pool.submit(start, SOURCES_FLAGS, first, ASCEND_SIM_TRACE=str(trace))
        cpu = pool.submit(start, CPU_FLAGS, second)
        yield Pair(cpu.result(), npu.result())


def _of_the_model(case: Case, model: str) -> Case:
    """The request with the name under which the model is served here: its path, as in the sources."""
    return dataclasses.replace(case, body=case.body | {"model": model})


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in EXHAUSTIVE_CASES)],
    ids=lambda case: case.name,
)
def test_answers_are_the_cpus(case: Case, pair: Pair, model: str) -> None:
    case = _of_the_model(case, model)
    cpu, npu = pair.answers(case)
    found = differences(cpu, npu)
    assert not found or is_tie(pair, case), found


# what tests/e2e/test_demo_chat.py asks, of all flags
QUESTIONS = [f"What does {flag.name} do?" for flag in all_flags()]
GREETINGS = ["hello", "hi", "hey", "good morning", "hello there"]
NUM_AT_ONCE = 128


def _chat(text: str, number: int) -> Case:
    """Every other answer is streamed, and every other one of either kind is cut off in the middle."""
    fields = {"stream": number % 2 == 0, "max_tokens": (100, 40)[number // 2 % 2], "temperature": 0}
    return Case(text, CHAT, fields | {"messages": [{"role": "user", "content": text}]})


CHATS = [_chat(text, number) for number, text in enumerate((*QUESTIONS, *GREETINGS))]
# without --all, of the chats one in so many: prime to 4, so that all kinds of `_chat` are among them
CHATS_APART = 9


def _text(side: Side, case: Case) -> str:
    answer = side.answer(case)
    assert answer["status"] == 200, answer
    if "body" in answer:
        return str(answer["body"]["choices"][0]["message"]["content"])
    chunks = [data for _, data in answer["events"] if data != "[DONE]"]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def test_the_demo_models_own_chats_are_the_cpus(pair: Pair, model: str, runs_all: bool) -> None:
    """To the last character: what the model was trained for it answers without doubt."""
    cases = [_of_the_model(case, model) for case in (CHATS if runs_all else CHATS[::CHATS_APART])]
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool, ThreadPoolExecutor(NUM_AT_ONCE) as other:
        answers = (
            pool.map(functools.partial(_text, pair.npu), cases),
            other.map(functools.partial(_text, pair.cpu), cases),
        )
        npu, cpu = map(list, answers)
    parted = {case.name: texts for case, *texts in zip(cases, npu, cpu, strict=True) if texts[0] != texts[1]}
    assert parted == {}
    assert len(set(npu)) > 0.9 * (len(cases) - len(GREETINGS))


def _change(answer: dict[str, Any], *path: str | int, by: Any) -> dict[str, Any]:
    changed = copy.deepcopy(answer)
    *before, last = path
    place = functools.reduce(lambda value, key: value[key], before, changed["body"])
    place[last] += by
    return changed


def test_what_is_more_than_rounding_is_found(pair: Pair, model: str) -> None:
    # whatever the demo model has learned to say, or not to say, to a prompt that is none of its own
    body = COUNT | {"logprobs": 2, "prompt_logprobs": 2, "max_tokens": 3, "ignore_eos": True}
    cpu, npu = pair.answers(_of_the_model(Case("", "/v1/completions", body), model))
    assert differences(cpu, npu) == []
    logprobs = ("choices", 0, "logprobs")
    token, other = npu["body"]["choices"][0]["logprobs"]["top_logprobs"][1]
    for changed in (
        _change(npu, "choices", 0, "text", by="x"),
        _change(npu, "choices", 0, "finish_reason", by="x"),
        _change(npu, "choices", 0, "prompt_logprobs", by=[None]),
        _change(npu, "usage", "completion_tokens", by=1),
        _change(npu, *logprobs, "token_logprobs", 1, by=0.08),
        _change(npu, *logprobs, "top_logprobs", 1, token, by=0.08),
        _change(npu, *logprobs, "top_logprobs", 1, other, by=-0.08),
    ):
        assert differences(cpu, changed)


class Wrong(Side):
    """One that takes other tokens than the best."""

    def answer(self, case: Case) -> dict[str, Any]:
        body = case.body | {"logit_bias": {"40": 100} | case.body.get("logit_bias", {})}
        return super().answer(dataclasses.replace(case, body=body))


def test_a_wrong_token_is_no_tie(pair: Pair, model: str) -> None:
    case = _of_the_model(Case("", "/v1/completions", COUNT), model)
    wrong = Pair(pair.cpu, Wrong(pair.npu.server, pair.npu.client))
    assert differences(*wrong.answers(case))
    assert not is_tie(wrong, case)


def test_seeded_answers_repeat(pair: Pair, model: str) -> None:
    body = COUNT | {"temperature": 1.0, "top_p": 0.9, "model": model, "ignore_eos": True}
    first, again, other = (
        pair.npu.answer(Case("", "/v1/completions", body | {"seed": seed}))["body"]["choices"][0]["text"]
        for seed in (11, 11, 12)
    )
    assert first == again != other


def _launches(trace: pathlib.Path, start: int) -> list[str]:
    with trace.open(encoding="utf-8") as lines:
        lines.seek(start)
        return [json.loads(line)["op"] for line in lines]


def test_steps_replay_graphs(pair: Pair, trace: pathlib.Path, model: str) -> None:
    """Keys are stored in graphs, those of the prompt in the pieces between its attention calls."""
    assert "Captured 8 graphs" in pair.npu.server.log
    assert f"Captured {5 * (NUM_LAYERS + 1)} pieces" in pair.npu.server.log
    start = trace.stat().st_size
    answer = pair.npu.answer(Case("", "/v1/completions", COUNT | {"model": model, "ignore_eos": True}))
    assert answer["body"]["usage"]["completion_tokens"] == 24
    launches = _launches(trace, start)
    assert launches.count(ATTENDS) >= NUM_LAYERS
    assert STORES_KEYS not in launches


def test_the_log_says_where_it_runs(pair: Pair) -> None:
    log = pair.npu.server.log
    assert "NPU worker 0: Ascend910B3" in log
    assert "Qwen2ForCausalLM, float16, attention backend ascend" in log
    assert "NPU memory: 1.00 GiB in all" in log
    assert "blocks to swap to, 4.00 GiB" in log
    # the weights, the runtime and what 4096 tokens need are not the cache's
    assert "ops run on their reference on npu" in log


def test_the_doctor_finds_the_simulated_npus() -> None:
    """Everything that the simulator has is well; it has no driver and no installation of CANN."""
    command = [sys.executable, "-m", "ascend_vllm.entrypoints.cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    for name in ("Python", "torch", "torch_npu", "CANN runtime", "NPUs", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        assert findings[name]["level"] == "ok", findings[name]
    assert findings["NPUs"]["found"].endswith("x Ascend910B3")
    problems = [name for name, finding in findings.items() if finding["level"] == "problem"]
    assert problems in ([], ["driver"], ["CANN"], ["driver", "CANN"])
    assert done.returncode == (1 if problems else 0)
