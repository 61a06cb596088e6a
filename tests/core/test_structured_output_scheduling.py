"""Constrained requests in the scheduler: their texts do not depend on what else runs."""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest

from ascend_vllm.config.structured import StructuredOutputsConfig
from ascend_vllm.core.engine_core import EngineCore
from ascend_vllm.core.request import Request
from ascend_vllm.core.structured import manager as structured_output
from ascend_vllm.core.structured.compile_pool import GrammarProcesses
from ascend_vllm.core.structured.compile_process import Trial
from ascend_vllm.core.structured.constraint import Constraint, make_constraint
from ascend_vllm.core.structured.manager import StructuredOutputManager
from ascend_vllm.core.structured.output_constraint import OutputConstraint
from ascend_vllm.core.structured.vocabulary import Vocabulary
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.sandbox.pool import Job
from ascend_vllm.structured_outputs import StructuredOutputsParams
from ascend_vllm.types.messages import EngineCoreRequest, FinishReason
from tests.core.constrained_requests import (
    BACKENDS,
    CONSTRAINTS,
    PROCESSES,
    TEXTS,
    VOCABULARY,
    constrain_alone,
    constrained,
)
from tests.core.memory_executor import (
    EOS,
    Collected,
    MemoryExecutor,
    add_all,
    assert_all_free,
    assert_tokens,
    generate_alone,
    make_config,
    make_request,
    next_token,
    run,
    step,
    step_until,
)
from tests.plain_arch import make_arch
from tests.server import wait_until

# name → settings of the core and its cache
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"chunked": True, "max_num_batched_tokens": 16},
    "prefix caching": {"prefix_caching": True},
    "several steps at once": {"num_scheduler_steps": 4},
    "overlapped": {"async_scheduling": True},
    "overlapped, several steps, chunked": {
        "async_scheduling": True,
        "num_scheduler_steps": 3,
        "chunked": True,
        "max_num_batched_tokens": 16,
    },
    "recomputed": {"num_blocks": 14, "preemption_mode": "recompute", "max_num_seqs": 8},
    "swapped": {"num_blocks": 14, "num_cpu_blocks": 40, "preemption_mode": "swap", "max_num_seqs": 8},
    "all of it": {
        "num_blocks": 14,
        "num_cpu_blocks": 40,
        "max_num_seqs": 8,
        "async_scheduling": True,
        "num_scheduler_steps": 3,
        "chunked": True,
        "max_num_batched_tokens": 16,
        "prefix_caching": True,
    },
}


def make_manager(config: Any, **options: Any) -> StructuredOutputManager:
    options = {"processes": PROCESSES} | options
    return StructuredOutputManager(StructuredOutputsConfig(), config.model, lambda: VOCABULARY, **options)


def make_core(
    num_blocks: int = 64, num_cpu_blocks: int = 0, manager: StructuredOutputManager | None = None, **settings: Any
) -> tuple[EngineCore, MemoryExecutor]:
    config = make_config(**settings)
    executor = MemoryExecutor(config, num_blocks, num_cpu_blocks)
    return EngineCore(config, executor, manager or make_manager(config)), executor


def assert_alone(results: dict[str, Collected], requests: list[EngineCoreRequest]) -> None:
    for request in requests:
        found, alone = results[request.request_id], constrain_alone(request)
        assert (found.token_ids, found.finish_reason) == (alone.token_ids, alone.finish_reason), request.request_id
        assert found.stop_reason == alone.stop_reason


