"""The simulated attention operators against a float64 reference, as torch_npu calls them."""

import math
import sys
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from tests.npu.attention_reference import Sequences, attention, causal, close
from tests.npu.launches import takes
from tests.npu.processes import run

HALFS = [torch.float16, torch.bfloat16]
TRIANGLE = torch.triu(torch.ones(2048, 2048, dtype=torch.int8), 1)


@pytest.fixture(scope="module")
def triangle() -> Tensor:
    return TRIANGLE.npu()


def fused(sequences: Sequences, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The fused operator with the heads and the scale of the sequences."""
    return torch_npu.npu_fused_infer_attention_score(
        query.npu(),
        key.npu(),
        value.npu(),
        num_heads=sequences.heads,
        num_key_value_heads=sequences.kv_heads,
        scale=sequences.scale,
        **options,
    )


def fused_packed(sequences: Sequences, triangle: Tensor, *tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Prompts one after another under a causal mask; `tensors` are query, key and value if not the sequences' own."""
    return fused(
        sequences,
        *(tensors or (sequences.query, sequences.key, sequences.value)),
        input_layout="TND",
        actual_seq_lengths=sequences.query_ends,
        actual_seq_lengths_kv=sequences.kv_ends,
        atten_mask=triangle,
        sparse_mode=3,
        **options,
    )


def fused_paged(sequences: Sequences, block_size: int, form: str = "BBH", **options: Any) -> tuple[Tensor, Tensor]:
    key, value, table = sequences.paged(block_size, form)
    return fused(
        sequences,
        sequences.query,
        key,
        value,
        block_table=table.npu(),
        block_size=block_size,
        input_layout="TND",
        actual_seq_lengths=sequences.query_ends,
        actual_seq_lengths_kv=sequences.kv_lengths,
        **options,
    )


class TestPackedLayout:
    """TND: tokens of all sequences one after another, what a server passes."""

    @pytest.mark.parametrize("dtype", HALFS, ids=["float16", "bfloat16"])
    @pytest.mark.parametrize(
        ("heads", "head_size"), [((4, 1), 64), ((6, 2), 80), ((4, 4), 96), ((8, 2), 128), ((2, 1), 256)]
    )
    @takes("aclnnFusedInferAttentionScoreV3")
    def test_prompts(self, heads: tuple[int, int], head_size: int, dtype: torch.dtype, triangle: Tensor) -> None:
        lengths = [5, 1, 33, 17]
        sequences = Sequences(lengths, lengths, heads, head_size, dtype)
        out, lse = fused_packed(sequences, triangle, softmax_lse_flag=True)
        sequences.check(out)
        exact = sequences.expected()[1]
        assert (lse.cpu().squeeze(-1).double() - exact).abs().max() < 1e-4

    def test_prompts_of_192_with_values_of_128(self, triangle: Tensor) -> None:
        sequences = Sequences([9, 20], [9, 20], (4, 4), 192, torch.bfloat16, value_size=128)
        out, _ = fused_packed(sequences, triangle)
        assert out.shape == (29, 4, 128)
        sequences.check(out)

    @pytest.mark.parametrize("form", ["BBH", "BNBD", "NZ"])
    @pytest.mark.parametrize(("block_size", "head_size"), [(64, 80), (128, 128), (128, 96)])
    def test_chunks_over_a_paged_cache(self, block_size: int, head_size: int, form: str, triangle: Tensor) -> None:
        sequences = Sequences([3, 1, 40, 7], [150, 129, 40, 64], (4, 2), head_size, torch.float16)
        out, _ = fused_paged(sequences, block_size, form, atten_mask=triangle, sparse_mode=3)
        sequences.check(out)

    @pytest.mark.parametrize("dtype", HALFS, ids=["float16", "bfloat16"])
    def test_decode_over_a_paged_cache(self, dtype: torch.dtype, triangle: Tensor) -> None:
        sequences = Sequences([1] * 4, [1, 128, 129, 300], (8, 2), 64, dtype)
        out, _ = fused_paged(sequences, 128, atten_mask=triangle, sparse_mode=3)
        sequences.check(out)

    def test_a_sliding_window(self, triangle: Tensor) -> None:
        sequences = Sequences([5, 1, 90], [200, 33, 90], (4, 2), 64, torch.float16)
        out, _ = fused_paged(sequences, 128, atten_mask=triangle, sparse_mode=4, pre_tokens=31, next_tokens=0)
        sequences.check(out, window=31)

    def test_no_mask_sees_everything(self) -> None:
        sequences = Sequences([5, 12], [11, 40], (4, 2), 64, torch.float16)
        out, _ = fused_paged(sequences, 64)
        sequences.check(out, full=True)

    def test_a_sequence_without_keys_is_zero(self, triangle: Tensor) -> None:
        sequences = Sequences([2, 3], [0, 5], (2, 1), 64, torch.float16)
        out, lse = fused_paged(sequences, 64, atten_mask=triangle, sparse_mode=3, softmax_lse_flag=True)
        assert (out.cpu()[:2] == 0).all()
        assert torch.isinf(lse.cpu()[:2]).all()
        assert torch.isfinite(lse.cpu()[2:]).all()

    @takes("aclnnFusedInferAttentionScoreV4")
    def test_sinks(self, triangle: Tensor) -> None:
        sequences = Sequences([4, 9], [4, 9], (4, 2), 64, torch.bfloat16)
        sink = torch.randn(4).bfloat16()
        out, _ = torch_npu.npu_fused_infer_attention_score_v2(
            sequences.query.npu(),
            sequences.key.npu(),
            sequences.value.npu(),
            atten_mask=triangle,
            sparse_mode=3,
            input_layout="TND",
            actual_seq_qlen=sequences.query_ends,
            actual_seq_kvlen=sequences.kv_ends,
            num_query_heads=4,
            num_key_value_heads=2,
            softmax_scale=sequences.scale,
            learnable_sink=sink.npu(),
        )
        sequences.check(out, sink=sink)
        assert (out.cpu().double() - sequences.expected()[0]).abs().max() > 0.05


def batched(rows: int, keys: int, layout: str) -> tuple[Sequences, Tensor, Tensor, Tensor]:
    """Two sequences of one length in a layout with a batch axis: (heads 4, key heads 2, head size 64)."""
    sequences = Sequences([rows] * 2, [keys] * 2, (4, 2), 64, torch.float16)

    def arranged(packed: Tensor) -> Tensor:
        whole = packed.view(2, -1, *packed.shape[1:])
        if layout.startswith("BSH"):
            return whole.flatten(2)
        return whole if layout.startswith("BSND") else whole.transpose(1, 2).contiguous()

    return sequences, arranged(sequences.query), arranged(sequences.key), arranged(sequences.value)


def in_bytes(numbers: Tensor, axes: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Numbers as int8 with a float32 scale for what lies along `axes`, which stay with size 1; NaN becomes 0."""
    numbers = numbers.float().nan_to_num()
    scales = numbers.abs().amax(axes, keepdim=True).clamp_min(1e-3) / 127
    return (numbers / scales).round().to(torch.int8), scales


def packed_again(out: Tensor, layout: str) -> Tensor:
    if layout.endswith("BSH"):
        out = out.view(*out.shape[:2], 4, -1)
    elif layout.endswith("NBSD"):
        out = out.permute(1, 2, 0, 3)
    elif layout.endswith("BNSD"):
        out = out.transpose(1, 2)
    return out.flatten(0, 1)


def split_prefix(half: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The first sequence's first seven tokens with NaN behind them, and what follows the seven in all sequences."""
    axis = 2 if layout.startswith("BNSD") else 1
    prefix = half[:1].narrow(axis, 0, 9).clone()
    prefix.narrow(axis, 7, 2).fill_(torch.nan)
    return prefix, half.narrow(axis, 7, 13).contiguous()


class TestBatchedLayouts:
    @pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD"])
    def test_layouts(self, layout: str, triangle: Tensor) -> None:
        sequences, query, key, value = batched(9, 20, layout)
        out, _ = fused(sequences, query, key, value, input_layout=layout, atten_mask=triangle, sparse_mode=3)
        sequences.check(packed_again(out.cpu(), layout))

    @pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
    def test_one_row_takes_no_causal_mask(self, layout: str) -> None:
        sequences, query, key, value = batched(1, 50, layout)
        out, _ = fused(sequences, query, key, value, input_layout=layout)
        sequences.check(packed_again(out.cpu(), layout))

    def test_lengths_of_the_sequences(self) -> None:
        sequences, query, key, value = batched(6, 20, "BNSD")
        out, _ = fused(
            sequences,
            query,
            key,
            value,
            input_layout="BNSD",
            actual_seq_lengths=[6, 2],
            actual_seq_lengths_kv=[20, 7],
        )
        short = attention(query[1, :, :2], key[1, :, :7], value[1, :, :7], sequences.scale)[0]
        assert (out.cpu()[1, :, :2].double() - short).abs().max() < 2e-3
        assert (out.cpu()[1, :, 2:] == 0).all()

    @pytest.mark.parametrize(
        ("sparse_mode", "hidden"),
        [
            (0, causal(9, 20) | (torch.arange(20)[None] > torch.arange(9)[:, None] + 13)),
            (1, causal(9, 20)),
            (2, torch.arange(20)[None] > torch.arange(9)[:, None]),
        ],
    )
    def test_mask_modes(self, sparse_mode: int, hidden: Tensor, triangle: Tensor) -> None:
        sequences, query, key, value = batched(9, 20, "BNSD")
        # The mode 0 hides what the mask hides and what lies beyond next_tokens, counted from the upper left corner.
        mask = triangle if sparse_mode == 2 else causal(9, 20).npu()
        options = {"next_tokens": 13} if sparse_mode == 0 else {}
        out, _ = fused(
            sequences, query, key, value, input_layout="BNSD", atten_mask=mask, sparse_mode=sparse_mode, **options
        )
        exact = attention(
            query.flatten(0, 1), key.flatten(0, 1).contiguous(), value.flatten(0, 1), sequences.scale, hidden
        )
        plain = attention(
            query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), sequences.scale, hidden, dtype=torch.float16
        )
        close(out.cpu().flatten(0, 1), exact[0], plain[0])

    @pytest.mark.parametrize(("layout", "form"), [("BSH", "BBH"), ("BSND", "BBH"), ("BNSD", "BNBD")])
    def test_decode_over_a_paged_cache(self, layout: str, form: str) -> None:
        sequences, query, _, _ = batched(1, 150, layout)
        key, value, table = sequences.paged(128, form)
        out, _ = fused(
            sequences,
            query,
            key,
            value,
            input_layout=layout,
            block_table=table.npu(),
            block_size=128,
            actual_seq_lengths_kv=[150, 150],
        )
        sequences.check(packed_again(out.cpu(), layout))

    @pytest.mark.parametrize("dtype", HALFS, ids=["float16", "bfloat16"])
    def test_keys_in_bytes_with_scales_in_blocks(self, dtype: torch.dtype) -> None:
        sequences = Sequences([1, 1], [150, 33], (4, 2), 64, dtype)
        key, value, table = sequences.paged(64, "BNBD")
        (keys, key_scales), (values, value_scales) = in_bytes(key, -1), in_bytes(value, -1)
        out, _ = fused(
            sequences,
            sequences.query[:, :, None],
            keys,
            values,
            input_layout="BNSD",
            block_table=table.npu(),
            block_size=64,
            actual_seq_lengths_kv=[150, 33],
            key_antiquant_scale=key_scales[..., 0].npu(),
            value_antiquant_scale=value_scales[..., 0].npu(),
            key_antiquant_mode=5,
            value_antiquant_mode=5,
        )
        for tensor, scales in ((sequences.key, -1), (sequences.value, -1)):
            rounded, scale = in_bytes(tensor, scales)
            tensor.copy_(rounded * scale)
        close(out.cpu()[:, :, 0], sequences.expected()[0], sequences.expected(dtype)[0])

    @pytest.mark.parametrize(("layout", "form"), [("BSH", "BBH"), ("BSND", "BBH"), ("BNSD", "BNBD")])
    @takes("aclnnFusedInferAttentionScoreV3")
    def test_keys_in_bytes_with_scales_of_channels(self, layout: str, form: str) -> None:
        """With offsets: a number is (byte + offset) * scale."""
        sequences, query, _, _ = batched(1, 150, layout)
        scales, offsets = torch.rand(2, 2, 64).half() / 40, torch.randint(-9, 9, (2, 2, 64)).half()
        halves = (sequences.key, sequences.value)
        for half, scale, offset in zip(halves, scales, offsets, strict=True):
            half.copy_((half.float() / scale.float() - offset).round().clamp(-128, 127))
        key, value, table = sequences.paged(128, form)
        shape = {"BSH": [128], "BSND": [1, 2, 64], "BNSD": [2, 1, 64]}[layout]
        key_scale, value_scale, key_offset, value_offset = (
            one.view(shape).npu() for pair in (scales, offsets) for one in pair
        )
        out, _ = fused(
            sequences,
            query,
            key.nan_to_num().to(torch.int8),
            value.nan_to_num().to(torch.int8),
            input_layout=layout,
            block_table=table.npu(),
            block_size=128,
            actual_seq_lengths_kv=[150, 150],
            key_antiquant_scale=key_scale,
            key_antiquant_offset=key_offset,
            value_antiquant_scale=value_scale,
            value_antiquant_offset=value_offset,
        )
        for half, scale, offset in zip(halves, scales, offsets, strict=True):
            half.copy_((half.float() + offset.float()) * scale.float())
        sequences.check(packed_again(out.cpu(), layout))

    @pytest.mark.parametrize(
        ("rows", "layout"), [(1, "BSH"), (1, "BNSD"), (9, "BSH"), (9, "BSND"), (9, "BNSD"), (9, "BNSD_BSND")]
    )
    def test_a_shared_prefix(self, rows: int, layout: str, triangle: Tensor) -> None:
        """Its first seven tokens are in front of the 13 of both sequences; what follows them is not read."""
        sequences, query, key, value = batched(rows, 20, layout)
        shared, own = zip(*(split_prefix(half, layout) for half in (key, value)), strict=True)
        for half in (sequences.key, sequences.value):
            half[20:27] = half[:7]
        out, _ = fused(
            sequences,
            query,
            *own,
            input_layout=layout,
            key_shared_prefix=shared[0].npu(),
            value_shared_prefix=shared[1].npu(),
            actual_shared_prefix_len=[7],
            **({"atten_mask": triangle, "sparse_mode": 3} if rows > 1 else {}),
        )
        sequences.check(packed_again(out.cpu(), layout))

    def test_a_shared_prefix_in_bytes(self) -> None:
        sequences, query, _, _ = batched(1, 20, "BNSD")
        scales = torch.rand(2, 2, 1, 64).half() / 40
        halves = (sequences.key, sequences.value)
        shared, own = [], []
        for half, scale in zip(halves, scales, strict=True):
            half[20:27] = half[:7]
            half.copy_((half.float() / scale.float().view(2, 64)).round().clamp(-128, 127))
            in_front, behind = split_prefix(half.view(2, 20, 2, 64).transpose(1, 2).contiguous(), "BNSD")
            shared.append(in_front.nan_to_num().to(torch.int8).npu())
            own.append(behind.to(torch.int8))
            half.mul_(scale.view(2, 64))
        out, _ = fused(
            sequences,
            query,
            *own,
            input_layout="BNSD",
            key_antiquant_scale=scales[0].npu(),
            value_antiquant_scale=scales[1].npu(),
            key_shared_prefix=shared[0],
            value_shared_prefix=shared[1],
            actual_shared_prefix_len=[7],
        )
        sequences.check(packed_again(out.cpu(), "BNSD"))

    def test_a_positional_bias(self) -> None:
        sequences, query, key, value = batched(8, 16, "BNSD")
        bias = torch.randn(1, 4, 8, 16).half()
        out, _ = fused(sequences, query, key, value, input_layout="BNSD", pse_shift=bias.npu())
        wide = key.double().repeat_interleave(2, 1), value.double().repeat_interleave(2, 1)
        scores = query.double() @ wide[0].transpose(2, 3) * sequences.scale + bias.double()
        exact = torch.softmax(scores, -1) @ wide[1]
        assert (out.cpu().double() - exact).abs().max() < 3e-3

    def test_rows_that_see_nothing(self) -> None:
        """The correction of such rows makes them zero; without it they are the mean of all values."""
        sequences, query, key, value = batched(4, 16, "BNSD")
        mask = torch.zeros(1, 1, 4, 16, dtype=torch.bool)
        mask[..., 1, :] = True
        out = {}
        for inner_precise in (0, 2):
            result, _ = fused(
                sequences, query, key, value, input_layout="BNSD", atten_mask=mask.npu(), inner_precise=inner_precise
            )
            out[inner_precise] = result.cpu()
        assert (out[2][:, :, 1] == 0).all()
        mean = value.double().mean(2).repeat_interleave(2, 1)
        assert (out[0][:, :, 1].double() - mean).abs().max() < 1e-3
        assert torch.equal(out[0][:, :, 2], out[2][:, :, 2])


class TestPrecision:
    """inner_precise, bit 0: the high-performance kernels keep the product in float16."""

    def run(
        self, dtype: torch.dtype, inner_precise: int, magnitude: float, triangle: Tensor
    ) -> tuple[Sequences, Tensor]:
        sequences = Sequences([12], [12], (4, 2), 128, dtype)
        sequences.query *= magnitude
        out, _ = fused_packed(sequences, triangle, inner_precise=inner_precise)
        return sequences, out.cpu()

    def test_float16_differs(self, triangle: Tensor) -> None:
        sequences, precise = self.run(torch.float16, 0, 1.0, triangle)
        _, fast = self.run(torch.float16, 1, 1.0, triangle)
        sequences.check(precise)
        sequences.check(fast)
        exact = sequences.expected()[0]
        assert (fast - exact).abs().mean() > 1.2 * (precise - exact).abs().mean()

    def test_large_products_overflow_only_in_the_fast_mode(self, triangle: Tensor) -> None:
        sequences, precise = self.run(torch.float16, 0, 4000.0, triangle)
        _, fast = self.run(torch.float16, 1, 4000.0, triangle)
        assert (precise.double() - sequences.expected()[0]).abs().max() < 2e-3
        assert not torch.isfinite(fast).all()

    def test_bfloat16_knows_no_fast_mode(self, triangle: Tensor) -> None:
        _, precise = self.run(torch.bfloat16, 0, 1.0, triangle)
        _, fast = self.run(torch.bfloat16, 1, 1.0, triangle)
        assert torch.equal(precise, fast)


class TestLatentAttention:
    """Multi-head latent attention: heads of 512 over a cache of one head, each with a rope part of 64."""

    @pytest.mark.parametrize(
        ("layout", "form"), [("BNSD_NBSD", "BNBD"), ("BSND_NBSD", "NZ"), ("BSH", "BBH"), ("BNSD", "BNBD")]
    )
    def test_decode(self, layout: str, form: str) -> None:
        sequences = Sequences([1, 1], [70, 140], (4, 1), 512, torch.bfloat16, rope_size=64)
        sequences.value = sequences.key[..., :512].contiguous()
        whole = sequences.query.unsqueeze(1 if layout[:3] == "BSH" or layout[:4] == "BSND" else 2)
        query, query_rope = whole.split([512, 64], -1)
        if layout == "BSH":
            query, query_rope = query.flatten(2), query_rope.flatten(2)
        cache, _, table = sequences.paged(128, form)
        if form == "NZ":
            key, key_rope = cache.split([32, 4], 2)
        else:
            key, key_rope = cache.split([512, 64], -1)
        out, _ = fused(
            sequences,
            query.contiguous(),
            key.contiguous(),
            key.contiguous(),
            query_rope=query_rope.contiguous().npu(),
            key_rope=key_rope.contiguous().npu(),
            input_layout=layout,
            block_table=table.npu(),
            block_size=128,
            actual_seq_lengths_kv=[70, 140],
        )
        sequences.check(packed_again(out.cpu(), layout))

    def test_prompts(self, triangle: Tensor) -> None:
        sequences = Sequences([6, 15], [6, 15], (4, 4), 128, torch.bfloat16, value_size=128, rope_size=64)
        query, query_rope = (part.contiguous().npu() for part in sequences.query.split([128, 64], -1))
        key, key_rope = (part.contiguous().npu() for part in sequences.key.split([128, 64], -1))
        out, lse = fused_packed(
            sequences,
            triangle,
            query,
            key,
            sequences.value,
            query_rope=query_rope,
            key_rope=key_rope,
            softmax_lse_flag=True,
        )
        sequences.check(out)
        assert (lse.cpu().squeeze(-1).double() - sequences.expected()[1]).abs().max() < 1e-4


class TestOutForm:
    """The form that graphs capture: workspace and outputs are given; the lengths are part of the recorded call."""

    @pytest.fixture
    def sequences(self) -> Sequences:
        return Sequences([1, 1], [40, 150], (4, 2), 128, torch.float16)

    @pytest.fixture
    def call(self, sequences: Sequences, triangle: Tensor) -> dict[str, Any]:
        key, value, table = (tensor.npu() for tensor in sequences.paged(128))
        return {
            "query": sequences.query.npu(),
            "key": key,
            "value": value,
            "atten_mask": triangle,
            "sparse_mode": 3,
            "block_table": table,
            "block_size": 128,
            "input_layout": "TND",
            "num_heads": 4,
            "num_key_value_heads": 2,
            "scale": sequences.scale,
            "actual_seq_lengths": sequences.query_ends,
        }

    def outs(self, call: dict[str, Any]) -> list[Tensor]:
        return [torch.empty_like(call["query"]), torch.empty(1, dtype=torch.float32, device="npu")]

    def run(self, call: dict[str, Any], lengths: list[int], outs: list[Tensor], workspace: Tensor) -> None:
        torch_npu.npu_fused_infer_attention_score.out(
            **call, actual_seq_lengths_kv=lengths, workspace=workspace, out=outs
        )

    def workspace(self, call: dict[str, Any], lengths: list[int]) -> Tensor:
        return torch_npu._npu_fused_infer_attention_score_get_max_workspace(**call, actual_seq_lengths_kv=lengths)

    def test_workspace_and_out(self, sequences: Sequences, call: dict[str, Any]) -> None:
        workspace = self.workspace(call, sequences.kv_lengths)
        assert workspace.numel() > 0
        outs = self.outs(call)
        self.run(call, sequences.kv_lengths, outs, workspace)
        sequences.check(outs[0])

    def test_a_workspace_that_is_too_small_is_refused(self) -> None:
        script = """
import torch, torch_npu
query, cache = torch.zeros(1, 2, 64, dtype=torch.float16).npu(), torch.zeros(1, 128, 128, dtype=torch.float16).npu()
torch_npu.npu_fused_infer_attention_score.out(
    query, cache, cache, block_table=torch.zeros(1, 1, dtype=torch.int32).npu(), block_size=128, num_heads=2,
    num_key_value_heads=2, input_layout="TND", actual_seq_lengths=[1], actual_seq_lengths_kv=[1],
    workspace=torch.empty(8, dtype=torch.uint8, device="npu"),
    out=[torch.empty_like(query), torch.empty(1, dtype=torch.float32, device="npu")],
)
torch.npu.synchronize()
"""
        done = run(sys.executable, "-W", "ignore", "-c", script)
        assert done.returncode != 0
        assert "aclnnFusedInferAttentionScoreV3: workspace: 8 bytes, but 16777216 on the device" in done.stderr

    def test_lengths_of_a_captured_call_are_updated(self, sequences: Sequences, call: dict[str, Any]) -> None:
        workspace = self.workspace(call, [1, 1])
        outs = self.outs(call)
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph, auto_dispatch_capture=True):
            self.run(call, [1, 1], outs, workspace)
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": sequences.kv_lengths}])
        graph.replay()
        sequences.check(outs[0])


