"""The choice of the kernels' instruction sets: what it may mix, how timings decide, and how it is kept."""

from __future__ import annotations

import json
import pathlib
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch

from ascend_vllm.config.quantization import QuantizationConfig
from ascend_vllm.ops import kernel_choice, native
from ascend_vllm.ops.gemm import PackedLinear
from ascend_vllm.ops.kernel_choice import FAMILIES, choose, choose_cpu_kernels, families
from ascend_vllm.ops.quantized_gemm import CODES, Int8Panels, QuantizedPanels, quantize_tokens
from ascend_vllm.ops.registry import FLOAT_DTYPES
from ascend_vllm.platforms.processor import fastest_set, this_processor
from ascend_vllm.worker.worker import Worker
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import make_config, started_worker

AVAILABLE = native.available_cpu_isas()
BEST = AVAILABLE[0] if AVAILABLE else ""
CLASSES = (*native.product_classes(), "attention")
BF16 = FAMILIES[torch.bfloat16]
needs_a_choice = pytest.mark.skipif("avx2" not in AVAILABLE[1:], reason="this machine has one vector set")


def _active() -> dict[tuple[str, torch.dtype], str | None]:
    return {(name, dtype): native.cpu_isa(name, dtype) for name in native.KERNEL_CLASSES for dtype in FLOAT_DTYPES}