@pytest.mark.parametrize("mode", MODES)
def test_texts_do_not_depend_on_the_mode(mode: str) -> None:
    core, executor = make_core(**MODES[mode])
    # all grammars are compiled before, so that the traffic is reproducible
    for backend, (index, constraint) in itertools.product(("auto", "guidance"), enumerate(CONSTRAINTS)):
        core.add_request(constrained(f"{backend}{index}", {**constraint, "backend": backend}, max_tokens=1))
    run(core)
    guided, free = [], []
    serial = itertools.count()
    for backend in ("auto", "guidance"):
        for index, constraint in enumerate(CONSTRAINTS):
            number = next(serial)
            # n = 3 of a prompt, with its blocks shared
            prompt = [(number + place) % 30 + 1 for place in range(4 + 3 * index)]
            first = f"g{number}.0"
            guided += [
                constrained(
                    f"g{number}.{child}",
                    {**constraint, "backend": backend},
                    prompt,
                    seed=10 * number + child,
                    message={"parent_id": first} if child else None,
                )
                for child in range(3)
            ]
            free.append(make_request(f"f{number}", 6 + index, seed=number, max_tokens=14))
    rng = random.Random(mode)
    requests = [*guided, *free]
    if "recomputed" not in mode and "swapped" not in mode:
        rng.shuffle(requests)
    results: dict[str, Collected] = {}
    while requests or core.has_unfinished():
        add_all(core, requests[:5])
        del requests[:5]
        for _ in range(3):
            step(core, results)
            assert core.audit()["violations"] == []
    # and requests without constraints
    free.append(make_request("last", 5, seed=99, max_tokens=12))
    core.add_request(free[-1])
    results |= run(core)
    assert_alone(results, guided)
    assert_tokens(results, free)
    stats = core.stats()
    if "num_blocks" in MODES[mode]:
        assert stats["num_preemptions"] > 0
    if "several steps" in mode:
        assert any(made.num_steps > 1 for made in executor.steps)
        assert any(made.num_steps == 1 and made.constrained_slots for made in executor.steps)


def test_texts_are_of_their_grammars() -> None:
    """The expected outputs of the other tests match the constraints."""
    yes_no = constrain_alone(constrained("a", CONSTRAINTS[2]))
    assert yes_no.text in CONSTRAINTS[2]["choice"] and yes_no.token_ids[-1] == EOS
    nested = constrain_alone(constrained("a", CONSTRAINTS[3], seed=5, max_tokens=60))
    depth = nested.text.index("c")
    assert nested.text == "a" * depth + "c" + nested.text[depth + 1 : -depth - 1] + "d" + "b" * depth


def test_rows_beside_a_constrained_one_overlap() -> None:
    """A row that waits for its outputs is in every other step; the one without a constraint is in all."""
    core, executor = make_core(async_scheduling=True)
    # from now on the grammar is compiled
    core.add_request(constrained("before", {"regex": "[a-z]{8}"}))
    run(core)
    num_before = len(executor.steps)
    core.add_request(make_request("free", 5, max_tokens=30))
    core.add_request(constrained("guided", {"regex": "[a-z]{8}"}))
    run(core)
    # while both run
    steps = executor.steps[num_before:]
    shared = [index for index, made in enumerate(steps) if made.constrained_slots]
    assert len(shared) == 9 and shared[0] == 0
    assert [len(made.slots) for made in steps[: shared[-1] + 1]] == [2, 1] * 8 + [2]


@pytest.mark.parametrize(
    ("fields", "params", "text", "stop_reason"),
    [
        # the end is forced when the text is complete
        ({"regex": "abc"}, {}, "abc", None),
        ({"regex": "abc"}, {"ignore_eos": True}, "abc", None),
        ({"regex": "abc"}, {"min_tokens": 15}, "abc", None),
        ({"regex": "abc"}, {"min_tokens": 15, "ignore_eos": True}, "abc", None),
        # a stop token may end it instead
        ({"regex": "abc"}, {"stop_token_ids": [39], "ignore_eos": True}, "abc", 39),
        # … and one with text ends it anywhere after min_tokens
        ({"regex": "abcd"}, {"stop_token_ids": [3]}, "abc", 3),
        ({"regex": "abcd"}, {"stop_token_ids": [3], "min_tokens": 4}, "abcd", None),
        # min_tokens forbids the end while other tokens are allowed
        ({"regex": "a{2,}"}, {"min_tokens": 20, "stop_token_ids": [39]}, "a" * 20, None),
    ],
    ids=str,
)
def test_ends(fields: dict[str, Any], params: dict[str, Any], text: str, stop_reason: int | None) -> None:
    for backend in BACKENDS:
        core, _ = make_core()
        request = constrained("a", {**fields, "backend": backend}, **params)
        core.add_request(request)
        results = run(core)
        found = results["a"]
        assert "".join(TEXTS[token_id] for token_id in found.token_ids) == text
        assert found.stop_reason == stop_reason
        is_full = len(text) == 20
        assert found.finish_reason is (FinishReason.LENGTH if is_full else FinishReason.STOP)
        assert_alone(results, [request])


