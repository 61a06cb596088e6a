"""Chooses the instruction sets of matrix products and attention, by measurement at the first start on a machine.

A processor need not be fastest by the newest instructions that it has. So every set is timed in every class of calls
(`native.KERNEL_CLASSES`), and the choice is kept in the cache directory: later starts, and other processes that start
at the same time, read it. Of quantized products those of the loaded model are measured, each kind when a model first
has it. ``ASCEND_VLLM_CPU_ISA`` forces one set for all kernels, and nothing is measured.

All sets read the same packed weights, but not all round alike: see `families`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import itertools
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from ascend_vllm import envs
from ascend_vllm.logger import init_logger
from ascend_vllm.ops import native
from ascend_vllm.ops.gemm import PANEL, packed_linear, packed_zeros
from ascend_vllm.ops.paged import paged_attention
from ascend_vllm.ops.quantized_gemm import Int8Panels, QuantizedPanels
from ascend_vllm.platforms.processor import Processor, fastest_set, this_processor

logger = init_logger(__name__)

# class of calls → instruction set
Choice = dict[str, str]
# class of calls → instruction set → seconds of single calls
Timings = Mapping[str, Mapping[str, Sequence[float]]]

Families = tuple[tuple[str, ...], ...]

# Sets whose plain products are bitwise the same. A row's result must not depend on the number of rows beside it, so
# all classes of products use sets of one family; attention, whose rows do not change the choice, uses any set.
# avx2 and avx512 add the products of bfloat16 numbers, which are exact in float32, one by one in the order of the
# inputs. vdpbf16ps adds the second product of a pair before the first (the same as two multiply-adds in that order,
# without a difference in 20 million on Zen 4), and takes subnormal numbers for zero. AMX adds the products of 32
# inputs by pairs. In other dtypes every set from avx512 on runs the same instructions. On Arm the dot products of
# neon_bf16 round to odd and take subnormal numbers for zero; in other dtypes every set from neon on runs the same.
FAMILIES: dict[torch.dtype, Families] = {
    torch.bfloat16: (("amx_bf16",), ("avx512_bf16",), ("avx512", "avx2"), ("neon_bf16",), ("neon",)),
    torch.float16: (("avx512", "avx2"), ("neon",)),
    torch.float32: (("avx512", "avx2"), ("neon",)),
}
# The same of quantized products. Sums of products of bytes are exact in every set. By codes alone, AMX multiplies
# bfloat16 inputs, and the other sets 16-bit inputs that are rounded to whole numbers. Sets that have instructions for
# bfloat16 round results to it in another way than the other sets, and compute gates in another way; on Arm all round
# and compute alike.
_NEON = ("neon_bf16", "neon_dotprod", "neon")
_CODES: dict[torch.dtype, Families] = {
    torch.bfloat16: (("amx_bf16",), ("avx512_bf16",), ("avx512_vnni", "avx512", "avx2"), _NEON),
    torch.float16: (("avx512_vnni", "avx512", "avx2"), _NEON),
    torch.float32: (("avx512", "avx2"), ("neon",)),
}
_BYTES: dict[torch.dtype, Families] = {
    torch.bfloat16: (("amx_bf16", "avx512_bf16"), ("avx512_vnni", "avx512", "avx2"), _NEON),
    torch.float16: (("amx_bf16", "avx512_vnni", "avx512", "avx2"), _NEON),
    torch.float32: (("amx_bf16", "avx512_vnni", "avx512", "avx2"), _NEON),
}
_QUANTIZED_FAMILIES: dict[str, dict[torch.dtype, Families]] = {
    "uint4": _CODES,
    "uint8": _CODES,
    "float8_e4m3": FAMILIES,
    "uint4_rounded": _BYTES,
    "uint8_rounded": _BYTES,
    "int8": _BYTES,
}
_HAVE_BFLOAT16 = {"amx_bf16", "avx512_bf16"}

_LABELS = ("1 row", f"2 to {native.MOST_FEW_ROWS} rows", "more rows")
# what products are by, for the log
_PRODUCT_LABELS = {
    None: "products",
    "uint4": "products by 4-bit weights",
    "uint8": "products by 8-bit weights",
    "float8_e4m3": "products by fp8 weights",
    "uint4_rounded": "products of rounded inputs by 4-bit weights",
    "uint8_rounded": "products of rounded inputs by 8-bit weights",
    "int8": "int8 products",
}

_Key = TypeVar("_Key")

# What is measured, in one thread: rows of a product, by weights of 896 by 512 that are in no first-level cache, and
# attention of decoding rows and of a chunk of a prompt, all with so many keys.
_ROWS = (1, 8, 64)
_INPUTS, _OUTPUTS, _WEIGHTS = 896, 512, 4
# of quantized products; blocks of AMX begin at 65 rows
_QUANTIZED_ROWS, _GROUP_SIZE = (1, 8, 96), 128
_KEYS, _DECODES, _CHUNK, _HEADS, _KV_HEADS, _HEAD_SIZE, _BLOCK_SIZE = 512, 8, 32, 8, 2, 64, 32
# after this time no further round begins, but so many are measured at least
_BUDGET_S, _QUANTIZED_BUDGET_S, _MIN_ROUNDS = 0.015, 0.008, 3
# By how much faster than the set before it another set must be: as much as the two best calls of either differ, but
# at least and at most these shares of the time.
_LEAST_NOISE, _MOST_NOISE = 0.05, 0.25
# libraries whose choices are kept
_MAX_LIBRARIES = 16


def choose_cpu_kernels(dtype: torch.dtype, *, probe: bool, product: str | None = None) -> Choice | None:
    """Chooses and sets the instruction sets for models of a dtype; logs them in one line.

    Args:
        dtype: of the model.
        probe: whether sets are measured; if not, a table of known processors decides, or else what the processor has.
        product: None: plain products and attention; or one of native.QUANTIZED_PRODUCTS, after those.

    Returns:
        The choice; None if there is none, as there are no kernels or a set is forced.
    """
    possible = families(dtype, product)
    if product is not None:
        # results of gated products are the same as those of products and `gate_and_mul`
        gates = native.cpu_isa("one_row", dtype) in _HAVE_BFLOAT16
        possible = tuple(f for f in possible if dtype != torch.bfloat16 or (f[0] in _HAVE_BFLOAT16) == gates)
    isas = candidates(possible)
    if envs.cpu_isa() is not None or not isas:
        if product is None and native.load_native_library():
            logger.info("CPU kernels: %s%s", native.cpu_isa(), " by ASCEND_VLLM_CPU_ISA" if envs.cpu_isa() else "")
        return None
    choice = by_table(isas, product)
    reason = "by the table of known processors"
    if probe and len(isas) > 1:
        path = kept_path(this_processor(), dtype, product)
        calls = _Calls(dtype, product, possible, tuple(isas))
        try:
            choice, is_new = _kept_or_measured(path, calls, choice)
            reason = "measured now" if is_new else "measured at an earlier start"
        except OSError as error:
            # processes that start together could not agree on a measurement, nor one start with the next
            reason += f", as no measurement can be kept in {path.parent} ({error.strerror})"
    for kernel_class, isa in choice.items():
        native.set_cpu_isa(isa, kernel_class, dtype)
    logger.info("CPU kernels: %s, %s", _describe(choice, product, native.cpu_isa()), reason)
    return choice


@dataclasses.dataclass(frozen=True)
class _Calls:
    """Calls whose sets are chosen together.

    Attributes:
        dtype: of activations.
        product: of native.QUANTIZED_PRODUCTS, or None: plain products and attention.
        families: that products may use, see `families`.
        isas: sets of these that this machine has.
    """

    dtype: torch.dtype
    product: str | None
    families: Families
    isas: tuple[str, ...]

    def allow(self, choice: object) -> bool:
        """Whether this is a choice for these calls."""
        if not isinstance(choice, dict) or set(choice) != set(_classes(self.product)):
            return False
        if not all(isa in self.isas for isa in choice.values()):
            return False
        used = {choice[name] for name in native.product_classes(self.product)}
        return any(used <= set(family) for family in self.families)


def _classes(product: str | None) -> tuple[str, ...]:
    """Classes that are chosen together."""
    return native.product_classes(product) + (("attention",) if product is None else ())


def _describe(choice: Choice, product: str | None, others: str | None) -> str:
    """The chosen sets, and that of all other kernels, for the log."""
    label = _PRODUCT_LABELS[product]
    sets = list(dict.fromkeys(choice.values()))
    if product is None and sets == [others]:
        return f"{others}"
    if len(sets) == 1:
        named = [f"{sets[0]} for {label}{' and attention' if product is None else ''}"]
    else:
        labels = dict(zip(native.product_classes(product), (f"{label} of {rows}" for rows in _LABELS), strict=True))
        labels["attention"] = "attention"
        named = [
            f"{isa} for {' and '.join(labels[name] for name, used in choice.items() if used == isa)}" for isa in sets
        ]
    return ", ".join([*named, f"{others} for all others"] if product is None else named)


def families(dtype: torch.dtype, product: str | None = None) -> Families:
    """Sets by which products in a dtype are bitwise the same; all classes of products use sets of one family.

    Args:
        dtype: of activations.
        product: one of native.QUANTIZED_PRODUCTS, or None: plain products.
    """
    return (FAMILIES if product is None else _QUANTIZED_FAMILIES[product])[dtype]


def candidates(possible: Families) -> list[str]:
    """Sets of these families that this machine has, best first by its features."""
    return [isa for isa in native.available_cpu_isas() if any(isa in family for family in possible)]


def by_table(isas: Sequence[str], product: str | None = None) -> Choice:
    """The choice of one of these sets without a measurement; for quantized products the first one."""
    best = fastest_set(this_processor(), isas) if product is None else isas[0]
    return dict.fromkeys(_classes(product), best)


def choose(timings: Timings, before: Choice, possible: Families) -> Choice:
    """The fastest sets by measurement; those of before, unless others are faster by more than noise.

    Families of sets are compared by the sum of their times in the classes of products, relative to the times of
    before: one row, few and many rows count alike, since a request that generates half as many tokens as it was given
    takes about as long for either.

    Args:
        timings: of every class and set, two calls or more each.
        before: the choice so far, of sets that were measured; products by sets of one family.
        possible: see `families`.

    Example::

        choose(timings, dict.fromkeys(KERNEL_CLASSES, "avx512_bf16"), FAMILIES[torch.bfloat16])
    """
    products = [name for name in timings if name != "attention"]
    sums: dict[tuple[str, ...], list[float]] = {}
    best_sets: dict[tuple[str, ...], Choice] = {}
    # of the best calls
    units = {name: min(timings[name][before[name]]) for name in products}
    for family in possible:
        measured = [isa for isa in family if isa in timings[products[0]]]
        if not measured:
            continue
        sets = {name: _fastest({isa: timings[name][isa] for isa in measured}, before[name]) for name in products}
        best_sets[family] = sets
        # of the best calls, and of the second best
        sums[family] = [
            sum(sorted(timings[name][isa])[place] / units[name] for name, isa in sets.items()) for place in (0, 1)
        ]
    family_before = next(family for family in sums if before[products[0]] in family)
    best = best_sets[_fastest(sums, family_before)]
    others = {name: _fastest(timings[name], before[name]) for name in timings if name not in products}
    return best | others


def _fastest(seconds: Mapping[_Key, Sequence[float]], before: _Key) -> _Key:
    """The key with the shortest time; `before`, if it is among them, unless others are shorter by more than noise."""
    best = min(seconds, key=lambda key: min(seconds[key]))
    if before not in seconds:
        return best
    noise = _LEAST_NOISE
    for key in (best, before):
        first, second = sorted(seconds[key])[:2]
        noise = max(noise, min(second / first - 1, _MOST_NOISE))
    return best if min(seconds[best]) * (1 + noise) < min(seconds[before]) else before


def measure(dtype: torch.dtype, isas: Sequence[str], product: str | None = None) -> dict[str, dict[str, list[float]]]:
    """Times every class of calls with every set, in turns and in one thread.

    Args:
        dtype: of the operands.
        isas: sets that this machine has.
        product: None: plain products and attention; or one of native.QUANTIZED_PRODUCTS.

    Returns:
        Class of calls → set → seconds of each call.
    """
    threads = torch.get_num_threads()
    classes = _classes(product)
    chosen = {name: native.cpu_isa(name, dtype) for name in classes}
    timings: dict[str, dict[str, list[float]]] = {name: {isa: [] for isa in isas} for name in classes}
    torch.set_num_threads(1)
    try:
        calls = _calls(dtype) if product is None else _quantized_calls(dtype, product)
        deadline = time.perf_counter() + (_BUDGET_S if product is None else _QUANTIZED_BUDGET_S)
        rounds = 0
        # the first round warms up
        while rounds <= _MIN_ROUNDS or time.perf_counter() < deadline:
            # no set is always the first, which finds the caches as other calls left them
            turn = rounds % len(isas)
            for (name, variants), isa in itertools.product(calls.items(), [*isas[turn:], *isas[:turn]]):
                native.set_cpu_isa(isa, name, dtype)
                start = time.perf_counter()
                next(variants)()
                if rounds > 0:
                    timings[name][isa].append(time.perf_counter() - start)
            rounds += 1
    finally:
        torch.set_num_threads(threads)
        for name, before in chosen.items():
            if before is not None:
                native.set_cpu_isa(before, name, dtype)
    return timings


def _calls(dtype: torch.dtype) -> dict[str, Iterator[Callable[[], object]]]:
    """Class of calls → the calls to time one after another, each product with other weights than the last."""
    panels = _OUTPUTS // PANEL
    # ones, as the values do not matter, but subnormal numbers might
    weights = torch.split(packed_zeros(_WEIGHTS * _OUTPUTS, _INPUTS, dtype).fill_(1), panels)
    found: dict[str, Iterator[Callable[[], object]]] = {}
    for name, rows in zip(native.product_classes(), _ROWS, strict=True):
        x = torch.ones(rows, _INPUTS, dtype=dtype)
        calls = [functools.partial(packed_linear, x, weight, None, _OUTPUTS) for weight in weights]
        found[name] = itertools.cycle(calls)
    rows, blocks = _DECODES + 1, _KEYS // _BLOCK_SIZE
    cache = torch.ones(2, rows * blocks, _KV_HEADS, _BLOCK_SIZE, _HEAD_SIZE, dtype=dtype)
    attention = functools.partial(
        paged_attention,
        torch.ones(_DECODES + _CHUNK, _HEADS, _HEAD_SIZE, dtype=dtype),
        cache[0],
        cache[1],
        torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks),
        torch.tensor([*range(rows), _DECODES + _CHUNK], dtype=torch.int32),
        torch.full((rows,), _KEYS, dtype=torch.int32),
        _HEAD_SIZE**-0.5,
        0,
    )
    return found | {"attention": itertools.repeat(attention)}


def _quantized_calls(dtype: torch.dtype, product: str) -> dict[str, Iterator[Callable[[], object]]]:
    """The same of a quantized product."""
    weights = [_weight(product) for _ in range(_WEIGHTS)]
    found: dict[str, Iterator[Callable[[], object]]] = {}
    for name, rows in zip(native.product_classes(product), _QUANTIZED_ROWS, strict=True):
        x = torch.ones(rows, _INPUTS, dtype=dtype)
        q, q_scales = x.to(torch.int8), torch.ones(rows)
        calls = [
            functools.partial(weight.product, q, q_scales, None, None, dtype)
            if isinstance(weight, Int8Panels)
            else functools.partial(weight, x, None)
            for weight in weights
        ]
        found[name] = itertools.cycle(calls)
    return found


def _weight(product: str) -> QuantizedPanels:
    if product == "int8":
        panels: QuantizedPanels = Int8Panels(_OUTPUTS, _INPUTS)
    else:
        code = product.removesuffix("_rounded")
        group_size, scale_dtype = (_GROUP_SIZE, torch.float16) if code == "uint4" else (_INPUTS, torch.float32)
        panels = QuantizedPanels(_OUTPUTS, _INPUTS, group_size, code, scale_dtype=scale_dtype)
        panels.rounds_inputs = product.endswith("_rounded")
    # memory that was not written would be one page; these bytes are 1 as fp8
    panels.codes.view(torch.uint8).fill_(0x38)
    panels.scales.fill_(1)
    return panels


def kept_path(processor: Processor, dtype: torch.dtype, product: str | None = None) -> pathlib.Path:
    """Where the choices for a processor, a dtype and a product are kept, one for each build of the kernels."""
    digest = hashlib.sha256(repr((processor, dtype)).encode()).hexdigest()
    suffix = "" if product is None else f"-{product}"
    return envs.cache_root() / f"cpu-kernels-{digest[:12]}{suffix}.json"


def _kept_or_measured(path: pathlib.Path, calls: _Calls, unmeasured: Choice) -> tuple[Choice, bool]:
    """The choice for these kernels, and whether it was measured now.

    Raises:
        OSError: a measurement could not be kept.
    """
    library = hashlib.sha256(native.LIBRARY_PATH.read_bytes()).hexdigest()[:16]
    if library in (kept := _read(path, calls)):
        return kept[library], False
    path.parent.mkdir(parents=True, exist_ok=True)
    # one process measures, while others that start wait for it
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library in (kept := _read(path, calls)):
            return kept[library], False
        # other builds of the same kernels were about as fast
        before = next(reversed(kept.values()), unmeasured)
        choice = choose(measure(calls.dtype, calls.isas, calls.product), before, calls.families)
        libraries = dict([*kept.items(), (library, choice)][-_MAX_LIBRARIES:])
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            partial.write_text(json.dumps(libraries, indent=1) + "\n")
            partial.replace(path)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
    return choice, True


def _read(path: pathlib.Path, calls: _Calls) -> dict[str, Choice]:
    """The kept choices by library, oldest first; without those that are damaged or not possible here."""
    try:
        kept = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(kept, dict):
        return {}
    return {library: choice for library, choice in kept.items() if calls.allow(choice)}
