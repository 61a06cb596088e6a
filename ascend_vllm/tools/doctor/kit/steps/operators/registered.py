"""The ops of `ops.registry` that NPUs have: on all inputs of their tests, and in sizes of models."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ascend_vllm.ops.elementwise import make_cos_sin_cache
from ascend_vllm.ops.native import import_op_modules
from ascend_vllm.ops.registry import NAMESPACE, OPS, OpSpec
from ascend_vllm.tools.doctor.kit.session import Case, Result, Session
from ascend_vllm.tools.doctor.kit.steps.operators.comparing import DTYPES, dtype_name, error_of
from ascend_vllm.tools.doctor.kit.steps.operators.watching import watched_operators

# results are indices, which differ where two numbers are nearly equal
_INDICES = ("draw_tokens", "token_logprobs")
# rows and vocabulary of sampling, on a card and on the simulator
_SAMPLING = ((64, 152_064), (4, 300))


def cases(session: Session) -> list[Case]:
    """See `steps`."""
    import_op_modules()
    found = []
    for name, spec in sorted(OPS.items()):
        if "npu" not in spec.devices or name in _INDICES:
            continue
        found += [
            Case(f"op {name} {dtype_name(dtype)}", functools.partial(_run_inputs, session, spec, dtype))
            for dtype in spec.dtypes
        ]
    for dtype in DTYPES:
        for form, arguments in _ROTARY.items():
            name = f"rope {form} {dtype_name(dtype)}"
            found.append(Case(name, functools.partial(_run_rotary, session, dtype, *arguments)))
    for form, options in _FILTERS.items():
        found.append(Case(f"sampling {form}", functools.partial(_run_draws, session, **options)))
    found.append(Case("sampling equal logits", lambda: _run_ties(session)))
    found.append(Case("sampling log-probabilities", lambda: _run_logprobs(session)))
    return found


def _copies(arguments: Sequence[Any], device: str, dtype: torch.dtype | None = None) -> list[Any]:
    """Copies, contiguous, also of tensors in lists; floats become `dtype` if one is given."""
    return [
        argument.to(device, dtype if argument.is_floating_point() else None, copy=True)
        if isinstance(argument, torch.Tensor)
        else _copies(argument, device, dtype)
        if isinstance(argument, list)
        else argument
        for argument in arguments
    ]


def _results(function: Callable[..., Any], spec: OpSpec, arguments: list[Any]) -> list[torch.Tensor]:
    """What an op returns, and what it writes."""
    returned = function(*arguments)
    written = [arguments[list(spec.reference.__annotations__).index(name)] for name in spec.mutates]
    if isinstance(returned, tuple):
        return [*returned, *written]
    return ([] if returned is None else [returned]) + written


def _compare_op(
    spec: OpSpec, arguments: tuple[Any, ...], plain: list[torch.Tensor] | None = None
) -> tuple[float, float]:
    """The largest error of an op on the device, and the error that is allowed."""
    truth = _results(spec.reference, spec, _copies(arguments, "cpu", torch.float64))
    plain = plain or _results(spec.reference, spec, _copies(arguments, "cpu"))
    got = _results(getattr(getattr(torch.ops, NAMESPACE), spec.name), spec, _copies(arguments, "npu"))
    error = max(map(error_of, got, truth), default=0.0)
    return error, 2 * max(map(error_of, plain, truth), default=0.0) + spec.tolerance


def _run_inputs(session: Session, spec: OpSpec, dtype: torch.dtype) -> Result:
    """All inputs of the op's tests; the one that is furthest from what is allowed counts."""
    session.begin()
    worst = (0.0, spec.tolerance)
    number = -1
    with watched_operators() as calls:
        for index, arguments in enumerate(spec.inputs(dtype)):
            plain = _plain_rotary(arguments) if spec.name == "rotary_embedding" else None
            error, allowed = _compare_op(spec, arguments, plain)
            if number < 0 or _share(error, allowed) > _share(*worst):
                worst, number = (error, allowed), index
    result = Result.compared(*worst, {})
    message = f"input {number}: {result.message}" if result.message else ""
    return Result(result.status, result.numbers, {"calls": ", ".join(calls)}, message)


def _share(error: float, allowed: float) -> float:
    """An error as a share of what is allowed, which may be nothing."""
    return error / allowed if allowed else math.inf if error else 0.0


