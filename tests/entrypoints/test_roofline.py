"""The roofline report on small work: what it says follows from what it measured."""

from __future__ import annotations

import json
import pathlib
import types

import pytest

from tests.benchmark_modules import load_benchmark


@pytest.fixture(scope="module")
def roofline() -> types.ModuleType:
    return load_benchmark("roofline")


def test_every_kernel_beside_its_limit(
    roofline: types.ModuleType,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "roofline.json"
    words = ["--layers", "qkv", "--rows", "1", "64", "--attention", "1 decode at 1024", "--budget", "0.003"]
    words += ["--gib", "0.01", "--copies-mib", "4", "--note", "a test", "--json", str(target)]
    monkeypatch.setattr("sys.argv", ["roofline.py", *words])
    roofline.main()
    content = json.loads(target.read_text())
    assert (content["kind"], content["dtype"], content["note"]) == ("roofline", "bfloat16", "a test")
    machine = content["machine"]
    assert machine["cpu"] and machine["kernel"] and machine["torch"] and machine["cores"] >= 1
    highest = content["highest_limits"]
    has_dot = {"avx512_bf16", "bf16"} & set(machine["flags"])
    assert (highest["bf16_gflop_s"] > 0) == bool(has_dot) == (content["peak"] == "bf16 dot products")
    assert set(content["limits"]) == {"1", str(content["threads"])}
    for name, value in content["limits"][str(content["threads"])].items():
        assert highest[name] >= value
    assert highest["bandwidth_gb_s"] > 0 < highest["fp32_gflop_s"]
    labels = ["qkv 896x1152, 1 rows", "qkv 896x1152, 64 rows", "1 decode at 1024"]
    assert [result["label"] for result in content["results"]] == labels
    weights = 896 * 1152
    row, rows, decode = content["results"]
    assert (row["flops"], rows["flops"]) == (2 * weights, 128 * weights)
    assert row["num_bytes"] == 2 * (weights + 896 + 1152)
    # keys and values of 1,024 tokens; each of the 14 heads multiplies its query with 1,024 of both
    assert decode["num_bytes"] == 2 * (2 * 1024 * 2 + 2 * 14) * 64 and decode["flops"] == 4 * 14 * 1024 * 64
    for result in content["results"]:
        limits = result["limits"]
        peak = limits["bf16_gflop_s"] or limits["fp32_gflop_s"]
        times = {
            "bandwidth": result["num_bytes"] / limits["bandwidth_gb_s"] / 1e3,
            "peak": result["flops"] / peak / 1e3,
        }
        assert result["limited_by"] == max(times, key=lambda name: times[name])
        assert result["share"] == pytest.approx(max(times.values()) / result["median_us"])
        assert result["calls"] >= 3 and 0 < result["best_us"] <= result["median_us"]
        assert result["gflop_s"] == pytest.approx(result["flops"] / result["median_us"] / 1e3)
    printed = capsys.readouterr().out
    assert machine["cpu"] in printed and f"The peak is that of {content['peak']}." in printed
    assert all(printed.count(label) == 2 for label in labels)


def test_no_compiler(roofline: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SystemExit, match=r"install a C\+\+ compiler"):
        roofline.Peaks()
