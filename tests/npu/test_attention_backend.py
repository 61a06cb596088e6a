"""The Ascend attention backend against dense attention in float64, and the calls that it makes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ascend_vllm.attention.ascend import AscendAttention
from ascend_vllm.attention.backend import AttentionSpec, ForwardBatch
from ascend_vllm.ops import native
from ascend_vllm.ops.registry import OPS
from ascend_vllm.types.kv_cache import KEYS_AND_VALUES
from tests.npu.recorder import Recorder, traced

native.import_op_modules()

NPU = torch.device("npu:0")
MAX_ROWS = 70
# operators whose results the host waits for
WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::_to_copy"}
Rows = Sequence[tuple[int, int]]

# rows as (tokens of the step, tokens in the cache after it): decoding, chunks over what is cached, prompts
DECODE: Rows = [(1, 1), (1, 64), (1, 65), (1, 200), (1, 300)]
PROMPTS: Rows = [(5, 5), (64, 64), (130, 130), (2, 2)]
CHUNKS: Rows = [(3, 131), (64, 192), (7, 70)]
MIXED: Rows = [(1, 150), (1, 2), (33, 161), (1, 66), (70, 70), (2, 128), (9, 9)]


@dataclasses.dataclass
class Problem:
    """The inputs of one layer's step, and the expected results."""

    spec: AttentionSpec
    rows: Rows
    # [T, (N + 2K) * D], device: query, key and value as a fused projection leaves them
    fused: torch.Tensor
    # of kv_cache_shape, host: what is cached before the step, and NaN elsewhere
    cache: torch.Tensor
    batch: ForwardBatch
    num_blocks: int
    # [T, N*D] float64
    truth: torch.Tensor
    # largest error of a plain implementation in the same dtype
    plain_error: float

    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """query, key and value: strided views."""
        spec = self.spec
        width = spec.num_kv_heads * spec.head_size
        query, key, value = self.fused.split_with_sizes([spec.num_heads * spec.head_size, width, width], dim=1)
        return query, key, value


