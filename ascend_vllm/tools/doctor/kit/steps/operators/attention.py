"""Attention over precision, dtype, heads, head size, block size and kinds of rows, as the backend calls it.

Letters: N query heads, K KV heads, D head size, S tokens of a block.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ascend_vllm import envs
from ascend_vllm.attention.ascend import AscendAttention
from ascend_vllm.attention.backend import AttentionSpec, ForwardBatch
from ascend_vllm.ops.registry import OPS
from ascend_vllm.tools.doctor.kit.session import Case, Result, Session
from ascend_vllm.tools.doctor.kit.steps.operators.comparing import DTYPES, compare, dtype_name
from ascend_vllm.types.kv_cache import KEYS_AND_VALUES

# rows as (tokens of the step, tokens in the cache after it), on a card and on the simulator
_ROWS = {
    "decode": ([(1, 1), (1, 129), (1, 1000), (1, 2048)] * 4, [(1, 1), (1, 65), (1, 130)]),
    "prompt": ([(512, 512), (33, 33)], [(5, 5), (40, 40)]),
    "chunk": ([(128, 1024), (16, 300)], [(3, 131), (20, 70)]),
    "mixed": ([(1, 900), (64, 192), (1, 2), (257, 257)], [(1, 150), (9, 70), (12, 12)]),
}
# query heads and KV heads, as in Qwen2-7B, in Llama 3 and without groups
_HEADS = ((28, 4), (32, 8), (16, 16))
# head size and block size
_SIZES = ((64, 128), (128, 128), (128, 64), (96, 128), (256, 128))
_WINDOW = 50
_FAMILY = "ASCEND_VLLM_ATTENTION_OPS"


@dataclasses.dataclass(frozen=True)
class AttentionForm:
    """What a case varies: N and K are `heads`, D and S the sizes; `family` is ASCEND_VLLM_ATTENTION_OPS."""

    dtype: torch.dtype
    heads: tuple[int, int]
    head_size: int
    block_size: int
    kind: str
    family: str = "fused"
    window: int | None = None
    # None: as the backend chooses
    inner_precise: int | None = None

    @property
    def name(self) -> str:
        """Of the case."""
        text = f"attention {self.family} {dtype_name(self.dtype)} {self.heads[0]}/{self.heads[1]}x{self.head_size}"
        text += f" block {self.block_size} {self.kind}"
        text += "" if self.window is None else " window"
        return text if self.inner_precise is None else f"{text} inner_precise {self.inner_precise}"


def _forms() -> Iterator[AttentionForm]:
    for dtype, heads, (head_size, block_size), kind in itertools.product(DTYPES, _HEADS, _SIZES, _ROWS):
        # prompts do not read blocks
        if kind != "prompt" or block_size == 128:
            yield AttentionForm(dtype, heads, head_size, block_size, kind)
    for dtype, heads, kind in itertools.product(DTYPES, ((28, 4), (16, 16)), ("decode", "prompt", "chunk")):
        yield AttentionForm(dtype, heads, 128, 128, kind, window=_WINDOW)
        yield AttentionForm(dtype, heads, 128, 128, kind, family="flash")
        for inner_precise in (0, 1):
            yield AttentionForm(dtype, heads, 128, 128, kind, inner_precise=inner_precise)


def cases(session: Session) -> list[Case]:
    """See `steps`."""
    return [Case(form.name, functools.partial(_run, session, form)) for form in _forms()]


@contextlib.contextmanager
def _family(name: str) -> Iterator[None]:
    before = envs.everything().get(_FAMILY)
    envs.export({_FAMILY: name}, {})
    try:
        yield
    finally:
        if before is None:
            envs.forget(_FAMILY)
        else:
            envs.export({_FAMILY: before}, {})


@dataclasses.dataclass(frozen=True)
class AttentionStep:
    """A layer's attention in one step, on the device, and its right result."""

    backend: AscendAttention
    spec: AttentionSpec
    batch: ForwardBatch
    # query, key and value of the step's tokens: [T, N*D], [T, K*D]
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    kv_cache: torch.Tensor
    # [T, N*D] on the host, in float32, and by the definition in the dtype of the step
    truth: torch.Tensor
    plain: torch.Tensor

    def run(self) -> torch.Tensor:
        """The result, with metadata of its own."""
        return self.forward(self.backend.prepare(self.batch))

    def forward(self, metadata: Any) -> torch.Tensor:
        """The result, with the metadata of `prepare`."""
        return self.backend.forward(self.spec, *self.parts, self.kv_cache, self.batch, metadata)