class TestPromptOperator:
    """npu_prompt_flash_attention; a sparse_mode ten higher asks for high precision."""

    def run(self, *tensors: Tensor, triangle: Tensor, scale: float, **options: Any) -> Tensor:
        query, key, value = (tensor.npu() for tensor in tensors)
        return torch_npu.npu_prompt_flash_attention(
            query, key, value, atten_mask=triangle, num_heads=4, num_key_value_heads=2, scale_value=scale, **options
        ).cpu()

    @pytest.mark.parametrize("sparse_mode", [3, 13])
    @pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
    @takes("aclnnPromptFlashAttentionV3")
    def test_prompts(self, layout: str, sparse_mode: int, triangle: Tensor) -> None:
        sequences, query, key, value = batched(12, 12, layout)
        options = {"input_layout": layout, "sparse_mode": sparse_mode, "next_tokens": 0}
        out = self.run(query, key, value, triangle=triangle, scale=sequences.scale, **options)
        sequences.check(packed_again(out, layout))

    def test_high_precision_does_not_overflow(self, triangle: Tensor) -> None:
        sequences, query, key, value = batched(12, 12, "BSH")
        out = {
            mode: self.run(query * 4000, key, value, triangle=triangle, scale=sequences.scale, sparse_mode=mode)
            for mode in (3, 13)
        }
        assert torch.isfinite(out[13]).all()
        assert not torch.isfinite(out[3]).all()


