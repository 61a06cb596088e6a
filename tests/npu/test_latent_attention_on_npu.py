"""Latent attention on NPUs against its definition in float64, and the calls that it makes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ascend_vllm.attention import ascend_plan
from ascend_vllm.attention.ascend_latent import AscendLatentAttention, LatentCache
from ascend_vllm.attention.backend import AttentionSpec, ForwardBatch, LatentSpec, LatentWeights, RotaryStep
from ascend_vllm.ops import native
from ascend_vllm.platforms.npu_graphs import NpuGraphRecorder
from ascend_vllm.types.kv_cache import LATENT, KVCachePlan
from tests.npu.recorder import Recorder, traced

native.import_op_modules()

NPU = torch.device("npu:0")
BLOCK_SIZE = 64
MAX_ROWS = 40
EPS = 1e-6
L, F, Q, V = 512, 64, 128, 128
# operators whose results the host waits for
WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"}
Rows = Sequence[tuple[int, int]]

# rows as (tokens of the step, tokens in the cache after it)
DECODE: Rows = [(1, 1), (1, 64), (1, 65), (1, 150)]
PROMPTS: Rows = [(5, 5), (64, 64), (70, 70), (2, 2)]
# drafts that are verified, and short chunks
SHORT: Rows = [(3, 131), (16, 17), (1, 90)]
CHUNKS: Rows = [(17, 131), (64, 192), (20, 21)]
MIXED: Rows = [(1, 150), (1, 2), (33, 161), (1, 66), (70, 70), (2, 128), (9, 9)]


@dataclasses.dataclass
class Problem:
    """The inputs of one layer's step on the device, and the expected results."""

    spec: AttentionSpec
    # [T, N*(Q+F)] and [T, L+F]: strided
    query: torch.Tensor
    latent: torch.Tensor
    weights: LatentWeights
    rotary: RotaryStep
    batch: ForwardBatch
    # host: [P, S, L+F] before the step and after it; NaN where nothing is cached
    before: torch.Tensor
    after: torch.Tensor
    num_blocks: int
    # [T, N*V] float64
    truth: torch.Tensor
    # largest error of a plain implementation in the same dtype
    plain_error: float


def spec_of(num_heads: int = 4, **changes: int) -> AttentionSpec:
    """A layer of DeepSeek-V2's sizes; the scale of its yarn is left out."""
    widths = {"latent_width": L, "rotary_width": F, "nope_width": Q, "value_width": V} | changes
    return AttentionSpec(num_heads, 1, L + F, (Q + F) ** -0.5, latent=LatentSpec(**widths))