def _run(session: Session, form: AttentionForm) -> Result:
    session.begin()
    step = make_step(form, _ROWS[form.kind][session.size(0, 1)])
    metadata = step.backend.prepare(step.batch)
    changes: dict[str, object] = {} if form.inner_precise is None else {"inner_precise": form.inner_precise}
    return compare(session, lambda: step.forward(metadata), step.truth, step.plain, changes=changes)


def make_step(form: AttentionForm, rows: Sequence[tuple[int, int]]) -> AttentionStep:
    """A random step of rows, each with its tokens and with those in the cache after it."""
    num_heads, num_kv_heads = form.heads
    spec = AttentionSpec(num_heads, num_kv_heads, form.head_size, form.head_size**-0.5, form.window)
    generator = torch.Generator().manual_seed(len(form.name))
    counts, seq_lens = [count for count, _ in rows], [seq_len for _, seq_len in rows]
    num_blocks_of = [-(-seq_len // form.block_size) for seq_len in seq_lens]
    num_blocks = sum(num_blocks_of) + 1
    with _family(form.family):
        backend = AscendAttention(form.block_size)
    num_all = num_blocks + backend.num_spare_blocks(len(rows))
    # [2, P, S, K, D]: keys and values of all positions, stored or to be stored by the step
    cached = torch.randn(2, num_all, form.block_size, num_kv_heads, form.head_size, generator=generator).to(
        form.dtype
    )
    query = torch.randn(sum(counts), num_heads, form.head_size, generator=generator).to(form.dtype)
    order = torch.randperm(num_blocks, generator=generator)
    table = torch.full((len(rows), max(num_blocks_of)), num_blocks - 1, dtype=torch.int32)
    for row, blocks in enumerate(torch.split(order[: sum(num_blocks_of)], num_blocks_of)):
        table[row, : len(blocks)] = blocks.int()
    places = [torch.arange(seq_len - count, seq_len) for count, seq_len in rows]
    slots = torch.cat(
        [
            table[row, place // form.block_size].long() * form.block_size + place % form.block_size
            for row, place in enumerate(places)
        ]
    )
    starts = np.cumsum([0, *counts], dtype=np.int32)
    lengths = np.array(seq_lens, np.int32)
    key, value = (half.reshape(-1, num_kv_heads * form.head_size)[slots] for half in cached.unbind(0))
    batch = ForwardBatch(
        input_ids=slots.to("npu"),
        positions=torch.cat(places).to("npu"),
        slot_mapping=slots.to("npu"),
        query_start=torch.from_numpy(starts).to("npu"),
        seq_lens=torch.from_numpy(lengths).to("npu"),
        block_table=table.to("npu"),
        logits_indices=slots[:0].to("npu"),
        query_start_np=starts,
        seq_lens_np=lengths,
        max_query_len=max(counts),
        max_seq_len=max(seq_lens),
    )
    # what the step stores is not there before it
    stored = cached.clone()
    for half in stored.unbind(0):
        half.view(-1, num_kv_heads * form.head_size)[slots] = torch.nan
    # as a worker makes it: of bytes, since torch_npu remembers that a tensor was made with five axes
    cache = KEYS_AND_VALUES.spec(form.block_size, num_kv_heads, form.head_size, dtype_name(form.dtype))
    memory = torch.zeros(num_all * cache.block_bytes, dtype=torch.uint8, device="npu")
    kv_cache = backend.make_cache(memory, num_all, cache).copy_(stored)
    backend.bind([spec], [kv_cache], num_blocks)
    parts = [part.to("npu") for part in (query.flatten(1), key, value)]
    # [P, K, S, D], as the definition reads it
    caches = cached.transpose(2, 3).unbind(0)
    arguments = (table, torch.from_numpy(starts), torch.from_numpy(lengths), spec.scale, form.window or 0)
    definition = OPS["paged_attention"].reference
    truth = definition(query.float(), *(half.float() for half in caches), *arguments)
    plain = definition(query, *caches, *arguments)
    return AttentionStep(
        backend, spec, batch, (parts[0], parts[1], parts[2]), kv_cache, truth.flatten(1), plain.flatten(1)
    )