def _plain_rotary(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """With cosines and sines in the dtype of the query, as models' own code has them."""
    positions, query, key, head_size, table, is_neox = _copies(arguments, "cpu")
    OPS["rotary_embedding"].reference(positions, query, key, head_size, table.to(query.dtype).float(), is_neox)
    return [query, key]


# form → heads, KV heads, head size, rotated part, whether pairs are halves
_ROTARY: dict[str, tuple[int, int, int, int, bool]] = {
    "halves of 128": (28, 4, 128, 128, True),
    "halves of 64": (14, 2, 64, 64, True),
    "halves of 96": (32, 32, 96, 96, True),
    "too wide for the fused operator": (65, 65, 128, 128, True),
    "pairs": (32, 8, 128, 128, False),
    "part of a head": (32, 8, 128, 64, True),
    "part of a head in pairs": (32, 2, 128, 64, False),
}


def _run_rotary(
    session: Session, dtype: torch.dtype, heads: int, kv_heads: int, size: int, rot_dim: int, is_neox: bool
) -> Result:
    session.begin()
    tokens = session.size(512, 5)
    generator = torch.Generator().manual_seed(size)
    query, key = (torch.randn(tokens, count * size, generator=generator).to(dtype) for count in (heads, kv_heads))
    positions = torch.randint(4000, (tokens,), generator=generator)
    arguments = (positions, query, key, size, make_cos_sin_cache(4096, rot_dim), is_neox)
    spec = OPS["rotary_embedding"]
    on_device = _copies(arguments, "npu")
    with watched_operators() as calls:
        error, allowed = _compare_op(spec, arguments, _plain_rotary(arguments))
        _, numbers = session.measure(lambda: torch.ops.ascend_vllm.rotary_embedding(*on_device))
    result = Result.compared(error, allowed, numbers)
    return Result(result.status, result.numbers, {"calls": ", ".join(calls)}, result.message)


# form → top-k (0: off) and top-p of all rows, and min-p
_FILTERS: dict[str, dict[str, Any]] = {
    "without filters": {},
    "top-k 50": {"top_k": 50},
    "top-k 1024": {"top_k": 1024},
    "top-k 1025": {"top_k": 1025},
    "top-k of the vocabulary's size": {"top_k": -1},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50 and top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
}


def _run_draws(session: Session, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Result:
    """The share of rows whose token is another than the definition's, whose sums are rounded in another order."""
    session.begin()
    rows, vocab_size = _SAMPLING[session.size(0, 1)]
    generator = torch.Generator().manual_seed(7)
    k = vocab_size if top_k < 0 else top_k
    arguments = (
        torch.randn(rows, vocab_size, generator=generator) * 3,
        torch.full((rows,), 0.8),
        torch.full((rows,), k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.rand(rows, generator=generator),
        k,
        top_p < 1,
    )
    expected = OPS["draw_tokens"].reference(*_copies(arguments, "cpu"))
    on_device = _copies(arguments, "npu")
    with watched_operators() as calls:
        got, numbers = session.measure(lambda: torch.ops.ascend_vllm.draw_tokens(*on_device))
    share = float((got.cpu() != expected).float().mean())
    result = Result.compared(share, 0.05, numbers)
    return Result(result.status, result.numbers, {"calls": ", ".join(calls)}, result.message)


def _run_ties(session: Session) -> Result:
    """Which of several largest logits is taken, greedily."""
    session.begin()
    logits = torch.zeros(2, session.size(152_064, 300))
    logits[:, 100] = logits[:, 200] = 1.0
    place = logits.to("npu").argmax(-1).cpu()
    names = {100: "first", 200: "last"}
    return Result(facts={"argmax takes": names.get(int(place[0]), "another")})


def _run_logprobs(session: Session) -> Result:
    session.begin()
    rows, vocab_size = _SAMPLING[session.size(0, 1)]
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(rows, vocab_size, generator=generator)
    ids = torch.randint(vocab_size, (rows,), generator=generator)
    expected = OPS["token_logprobs"].reference(logits.double(), ids, 5)[1]
    on_device = logits.to("npu"), ids.to("npu"), 5
    got, numbers = session.measure(lambda: torch.ops.ascend_vllm.token_logprobs(*on_device))
    return Result.compared(error_of(got[1], expected), 1e-4, numbers)
