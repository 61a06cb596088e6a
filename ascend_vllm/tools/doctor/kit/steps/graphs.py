"""Captured and compiled graphs: how many there can be, both orders of replay and update, the compiler's cache."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import tempfile
import time
import types
from collections.abc import Callable
from typing import Any

import torch

from ascend_vllm.attention.backend import ForwardBatch
from ascend_vllm.platforms.npu_graphs import NpuGraph
from ascend_vllm.tools.doctor.kit.rows import Status
from ascend_vllm.tools.doctor.kit.session import Case, Result, Session
from ascend_vllm.tools.doctor.kit.steps.operators.attention import AttentionForm, AttentionStep, make_step

# as captured; replays have others
_LENGTHS = (130, 257, 129, 140)
_REPLAYED = ((1, 200, 129, 3), (130, 130, 64, 140), (7, 1, 2, 129))
# graphs on which a server of this project with default flags counts
_LEAST_GRAPHS = 40
_LAYERS = 8


def cases(session: Session) -> list[Case]:
    """See `steps`. What uses resources up comes last."""
    return [
        Case("replay, then update", functools.partial(_replay, session, _replay_first)),
        Case("update, then replay", functools.partial(_replay, session, _update_first)),
        Case("compiled cache", lambda: _compile(session)),
        Case("captures until failure", lambda: _capture_many(session)),
    ]


def _make(session: Session, lengths: tuple[int, ...] = _LENGTHS) -> AttentionStep:
    session.begin()
    return make_step(AttentionForm(torch.float16, (28, 4), 128, 128, "decode"), [(1, length) for length in lengths])


def _with_lengths(step: AttentionStep, lengths: tuple[int, ...]) -> AttentionStep:
    """The same step with other lengths, whose tokens are stored where they were."""
    host = torch.tensor(lengths, dtype=torch.int32)
    batch = dataclasses.replace(
        step.batch, seq_lens=host.to("npu"), seq_lens_np=host.numpy(), max_seq_len=max(lengths)
    )
    return dataclasses.replace(step, batch=batch)


def _replay_first(_session: Session, graph: NpuGraph, arguments: dict[str, list[int]]) -> None:
    graph.replay(arguments)


def _update_first(session: Session, graph: NpuGraph, arguments: dict[str, list[int]]) -> None:
    session.npu.synchronize()
    graph.graph.update(cpu_update_input=[arguments])
    graph.graph.replay()


def _replay(session: Session, replay: Callable[[Session, NpuGraph, dict[str, list[int]]], None]) -> Result:
    """Attention of some layers, whose lengths each replay updates."""
    step = _make(session)
    # initialisation must not become part of the graph
    step.run()
    outputs: list[torch.Tensor] = []

    def work() -> None:
        metadata = step.backend.prepare(step.batch)
        outputs.extend(step.forward(metadata) for _ in range(session.size(_LAYERS, 2)))

    graph = session.platform.make_graph_recorder().capture(work)
    wrong, times = [], []
    for lengths in _REPLAYED:
        # what the step stores is what the cache has
        expected = _with_lengths(step, lengths).run()
        arguments = step.backend.replay_arguments(list(lengths))
        assert arguments is not None
        session.npu.synchronize()
        begin = time.perf_counter()
        replay(session, graph, arguments)
        session.npu.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
        if any(not torch.equal(output, expected) for output in outputs):
            wrong.append(str(lengths))
    return Result.of(not wrong, f"differs from eager attention with lengths {', '.join(wrong)}", time_us=times[-1])


class _Layer(torch.nn.Module):
    """What is compiled, as a worker's decoding step: a product, and attention with lengths that are arguments."""

    def __init__(self, step: AttentionStep) -> None:
        super().__init__()
        self.backend, self.spec, self.kv_cache = step.backend, step.spec, step.kv_cache
        self.query_start = step.batch.query_start
        self.logits_indices = step.batch.logits_indices


def _attend(
    self: _Layer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    lengths: list[int],
) -> torch.Tensor:
    host: Any = None
    batch = ForwardBatch(
        input_ids=slots,
        positions=slots,
        slot_mapping=slots,
        query_start=self.query_start,
        seq_lens=seq_lens,
        block_table=block_table,
        logits_indices=self.logits_indices,
        query_start_np=host,
        seq_lens_np=host,
        max_query_len=1,
        max_seq_len=1,
    )
    metadata = self.backend.prepare_compiled(batch, lengths)
    return self.backend.forward(self.spec, query, key, value, self.kv_cache, batch, metadata) * 2


def _compile(session: Session) -> Result:
    """Compiles twice: the second time the result comes from the cache."""
    step = _make(session)
    step.run()
    compiler = session.platform.make_graph_compiler()
    method = types.MethodType(_attend, _Layer(step))
    batch = step.batch
    seconds: list[float] = []
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        directory = pathlib.Path(name)
        for lengths in ((5, 6, 7, 8), *_REPLAYED[:2]):
            begin = time.perf_counter()
            if len(seconds) < 2:
                compiler.reset()
                compiled = compiler.compile(method, directory)
            slots, table = batch.slot_mapping, batch.block_table
            seq_lens = torch.tensor(lengths, dtype=torch.int32).to("npu")
            got = compiled(*step.parts, slots, table, seq_lens, list(lengths))
            session.npu.synchronize()
            seconds.append(time.perf_counter() - begin)
            if not torch.equal(got, _with_lengths(step, lengths).run() * 2):
                wrong.append(str(lengths))
        has_files = any(path.is_file() for path in directory.rglob("*"))
    message = f"differs from eager attention with lengths {', '.join(wrong)}" if wrong else "nothing was cached"
    result = Result.of(not wrong and has_files, message, compiled_s=seconds[0], loaded_s=seconds[1], run_s=seconds[2])
    return Result(result.status, result.numbers, {"cache": "kept" if has_files else "empty"}, result.message)


def _capture_many(session: Session) -> Result:
    """Graphs of a layer, until one cannot be captured or there are many."""
    most = session.size(1024, 48)
    step = _make(session)
    step.run()
    platform = session.platform
    platform.release_memory()
    free = platform.free_bytes()
    recorder = platform.make_graph_recorder()
    graphs: list[NpuGraph] = []

    def work() -> None:
        step.run().add_(1)

    message = ""
    begin = time.perf_counter()
    try:
        while len(graphs) < most:
            graphs.append(recorder.capture(work))
    except RuntimeError as error:
        message = f"graph {len(graphs) + 1}: {error}"
    seconds = time.perf_counter() - begin
    numbers = {
        "captured": float(len(graphs)),
        "each_s": seconds / max(1, len(graphs)),
        "taken_bytes": float(free - platform.free_bytes()),
    }
    is_enough = len(graphs) >= _LEAST_GRAPHS
    return Result(Status.OK if is_enough else Status.WRONG, numbers, message=message)