@pytest.mark.parametrize("mode", ["plain", "overlapped, several steps, chunked", "recomputed"])
def test_a_constraint_begins_where_thoughts_end(mode: str) -> None:
    """Before that any text is allowed, also its end; the end mark may be several tokens, or a special one."""
    core, _ = make_core(**MODES[mode])
    marks = ["ab", "<x>", "b", "7", "no"]
    requests = [
        constrained(
            f"r{index}",
            {"regex": "q[0-9]{2}w", "begin_after": marks[index % 5]},
            seed=index,
            max_tokens=50,
            prompt=5 + index % 3,
        )
        for index in range(20)
    ]
    add_all(core, requests)
    results = run(core)
    num_begun = 0
    for request in requests:
        params, found = request.sampling_params, results[request.request_id]
        assert params.structured_outputs is not None
        texts = [VOCABULARY.bytes_of(token_id).decode() for token_id in found.token_ids]
        mark = params.structured_outputs.begin_after or ""
        _, begins, rest = "".join(texts).partition(mark)
        if begins:
            num_begun += 1
            assert (rest, found.finish_reason) == (rest[:4] + "<eos>", FinishReason.STOP)
            assert rest[0] == "q" and rest[1:3].isdigit() and rest[3] == "w"
    assert num_begun >= 5


