"""Norms, activations, rotary embeddings, paged caches and sampling filters, as torch_npu calls them."""

from collections.abc import Callable

import pytest
import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from tests.npu.launches import takes

HALFS = [torch.float16, torch.bfloat16]
FLOATS = [*HALFS, torch.float32]


def close(actual: Tensor, compute: Callable[..., Tensor], *inputs: Tensor) -> None:
    """The error against `compute` in float64 is at most twice that of `compute` in the dtype of the inputs."""
    exact = compute(*(tensor.double() for tensor in inputs))
    plain = compute(*inputs)
    bound = 2 * (plain.double() - exact).abs().max().item() + 1e-7
    error = (actual.cpu().double() - exact).abs().max().item()
    assert error <= bound, f"error {error:.3g}, a plain implementation has {bound / 2:.3g}"


def random(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def rms_norm(x: Tensor, gamma: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * gamma


class TestNorms:
    @pytest.mark.parametrize("dtype", FLOATS)
    @takes("aclnnRmsNorm")
    def test_rms_norm(self, dtype: torch.dtype) -> None:
        x, gamma = random(3, 5, 96, dtype=dtype), random(96, dtype=dtype)
        y, rstd = torch_npu.npu_rms_norm(x.npu(), gamma.npu(), 1e-5)
        close(y, rms_norm, x, gamma)
        assert rstd.shape == (3, 5, 1)
        exact = torch.rsqrt((x.double() ** 2).mean(-1, keepdim=True) + 1e-5)
        assert (rstd.cpu().double() - exact).abs().max() < 1e-5

    def test_rms_norm_with_a_float32_scale(self) -> None:
        x, gamma = random(4, 64), random(64, dtype=torch.float32)
        close(torch_npu.npu_rms_norm(x.npu(), gamma.npu(), 1e-5)[0], rms_norm, x, gamma.half())

    @pytest.mark.parametrize("dtype", HALFS)
    @takes("aclnnGemmaRmsNorm")
    def test_gemma_rms_norm(self, dtype: torch.dtype) -> None:
        x, gamma = random(7, 128, dtype=dtype), random(128, dtype=dtype)
        y = torch_npu.npu_gemma_rms_norm(x.npu(), gamma.npu(), 1e-5)[0]
        close(y, lambda x, gamma: rms_norm(x, gamma + 1), x, gamma)

    @pytest.mark.parametrize("dtype", HALFS)
    @takes("aclnnAddRmsNorm")
    def test_add_rms_norm(self, dtype: torch.dtype) -> None:
        x, residual, gamma = random(7, 128, dtype=dtype), random(7, 128, dtype=dtype) + 1, random(128, dtype=dtype)
        y, _, total = torch_npu.npu_add_rms_norm(x.npu(), residual.npu(), gamma.npu(), 1e-5)
        close(y, lambda x, residual, gamma: rms_norm(x + residual, gamma), x, residual, gamma)
        assert torch.equal(total.cpu(), x + residual)

    @takes("aclnnInplaceAddRmsNorm")
    def test_add_rms_norm_in_place(self) -> None:
        x, residual, gamma = random(7, 128), random(7, 128) + 1, random(128)
        own, other = x.npu(), residual.npu()
        torch_npu.npu_add_rms_norm_v2(own, other, gamma.npu(), 1e-5)
        close(own, lambda x, residual, gamma: rms_norm(x + residual, gamma), x, residual, gamma)
        assert torch.equal(other.cpu(), x + residual)


class TestActivations:
    @pytest.mark.parametrize("dtype", FLOATS)
    @takes("aclnnSwiGlu")
    def test_swiglu(self, dtype: torch.dtype) -> None:
        x = random(5, 3, 64, dtype=dtype)
        out = torch_npu.npu_swiglu(x.npu())
        assert out.shape == (5, 3, 32)
        close(out, lambda x: functional.silu(x[..., :32]) * x[..., 32:], x)

    def test_swiglu_of_another_axis(self) -> None:
        x = random(6, 4)
        close(torch_npu.npu_swiglu(x.npu(), 0), lambda x: functional.silu(x[:3]) * x[3:], x)

    @takes("aclnnFastGelu")
    def test_fast_gelu(self) -> None:
        x = random(50)
        close(torch_npu.npu_fast_gelu(x.npu()), lambda x: x * torch.sigmoid(1.702 * x), x)

    @pytest.mark.parametrize("approximate", ["none", "tanh"])
    @takes("aclnnGeluMul")
    def test_gelu_mul(self, approximate: str) -> None:
        x = random(5, 64)
        out = torch_npu.npu_gelu_mul(x.npu(), approximate=approximate)
        close(out, lambda x: functional.gelu(x[..., :32], approximate=approximate) * x[..., 32:], x)


def halves_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def neighbours_turned(x: Tensor) -> Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def angles(tokens: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of (tokens, size / 2)."""
    phase = torch.arange(tokens)[:, None] * 0.3 ** torch.arange(size // 2)
    return phase.cos().to(dtype), phase.sin().to(dtype)


class TestRotary:
    @pytest.mark.parametrize("mode", ["half", "interleave"])
    @pytest.mark.parametrize("size", [64, 80, 128])
    @takes("aclnnRotaryPositionEmbedding")
    def test_rotary_mul(self, size: int, mode: str) -> None:
        x = random(2, 6, 3, size)
        cos, sin = (
            (torch.cat([t, t], -1) if mode == "half" else t.repeat_interleave(2, -1))[None, :, None]
            for t in angles(6, size, torch.float16)
        )
        turned = halves_turned if mode == "half" else neighbours_turned
        out = torch_npu.npu_rotary_mul(x.npu(), cos.npu(), sin.npu(), mode)
        close(out, lambda x, cos, sin: x * cos + turned(x) * sin, x, cos.contiguous(), sin.contiguous())

    @pytest.mark.parametrize("layout", ["BSND", "TND"])
    @takes("aclnnApplyRotaryPosEmbV2")
    def test_apply_rotary_pos_emb(self, layout: str) -> None:
        cos, sin = (torch.cat([t, t], -1)[:, None] for t in angles(6, 64, torch.float16))
        query, key = random(6, 4, 64), random(6, 2, 64)
        if layout == "BSND":
            query, key, cos, sin = (tensor.unsqueeze(0) for tensor in (query, key, cos, sin))
        outs = torch_npu.npu_apply_rotary_pos_emb(query.npu(), key.npu(), cos.npu(), sin.npu(), layout)
        for x, out in zip((query, key), outs, strict=True):
            close(out, lambda x, cos, sin: x * cos + halves_turned(x) * sin, x, cos, sin)

    @pytest.mark.parametrize("mode", ["half", "interleave"])
    @pytest.mark.parametrize("section", [None, [8, 12, 12]])
    @takes("aclnnRopeWithSinCosCacheV2")
    def test_mrope(self, section: list[int] | None, mode: str) -> None:
        tokens, size, width = 5, 80, 64
        table = torch.cat(angles(20, width, torch.float16), -1)
        positions = torch.tensor([[1, 2, 3, 4, 5], [7, 7, 8, 8, 19], [0, 6, 0, 6, 2]])
        if section is None:
            positions = positions[0]
        query, key = random(tokens, 4 * size), random(tokens, 2 * size)
        outs = torch_npu.npu_mrope(
            positions.npu(),
            query.npu(),
            key.npu(),
            table.npu(),
            size,
            mrope_section=section or [0, 0, 0],
            rotary_mode=mode,
        )
        if section is None:
            cos, sin = table[positions].chunk(2, -1)
        else:
            parts = [table[row].chunk(2, -1) for row in positions]
            cos, sin = (torch.cat([parts[i][which].split(section, -1)[i] for i in range(3)], -1) for which in (0, 1))

        def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            heads = x.view(tokens, -1, size)
            own, rest = heads[..., :width], heads[..., width:]
            wide = [
                (torch.cat([t, t], -1) if mode == "half" else t.repeat_interleave(2, -1))[:, None] for t in (cos, sin)
            ]
            turned = halves_turned(own) if mode == "half" else neighbours_turned(own)
            return torch.cat([own * wide[0] + turned * wide[1], rest], -1).view(x.shape)

        for x, out in zip((query, key), outs, strict=True):
            close(out, rotated, x, cos, sin)

    @takes("aclnnInterleaveRope")
    def test_interleave_rope(self) -> None:
        x = random(3, 4, 1, 64)
        cos, sin = (torch.cat([t, t], -1).view(3, 1, 1, 64) for t in angles(3, 64, torch.float16))

        def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            apart = torch.cat([x[..., ::2], x[..., 1::2]], -1)
            return apart * cos + halves_turned(apart) * sin

        close(torch_npu.npu_interleave_rope(x.npu(), cos.npu(), sin.npu()), rotated, x, cos, sin)


class TestLatentCache:
    @pytest.mark.parametrize("mode", ["Norm", "PA", "PA_NZ"])
    @takes("aclnnKvRmsNormRopeCache")
    def test_norm_rope_and_cache(self, mode: str) -> None:
        tokens, value, rope, block_size = 5, 512, 64, 16
        kv = random(tokens, 1, 1, value + rope)
        gamma = random(value)
        cos, sin = (torch.cat([t, t], -1).view(tokens, 1, 1, rope) for t in angles(tokens, rope, torch.float16))
        paged = mode != "Norm"
        places = torch.tensor([17, 3, -1, 40, 0]) if paged else torch.tensor([[1], [3], [-1], [0], [7]])
        shape = (3, block_size, 1) if paged else (tokens, 1, 8)
        caches = [torch.zeros(*shape, size, dtype=torch.float16).npu() for size in (rope, value)]
        *_, k_rope, c_kv = torch_npu.npu_kv_rmsnorm_rope_cache(
            kv.npu(), gamma.npu(), cos.npu(), sin.npu(), places.npu(), *caches, cache_mode=mode, is_output_kv=True
        )
        close(c_kv, lambda kv, gamma: rms_norm(kv[..., :value], gamma), kv, gamma)

        def rotated(kv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            x = kv[..., value:]
            apart = torch.cat([x[..., ::2], x[..., 1::2]], -1)
            return apart * cos + halves_turned(apart) * sin

        close(k_rope, rotated, kv, cos, sin)
        for cache, rows in zip(caches, (k_rope, c_kv), strict=True):
            held = cache.cpu()
            if mode == "PA_NZ":
                held = held.view(3, -1, block_size, 16).transpose(1, 2)
            flat = held.reshape(3 * block_size if paged else tokens * 8, -1)
            room = 0 if paged else 8
            kept = {int(p) + i * room: i for i, p in enumerate(places.flatten()) if p >= 0}
            for place in range(len(flat)):
                wanted = rows.cpu()[kept[place]].flatten() if place in kept else torch.zeros(flat.shape[1]).half()
                assert torch.equal(flat[place], wanted), place


class TestPagedCaches:
    @pytest.mark.parametrize("fractal", [False, True])
    @pytest.mark.parametrize("dtype", [*HALFS, torch.int8])
    @takes("aclnnScatterPaKvCache")
    def test_scatter(self, fractal: bool, dtype: torch.dtype) -> None:
        blocks, block_size, heads, sizes = 3, 16, 2, (64, 96)
        rows = [torch.randint(-9, 9, (4, heads, size)).to(dtype) for size in sizes]
        slots = torch.tensor([40, 0, 17, 16], dtype=torch.int32)
        lane = 32 if dtype == torch.int8 else 16
        shapes = [
            (blocks, heads * s // lane, block_size, lane) if fractal else (blocks, block_size, heads, s)
            for s in sizes
        ]
        caches = [torch.zeros(shape, dtype=dtype).npu() for shape in shapes]
        torch_npu.npu_scatter_pa_kv_cache(
            rows[0].npu(), rows[1].npu(), *caches, slots.npu(), cache_mode="PA_NZ" if fractal else "Norm"
        )
        for cache, given in zip(caches, rows, strict=True):
            held = cache.cpu()
            held = held.transpose(1, 2) if fractal else held
            expected = torch.zeros(blocks * block_size, given[0].numel(), dtype=dtype)
            expected[slots.long()] = given.flatten(1)
            assert torch.equal(held.reshape(blocks * block_size, -1), expected)

    def test_scatter_into_heads_of_a_fractal_cache(self) -> None:
        """The five axes that attention reads: (blocks, heads, head size / 16, block size, 16)."""
        key = random(3, 2, 64)
        caches = [torch.zeros(2, 2, 4, 16, 16, dtype=torch.float16).npu() for _ in range(2)]
        torch_npu.npu_scatter_pa_kv_cache(key.npu(), key.npu(), *caches, torch.tensor([5, 31, 16]).npu())
        rows = caches[0].cpu().permute(0, 3, 1, 2, 4).reshape(32, 2, 64)
        assert torch.equal(rows[[5, 31, 16]], key)
        assert rows.count_nonzero() == key.count_nonzero()

    @pytest.mark.parametrize("cumulative", [False, True])
    @takes("aclnnGatherPaKvCache")
    def test_gather(self, cumulative: bool) -> None:
        block_size, lengths = 16, [20, 3, 0, 17]
        caches = [random(6, block_size, 1, size) for size in (64, 32)]
        table = torch.tensor([[5, 0, 9], [2, 9, 9], [9, 9, 9], [3, 1, 4]], dtype=torch.int32)
        offsets = torch.tensor([0, 0, 0, 16], dtype=torch.int32)
        given = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()] if cumulative else lengths).int()
        outs = [torch.empty(sum(lengths), 1, size, dtype=torch.float16).npu() for size in (64, 32)]
        torch_npu.npu_gather_pa_kv_cache(
            *(cache.npu() for cache in caches),
            table.npu(),
            given.npu(),
            *outs,
            seq_offset=offsets.npu(),
            is_seq_lens_cumsum=cumulative,
        )
        for cache, out in zip(caches, outs, strict=True):
            wanted = [
                cache[row[(start + i) // block_size], (start + i) % block_size]
                for row, start, length in zip(table, offsets.tolist(), lengths, strict=True)
                for i in range(length)
            ]
            assert torch.equal(out.cpu(), torch.stack(wanted))

    @takes("aclnnAdvanceStep")
    def test_a_step_on_the_device(self) -> None:
        tokens, positions, slots = (torch.tensor([7, 7, 7]).npu() for _ in range(3))
        lengths = torch.tensor([15, 16, 4]).npu()
        table = torch.tensor([[2, 5], [3, 1], [9, 9]])
        torch_npu.npu_advance_step_flashattn(
            tokens, torch.tensor([[11], [12]]).npu(), positions, lengths, slots, table.npu(), 3, 2, 16
        )
        assert tokens.tolist() == [11, 12, 7]
        assert positions.tolist() == [15, 16, 7]
        assert lengths.tolist() == [16, 17, 4]
        assert slots.tolist() == [2 * 16 + 15, 16, 7]


class TestMerging:
    @pytest.mark.parametrize("dtype", FLOATS)
    @takes("aclnnAttentionUpdate")
    def test_attention_update(self, dtype: torch.dtype) -> None:
        sums = [random(6, dtype=torch.float32), random(6, dtype=torch.float32) * 3, torch.full((6,), float("inf"))]
        parts = [random(6, 64, dtype=dtype), random(6, 64, dtype=dtype) + 1, torch.zeros(6, 64, dtype=dtype)]
        out, _ = torch_npu.npu_attention_update([t.npu() for t in sums], [t.npu() for t in parts], 0)
        weights = torch.softmax(torch.stack(sums[:2]).double(), 0)[..., None]
        exact = (torch.stack(parts[:2]).double() * weights).sum(0)
        bound = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps * exact.abs().max()
        assert (out.cpu().double() - exact).abs().max() <= bound


class TestSampling:
    def filtered(self, logits: Tensor, p: list[float] | None, k: list[int] | None) -> Tensor:
        """By the documented steps: k largest values, then the smallest set with the probability p."""
        out = logits.clone().double()
        for row in range(len(logits)):
            values = out[row]
            if k is not None:
                values[values < values.sort(descending=True).values[k[row] - 1]] = float("-inf")
            if p is not None:
                order = values.sort(stable=True).indices
                rising = torch.softmax(values[order], -1).cumsum(-1)
                hidden = rising <= 1 - p[row]
                hidden[-1] = False
                values[order[hidden]] = float("-inf")
        return out

    @takes("aclnnApplyTopKTopP")
    def test_k_that_is_none(self) -> None:
        logits = random(4, 2000, dtype=torch.float32)
        k = torch.tensor([0, 1025, 2000, 3], dtype=torch.int32)
        out = torch_npu.npu_top_k_top_p(logits.npu(), None, k.npu()).cpu()
        assert torch.equal(out[:3], logits[:3])
        assert out[3].isfinite().sum() == 3

    @pytest.mark.parametrize(("p", "k"), [([0.9, 0.5, 0.1], None), (None, [1, 5, 40]), ([0.8, 1.0, 0.0], [20, 3, 7])])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @takes("aclnnApplyTopKTopP")
    def test_top_k_top_p(self, p: list[float] | None, k: list[int] | None, dtype: torch.dtype) -> None:
        logits = random(3, 200, dtype=torch.float32).to(dtype) * 2
        out = torch_npu.npu_top_k_top_p(
            logits.npu(),
            None if p is None else torch.tensor(p, dtype=dtype).npu(),
            None if k is None else torch.tensor(k, dtype=torch.int32).npu(),
        )
        given = None if p is None else torch.tensor(p, dtype=dtype).double().tolist()
        assert torch.equal(out.cpu().double(), self.filtered(logits, given, k))
