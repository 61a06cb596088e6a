"""The custom operators through their bindings, and what takes them, on simulated devices.

The library is the one that CMake builds with CANN, but for its kernels: they run on simulated vector cores. What the
kernels do with every size is tested in tests/npu_kernels.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ascend_vllm.attention.backend import HeadNorms, RotaryStep
from ascend_vllm.ops import ascend_custom
from ascend_vllm.ops.paged import store_kv
from ascend_vllm.ops.registry import OPS
from tests.npu.recorder import Recorder, traced
from tests.npu.test_attention_backend import (
    DECODE,
    MIXED,
    PROMPTS,
    Problem,
    check,
    make_backend,
    make_problem,
    spec_of,
)
from tests.npu.test_graphs import PROMPTS as TEXTS
from tests.npu.test_graphs import generate, make_engine
from tests.npu_kernels.layouts import BLOCK_TOKEN_HEAD, FRACTAL_NZ, from_reference, to_reference

NPU = torch.device("npu:0")
LAYOUTS = {"ND": BLOCK_TOKEN_HEAD, "NZ": FRACTAL_NZ}
Use = Callable[..., None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Use]:
    """Makes what is constructed from now on use custom operators, as a process that starts with these variables."""
    registered: list[Any] = []

    def start(names: str, **variables: str) -> None:
        for name, value in {"ASCEND_VLLM_CUSTOM_OPS": names, **variables}.items():
            monkeypatch.setenv(name, value)
        stop()
        registered.append(ascend_custom.register(ascend_custom.enabled()))

    def stop() -> None:
        while registered:
            registered.pop()._destroy()
        ascend_custom.enabled.cache_clear()

    yield start
    stop()


@pytest.fixture(scope="module")
def custom() -> Any:
    """torch.ops.ascend_vllm_npu."""
    ascend_custom.load_library()
    return torch.ops.ascend_vllm_npu


def on_device(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(NPU) for tensor in tensors]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_are_stored(custom: Any, layout: str) -> None:
    """From views of a fused projection."""
    generator = torch.Generator().manual_seed(1)
    # [P, K, S, D], as the op's reference has them
    halves = torch.randn(2, 2, 2, 64, 80, generator=generator).half().unbind(0)
    fused = torch.randn(5, 3 * 160, generator=generator).half()
    _, key, value = (part.view(5, 2, 80) for part in fused.chunk(3, dim=1))
    slots = torch.tensor([3, -1, 70, 0, 127])
    caches = on_device(*(from_reference(half, LAYOUTS[layout]) for half in halves))
    store_kv(key, value, *halves, slots)
    _, *parts = (part.view(5, 2, 80) for part in fused.to(NPU).chunk(3, dim=1))
    custom.store_kv(*parts, *caches, slots.to(NPU), layout)
    for got, expected in zip(caches, halves, strict=True):
        assert torch.equal(to_reference(got.cpu(), LAYOUTS[layout], 2), expected)


def test_adapters_shrink_and_expand(custom: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 48, generator=generator).bfloat16()
    a, b = (torch.randn(2, *shape, generator=generator).bfloat16() for shape in ((8, 48), (24, 8)))
    adapters = torch.tensor([1, -1, 0])
    order = adapters.argsort().to(NPU)
    shrunk = torch.zeros(3, 8)
    y = torch.randn(3, 40, generator=generator).bfloat16()
    x_npu, a_npu, b_npu, adapters_npu, shrunk_npu, y_npu = on_device(x, a, b, adapters, shrunk, y)
    custom.lora_shrink(x_npu, a_npu, adapters_npu, order, shrunk_npu, 0.5)
    custom.lora_expand(shrunk_npu, b_npu, adapters_npu, order, y_npu, 16)
    expected = y.double()
    for token, adapter in ((0, 1), (2, 0)):
        shrunk[token] = (0.5 * a[adapter].double() @ x[token].double()).float()
        expected[token, 16:] += b[adapter].double() @ shrunk[token].double()
    torch.testing.assert_close(shrunk_npu.cpu(), shrunk, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y_npu.cpu().double(), expected, rtol=2**-7, atol=2**-6)
    assert torch.equal(y_npu.cpu()[:, :16], y[:, :16])


def test_bindings_name_what_is_wrong(custom: Any) -> None:
    key = torch.zeros(2, 2, 64, dtype=torch.float16, device=NPU)
    cache = torch.zeros(1, 64, 2, 64, dtype=torch.float16, device=NPU)
    slots = torch.zeros(2, dtype=torch.int64, device=NPU)
    for arguments, words in (
        ((key, key, cache, cache, slots, "TND"), "layout must be 'ND' or 'NZ', got 'TND'"),
        ((key, key, cache, cache, slots.int(), "ND"), "slot_mapping must be Long, got Int"),
        ((key.float(), key.float(), cache, cache, slots, "ND"), "key must be float16 or bfloat16"),
        ((key, key, cache, cache, slots, "NZ"), "not that of a NZ cache of 2 heads of 64"),
        ((key.transpose(1, 2), key, cache, cache, slots, "ND"), "key's heads must be contiguous"),
    ):
        with pytest.raises(ValueError, match=words):
            custom.store_kv(*arguments)


def test_kernels_stay_within_device_memory(custom: Any) -> None:
    key = torch.zeros(1, 2, 64, dtype=torch.float16, device=NPU)
    cache = torch.zeros(1, 64, 2, 64, dtype=torch.float16, device=NPU)
    slots = torch.tensor([1 << 30]).to(NPU)
    # on an ordinary stream the error comes when Python has gone on
    with (
        pytest.raises(RuntimeError, match="outside of the global memory"),
        torch.npu.stream(torch.npu.SyncLaunchStream()),
    ):
        custom.store_kv(key, key, cache, cache, slots, "ND")


def test_sampling_is_one_launch(use: Use) -> None:
    spec = OPS["edit_and_sample"]
    assert not spec.has_kernel("npu")
    use("edit_and_sample")
    assert spec.has_kernel("npu")
    for arguments in itertools.islice(spec.inputs(torch.bfloat16), 0, None, 9):
        *tensors, nothing = arguments
        given = on_device(*tensors)
        expected = spec.reference(*arguments)
        with traced() as calls:
            ids = torch.ops.ascend_vllm.edit_and_sample(*given, nothing)
        assert [call["op"] for call in calls] == ["edit_and_sample_bf16"] * (len(expected) > 0)
        assert torch.equal(ids.cpu(), expected)
        assert torch.equal(given[1].cpu(), tensors[1])


def test_a_captured_launch_samples_anew(use: Use) -> None:
    """Replays read logits, tokens to count and positions from memory, and go on counting."""
    use("edit_and_sample")
    generator = torch.Generator().manual_seed(4)
    vocab, rows = 300, 3
    ones, none = torch.ones(rows), torch.full((rows,), -1)
    counts = torch.zeros(rows, vocab, dtype=torch.int16)
    fixed = (ones * 1.4, ones * 0.3, ones * 0.2, torch.zeros(1, 10, dtype=torch.int32), none, ones * 0.9)
    filters = (torch.full((rows,), 20, dtype=torch.int32), ones * 0.95, ones * 0.001)
    logits, fresh, positions = torch.zeros(rows, vocab), none, torch.arange(rows)
    arguments = (logits, counts, torch.arange(rows), fresh, *fixed, *filters, torch.arange(rows) * 11, positions)
    given = on_device(*arguments)
    op = torch.ops.ascend_vllm.edit_and_sample
    op(*given, -1)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        ids = op(*given, -1)
    for step in range(3):
        logits = torch.randn(rows, vocab, generator=generator) * 3
        changed = (logits, counts, arguments[2], fresh, *arguments[4:-1], positions + step)
        for place in (0, 3, -1):
            given[place].copy_(changed[place])
        expected = OPS["edit_and_sample"].reference(*changed, -1)
        graph.replay()
        assert torch.equal(ids.cpu(), expected)
        assert torch.equal(given[1].cpu(), counts)
        fresh = expected


def attention_of(problem: Problem) -> list[str]:
    """Names of the operators that store keys or attend."""
    backend, kv_cache = make_backend(problem)
    with Recorder() as recorder:
        step = backend.prepare(problem.batch)
        backend.forward(problem.spec, *problem.parts(), kv_cache, problem.batch, step)
    names = [name for name, _ in recorder.calls if "attention" in name or "kv" in name]
    return [name.split("::")[1] for name in names]


@pytest.mark.parametrize(
    ("names", "operators"),
    [
        ("all", ["store_kv", "npu_fused_infer_attention_score"]),
        ("edit_and_sample", ["npu_scatter_pa_kv_cache", "npu_fused_infer_attention_score"]),
    ],
)
def test_which_operators_are_taken(use: Use, names: str, operators: list[str]) -> None:
    """Layers without rotary positions store keys by the simpler operator."""
    use(names)
    problem = make_problem(DECODE, spec_of())
    assert attention_of(problem) == operators
    check(problem)


@pytest.mark.parametrize("family", ["fused", "flash"])
@pytest.mark.parametrize("has_norms", [True, False], ids=["norms", "no norms"])
def test_heads_are_normalised_rotated_and_stored_in_one_launch(use: Use, family: str, has_norms: bool) -> None:
    """The same results as by one operator after another, but for rounding between them."""
    generator = torch.Generator().manual_seed(6)
    norms = None
    if has_norms:
        weights = [(torch.rand(64, generator=generator) + 0.5).half().to(NPU) for _ in range(2)]
        norms = HeadNorms(weights[0], weights[1], 1e-6)
    angles = torch.rand(400, 32, generator=generator) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to(NPU)
    for rows in (DECODE, PROMPTS, MIXED):
        problem = make_problem(rows, spec_of())
        results = []
        for names in ("", "norm_rope_store"):
            use(names, ASCEND_VLLM_ATTENTION_OPS=family)
            backend, kv_cache = make_backend(problem)
            parts = [part.clone() for part in problem.fused.clone().split_with_sizes([256, 128, 128], dim=1)]
            step, rotary = backend.prepare(problem.batch), RotaryStep(problem.batch.positions, table, is_neox=True)
            assert backend.norms_heads == bool(names)
            with traced() as calls:
                arguments = (problem.spec, *parts, kv_cache, problem.batch, step, rotary)
                output = backend.forward(*arguments) if norms is None else backend.forward_normed(*arguments, norms)
            launched = [call["op"] for call in calls]
            assert ("norm_rope_store_f16" in launched) == bool(names)
            assert (len(launched) <= 4 or family == "flash") or not names
            pool = kv_cache.cpu()[:, : problem.num_blocks]
            results.append((output.cpu().float(), pool.nan_to_num(7.0).float()))
        for got, expected in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(got, expected, rtol=4e-3, atol=6e-3)


def test_what_the_fused_write_does_not_support_is_done_by_others(use: Use) -> None:
    use("norm_rope_store")
    problem = make_problem(DECODE, spec_of())
    backend, kv_cache = make_backend(problem)
    table = torch.rand(400, 64).to(NPU)
    rotary = RotaryStep(problem.batch.positions, table, is_neox=False)
    with traced() as calls:
        backend.forward(
            problem.spec, *problem.parts(), kv_cache, problem.batch, backend.prepare(problem.batch), rotary
        )
    assert "norm_rope_store_f16" not in [call["op"] for call in calls]


def test_graphs_decode_with_them(use: Use) -> None:
    answers = []
    for enforce_eager in (True, False):
        use("all")
        with traced() as calls:
            engine = make_engine(enforce_eager=enforce_eager, capture_sizes=(3,), max_num_seqs=3)
        assert "norm_rope_store_f16" in [call["op"] for call in calls]
        with traced() as calls:
            answers.append(generate(engine, TEXTS[:2], max_tokens=5, repetition_penalty=1.2))
        names = [call["op"] for call in calls]
        assert names.count("edit_and_sample_f32") + names.count("edit_and_sample_f16") == 5
        # a replay launches nothing by itself, be it of a decoding step or of prompts
        assert ("norm_rope_store_f16" in names) == enforce_eager
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == 2


def test_what_is_asked_for_is_in_the_log(use: Use, caplog: pytest.LogCaptureFixture) -> None:
    use("store_kv,edit_and_sample")
    with caplog.at_level(logging.INFO, "ascend_vllm"):
        ascend_custom._report(ascend_custom.enabled())
    assert caplog.messages == ["Custom operators of libascend_vllm_npu.so: edit_and_sample, store_kv"]