@pytest.mark.parametrize("mode", ["plain", "overlapped, several steps, chunked", "recomputed"])
def test_reasoning_ends_within_its_budget(mode: str) -> None:
    """With or without a constraint behind it, and whether the mark is one token or several."""
    vocabulary = dataclasses.replace(VOCABULARY, encode=lambda text: {"<x>": [39], "abz": [37, 26]}[text])
    manager = StructuredOutputManager(
        StructuredOutputsConfig(), make_config().model, lambda: vocabulary, processes=PROCESSES
    )
    core, _ = make_core(manager=manager, **MODES[mode])
    constraints: list[dict[str, Any]] = [{}, {"regex": "q[0-9]w"}]
    requests = [
        constrained(
            f"r{index}",
            {**constraints[index % 2], "begin_after": ("<x>", "abz")[index // 2 % 2], "begin_within": index % 5},
            seed=index,
            max_tokens=20,
            ignore_eos=index % 2 == 0,
            prompt=5 + index % 3,
        )
        for index in range(20)
    ]
    add_all(core, requests)
    results = run(core)
    for request in requests:
        params, found = request.sampling_params.structured_outputs, results[request.request_id]
        assert params is not None and params.begin_after is not None and params.begin_within is not None
        texts = [VOCABULARY.bytes_of(token_id).decode() for token_id in found.token_ids]
        before, mark, rest = "".join(texts).partition(params.begin_after)
        num_mark_tokens = 1 if mark == "<x>" else 2
        assert mark
        if params.constraints():
            assert rest[0] == "q" and rest[1].isdigit() and rest[2:] == "w<eos>"
        else:
            assert (found.finish_reason, len(texts)) == (FinishReason.LENGTH, 20)
            # all but the mark is what the model would write
            tokens, seed = [*request.prompt_token_ids, *found.token_ids], request.sampling_params.seed or 0
            first = len(request.prompt_token_ids)
            own = [tokens[place] == next_token(seed, tokens[:place]) for place in range(first, len(tokens))]
            forced = range(params.begin_within, params.begin_within + num_mark_tokens)
            assert all(is_own or place in forced for place, is_own in enumerate(own))
        ends = [count for count in range(len(texts) + 1) if "".join(texts[:count]) == before + mark]
        assert min(ends) <= params.begin_within + num_mark_tokens


def test_a_budget_is_for_texts_with_an_opener() -> None:
    vocabulary = dataclasses.replace(VOCABULARY, encode=lambda _text: [39])
    for opener, texts, is_forced in (
        ("", "q", True),
        ("ab", "ab", True),
        ("abc", "abc", True),
        ("abc", "ab", False),
        ("abc", "abd", False),
        ("abc", "q", False),
    ):
        params = StructuredOutputsParams(begin_after="<x>", begin_within=1, begin_opener=opener)
        request = Request(make_request("a", 3, structured_outputs=params), 64, 0)
        output = OutputConstraint(None, None, request, vocabulary)
        for text in texts:
            assert output.accept(TEXTS.index(text))
        row = np.zeros(VOCABULARY.num_words, np.int32)
        output.finish_bitmask(row, request.num_prompt_tokens + len(texts))
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        assert (list(allowed) == [39]) == is_forced


def test_a_model_without_an_end_of_text_ends_where_nothing_can_follow() -> None:
    vocabulary = dataclasses.replace(VOCABULARY, eos_token_ids=[])
    for backend in BACKENDS:
        config = make_config()
        manager = StructuredOutputManager(
            StructuredOutputsConfig(), config.model, lambda: vocabulary, processes=PROCESSES
        )
        core, _ = make_core(manager=manager)
        request = constrained("a", {"regex": "a?b[0-9]", "backend": backend})
        request.eos_token_id = None
        core.add_request(request)
        found = run(core)["a"]
        assert found.finish_reason is FinishReason.STOP
        text = "".join(TEXTS[token_id] for token_id in found.token_ids)
        assert text.lstrip("a")[0] == "b" and text[-1].isdigit() and EOS not in found.token_ids


def test_a_grammar_that_allows_no_token_ends_its_request_only() -> None:
    for settings in ({}, {"async_scheduling": True}, {"num_scheduler_steps": 3, "async_scheduling": True}):
        core, _ = make_core(**settings)
        free = [make_request(f"f{index}", 5, seed=index) for index in range(2)]
        core.add_request(free[0])
        # an endless recursion, and a letter that the vocabulary does not have
        core.add_request(constrained("a", {"grammar": "root ::= root"}))
        core.add_request(constrained("b", {"regex": "ab[A-Z]"}))
        core.add_request(free[1])
        results = run(core)
        assert_tokens(results, free)
        for name, length in (("a", 0), ("b", len(results["b"].token_ids))):
            assert results[name].finish_reason is FinishReason.ERROR
            assert len(results[name].token_ids) == length
            assert (results[name].error or "").startswith("No token is left to sample")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "("}, "regex cannot be compiled to a grammar. xgrammar: Regex parsing error at position 2"),
        ({"regex": "(", "backend": "guidance"}, "regex cannot be compiled to a grammar. guidance: unclosed group"),
        ({"grammar": "start: missing"}, "grammar cannot be compiled to a grammar. guidance:"),
        ({"json": "{"}, "json is not valid JSON: Expecting property name"),
        (
            {"json": {"type": "array", "uniqueItems": True}},
            "xgrammar: the schema uses keywords that are not supported",
        ),
        ({"structural_tag": "[]"}, "structural_tag cannot be compiled"),
    ],
    ids=str,
)
def test_a_wrong_constraint_ends_its_request_with_an_error(fields: dict[str, Any], message: str) -> None:
    core, executor = make_core()
    free = make_request("free", 5)
    core.add_request(free)
    for again in range(2):
        core.add_request(constrained(f"bad{again}", fields))
    results = run(core)
    for again in range(2):
        found = results[f"bad{again}"]
        assert found.finish_reason is FinishReason.ERROR and found.error_class == "RequestError"
        assert message in (found.error or "")
    assert_tokens(results, [free])
    assert all(made.bitmask is None for made in executor.steps)


class _HeldProcesses(GrammarProcesses):
    """The processes of all tests, but what they are asked waits until it may go on.

    Attributes:
        go: lets all go on.
        held: only these texts wait; None: all.
        asked: what was begun.
        compiled: what came to its end.
    """

    def __init__(self) -> None:
        super().__init__(VOCABULARY)
        self.go = threading.Event()
        self.held: set[str] | None = None
        self.asked: list[str] = []
        self.compiled: list[str] = []

    def try_out(self, job: Job, backend: str, constraint: Constraint, *, slow: bool) -> Trial:
        self.asked.append(constraint.text)
        while (self.held is None or constraint.text in self.held) and not self.go.wait(0.01):
            if job.is_given_up:
                raise CancelledError
        trial = PROCESSES.try_out(job, backend, constraint, slow=slow)
        self.compiled.append(constraint.text)
        return trial