@pytest.fixture(autouse=True)
def _keep_sets() -> Iterator[None]:
    before = _active()
    yield
    for (name, dtype), isa in before.items():
        if isa is not None:
            native.set_cpu_isa(isa, name, dtype)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """An empty cache directory, which does not exist yet, and no forced set."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.delenv("ASCEND_VLLM_CPU_ISA", raising=False)
    return tmp_path / "cache"


@needs_a_choice
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_a_row_is_the_same_in_any_batch_whatever_sets_of_a_family_are_chosen(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(130, 1101, generator=generator).to(dtype)
    layer = PackedLinear.of((torch.randn(352, 1101, generator=generator) / 33).to(dtype))
    for family in FAMILIES[dtype]:
        sets = [isa for isa in family if isa in AVAILABLE]
        for shift in range(len(sets)):
            for place, name in enumerate(CLASSES):
                native.set_cpu_isa(sets[(place + shift) % len(sets)], name, dtype)
            for method in (lambda x: layer(x, None), lambda x: layer.gated(x, None, "silu")):
                together = method(x)
                for rows in (1, 2, 8, 9, 16, 17, 97):
                    assert torch.equal(method(x[-rows:]), together[-rows:]), (family, shift, rows)


def _products_of(kind: str, dtype: torch.dtype) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """A product of [T, 1100] of a kind, and a gated one."""
    generator = torch.Generator().manual_seed(1)
    if kind == "int8":
        int8 = Int8Panels(352, 1100)
        weight = torch.randint(-128, 128, (352, 1100), generator=generator).to(torch.int8)
        int8.pack_int8_rows(0, weight, torch.rand(352, generator=generator) / 74 / 33)
        return [
            lambda x: int8.product(*quantize_tokens(x, False)[:2], None, None, dtype),
            lambda x: int8.gated_product(*quantize_tokens(x, False)[:2], None, None, dtype, "silu"),
        ]
    code = kind.removesuffix("_rounded")
    panels = QuantizedPanels(352, 1100, 128, code)
    values = torch.randint(2 ** CODES[code], (352, 1100), generator=generator).to(torch.uint8)
    if code == "float8_e4m3":
        values = torch.randn(352, 1100, generator=generator).to(torch.float8_e4m3fn)
    size = 2.0 if code == "float8_e4m3" else 0.3 * 2 ** CODES[code]
    panels.pack_rows(0, values, torch.rand(352, 9, generator=generator) / size / 33)
    panels.rounds_inputs = kind.endswith("_rounded")
    return [lambda x: panels(x, None), lambda x: panels.gated(x, None, "silu")]


@needs_a_choice
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("kind", native.QUANTIZED_PRODUCTS)
def test_a_row_of_a_quantized_product_is_the_same_whatever_sets_of_a_family_are_chosen(
    kind: str, dtype: torch.dtype
) -> None:
    x = torch.randn(130, 1100, generator=torch.Generator().manual_seed(0)).to(dtype)
    classes = native.product_classes(kind)
    for family in families(dtype, kind):
        sets = [isa for isa in family if isa in AVAILABLE]
        for method in _products_of(kind, dtype) if sets else ():
            native.set_cpu_isa("scalar" if "scalar" not in sets else "avx2")
            for name in classes:
                native.set_cpu_isa(sets[0], name, dtype)
            together = method(x)
            for shift in range(len(sets)):
                for place, name in enumerate(classes):
                    native.set_cpu_isa(sets[(place + shift) % len(sets)], name, dtype)
                for rows in (1, 2, 16, 17, 64, 65, 130):
                    assert torch.equal(method(x[-rows:]), together[-rows:]), (family, shift, rows)


@needs_a_choice
def test_classes_and_dtypes_have_sets_of_their_own() -> None:
    native.set_cpu_isa(BEST)
    changed = {("few_rows", torch.float16), ("uint4.one_row", torch.bfloat16), ("int8.many_rows", torch.float32)}
    for name, dtype in changed:
        native.set_cpu_isa("avx2", name, dtype)
    assert {key for key, isa in _active().items() if isa == "avx2"} == changed
    assert native.cpu_isa() == BEST


def _timings(**seconds: tuple[float, float, float, float]) -> dict[str, dict[str, list[float]]]:
    """Of sets by their shortest times in each class; other calls take a little longer."""
    return {
        name: {isa: [1.02 * t[i], t[i], 1.3 * t[i]] for isa, t in seconds.items()} for i, name in enumerate(CLASSES)
    }


ALL_BF16 = dict.fromkeys(CLASSES, "avx512_bf16")
ALL_AVX512 = dict.fromkeys(CLASSES, "avx512")


@pytest.mark.parametrize(
    ("avx512", "avx2", "before", "expected"),
    [
        # slow dot products of pairs, as on the Xeon whose host hides AMX; avx512_bf16 takes 1 in each class
        ((0.9, 0.6, 0.5, 0.7), (1, 0.9, 0.8, 0.9), ALL_BF16, ALL_AVX512),
        # fast ones
        ((0.95, 1.8, 2, 1.3), (0.95, 2, 2.2, 1.4), ALL_BF16, ALL_BF16),
        ((0.95, 1.8, 2, 1.3), (0.95, 2, 2.2, 1.4), ALL_AVX512, ALL_BF16),
        # as fast but for noise: nothing changes, from wherever
        ((0.97, 0.98, 0.96, 0.97), (1.03, 0.98, 1, 1), ALL_BF16, ALL_BF16),
        ((1.02, 1.03, 1.04, 1.02), (1.03, 0.99, 1, 1), ALL_AVX512, ALL_AVX512),
        # one class alone would gain, all together would lose
        ((0.5, 1.4, 1.4, 1), (0.6, 1.5, 1.5, 1), ALL_BF16, ALL_BF16),
        # the sets of a family are chosen class by class, attention by itself
        ((0.5, 0.5, 0.5, 1.2), (0.4, 0.5, 0.6, 0.8), ALL_BF16, ALL_AVX512 | {"one_row": "avx2", "attention": "avx2"}),
        ((2, 2, 2, 0.5), (2, 2, 2, 0.6), ALL_BF16, ALL_BF16 | {"attention": "avx512"}),
    ],
)
def test_timings_decide(
    avx512: tuple[float, ...], avx2: tuple[float, ...], before: dict[str, str], expected: dict[str, str]
) -> None:
    timings = _timings(avx512_bf16=(1, 1, 1, 1), avx512=avx512, avx2=avx2)
    got = choose(timings, before, BF16)
    if got != expected:
        # sets of the family that are equally fast may stand for each other
        assert {name: min(timings[name][isa]) for name, isa in got.items()} == {
            name: min(timings[name][isa]) for name, isa in expected.items()
        }
    assert choose(timings, got, BF16) == got, "a second measurement with the same result changes nothing"


def test_calls_that_differ_much_change_nothing() -> None:
    timings = _timings(avx512_bf16=(1, 1, 1, 1), avx512=(0.85, 0.85, 0.85, 0.85))
    assert choose(timings, ALL_BF16, BF16) == ALL_AVX512
    for name in CLASSES:
        timings[name]["avx512"] = [0.85, 1.1, 1.2]
    assert choose(timings, ALL_BF16, BF16) == ALL_BF16


@needs_a_choice
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_every_class_is_timed_with_every_set(dtype: torch.dtype) -> None:
    isas = [isa for isa in AVAILABLE if any(isa in family for family in FAMILIES[dtype])]
    before, threads = _active(), torch.get_num_threads()
    timings = kernel_choice.measure(dtype, isas)
    assert tuple(timings) == CLASSES and all(list(by_isa) == isas for by_isa in timings.values())
    assert all(len(calls) > 2 and min(calls) > 0 for by_isa in timings.values() for calls in by_isa.values())
    assert min(timings["many_rows"]["avx2"]) > min(timings["one_row"]["avx2"]), "64 rows take longer than one"
    assert (_active(), torch.get_num_threads()) == (before, threads)


@needs_a_choice
@pytest.mark.parametrize("kind", native.QUANTIZED_PRODUCTS)
def test_quantized_products_are_timed_with_every_set(kind: str) -> None:
    dtype = torch.bfloat16
    isas = kernel_choice.candidates(families(dtype, kind))
    before = _active()
    timings = kernel_choice.measure(dtype, isas, kind)
    assert tuple(timings) == native.product_classes(kind)
    assert all(list(by_isa) == isas for by_isa in timings.values())
    assert all(len(calls) > 2 and min(calls) > 0 for by_isa in timings.values() for calls in by_isa.values())
    assert min(timings[f"{kind}.many_rows"]["avx2"]) > min(timings[f"{kind}.one_row"]["avx2"])
    assert _active() == before


@needs_a_choice
@pytest.mark.parametrize("plain", [BEST, "avx2"])
def test_quantized_products_are_chosen_when_a_model_has_them(
    cache: pathlib.Path, package_log: pytest.LogCaptureFixture, plain: str
) -> None:
    dtype = torch.bfloat16
    native.set_cpu_isa(BEST)
    for name in CLASSES:
        native.set_cpu_isa(plain, name, dtype)
    chosen = choose_cpu_kernels(dtype, probe=True, product="int8")
    assert chosen is not None and tuple(chosen) == native.product_classes("int8")
    assert {name: native.cpu_isa(name, dtype) for name in chosen} == chosen
    # gates are as plain ones
    alike = [isa for isa in AVAILABLE if isa != "scalar" and isa.endswith("_bf16") == plain.endswith("_bf16")]
    assert set(chosen.values()) <= set(alike)
    assert {isa for (name, _), isa in _active().items() if name.startswith("uint")} == {BEST}, "others are untouched"
    (line,) = package_log.messages
    assert line.startswith("CPU kernels: ") and " for int8 products" in line
    assert line.endswith(", measured now" if len(alike) > 1 else ", by the table of known processors")
    choose_cpu_kernels(dtype, probe=True, product="int8")
    assert package_log.messages[-1] == line.replace("measured now", "measured at an earlier start")
    table = choose_cpu_kernels(dtype, probe=False, product="uint4")
    assert table is not None and len(set(table.values())) == 1


@needs_a_choice
def test_the_first_start_measures_and_later_ones_read(
    cache: pathlib.Path, package_log: pytest.LogCaptureFixture
) -> None:
    chosen = choose_cpu_kernels(torch.bfloat16, probe=True)
    assert chosen is not None and "measured now" in package_log.messages[-1]
    assert {name: native.cpu_isa(name) for name in CLASSES} == chosen
    (path,) = cache.glob("*.json")
    kept = json.loads(path.read_text())
    assert list(kept.values()) == [chosen]
    # what is kept counts, whatever a measurement would say
    other = dict.fromkeys(CLASSES, "avx2")
    path.write_text(json.dumps(dict.fromkeys(kept, other)))
    assert choose_cpu_kernels(torch.bfloat16, probe=True) == other
    assert "at an earlier start" in package_log.messages[-1]
    assert {name: native.cpu_isa(name) for name in CLASSES} == other
    assert choose_cpu_kernels(torch.float32, probe=True) is not None
    assert len(list(cache.glob("*.json"))) == 2, "each dtype has a file of its own"


@needs_a_choice
@pytest.mark.parametrize(
    "kept",
    [
        b"",
        b"\xff{",
        b"[]",
        b'{"LIBRARY": {"one_row": "avx2"}}',
        b'{"LIBRARY": {"one_row": "mmx", "few_rows": "avx2", "many_rows": "avx2", "attention": "avx2"}}',
        b'{"LIBRARY": {"one_row": "avx2", "few_rows": "scalar", "many_rows": "avx2", "attention": "avx2"}}',
        b'{"LIBRARY": {"one_row": "avx2", "few_rows": ["avx2"], "many_rows": "avx2", "attention": "avx2"}}',
        b'{"other": {"one_row": "avx2", "few_rows": "avx2", "many_rows": "avx2", "attention": "avx2"}}',
    ],
)
def test_a_file_that_is_damaged_or_of_other_kernels_is_replaced(
    cache: pathlib.Path, package_log: pytest.LogCaptureFixture, kept: bytes
) -> None:
    cache.mkdir()
    path = kernel_choice.kept_path(this_processor(), torch.bfloat16)
    choose_cpu_kernels(torch.bfloat16, probe=True)
    (library,) = json.loads(path.read_text())
    path.write_bytes(kept.replace(b"LIBRARY", library.encode()))
    chosen = choose_cpu_kernels(torch.bfloat16, probe=True)
    assert "measured now" in package_log.messages[-1]
    written = json.loads(path.read_text())
    assert written[library] == chosen
    assert set(written) == ({library, "other"} if b"other" in kept else {library}), "those of other kernels stay"


@needs_a_choice
def test_of_processes_that_start_together_one_measures(
    cache: pathlib.Path, package_log: pytest.LogCaptureFixture
) -> None:
    """Threads, whose locks exclude each other as those of processes do."""
    chosen: list[object] = []
    threads = [
        threading.Thread(target=lambda: chosen.append(choose_cpu_kernels(torch.bfloat16, probe=True)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(chosen) == 3 and chosen[0] == chosen[1] == chosen[2]
    assert sum("measured now" in line for line in package_log.messages) == 1
    assert sorted(path.suffix for path in cache.iterdir()) == [".json", ".lock"], "nothing else is left"


@needs_a_choice
def test_the_table_decides_where_nothing_can_be_kept_or_measured(
    cache: pathlib.Path, package_log: pytest.LogCaptureFixture
) -> None:
    by_table = fastest_set(this_processor(), [isa for isa in AVAILABLE if isa != "scalar"])
    assert choose_cpu_kernels(torch.bfloat16, probe=False) == dict.fromkeys(CLASSES, by_table)
    assert package_log.messages[-1].endswith(", by the table of known processors")
    assert not cache.exists()
    cache.write_text("a file where the directory should be")
    assert choose_cpu_kernels(torch.bfloat16, probe=True) == dict.fromkeys(CLASSES, by_table)
    assert f"as no measurement can be kept in {cache}" in package_log.messages[-1]


@needs_a_choice
def test_a_forced_set_is_used_for_everything(
    cache: pathlib.Path, package_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.set_cpu_isa("scalar")
    monkeypatch.setenv("ASCEND_VLLM_CPU_ISA", "scalar")
    assert choose_cpu_kernels(torch.bfloat16, probe=True) is None
    assert package_log.messages[-1] == "CPU kernels: scalar by ASCEND_VLLM_CPU_ISA"
    assert set(_active().values()) == {"scalar"} and not cache.exists()
    native.set_cpu_isa(BEST)


@pytest.mark.skipif("avx512" not in AVAILABLE[1:], reason="the line is shorter with fewer sets")
@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        (dict.fromkeys(CLASSES, BEST), BEST),
        (dict.fromkeys(CLASSES, "avx2"), f"avx2 for products and attention, {BEST} for all others"),
        (
            ALL_AVX512 | {"few_rows": "avx2"},
            "avx512 for products of 1 row and products of more rows and attention, "
            f"avx2 for products of 2 to 16 rows, {BEST} for all others",
        ),
    ],
)
def test_one_line_of_the_log_names_the_sets(
    cache: pathlib.Path, package_log: pytest.LogCaptureFixture, chosen: dict[str, str], text: str
) -> None:
    native.set_cpu_isa(BEST)
    choose_cpu_kernels(torch.bfloat16, probe=True)
    (path,) = cache.glob("*.json")
    path.write_text(json.dumps(dict.fromkeys(json.loads(path.read_text()), chosen)))
    choose_cpu_kernels(torch.bfloat16, probe=True)
    assert package_log.messages[-1] == f"CPU kernels: {text}, measured at an earlier start"


@needs_a_choice
def test_a_worker_chooses_before_it_packs_weights(cache: pathlib.Path, package_log: pytest.LogCaptureFixture) -> None:
    for probe, reason in ((True, "measured now"), (False, "by the table")):
        started_worker.__wrapped__(tiny_model("qwen2"), cpu_kernel_probe=probe)
        lines = [line for line in package_log.messages if line.startswith(("CPU kernels: ", "Model loaded"))]
        assert reason in lines[-2] and lines[-1].startswith("Model loaded")
        assert make_config(tiny_model("qwen2"), cpu_kernel_probe=probe).device.cpu_kernel_probe is probe


@needs_a_choice
def test_a_worker_chooses_for_the_quantized_products_of_its_model(
    cache: pathlib.Path, package_log: pytest.LogCaptureFixture
) -> None:
    config = make_config(tiny_model("qwen2"))
    arch = msgspec.structs.replace(config.model.arch, quantization=QuantizationConfig("weight_only_int8"))
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, arch=arch))
    Worker(config).load_model()
    lines = [line for line in package_log.messages if line.startswith("CPU kernels: ")]
    assert len(lines) == 2 and "products by 8-bit weights" in lines[1]
