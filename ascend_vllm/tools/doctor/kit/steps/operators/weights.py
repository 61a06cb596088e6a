"""Casts, packed numbers of 4 bits, and products of quantized weights and experts.

Letters: T tokens, K inputs, N outputs, G groups of inputs, E experts.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

from ascend_vllm import envs
from ascend_vllm.ops.ascend_formats import format_inputs_first, format_weight, is_fractal
from ascend_vllm.ops.ascend_quantized import NpuInt8Weight, make_coded_weight, pack_int4
from ascend_vllm.ops.ascend_quantized_experts import NpuQuantizedExperts
from ascend_vllm.ops.quantized_gemm import MIDDLES, QuantizedPanels
from ascend_vllm.ops.quantized_weights import InputRounding
from ascend_vllm.ops.weight_only import unpack_int4
from ascend_vllm.tools.doctor.kit.session import Case, Result, Session
from ascend_vllm.tools.doctor.kit.steps.operators.comparing import DTYPES, compare, dtype_name

_NZ = "VLLM_ASCEND_ENABLE_NZ"
# of results in 16 bits whose inputs are rounded to 8, in parts of the largest
_ROUNDED = 0.02
# code and inputs of a group; 0: all are one
_CODES = (("uint4", 128), ("uint4", 0), ("uint8", 128), ("uint8", 0))

# name, code, and whether inputs are rounded, too
_EXPERTS = (("uint4", "uint4", False), ("uint8", "uint8", False), ("W8A8", "uint8", True))


def cases(session: Session) -> list[Case]:
    """See `steps`."""
    found = [
        Case("int4 order", lambda: _run_order(session)),
        Case("casts of numbers", lambda: _run_casts(session)),
        Case("scale of a row of zeros", lambda: _run_zeros(session)),
        Case("cast to FRACTAL_NZ int8", lambda: _run_int8_format(session)),
    ]
    for dtype in DTYPES:
        name = dtype_name(dtype)
        found.append(Case(f"product in FRACTAL_NZ {name}", functools.partial(_run_linear, session, dtype, "2")))
        found.append(Case(f"product {name}", functools.partial(_run_linear, session, dtype, "0")))
        for nz in ("0", "1"):
            for is_static in (False, True):
                kind = "measured" if is_static else "per token"
                run = functools.partial(_run_int8, session, dtype, nz, is_static)
                found.append(Case(f"W8A8 {kind} {name} nz {nz}", run))
        for code, group in _CODES:
            run = functools.partial(_run_coded, session, dtype, code, group)
            found.append(Case(f"weights {code} {f'groups of {group}' if group else 'per output'} {name}", run))
        for kind, code, is_rounded in _EXPERTS:
            run = functools.partial(_run_experts, session, dtype, code, is_rounded)
            found.append(Case(f"experts {kind} {name}", run))
    return found


@contextlib.contextmanager
def _formats(nz: str) -> Iterator[None]:
    before = envs.everything().get(_NZ)
    envs.export({_NZ: nz}, {})
    try:
        yield
    finally:
        if before is None:
            envs.forget(_NZ)
        else:
            envs.export({_NZ: before}, {})


def _run_order(session: Session) -> Result:
    """Where in a word the operator that packs puts a number."""
    session.begin()
    values = torch.arange(-8, 8, dtype=torch.int8).view(2, 8)
    words = pack_int4(values, torch.device("npu:0")).cpu()
    if torch.equal(unpack_int4(words), values):
        order = "lowest bits first"
    elif torch.equal(unpack_int4(words), values.flip(1)):
        order = "highest bits first"
    else:
        order = " ".join(f"{word & 0xFFFFFFFF:08x}" for word in words.flatten().tolist())
    return Result(facts={"order": order})


def _run_casts(session: Session) -> Result:
    """Of float32 to less, by bits; and to whole numbers, which are cut off."""
    session.begin()
    numbers = torch.cat(
        (torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 100, torch.arange(-3, 4) / 2)
    )
    wrong = [
        dtype_name(dtype)
        for dtype in (torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool)
        if not torch.equal(numbers.to("npu").to(dtype).cpu(), numbers.to(dtype))
    ]
    return Result.of(not wrong, f"casts to {', '.join(wrong)} differ from the host's")


def _run_zeros(session: Session) -> Result:
    session.begin()
    weight = NpuInt8Weight([(torch.ones(16, 32, dtype=torch.int8), torch.ones(16))], *_dynamic(torch.float16))
    numbers, scales = weight.quantize(torch.zeros(2, 32, dtype=torch.float16).to("npu"))
    is_right = not bool(numbers.cpu().any())
    return Result.of(is_right, "rows of zeros are not zero after they were rounded", scale=float(scales.cpu()[0]))


def _dynamic(dtype: torch.dtype) -> tuple[InputRounding, torch.dtype, torch.device]:
    return InputRounding(), dtype, torch.device("npu:0")


def _run_int8_format(session: Session) -> Result:
    session.begin()
    weight = torch.randint(-127, 128, (96, 64), dtype=torch.int8)
    with _formats("1"):
        tiles = format_inputs_first(weight.to("npu"))
    is_same = torch.equal(tiles.cpu(), weight.T)
    facts = {"format": "FRACTAL_NZ" if is_fractal(tiles) else "plain"}
    result = Result.of(is_same, "numbers differ after the cast")
    return Result(result.status, {}, facts, result.message)


def _sizes(session: Session) -> tuple[int, int, int]:
    """T, K, N."""
    return session.size((64, 4096, 4096), (5, 256, 64))


def _run_linear(session: Session, dtype: torch.dtype, nz: str) -> Result:
    session.begin()
    tokens, inputs, outputs = _sizes(session)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, inputs, generator=generator).to(dtype)
    weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
    with _formats(nz):
        formatted = format_weight(weight.to("npu"))
    x_npu = x.to("npu")
    truth, plain = x.float() @ weight.float().T, x @ weight.T
    return compare(session, lambda: torch.nn.functional.linear(x_npu, formatted), truth, plain, _float_error(dtype))


def _float_error(dtype: torch.dtype) -> float:
    """Of results about 1, whose sums are in float32."""
    return 4 * torch.finfo(dtype).eps


def _run_int8(session: Session, dtype: torch.dtype, nz: str, is_static: bool) -> Result:
    session.begin()
    tokens, inputs, outputs = _sizes(session)
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(tokens, inputs, generator=generator).to(dtype)
    values = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    scales = (torch.rand(outputs, generator=generator) + 0.5) / (73 * inputs**0.5)
    rounding = InputRounding(scale=float(x.abs().max()) / 127) if is_static else InputRounding()
    with _formats(nz):
        weight = NpuInt8Weight([(values, scales)], rounding, dtype, torch.device("npu:0"))
    x_npu = x.to("npu")
    truth = x.float() @ (values.float() * scales[:, None]).T
    allowed = _ROUNDED * float(truth.abs().max())
    return compare(session, lambda: weight.product(weight.quantize(x_npu), None), truth, truth, allowed)


def _codes(
    outputs: int, inputs: int, code: str, group: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values [N, K] uint8, scales [N, G], and what both mean, [N, K] float32."""
    middle = MIDDLES[code]
    values = torch.randint(2 * middle, (outputs, inputs), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(outputs, -(-inputs // group), generator=generator) + 0.5) / (middle * inputs**0.5)
    meant = (values.float() - middle) * scales.repeat_interleave(group, 1)[:, :inputs]
    return values, scales, meant


def _run_coded(session: Session, dtype: torch.dtype, code: str, group: int) -> Result:
    session.begin()
    tokens, inputs, outputs = _sizes(session)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(tokens, inputs, generator=generator).to(dtype)
    values, scales, meant = _codes(outputs, inputs, code, group or inputs, generator)
    weight = make_coded_weight(
        outputs,
        inputs,
        group or inputs,
        code,
        has_zeros=False,
        scale_dtype=torch.float32,
        dtype=dtype,
        device=torch.device("npu:0"),
    )
    weight.pack_rows(0, values, scales)
    weight.finish()
    x_npu = x.to("npu")
    truth, plain = x.float() @ meant.T, x @ meant.to(dtype).T
    return compare(session, lambda: weight(x_npu, None), truth, plain, 4 * _float_error(dtype))


def _run_experts(session: Session, dtype: torch.dtype, code: str, is_rounded: bool) -> Result:
    session.begin()
    experts, tokens, hidden, inner = session.size((16, 64, 2048, 1024), (4, 5, 128, 64))
    # experts in 8 bits have one scale for each output
    group = 64 if code == "uint4" else max(hidden, inner)
    generator = torch.Generator().manual_seed(8)
    stack = NpuQuantizedExperts(experts, 0, experts, hidden, inner, dtype, torch.device("npu:0"))
    matrices = []
    for index in range(experts):
        for matrix, shape in enumerate(((inner, hidden), (inner, hidden), (hidden, inner))):
            size = min(group, shape[1])
            values, scales, meant = _codes(*shape, code, size, generator)
            panels = QuantizedPanels(*shape, size, code)
            panels.pack_rows(0, values, scales)
            panels.finish()
            stack.put(index, matrix, panels, InputRounding() if is_rounded else None)
            matrices.append(meant)
    stack.finish()
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :2].int().contiguous()
    shares = torch.full((tokens, 2), 0.5)
    truth = torch.zeros(tokens, hidden)
    for token, chosen in enumerate(ids.tolist()):
        for expert in chosen:
            gate, up, down = matrices[3 * expert : 3 * expert + 3]
            row = x[token].float()
            truth[token] += 0.5 * (down @ (torch.nn.functional.silu(gate @ row) * (up @ row)))
    on_device = x.to("npu"), ids.to("npu"), shares.to("npu")
    allowed = _ROUNDED * float(truth.abs().max()) + 4 * _float_error(dtype)
    return compare(session, lambda: stack(*on_device, "silu", None, None), truth, truth, allowed)