@pytest.fixture
def held() -> Iterator[_HeldProcesses]:
    processes = _HeldProcesses()
    yield processes
    processes.go.set()
    assert processes.pids == []


def test_requests_do_not_wait_for_the_grammars_of_others(held: _HeldProcesses) -> None:
    core, _ = held_core(held)
    guided = [constrained(f"g{index}", {"regex": "[a-c]{4}"}, seed=index) for index in range(3)]
    free = make_request("free", 5)
    add_all(core, guided)
    core.add_request(free)
    results: dict[str, Collected] = {}
    step_until(core, lambda: "free" in results and results["free"].finish_reason is not None, results)
    assert core.stats()["num_waiting"] == 3 and results.keys() == {"free"}
    assert_tokens(results, [free])
    # waiting must not keep a processor busy
    steps, started = 0, time.process_time()
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline:
        step(core, results)
        steps += 1
    assert steps < 100 and time.process_time() - started < 0.15
    core.abort_requests(["g1"])
    assert core.stats()["num_waiting"] == 2
    held.go.set()
    results |= run(core)
    assert_alone(results, [guided[0], guided[2]])
    assert "g1" not in results and len(held.compiled) == 1


def test_compilations_have_a_time_limit(held: _HeldProcesses) -> None:
    core, manager = held_core(held, compile_timeout_s=0.05)
    core.add_request(constrained("a", {"regex": "a"}))
    assert wait_until(lambda: held.asked == ["a"])
    found = run(core)["a"]
    assert found.finish_reason is FinishReason.ERROR and found.error == "regex was not compiled within 0.05 s."
    # compilations that hang were cancelled: others are not delayed
    for name in ("c", "d"):
        core.add_request(constrained(name, {"regex": name}))
        assert "not compiled within" in (run(core)[name].error or "")
    assert not manager._entries
    manager._timeout_s = 20.0
    held.go.set()
    # and the same constraint can be compiled later
    again = [constrained("b", {"regex": "a"}), constrained("e", {"regex": "e", "backend": "guidance"})]
    add_all(core, again)
    assert_alone(run(core), again)
    assert held.compiled in (["a", "e"], ["e", "a"])


def test_requests_after_the_time_limit_are_asked_to_retry(held: _HeldProcesses) -> None:
    core, _ = held_core(held, compile_timeout_s=0.3)
    for name in "abc":
        core.add_request(constrained(name, {"regex": name}))
    assert wait_until(lambda: len(held.asked) == 2)
    # all are late at the same time
    time.sleep(0.4)
    results = run(core)
    assert [results[name].error_class for name in "abc"] == ["RequestError", "RequestError", "EngineBusyError"]


def test_compilations_without_waiting_requests_are_cancelled(held: _HeldProcesses) -> None:
    core, manager = held_core(held)
    for name in ("a", "a2", "b", "c", "d"):
        core.add_request(constrained(name, {"regex": name[0]}))
    assert wait_until(lambda: len(held.asked) == 2)
    core.abort_requests(["a", "b", "c"])
    assert [entry.constraint.text for entry in manager._entries.values()] == ["a", "d"]
    core.abort_requests(["a2", "d"])
    assert not manager._entries and core.stats()["num_waiting"] == 0
    held.go.set()
    again = constrained("again", {"regex": "b"})
    core.add_request(again)
    assert_alone(run(core), [again])
    assert held.compiled == ["b"]


def held_core(held: _HeldProcesses, **options: Any) -> tuple[EngineCore, StructuredOutputManager]:
    manager = make_manager(make_config(), processes=held, **options)
    return make_core(manager=manager)[0], manager


def test_waiting_for_a_grammar_counts_as_waiting(held: _HeldProcesses) -> None:
    core, _ = make_core(queue_timeout_s=0.05, manager=make_manager(make_config(), processes=held))
    core.add_request(constrained("a", {"regex": "b"}))
    found = run(core)["a"]
    assert found.error_class == "EngineBusyError" and "--queue-timeout-s" in (found.error or "")
    core.add_request(constrained("b", {"regex": "c"}))
    core.fail_requests("the end")
    assert_all_free(core)