def _cached(latent: torch.Tensor, norm: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[n, L+F]: normed, and rotated by pairs of neighbours, which are halves of the result."""
    normed = latent[:, :L]
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + EPS) * norm
    return torch.cat([normed, _rotated(latent[:, L:], cos, sin)], -1)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x[..., ::2], x[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _expanded(query: torch.Tensor, cached: torch.Tensor, expand: torch.Tensor, scale: float) -> torch.Tensor:
    """[n, N*V] of queries [n, N, Q+F] whose last is at the end of what is cached [s, L+F]."""
    num_tokens, num_heads, _ = query.shape
    keys, values = (cached[:, :L] @ expand.T).view(len(cached), num_heads, Q + V).split([Q, V], -1)
    keys = torch.cat([keys, cached[:, None, L:].expand(-1, num_heads, -1)], -1)
    scores = torch.einsum("tnd,snd->nts", query, keys) * scale
    later = torch.arange(len(cached)) > torch.arange(num_tokens)[:, None] + len(cached) - num_tokens
    weights = torch.softmax(scores.masked_fill(later, -math.inf), -1)
    return torch.einsum("nts,snd->tnd", weights, values).flatten(1)


def make_problem(
    rows: Rows, num_heads: int = 4, dtype: torch.dtype = torch.float16, void: Sequence[int] = ()
) -> Problem:
    """A random step.

    Args:
        rows: see above.
        num_heads: N.
        dtype: of everything.
        void: rows of one token that store nothing; what they see there was stored before.
    """
    generator = torch.Generator().manual_seed(len(rows) + num_heads)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    spec = spec_of(num_heads)
    expand = random(num_heads * (Q + V), L) * L**-0.5
    norm = random(L)
    angles = torch.rand(256, F // 2, generator=generator) * 6
    table = torch.cat([angles.cos(), angles.sin()], -1)
    blocks_of_row = [-(-seq_len // BLOCK_SIZE) for _, seq_len in rows]
    num_blocks = sum(blocks_of_row) + 2
    order = torch.randperm(num_blocks, generator=generator)
    spare = -(-MAX_ROWS // BLOCK_SIZE)
    before = torch.full((num_blocks + spare, BLOCK_SIZE, L + F), math.nan, dtype=dtype)
    after = before.clone()
    # entries behind a row's blocks must not be followed
    block_table = torch.full((len(rows), max(blocks_of_row)), num_blocks - 1, dtype=torch.int32)
    queries, latents, slots, positions, truths, errors = [], [], [], [], [], []
    taken = 0
    for row, (count, seq_len) in enumerate(rows):
        blocks = order[taken : taken + blocks_of_row[row]]
        taken += len(blocks)
        block_table[row, : len(blocks)] = blocks.int()
        query, latent, places = random(count, num_heads, Q + F), random(seq_len, L + F), torch.arange(seq_len)
        # the operators take angles in the dtype of keys
        cos, sin = table[places].to(dtype).chunk(2, -1)
        row_slots = blocks[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
        results = []
        for kind in (torch.float64, dtype):
            cached = _cached(*(x.to(kind) for x in (latent, norm, cos, sin)))
            own_cos, own_sin = (x[-count:, None].to(kind) for x in (cos, sin))
            rotated = _rotated(query[..., Q:].to(kind), own_cos, own_sin)
            whole = torch.cat([query[..., :Q].to(kind), rotated], -1)
            results.append(_expanded(whole, cached, expand.to(kind), spec.scale))
            stored = seq_len if row in void else seq_len - count
            if kind == torch.float64:
                before.view(-1, L + F)[row_slots[:stored]] = cached[:stored].to(dtype)
                after.view(-1, L + F)[row_slots] = cached.to(dtype)
        queries.append(query.flatten(1))
        latents.append(latent[-count:])
        slots.append(torch.full((count,), -1) if row in void else row_slots[-count:])
        positions.append(places[-count:])
        truths.append(results[0])
        errors.append(float((results[1].double() - results[0]).abs().max()))
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
    keys, values = expand.view(num_heads, Q + V, L).split([Q, V], 1)
    weights = LatentWeights(
        norm=norm.to(NPU),
        norm_eps=EPS,
        absorb=keys.contiguous().to(NPU),
        output=values.transpose(1, 2).contiguous().to(NPU),
        expand=expand.to(NPU),
    )
    # both come from one projection in models whose queries have no rank of their own
    fused = torch.cat([torch.cat(queries), torch.cat(latents)], -1).to(NPU)
    query, latent = fused.split([num_heads * (Q + F), L + F], -1)
    rotary = RotaryStep(batch.positions, table.to(NPU), is_neox=False)
    truth = torch.cat(truths)
    return Problem(spec, query, latent, weights, rotary, batch, before, after, num_blocks, truth, max(errors))


def make_backend(problem: Problem) -> tuple[AscendLatentAttention, LatentCache]:
    """A backend, and the problem's cache on the device, bound to it."""
    backend = AscendLatentAttention(BLOCK_SIZE)
    num_blocks = len(problem.before)
    assert num_blocks == problem.num_blocks + backend.num_spare_blocks(MAX_ROWS)
    plan = KVCachePlan(LATENT, num_vectors=1, num_heads=1, width=L + F)
    spec = plan.spec(BLOCK_SIZE, 1, L + F, str(problem.before.dtype).removeprefix("torch."))
    assert backend.unsupported_cache_reason(spec, problem.before.dtype) is None
    memory = torch.zeros(num_blocks * spec.block_bytes, dtype=torch.uint8, device=NPU)
    cache = backend.make_cache(memory, num_blocks, spec)
    for tensor, part in zip(cache, problem.before.split([L, F], -1), strict=True):
        tensor.copy_(part[:, :, None])
    backend.bind([problem.spec], [cache], problem.num_blocks)
    return backend, cache


def forward(problem: Problem, backend: AscendLatentAttention, cache: LatentCache) -> torch.Tensor:
    """The output, [T, N*V], on the device."""
    parts = (problem.query, problem.latent, problem.weights, cache, problem.batch, backend.prepare(problem.batch))
    return backend.forward_latent(problem.spec, *parts, problem.rotary)


def check(problem: Problem) -> torch.Tensor:
    """Output and cache are right; returns the output."""
    backend, cache = make_backend(problem)
    output = forward(problem, backend, cache).cpu()
    assert output.dtype == problem.query.dtype
    error = float((output.double() - problem.truth).abs().max())
    assert error <= 2 * problem.plain_error, f"error {error}, a plain implementation's is {problem.plain_error}"
    # stored: the step's rows, each in its slot, and nothing else in a block of the pool
    pool = slice(0, problem.num_blocks)
    held = torch.cat([tensor.cpu()[:, :, 0] for tensor in cache], -1)[pool].double()
    expected = problem.after[pool].double()
    assert torch.equal(held.isnan(), expected.isnan())
    rounding = torch.finfo(problem.before.dtype).eps
    assert ((held - expected).abs().nan_to_num(0.0) <= 2 * rounding * expected.abs().nan_to_num(0.0).clamp(1)).all()
    return output


@pytest.mark.parametrize(
    "rows", [DECODE, PROMPTS, SHORT, CHUNKS, MIXED], ids=["decode", "prompts", "short", "chunks", "mixed"]
)
def test_rows_of_every_kind(rows: Rows) -> None:
    check(make_problem(rows))


@pytest.mark.parametrize(("num_heads", "dtype"), [(16, torch.bfloat16), (1, torch.float16), (6, torch.bfloat16)])
def test_heads(num_heads: int, dtype: torch.dtype) -> None:
    """Of six heads the operator has no form: two of zeros are added."""
    check(make_problem(MIXED, num_heads, dtype))


def test_pairs_that_are_halves() -> None:
    """The same step of a model that has the elements of pairs in another order."""
    problem = make_problem(MIXED)
    query = problem.query.view(len(problem.query), -1, Q + F)
    nope, rope = query.split([Q, F], -1)
    problem.query = torch.cat([nope, torch.cat([rope[..., ::2], rope[..., 1::2]], -1)], -1).flatten(1)
    latents, keys = problem.latent.split([L, F], -1)
    problem.latent = torch.cat([latents, keys[:, ::2], keys[:, 1::2]], -1)
    problem.rotary = dataclasses.replace(problem.rotary, is_neox=True)
    check(problem)


def test_tokens_that_are_stored_nowhere() -> None:
    """As many rows as there may be, of which most have ended: their slots are negative."""
    rows = [(1, 3 + row % 9) for row in range(MAX_ROWS)]
    problem = make_problem(rows, void=range(2, MAX_ROWS))
    check(problem)


def test_long_sequences_are_expanded_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so many chunks that they are merged in more than one call."""
    whole = check(make_problem([(17, 250), (30, 60)]))
    monkeypatch.setattr(ascend_plan, "MAX_EXPANDED_TOKENS", BLOCK_SIZE)
    problem = make_problem([(17, 250), (30, 60)])
    assert [part.chunk_starts for part in _parts(problem)] == [(0, 64, 128, 192), (0,)]
    monkeypatch.setattr("ascend_vllm.attention.ascend_latent._MAX_MERGED", 3)
    chunked = check(problem)
    assert (whole.double() - chunked.double()).abs().max() <= 2 * problem.plain_error


def _parts(problem: Problem) -> list[ascend_plan.LatentPart]:
    return ascend_plan.split_latent_rows(problem.batch.query_start_np, problem.batch.seq_lens_np)


def test_a_row_depends_on_nothing_but_itself() -> None:
    alone, together = check(make_problem(MIXED[:1])), check(make_problem([*MIXED[:1], (33, 161)]))
    assert alone.shape == together[:1].shape


def attention_calls(problem: Problem) -> list[dict[str, Any]]:
    """Arguments of the attention operators that a step launches, as the device is given them."""
    backend, cache = make_backend(problem)
    with traced() as calls:
        forward(problem, backend, cache)
    return [call["args"] for call in calls if "Attention" in call["op"]]


def test_calls() -> None:
    """Decoding reads blocks of latents; a mixed step makes one call for each run of rows of a kind."""
    assert [call["input_layout"] for call in attention_calls(make_problem(DECODE))] == ["BNSD_NBSD"]
    assert [call["input_layout"] for call in attention_calls(make_problem(SHORT))] == ["TND_NTD"]
    assert [call["input_layout"] for call in attention_calls(make_problem(PROMPTS))] == ["TND"]
    layouts = [call["input_layout"] for call in attention_calls(make_problem(MIXED))]
    assert layouts == ["BNSD_NBSD", "TND", "BNSD_NBSD", "TND", "TND_NTD", "TND"]


@pytest.mark.parametrize("rows", [DECODE, SHORT, MIXED], ids=["decode", "short", "mixed"])
def test_the_host_waits_for_nothing(rows: Rows) -> None:
    problem = make_problem(rows)
    backend, cache = make_backend(problem)
    with Recorder() as recorder:
        forward(problem, backend, cache)
    assert not WAITING.intersection(recorder.launched())
    # nothing comes from the host or goes there
    for _, arguments in recorder.calls:
        assert arguments.get("device") in (None, NPU)
        assert all(value.device == NPU for value in arguments.values() if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("query_len", [1, 3])
def test_a_captured_step_follows_its_lengths(query_len: int) -> None:
    """Captured with lengths of one size and replayed with others, as a graph of the worker is."""
    rows = [(query_len, 40), (query_len, 130), (query_len, query_len + 1)]
    problem = make_problem(rows)
    backend, cache = make_backend(problem)
    batch = problem.batch
    short = [query_len + 1] * len(rows)
    problem.batch = dataclasses.replace(batch, seq_lens_np=np.array(short, np.int32), max_seq_len=query_len + 1)
    outputs: list[torch.Tensor] = []
    recorder = NpuGraphRecorder(torch.npu)  # type: ignore[attr-defined]
    graph = recorder.capture(lambda: outputs.append(forward(problem, backend, cache)))
    arguments = backend.replay_arguments(batch.seq_lens_np.tolist(), query_len)
    assert arguments is not None
    graph.replay(arguments)
    error = float((outputs[0].cpu().double() - problem.truth).abs().max())
    assert error <= 2 * problem.plain_error


def test_blocks_are_copied_within_the_cache_and_to_the_host() -> None:
    problem = make_problem(PROMPTS)
    backend, cache = make_backend(problem)
    for tensor in cache:
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.cpu() for tensor in cache]
    host = tuple(torch.zeros(5, *tensor.shape[1:], dtype=tensor.dtype) for tensor in before)
    backend.copy_blocks(cache, torch.tensor([0, 1], device=NPU), cache, torch.tensor([1, 2], device=NPU))
    backend.copy_blocks(cache, torch.tensor([2, 0], device=NPU), host, torch.tensor([4, 0]))  # type: ignore[arg-type]
    backend.copy_blocks(host, torch.tensor([4]), cache, torch.tensor([3], device=NPU))  # type: ignore[arg-type]
    for tensor, old, swapped in zip(cache, before, host, strict=True):
        assert torch.equal(tensor.cpu()[[1, 2, 3]], old[[0, 1, 1]])
        assert torch.equal(swapped[[4, 0]], old[[1, 0]])


@pytest.mark.parametrize(
    ("spec", "dtype", "block_size", "words"),
    [
        (spec_of(latent_width=256), torch.float16, 128, "need kv_lora_rank 512, qk_rope_head_dim 64"),
        (spec_of(rotary_width=32), torch.float16, 128, "but this model has 512, 32, 128, 128"),
        (spec_of(value_width=256), torch.float16, 128, "but this model has 512, 64, 128, 256"),
        (spec_of(160), torch.float16, 128, "160 query heads of a device are more than its operators take, 128"),
        (spec_of(), torch.float32, 128, "float32"),
        (spec_of(), torch.float16, 32, "block size 32"),
        (AttentionSpec(4, 2, 64, 0.125), torch.float16, 128, "latent attention only"),
    ],
)
def test_what_it_refuses(spec: AttentionSpec, dtype: torch.dtype, block_size: int, words: str) -> None:
    assert words in (AscendLatentAttention.unsupported_reason(spec, dtype, block_size) or "")
    assert AscendLatentAttention.unsupported_reason(spec_of(), torch.bfloat16, 64) is None
