"""The limited processes that compile grammars: their results, and their limits for hostile grammars."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import os
import pathlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import psutil
import pytest

from ascend_vllm.config.structured import StructuredOutputsConfig
from ascend_vllm.core.engine_core import EngineCore
from ascend_vllm.core.structured import compile_process, output_constraint
from ascend_vllm.core.structured.backend_xgrammar import XGrammarBackend
from ascend_vllm.core.structured.backends import BACKENDS, make_backend
from ascend_vllm.core.structured.compile_pool import QUICK, SLOW, GrammarProcesses
from ascend_vllm.core.structured.compile_process import try_out
from ascend_vllm.core.structured.constraint import Constraint, make_constraint
from ascend_vllm.core.structured.grammar import Grammar
from ascend_vllm.core.structured.manager import StructuredOutputManager
from ascend_vllm.core.structured.vocabulary import Vocabulary
from ascend_vllm.sandbox.pool import Job, LimitExceededError, TooSlowError
from ascend_vllm.structured_outputs import StructuredOutputsParams
from ascend_vllm.types.messages import FinishReason
from tests.core.constrained_requests import PROCESSES, VOCABULARY, constrained
from tests.core.grammar_vocabulary import allowed, make_vocabulary
from tests.core.memory_executor import (
    MemoryExecutor,
    add_all,
    assert_tokens,
    make_config,
    make_request,
    run,
)
from tests.server import wait_until

# 3 million symbols: not refused by size, but the library takes gigabytes and minutes for the first mask
HOSTILE = "start: a{100}\na: /x{100}/{300}"
# a text has as many parses as there are ways to split it
AMBIGUOUS = 'root ::= a\na ::= a a | a a a | [a-c] | ""'


# each letter may be the middle one: a mask takes quadratic time
SLOWER_AND_SLOWER = 'root ::= a\na ::= [a-z] a [a-z] | [a-z] a | ""'


def constraint_of(**fields: Any) -> Constraint:
    return make_constraint(StructuredOutputsParams(**fields), StructuredOutputsConfig())


@contextlib.contextmanager
def processes_with(**limits: Any) -> Iterator[GrammarProcesses]:
    """Processes; checks that none is left at the end."""
    processes = GrammarProcesses(
        VOCABULARY, msgspec.structs.replace(QUICK, **limits), msgspec.structs.replace(SLOW, **limits)
    )
    seen: set[int] = set()
    try:
        yield processes
        seen.update(processes.pids)
    finally:
        processes.close()
    assert not any(map(psutil.pid_exists, seen))


def test_a_hostile_grammar_reaches_a_limit_and_others_still_compile() -> None:
    """In a thread the library could not be stopped: it went on computing and kept its memory."""
    with processes_with(cpu_s=1, wall_s=300.0) as processes:
        with pytest.raises(TooSlowError, match="took more than 1 s of CPU time"):
            processes.try_out(Job(), "guidance", constraint_of(grammar=HOSTILE), slow=False)
        trial = processes.try_out(Job(), "guidance", constraint_of(grammar='start: "a"'), slow=False)
        assert trial.error is None and trial.packed is None
    with (
        processes_with(wall_s=300.0, cpu_s=60, memory_bytes=8 << 20) as processes,
        pytest.raises(LimitExceededError, match="more than 8 MiB of memory"),
    ):
        processes.try_out(Job(), "guidance", constraint_of(grammar=HOSTILE), slow=False)


def test_cancelling_ends_the_process_at_once() -> None:
    job, threads = Job(), concurrent.futures.ThreadPoolExecutor(1)
    with processes_with(wall_s=300.0, cpu_s=60) as processes:
        answer = threads.submit(processes.try_out, job, "guidance", constraint_of(grammar=HOSTILE), slow=True)
        assert wait_until(lambda: processes.pids)
        (pid,) = processes.pids
        busy = psutil.Process(pid)
        # it is ready once its standard input is not the socket any more
        assert wait_until(lambda: str(pathlib.Path(f"/proc/{pid}/fd/0").readlink()) == os.devnull)
        assert wait_until(lambda: busy.nice() == min(19, psutil.Process().nice() + SLOW.niceness))
        used = busy.cpu_times().user
        assert wait_until(lambda: busy.cpu_times().user > used + 0.1)
        job.give_up()
        with pytest.raises(concurrent.futures.CancelledError):
            answer.result(60)
        assert not psutil.pid_exists(pid)
        with pytest.raises(concurrent.futures.CancelledError):
            processes.try_out(job, "guidance", constraint_of(grammar=HOSTILE), slow=True)
    # its process ended with it
    threads.shutdown()


def assert_alike(first: Grammar, second: Grammar, vocabulary: Vocabulary, rng: random.Random, length: int) -> None:
    """Two sequences of grammars allow the same tokens on the way of a random text."""
    for _ in range(length):
        ids = allowed(first, vocabulary)
        assert ids == allowed(second, vocabulary)
        if not ids:
            break
        token_id = rng.choice(sorted(ids))
        assert first.accept_tokens([token_id]) and second.accept_tokens([token_id])


def test_the_process_is_small() -> None:
    code = (
        f"import sys; from {compile_process.__name__} import _import_xgrammar; _import_xgrammar(); "
        "import xgrammar, llguidance; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
    with processes_with() as processes:
        processes.try_out(Job(), "xgrammar", constraint_of(regex="a"), slow=False)
        for pid in processes.pids:
            process = psutil.Process(pid)
            # only its socket, and /dev/null for the standard streams
            assert wait_until(lambda process=process: process.num_fds() == 4 and process.cpu_times().user > 0.1)


@pytest.mark.parametrize(
    "fields",
    [{"regex": "[a-z]{100}x?"}, {"json": {"type": "array", "items": {"enum": ["a", "bc", 7]}}}],
    ids=str,
)
def test_a_serialised_grammar_is_the_same(fields: dict[str, Any]) -> None:
    vocabulary = make_vocabulary()
    backend, other = XGrammarBackend(vocabulary, 1), XGrammarBackend(vocabulary, 1)
    compiled = backend.compile(constraint_of(**fields))
    assert backend.pack(compiled, 10) is None
    packed = backend.pack(compiled, 1 << 20)
    assert packed is not None
    assert_alike(compiled.start(), other.unpack(packed).start(), vocabulary, random.Random(0), 80)


def test_a_grammar_is_the_same_whatever_was_compiled_before() -> None:
    """The library shares parts of grammars."""
    vocabulary, rng = make_vocabulary(), random.Random(0)
    used = XGrammarBackend(vocabulary, 1)
    kinds: list[Any] = [{"type": "string"}, {"type": "integer"}, {"enum": ["a", "b"]}, {"type": "null"}, {}]
    for _ in range(6):
        names = rng.sample(["a", "b", "ab", "no", "yes"], 3)
        schema = {
            "type": "object",
            "properties": {name: rng.choice(kinds) for name in names},
            "required": names[: rng.randrange(4)],
        }
        constraint = constraint_of(json=schema)
        first = used.compile(constraint).start()
        assert_alike(first, XGrammarBackend(vocabulary, 1).compile(constraint).start(), vocabulary, rng, 40)


def test_grammars_with_slow_masks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = make_vocabulary()
    backend = XGrammarBackend(vocabulary, 1)
    constraint = constraint_of(grammar=AMBIGUOUS)
    monkeypatch.setattr(compile_process, "_MAX_TRIAL_S", 0.001)
    assert "tokens take" in (try_out(constraint, backend, vocabulary).error or "")
    monkeypatch.setattr(compile_process, "_MAX_MASK_S", 0.0)
    assert "a mask of it takes" in (try_out(constraint, backend, vocabulary).error or "")


def test_slow_grammars_that_cannot_be_serialised_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_process, "_AFFORDABLE_S", 0.0)
    vocabulary = make_vocabulary()
    for name in BACKENDS:
        backend = make_backend(name, vocabulary, 1)
        trial = try_out(constraint_of(regex="a{9}"), backend, vocabulary)
        assert (trial.error or "").endswith("the limit is 0 s") == (name == "guidance")
        assert (trial.packed is None) == (name == "guidance")


def test_a_grammar_that_becomes_slow_ends_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its masks took longer and longer, up to seconds, which delayed all other requests."""
    monkeypatch.setattr(output_constraint, "_BURST_S", 0.02)
    monkeypatch.setattr(output_constraint, "_TIMED_BELOW_S", 0.016)
    monkeypatch.setattr(output_constraint, "_TOKEN_S", 0.0002)
    monkeypatch.setattr(output_constraint, "_MIN_CHARGED_S", 0.0001)
    config = make_config(max_model_len=512, max_num_batched_tokens=512)
    manager = StructuredOutputManager(
        StructuredOutputsConfig(), config.model, lambda: VOCABULARY, processes=PROCESSES
    )
    core = EngineCore(config, MemoryExecutor(config, 400), manager)
    innocent = [constrained(f"g{index}", {"regex": "[a-z]{200}"}, seed=index, max_tokens=150) for index in range(2)]
    free = make_request("free", 5, max_tokens=150)
    hostile = constrained("bad", {"grammar": SLOWER_AND_SLOWER}, ignore_eos=True, max_tokens=250)
    add_all(core, (*innocent, free, hostile))
    results = run(core)
    assert results["bad"].finish_reason is FinishReason.ERROR
    assert "too complex" in (results["bad"].error or "") and 20 < len(results["bad"].token_ids) < 250
    assert [results[request.request_id].finish_reason for request in innocent] == [FinishReason.LENGTH] * 2
    assert_tokens(results, [free], 512)


def test_the_core_checks_constraints_quickly() -> None:
    """Counting a grammar's rules took minutes for 250,000 letters, during which no step was made."""
    size = 250_000
    hostile: list[dict[str, Any]] = [
        *(
            {"grammar": letters * (size // len(letters))}
            for letters in ("a", "a\n", " ", "\t\n", "a ", '"', "[", "a:")
        ),
        {"regex": "(" * 32_000},
        {"regex": "a{9}" * 8000},
        {"json": {"properties": {f"p{index}": {} for index in range(18_000)}}},
        {"json": {"items": [[]] * 60_000}},
        {"json": {"pattern": "(" * size}},
        {"choice": [str(index) * 5 for index in range(8000)]},
        {"structural_tag": "[" * size},
    ]
    # what other tests have left is not searched for garbage meanwhile, which took longer than all of this
    gc.collect()
    gc.freeze()
    try:
        for fields in hostile:
            started = time.thread_time()
            constraint_of(**fields)
            # it takes a tenth of that on a quiet machine
            assert time.thread_time() - started < 0.2, str(fields)[:40]
    finally:
        gc.unfreeze()