def test_least_recently_used_grammars_are_evicted(monkeypatch: pytest.MonkeyPatch, held: _HeldProcesses) -> None:
    monkeypatch.setattr(structured_output, "_MAX_CACHED", 2)
    held.go.set()
    core, _ = held_core(held)
    for index, letter in enumerate("abacab"):
        core.add_request(constrained(f"r{index}", {"regex": letter}))
        assert run(core)[f"r{index}"].finish_reason is FinishReason.STOP
    assert held.compiled == list("abcb")


def test_a_grammar_that_is_not_compiled_yet_evicts_no_others(
    monkeypatch: pytest.MonkeyPatch, held: _HeldProcesses
) -> None:
    monkeypatch.setattr(structured_output, "_MAX_CACHED", 2)
    held.held = {"z"}
    core, manager = held_core(held)
    core.add_request(constrained("z", {"regex": "z"}))
    results: dict[str, Collected] = {}
    for letter in "abcdef":
        core.add_request(constrained(letter, {"regex": letter}))
        while letter not in results or results[letter].finish_reason is None:
            step(core, results)
        assert len(manager._entries) <= 3
    held.go.set()
    assert run(core)["z"].finish_reason is FinishReason.STOP


def test_too_many_grammars_at_a_time(monkeypatch: pytest.MonkeyPatch, held: _HeldProcesses) -> None:
    monkeypatch.setattr(structured_output, "_MAX_COMPILING", 2)
    core, _ = held_core(held)
    requests = [constrained(f"r{letter}", {"regex": letter}) for letter in "abc"]
    add_all(core, requests)
    results = step(core)
    assert results["rc"].error_class == "EngineBusyError"
    held.go.set()
    assert_alone(run(core), requests[:2])


def test_without_a_tokenizer_there_are_no_constraints() -> None:
    config = make_config()
    model = structured_output.ModelConfig(
        "hash", ("hash",), "hash", "Hash", make_arch(), {}, "float32", 64, skip_tokenizer_init=True
    )
    core, _ = make_core(manager=StructuredOutputManager(StructuredOutputsConfig(), model))
    core.add_request(constrained("a", {"regex": "b"}))
    assert "--skip-tokenizer-init" in (run(core)["a"].error or "")

    def no_vocabulary() -> Vocabulary:
        raise ModelLoadError("cannot load the tokenizer in nowhere")

    manager = StructuredOutputManager(StructuredOutputsConfig(), config.model, no_vocabulary)
    core, _ = make_core(manager=manager)
    core.add_request(constrained("a", {"regex": "b"}))
    assert (run(core)["a"].error or "").startswith("structured outputs are not available: cannot load the tokenizer")
    # it may be available the next time
    assert not manager._entries


def test_names_of_libraries_that_are_not_available(package_log: pytest.LogCaptureFixture) -> None:
    core, _ = make_core()
    requests = [
        constrained(f"r{index}", {"regex": "a|b", "backend": backend}, seed=index)
        for index, backend in enumerate(("outlines", "lm-format-enforcer", "auto"))
    ]
    add_all(core, requests)
    assert_alone(run(core), requests)
    assert len([line for line in package_log.messages if "backend outlines is not available" in line]) == 1
    assert not [line for line in package_log.messages if "lm-format-enforcer is not there" in line]


def test_the_mask_of_an_end() -> None:
    """The end token is one of the allowed ones, or the only one."""
    request = Request(constrained("a", {"regex": "a{1,2}"}, min_tokens=2), 64, 0)
    backend = BACKENDS["xgrammar"]
    constraint = make_constraint(StructuredOutputsParams(regex="a{1,2}"), StructuredOutputsConfig())
    output = OutputConstraint(backend.compile(constraint), backend, request, VOCABULARY)

    def mask(num_output: int) -> set[int]:
        row = np.zeros(VOCABULARY.num_words, np.int32)
        output.grammar.fill_bitmask(row)
        output.finish_bitmask(row, request.num_prompt_tokens + num_output)
        return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())

    assert mask(0) == {1}
    assert output.accept(1)
    assert mask(1) == {1, EOS}
    assert output.accept(1) and not output.accept(EOS)
    assert mask(2) == {EOS}
    assert generate_alone(make_request("b", 3), 1, 64)[0]
