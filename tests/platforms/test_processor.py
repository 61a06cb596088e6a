"""The processor as the system names it, and the table of the fastest instruction sets."""

from __future__ import annotations

import pathlib

import pytest

from ascend_vllm.platforms.processor import Processor, fastest_set, this_processor

ALL = ["amx_bf16", "avx512_bf16", "avx512", "avx2", "scalar"]


def test_the_first_processor_is_read(tmp_path: pathlib.Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    first = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n"
    cpuinfo.write_text(f"{first}flags\t\t: fpu avx2\n\nvendor_id\t: Other\n")
    assert this_processor(cpuinfo) == Processor("AuthenticAMD", 25, 17, "AMD EPYC", "fpu avx2")
    cpuinfo.write_text("processor\t: 0\nFeatures\t: asimd bf16\nCPU implementer\t: 0x48\n\n")
    arm = this_processor(cpuinfo)
    assert (arm.vendor, arm.family, arm.model, arm.flags) == ("0x48", 0, 0, "asimd bf16") and arm.name
    assert this_processor(tmp_path / "missing").flags == ""


@pytest.mark.parametrize(
    ("vendor", "family", "model", "has", "expected"),
    [
        ("GenuineIntel", 6, 173, ALL, "amx_bf16"),
        ("GenuineIntel", 6, 173, ALL[1:], "avx512"),
        ("GenuineIntel", 6, 207, ALL[1:], "avx512"),
        ("GenuineIntel", 6, 85, ALL[1:], "avx512_bf16"),
        ("AuthenticAMD", 25, 17, ALL[1:], "avx512_bf16"),
        ("AuthenticAMD", 25, 17, ALL[2:], "avx512"),
        ("AuthenticAMD", 26, 2, ALL[1:], "avx512_bf16"),
        ("AuthenticAMD", 25, 1, ALL[3:], "avx2"),
        ("", 0, 0, ALL[4:], "scalar"),
    ],
)
def test_the_table_knows_what_features_do_not_tell(
    vendor: str, family: int, model: int, has: list[str], expected: str
) -> None:
    assert fastest_set(Processor(vendor, family, model, "", ""), has) == expected


def test_an_arm_processor_is_known_by_its_numbers(tmp_path: pathlib.Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nFeatures\t: fp asimd asimddp\nCPU implementer\t: 0x48\nCPU architecture: 8\n"
        "CPU variant\t: 0x1\nCPU part\t: 0xd01\n\nprocessor\t: 1\n"
    )
    found = this_processor(cpuinfo)
    assert (found.vendor, found.family, found.model) == ("0x48", 1, 0xD01)
    assert found.name.startswith("Kunpeng 920") and found.flags == "fp asimd asimddp"