class TestIncrementalOperator:
    @pytest.mark.parametrize("inner_precise", [0, 1])
    @pytest.mark.parametrize(("layout", "form"), [("BSH", "BBH"), ("BNSD", "BNBD")])
    @takes("aclnnIncreFlashAttentionV4")
    def test_paged(self, layout: str, form: str, inner_precise: int) -> None:
        sequences = Sequences([1, 1, 1], [1, 64, 130], (4, 2), 80, torch.float16)
        query = sequences.query.flatten(1).unsqueeze(1) if layout == "BSH" else sequences.query.unsqueeze(2)
        key, value, table = sequences.paged(64, form)
        out = torch_npu.npu_incre_flash_attention(
            query.npu(),
            key.npu(),
            value.npu(),
            actual_seq_lengths=sequences.kv_lengths,
            block_table=table.npu(),
            block_size=64,
            num_heads=4,
            num_key_value_heads=2,
            scale_value=sequences.scale,
            input_layout=layout,
            inner_precise=inner_precise,
        )
        sequences.check(out.cpu().reshape(3, 4, 80))

    def test_mask(self) -> None:
        sequences, query, key, value = batched(1, 40, "BNSD")
        mask = torch.zeros(2, 40, dtype=torch.bool)
        mask[1, 10:] = True
        out = torch_npu.npu_incre_flash_attention(
            query.npu(),
            key.npu(),
            value.npu(),
            atten_mask=mask.npu(),
            num_heads=4,
            num_key_value_heads=2,
            scale_value=sequences.scale,
            input_layout="BNSD",
        )
        short = attention(query[1], key[1, :, :10], value[1, :, :10], sequences.scale)[0]
        assert (out.cpu()[1].double() - short).abs().max() < 3e-3