def make_problem(
    rows: Rows,
    spec: AttentionSpec,
    dtype: torch.dtype = torch.float16,
    block_size: int = 128,
    void: Sequence[int] = (),
    scale_of_queries: float = 1.0,
    is_exact_in_int8: bool = False,
) -> Problem:
    """A random step.

    Args:
        rows: see above.
        spec: of the layer.
        dtype: of everything.
        block_size: of the cache.
        void: rows of one token that store nothing; what they see there was stored before.
        scale_of_queries: their standard deviation.
        is_exact_in_int8: keys and values are integers up to 127, which each of them has, times a power of two.
    """
    generator = torch.Generator().manual_seed(len(rows) + spec.head_size + block_size)
    num_heads, num_kv_heads, head_size = spec.num_heads, spec.num_kv_heads, spec.head_size
    blocks_of_row = [-(-seq_len // block_size) for _, seq_len in rows]
    num_blocks = sum(blocks_of_row) + 2
    order = torch.randperm(num_blocks, generator=generator)
    spare = -(-MAX_ROWS // block_size)
    cache = torch.full((2, num_blocks + spare, block_size, num_kv_heads, head_size), math.nan, dtype=dtype)
    # entries behind a row's blocks must not be followed
    block_table = torch.full((len(rows), max(blocks_of_row)), num_blocks - 1, dtype=torch.int32)
    fused, slots, positions, truths, errors = [], [], [], [], []
    taken = 0
    for row, (count, seq_len) in enumerate(rows):
        blocks = order[taken : taken + blocks_of_row[row]]
        taken += len(blocks)
        block_table[row, : len(blocks)] = blocks.int()
        query = (torch.randn(count, num_heads, head_size, generator=generator) * scale_of_queries).to(dtype)
        cached = torch.randn(2, seq_len, num_kv_heads, head_size, generator=generator)
        if is_exact_in_int8:
            cached = (cached * 32).round().clamp(-127, 127)
            cached[..., 0] = 127
            cached /= 64
        key, value = cached.to(dtype).unbind(0)
        places = torch.arange(seq_len)
        row_slots = blocks[places // block_size] * block_size + places % block_size
        stored = seq_len if row in void else seq_len - count
        for half, tensor in zip(cache.unbind(0), (key, value), strict=True):
            half.view(-1, num_kv_heads, head_size)[row_slots[:stored]] = tensor[:stored]
        fused.append(torch.cat([part.flatten(1) for part in (query, key[-count:], value[-count:])], dim=1))
        slots.append(torch.full((count,), -1) if row in void else row_slots[-count:])
        positions.append(places[-count:])
        truth, error = _truth(query, key, value, spec)
        truths.append(truth)
        errors.append(error)
    counts, seq_lens = [count for count, _ in rows], [seq_len for _, seq_len in rows]
    batch = ForwardBatch(
        input_ids=torch.zeros(sum(counts), dtype=torch.int64, device=NPU),
        positions=torch.cat(positions).to(NPU),
        slot_mapping=torch.cat(slots).to(NPU),
        query_start=torch.tensor([0, *counts]).cumsum(0).int().to(NPU),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=NPU),
        block_table=block_table.to(NPU),
        logits_indices=torch.zeros(0, dtype=torch.int64, device=NPU),
        query_start_np=np.cumsum([0, *counts], dtype=np.int32),
        seq_lens_np=np.array(seq_lens, np.int32),
        max_query_len=max(counts),
        max_seq_len=max(seq_lens),
    )
    return Problem(spec, rows, torch.cat(fused).to(NPU), cache, batch, num_blocks, torch.cat(truths), max(errors))


def _truth(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec
) -> tuple[torch.Tensor, float]:
    """A row's attention in float64, [count, N*D], and how far the plain definition in its dtype is from it."""
    count, seq_len = len(query), len(key)
    cache = torch.stack([key, value]).transpose(1, 2)[:, None].contiguous()
    arguments = (
        torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([seq_len], dtype=torch.int32),
        spec.scale,
        spec.sliding_window or 0,
    )
    definition = OPS["paged_attention"].reference
    truth = definition(query.double(), *cache.double().unbind(0), *arguments)
    plain = definition(query, *cache.unbind(0), *arguments)
    return truth.flatten(1), float((plain.double() - truth).abs().max())


def make_backend(
    problem: Problem, block_size: int = 128, specs: Sequence[AttentionSpec] = ()
) -> tuple[AscendAttention, torch.Tensor]:
    """A backend, and the problem's cache on the device, bound to it."""
    backend = AscendAttention(block_size)
    assert problem.cache.shape[1] == problem.num_blocks + backend.num_spare_blocks(MAX_ROWS)
    dtype = str(problem.cache.dtype).removeprefix("torch.")
    spec = KEYS_AND_VALUES.spec(block_size, problem.spec.num_kv_heads, problem.spec.head_size, dtype)
    assert problem.cache.shape == backend.kv_cache_shape(problem.cache.shape[1], spec)
    kv_cache = problem.cache.to(NPU)
    backend.bind(specs or [problem.spec], [kv_cache], problem.num_blocks)
    return backend, kv_cache


def run(problem: Problem, block_size: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, [T, N*D], and the cache after the step; both on the host."""
    backend, kv_cache = make_backend(problem, block_size)
    output = backend.forward(problem.spec, *problem.parts(), kv_cache, problem.batch, backend.prepare(problem.batch))
    return output.cpu(), kv_cache.cpu()


def check(problem: Problem, block_size: int = 128) -> torch.Tensor:
    """Output and cache are right; returns the output."""
    output, cache = run(problem, block_size)
    assert output.dtype == problem.fused.dtype
    error = float((output.double() - problem.truth).abs().max())
    assert error <= 2 * problem.plain_error, f"error {error}, a plain implementation's is {problem.plain_error}"
    # stored: the step's keys and values, each in its slot, and nothing else in a block of the pool
    expected = problem.cache.clone()
    slots = problem.batch.slot_mapping.cpu()
    kept = slots >= 0
    for half, part in zip(expected.unbind(0), problem.parts()[1:], strict=True):
        flat = half.view(-1, problem.spec.num_kv_heads * problem.spec.head_size)
        flat[slots[kept]] = part.cpu()[kept]
    pool = slice(0, problem.num_blocks)
    assert torch.equal(cache[:, pool].nan_to_num(7.0), expected[:, pool].nan_to_num(7.0))
    return output


def spec_of(heads: int = 4, kv_heads: int = 2, head_size: int = 64, window: int | None = None) -> AttentionSpec:
    """A layer; 1/sqrt(D) is its scale."""
    return AttentionSpec(heads, kv_heads, head_size, head_size**-0.5, window)


@pytest.fixture(params=["fused", "flash"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each family of operators."""
    monkeypatch.setenv("ASCEND_VLLM_ATTENTION_OPS", request.param)
    return str(request.param)


@pytest.mark.parametrize(
    ("rows", "window"),
    [(DECODE, None), (PROMPTS, None), (CHUNKS, None), (MIXED, None), (DECODE, 50), (PROMPTS, 50), (CHUNKS, 50)]
    + [(MIXED, window) for window in (1, 50, 4096)],
)
@pytest.mark.usefixtures("family")
def test_rows_of_every_kind(rows: Rows, window: int | None) -> None:
    check(make_problem(rows, spec_of(window=window)))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "dtype", "block_size"),
    [
        (2, 2, 80, torch.float16, 64),
        (7, 1, 128, torch.float16, 128),
        (7, 1, 128, torch.bfloat16, 64),
        (14, 2, 64, torch.bfloat16, 128),
        (4, 2, 256, torch.bfloat16, 64),
        (4, 4, 64, torch.bfloat16, 128),
        (4, 4, 16, torch.float16, 64),
    ],
)
@pytest.mark.usefixtures("family")
def test_shapes(heads: int, kv_heads: int, head_size: int, dtype: torch.dtype, block_size: int) -> None:
    check(make_problem(MIXED, spec_of(heads, kv_heads, head_size), dtype, block_size), block_size)


@pytest.mark.usefixtures("family")
def test_tokens_that_are_stored_nowhere() -> None:
    """As many rows as there may be, of which most have ended: their slots are negative."""
    rows = [(1, 3 + row % 9) for row in range(MAX_ROWS)]
    check(make_problem(rows, spec_of(head_size=16), block_size=64, void=range(2, MAX_ROWS)), block_size=64)


@pytest.mark.usefixtures("family")
def test_a_row_depends_on_nothing_but_itself() -> None:
    together = check(make_problem(MIXED, spec_of()))
    # the same rows in reverse order have other neighbours, and other operators' parts
    assert len(together) == sum(count for count, _ in MIXED)
    assert check(make_problem(MIXED[::-1], spec_of())).isfinite().all()


def test_a_copy_of_blocks_moves_those_blocks_alone() -> None:
    """Operators read and write the blocks in their places; none rearranges, moves or allocates the cache."""
    problem = make_problem(PROMPTS, spec_of())
    backend, kv_cache = make_backend(problem)
    sources, targets = torch.tensor([0], device=NPU), torch.tensor([1], device=NPU)
    allocated = torch.npu.memory_allocated()  # type: ignore[attr-defined]
    torch.npu.reset_peak_memory_stats()  # type: ignore[attr-defined]
    with traced() as calls:
        backend.copy_blocks(kv_cache, sources, kv_cache, targets)
    # of keys, then of values
    assert [call["op"] for call in calls] == ["aclnnIndexSelect", "aclnnInplaceIndexCopy"] * 2
    # any other dimension would be made the first one by a copy of everything
    assert [call["args"]["dim"] for call in calls] == [0] * 4
    half, block = list(kv_cache.shape[1:]), [1, *kv_cache.shape[2:]]
    for call in calls:
        shapes = [value["shape"] for value in call["args"].values() if isinstance(value, dict)]
        # the cache that is indexed, the block and its number
        assert sorted(shapes) == sorted([half, block, [1]])
    peak = torch.npu.max_memory_allocated() - allocated  # type: ignore[attr-defined]
    assert peak <= 2 * kv_cache[0, 0].nbytes + 4096


def test_blocks_are_copied_within_the_cache_and_to_the_host() -> None:
    problem = make_problem(PROMPTS, spec_of())
    backend, kv_cache = make_backend(problem)
    kv_cache.copy_(torch.randn(kv_cache.shape))
    before = kv_cache.cpu()
    host = torch.zeros(2, 5, *before.shape[2:], dtype=before.dtype)
    backend.copy_blocks(kv_cache, torch.tensor([0, 1], device=NPU), kv_cache, torch.tensor([1, 2], device=NPU))
    assert torch.equal(kv_cache.cpu()[:, 1:3], before[:, 0:2])
    backend.copy_blocks(kv_cache, torch.tensor([2, 0], device=NPU), host, torch.tensor([4, 0]))
    assert torch.equal(host[:, [4, 0]], before[:, [1, 0]])
    backend.copy_blocks(host, torch.tensor([4]), kv_cache, torch.tensor([3], device=NPU))
    assert torch.equal(kv_cache.cpu()[:, 3], before[:, 1])


@pytest.mark.parametrize(
    ("spec", "dtype", "block_size", "words"),
    [
        (spec_of(), torch.float32, 128, "float32"),
        (spec_of(head_size=72), torch.float16, 128, "head size 72"),
        (spec_of(head_size=272), torch.float16, 128, "head size 272"),
        (spec_of(heads=3), torch.float16, 128, "cannot share 2 KV heads"),
        (spec_of(heads=130, kv_heads=2), torch.float16, 128, "130 query heads on 2"),
        (spec_of(heads=256, kv_heads=256, head_size=256), torch.float16, 128, "wider than 65535"),
        (spec_of(), torch.float16, 32, "block size 32"),
        (spec_of(window=0), torch.float16, 128, "sliding window 0"),
    ],
)
def test_what_it_refuses(spec: AttentionSpec, dtype: torch.dtype, block_size: int, words: str) -> None:
    assert words in (AscendAttention.unsupported_reason(spec, dtype, block_size) or "")
    assert AscendAttention.unsupported_reason(spec_of(), torch.bfloat16, 64) is None


def attention_calls(problem: Problem) -> list[dict[str, Any]]:
    """Arguments of the attention operators that a step launches, as the device is given them."""
    with traced() as calls:
        run(problem)
    return [call["args"] for call in calls if "Attention" in call["op"]]


def precision(problem: Problem) -> list[bool]:
    """Whether each attention operator of a step is called with high precision."""
    return [arguments["inner_precise"] == 0 for arguments in attention_calls(problem)]


# switch → a row that it is about
SWITCHES = {
    "USE_PFA_HIGH_PRECISION_MODE": PROMPTS[:1],
    "USE_IFA_HIGH_PRECISION_MODE": DECODE[3:4],
    "USE_PREFIX_HIGH_PRECISION_MODE": CHUNKS[:1],
}
DEFAULTS = {
    "USE_PFA_HIGH_PRECISION_MODE": True,
    "USE_IFA_HIGH_PRECISION_MODE": False,
    "USE_PREFIX_HIGH_PRECISION_MODE": False,
}


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.usefixtures("family")
def test_each_switch_changes_its_call(name: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in SWITCHES:
        monkeypatch.delenv(other, raising=False)
    # the fused operator has a form in high performance for as many heads of keys as of queries
    problem = make_problem(SWITCHES[name], spec_of(kv_heads=4, window=window))
    for value, precise in ((None, DEFAULTS[name]), ("1", True), ("0", False)):
        if value is not None:
            monkeypatch.setenv(name, value)
        assert precision(problem) == [precise]
    # the others are about other rows
    for other in SWITCHES.keys() - {name}:
        monkeypatch.setenv(other, "1" if DEFAULTS[other] is False else "0")
    assert precision(problem) == [False]


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_rows_of_all_kinds_share_a_call(kv_heads: int) -> None:
    [arguments] = attention_calls(make_problem(MIXED, spec_of(kv_heads=kv_heads)))
    # of prompts, which need it
    assert arguments["inner_precise"] == 0
    # queries' lengths are summed up, those of keys are not where there is a block table
    assert arguments["actual_seq_lengths"] == [1, 2, 35, 36, 106, 108, 117]
    assert arguments["actual_seq_lengths_kv"] == [seq_len for _, seq_len in MIXED]
    [arguments] = attention_calls(make_problem(PROMPTS, spec_of(kv_heads=kv_heads)))
    assert arguments["block_table"] is None
    assert arguments["actual_seq_lengths"] == arguments["actual_seq_lengths_kv"] == [5, 69, 199, 201]


@pytest.mark.parametrize(
    ("kv_heads", "dtype", "inner_precise"),
    [(2, torch.float16, 0), (2, torch.bfloat16, 0), (4, torch.bfloat16, 0), (4, torch.float16, 1)],
)
def test_decoding_is_called_as_its_fastest_kernel_takes_it(
    kv_heads: int, dtype: torch.dtype, inner_precise: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a mask, and at inner_precise 0 whatever the switches say, unless float16 has as many heads of keys."""
    for name in SWITCHES:
        monkeypatch.setenv(name, "0")
    [arguments] = attention_calls(make_problem(DECODE, spec_of(kv_heads=kv_heads), dtype))
    chosen = [arguments[name] for name in ("inner_precise", "sparse_mode", "atten_mask")]
    assert chosen == [inner_precise, 0, None]
    [arguments] = attention_calls(make_problem(DECODE, spec_of(kv_heads=kv_heads, window=50), dtype))
    assert (arguments["inner_precise"], arguments["sparse_mode"]) == (inner_precise, 4)
    [arguments] = attention_calls(make_problem(CHUNKS, spec_of(kv_heads=kv_heads), dtype))
    assert (arguments["inner_precise"], arguments["sparse_mode"]) == (inner_precise, 3)


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.usefixtures("family")
def test_high_precision_is_in_the_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, products of queries and keys are kept in float16 and some of these are too large for that."""
    problem = make_problem(SWITCHES[name], spec_of(kv_heads=4), scale_of_queries=1e4)
    monkeypatch.setenv(name, "1")
    assert run(problem)[0].isfinite().all()
    monkeypatch.setenv(name, "0")
    assert not run(problem)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.usefixtures("family")
def test_nothing_waits_and_nothing_is_uploaded_in_a_layer(dtype: torch.dtype) -> None:
    """All uploads are in `prepare`; a layer launches only operators that compute and store."""
    windows = (None, 50, None)
    specs = [spec_of(window=window) for window in windows]
    problem = make_problem(DECODE, specs[0], dtype)
    backend, kv_cache = make_backend(problem, specs=specs)
    with Recorder() as recorder:
        step = backend.prepare(problem.batch)
    prepared = recorder.launched()
    assert len(prepared) <= 5
    assert not WAITING.intersection(prepared)
    for spec in specs:
        with Recorder() as recorder, traced() as calls:
            backend.forward(spec, *problem.parts(), kv_cache, problem.batch, step)
        launched = recorder.launched()
        # key, value and query leave the fused projection
        clone, store, clone_query, attention = launched[1:]
        assert {launched[0], clone, clone_query} == {"aten::clone"}
        assert store == "npu::npu_scatter_pa_kv_cache"
        assert attention.startswith("npu::")
        # the same on the device: nothing is cast, copied or computed beside them
        *copies, stored, attended = [call["op"] for call in calls]
        assert sorted([*copies, stored]) == ["aclnnInplaceCopy"] * 3 + ["aclnnScatterPaKvCache"]
        assert "Attention" in attended
        assert all(
            value.device == NPU
            for _, arguments in recorder.calls
            for value in arguments.values()
            if isinstance(value, torch.Tensor)
        )


def test_it_says_that_it_needs_its_caches() -> None:
    problem = make_problem(DECODE, spec_of())
    with pytest.raises(RuntimeError, match="call bind first"):
        AscendAttention(128).prepare(problem.batch)
