"""This machine's processor, and the instruction sets that are fastest on those that are known."""

from __future__ import annotations

import dataclasses
import pathlib
import platform
from collections.abc import Mapping, Sequence

_CPUINFO = pathlib.Path("/proc/cpuinfo")


@dataclasses.dataclass(frozen=True)
class Processor:
    """A processor as the system names it.

    Attributes:
        vendor: such as "GenuineIntel", or an Arm implementer, such as "0x48"; empty where the system does not say.
        family: 0 where the system does not say; on Arm the variant.
        model: likewise; on Arm the part.
        name: for people; hosts of virtual machines shorten it.
        flags: features, separated by spaces.
    """

    vendor: str
    family: int
    model: int
    name: str
    flags: str


# Processors whose fastest set for bfloat16 products is not the last that they have: (vendor, family, models) → sets,
# best first. Sapphire, Emerald and Granite Rapids have fast tiles, which a host may hide, and slow dot products of
# bfloat16 pairs: both cores of such a Xeon reach 172 GFLOP/s by them in registers and 338 by multiply-adds of widened
# weights. Zen 4 (461 against 232 GFLOP/s) and Zen 5 (920 against 460) are twice as fast by dot products.
_FASTEST_SETS: dict[tuple[str, int, tuple[int, ...]], tuple[str, ...]] = {
    ("GenuineIntel", 6, (143, 173, 174, 207)): ("amx_bf16", "avx512", "avx512_bf16"),
    ("AuthenticAMD", 25, (*range(16, 32), *range(96, 128), *range(160, 176))): ("avx512_bf16",),
    ("AuthenticAMD", 26, tuple(range(256))): ("avx512_bf16",),
}


# Arm processors of servers with NPUs, which the system names by numbers only: (implementer, part) → name
_ARM_NAMES = {("0x48", "0xd01"): "Kunpeng 920 (TaiShan v110)", ("0x48", "0xd02"): "Kunpeng 920 (TaiShan v120)"}


def _arm_name(facts: Mapping[str, str]) -> str | None:
    return _ARM_NAMES.get((facts.get("CPU implementer", ""), facts.get("CPU part", "")))


def this_processor(cpuinfo: pathlib.Path = _CPUINFO) -> Processor:
    """What the system says of the first processor."""
    facts = {}
    try:
        with cpuinfo.open(encoding="utf-8") as lines:
            for line in lines:
                name, separator, value = line.partition(":")
                if not separator:
                    break
                facts[name.strip()] = value.strip()
    except OSError:
        pass

    def number(name: str) -> int:
        try:
            return int(facts.get(name, ""), 0)
        except ValueError:
            return 0

    return Processor(
        vendor=facts.get("vendor_id") or facts.get("CPU implementer") or "",
        family=number("cpu family") or number("CPU variant"),
        model=number("model") or number("CPU part"),
        name=facts.get("model name") or _arm_name(facts) or platform.processor() or platform.machine(),
        flags=facts.get("flags") or facts.get("Features") or "",
    )


def fastest_set(processor: Processor, isas: Sequence[str]) -> str:
    """The instruction set for bfloat16 products that is best by the table, or else the first of `isas`.

    Args:
        processor: it need not be known.
        isas: sets that it has, best first by its features.
    """
    for (vendor, family, models), sets in _FASTEST_SETS.items():
        if (processor.vendor, processor.family) == (vendor, family) and processor.model in models:
            return next((name for name in sets if name in isas), isas[0])
    return isas[0]