class TestTrainingOperators:
    """npu_fusion_attention and what torch's own attention becomes."""

    @pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    @takes("aclnnFlashAttentionScore")
    def test_fusion_attention(self, layout: str, dtype: torch.dtype) -> None:
        sequences, *tensors = batched(9, 20, layout)
        query, key, value = (tensor.to(dtype).npu() for tensor in tensors)
        out, row_max, row_sum, *_ = torch_npu.npu_fusion_attention(
            query, key, value, 4, layout, atten_mask=TRIANGLE.bool().npu(), scale=sequences.scale, sparse_mode=3
        )
        sequences.check(packed_again(out.cpu(), layout))
        lse = (row_max.cpu() + row_sum.cpu().log())[..., 0].transpose(1, 2).flatten(0, 1)
        assert (lse.double() - sequences.expected()[1]).abs().max() < 1e-4

    @takes("aclnnFlashAttentionVarLenScore")
    def test_sequences_one_after_another(self) -> None:
        sequences = Sequences([5, 12], [5, 12], (4, 2), 80, torch.bfloat16)
        out = torch_npu.npu_fusion_attention(
            sequences.query.npu(),
            sequences.key.npu(),
            sequences.value.npu(),
            4,
            "TND",
            atten_mask=TRIANGLE.bool().npu(),
            scale=sequences.scale,
            sparse_mode=2,
            actual_seq_qlen=[5, 17, 0],
            actual_seq_kvlen=[5, 17, 0],
        )[0]
        sequences.check(out)

    @pytest.mark.parametrize("mode", ["plain", "causal", "mask"])
    def test_scaled_dot_product_attention(self, mode: str) -> None:
        torch.manual_seed(1)
        query, key, value = (torch.randn(2, 4, 16, 64).half() for _ in range(3))
        hidden = {"plain": None, "causal": causal(16, 16), "mask": torch.arange(16)[None] > 9}[mode]
        options: dict[str, Any] = {"is_causal": mode == "causal"}
        if mode == "mask":
            options["attn_mask"] = ~hidden.expand(1, 1, 16, 16).contiguous().npu()
        out = functional.scaled_dot_product_attention(query.npu(), key.npu(), value.npu(), **options)
        flat = [tensor.flatten(0, 1) for tensor in (query, key, value)]
        exact, plain = (
            attention(*flat, 1 / math.sqrt(64), hidden, dtype=dtype)[0] for dtype in (torch.float64, torch.float16)
        )
        close(out.cpu().flatten(0, 1), exact, plain)
