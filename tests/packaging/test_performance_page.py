"""docs/performance.md and its chart are what the script makes of the results that are kept."""

from __future__ import annotations

import copy
import pathlib
import types
import xml.etree.ElementTree
from typing import Any

import pytest

from tests.benchmark_modules import load_script


@pytest.fixture(scope="module")
def script() -> types.ModuleType:
    return load_script("make_performance_doc")


def test_page_and_chart_are_up_to_date(script: types.ModuleType) -> None:
    results = script.load_results(script.RESULTS)
    assert script.PAGE.read_text(encoding="utf-8") == script.render(results), "run scripts/make_performance_doc.py"
    drawn = script.CHART.read_text(encoding="utf-8") if script.CHART.exists() else None
    assert drawn == script.chart(results), "run scripts/make_performance_doc.py"


def test_results_name_no_place_of_the_machine(script: types.ModuleType) -> None:
    """Results are read by others: they hold no directories but /tmp, where the page's own commands put models."""
    results = list(script.RESULTS.glob("*.json"))
    assert results
    for path in results:
        text = path.read_text(encoding="utf-8")
        for place in ("/home", "/root", "/work", "/tmp/wt"):
            assert place not in text, path


MACHINE = {
    "date": "2026-01-02T03:04:05+00:00",
    "cpu": "A & B <9000>",
    "flags": ["avx2"],
    "cores": 2,
    "memory_gib": 8.0,
    "kernel": "6.1",
    "torch": "2",
    "commit": "abc",
    "kernels_isa": "sse9",
    "load_average": [0.5, 0, 0],
}


def _row(name: str, better: str, ours: float, peer: float | None, target: float) -> dict[str, Any]:
    higher = better == "higher"
    ratio = None if peer is None else ours / peer
    return {
        "name": name,
        "title": f"title of {name}",
        "unit": "tok/s" if higher else "s",
        "better": better,
        "ours": ours,
        "peer": peer,
        "ratio": ratio,
        "target": {"ratio_at_least" if higher else "ratio_at_most": target},
        "meets_target": None if ratio is None else (ratio >= target if higher else ratio <= target),
        "limit": 1234.5 if higher else None,
        "share_of_limit": 0.5 if higher else None,
        "machine_limits": [{"bandwidth_gb_s": 30.0, "fp32_gflop_s": 190.0, "bf16_gflop_s": 0.0}],
    }


RESULT: dict[str, Any] = {
    "kind": "servers",
    "note": "on a busy machine",
    "machine": MACHINE,
    "command": "python compare",
    "rounds": 3,
    "sizes": {"input_len": 128},
    "programs": {
        "ours": {"name": "mine", "version": "1", "commands": {"main": "mine serve"}},
        "peer": {"name": "theirs", "version": "2", "commands": {"main": "theirs serve"}},
    },
    "rows": [_row("c8", "higher", 300.0, 200.0, 1.5), _row("start", "lower", 8.0, 64.0, 0.1)],
}


def test_a_comparison_is_told_whole(script: types.ModuleType) -> None:
    page = script.render([RESULT])
    assert "| title of c8 | 300 tok/s | 200 tok/s | 1.5 | at least 1.5: met | 1,234 tok/s | 50% |" in page
    assert "| title of start | 8 s | 64 s | 0.125 | at most 0.1: missed | | |" in page
    assert "**on a busy machine**" in page and "30 to 30 GB/s read, 190 to 190 GFLOP/s fp32 FMA." in page
    assert "### mine 1 and theirs 2: A & B <9000>, kernels for sse9\n" in page
    assert "python compare\nmine serve\ntheirs serve\n" in page and "(performance.svg)" in page
    bounded = copy.deepcopy(RESULT)
    bounded["rows"][1] |= {"target": {"ratio_at_most": 0.1, "at_most": 3.0}}
    assert "| 8 s | 64 s | 0.125 | at most 0.1, and 3 s: missed | | |" in script.render([bounded])
    alone = copy.deepcopy(RESULT)
    alone["programs"].pop("peer")
    alone["rows"] = [_row("c8", "higher", 300.0, None, 1.5)]
    page = script.render([alone])
    assert "| title of c8 | 300 tok/s | | | at least 1.5 | 1,234 tok/s | 50% |" in page
    assert "performance.svg" not in page and script.chart([alone]) is None


def test_the_chart_shows_how_many_times_better(script: types.ModuleType) -> None:
    drawing = xml.etree.ElementTree.fromstring(script.chart([RESULT]))
    name = "{http://www.w3.org/2000/svg}"
    texts = [element.text or "" for element in drawing.iter(f"{name}text")]
    # half the time is twice as good, whatever the unit
    assert [text for text in texts if text in ("1.50×", "8.00×")] == ["1.50×", "8.00×"]
    assert any("A & B <9000>" in text for text in texts)
    bars = [element for element in drawing.iter(f"{name}rect") if element.get("fill") == "#1f6feb"]
    widths = [float(element.get("width", 0)) for element in bars]
    # the scale is logarithmic: 8 is three doublings
    assert widths[1] / widths[0] == pytest.approx(3 / 0.585, rel=0.01)
    ticks = [element for element in drawing.iter(f"{name}line") if element.get("stroke-width") == "3"]
    x_first, x_second = (float(element.get("x1", 0)) for element in ticks)
    # the first is met exactly, the second missed
    assert x_first == pytest.approx(float(bars[0].get("x", 0)) + widths[0], abs=0.2)
    assert x_second > float(bars[1].get("x", 0)) + widths[1]


def test_a_page_without_results(script: types.ModuleType, tmp_path: pathlib.Path) -> None:
    page = script.render(script.load_results(tmp_path))
    assert "No result is kept yet." in page and "## How to measure" in page and script.chart([]) is None
    assert "No result is kept yet." not in script.render([RESULT])


def test_the_newest_comes_first(script: types.ModuleType, tmp_path: pathlib.Path) -> None:
    for name, date in (("a", "2026-01-01"), ("b", "2026-03-01"), ("c", "2026-02-01")):
        (tmp_path / f"{name}.json").write_text(f'{{"name": "{name}", "machine": {{"date": "{date}"}}}}')
    assert [result["name"] for result in script.load_results(tmp_path)] == ["b", "c", "a"]


def test_kernels_beside_their_limits(script: types.ModuleType) -> None:
    limits = {"bandwidth_gb_s": 20.0, "fp32_gflop_s": 100.0, "bf16_gflop_s": 0.0}
    row = {"kernel": "linear", "label": "qkv", "median_us": 1234.5, "gb_s": 12.34, "gflop_s": 56.78}
    result = {
        "kind": "roofline",
        "note": "",
        "machine": MACHINE,
        "command": "python roofline",
        "dtype": "bfloat16",
        "threads": 2,
        "peak": "fp32 FMA",
        "limits": {"1": limits, "2": {**limits, "bandwidth_gb_s": 30.0}},
        "highest_limits": {**limits, "fp32_gflop_s": 200.0},
        "results": [{**row, "limited_by": "bandwidth", "share": 0.876, "best_share": 0.9}],
    }
    page = script.render([result])
    assert "| linear | qkv | 1,234 µs | 12.3 | 56.8 | bandwidth | 88% | 90% |" in page
    assert "20 GB/s read and 100 GFLOP/s with 1 thread, 30 GB/s read and 100 GFLOP/s with 2 threads" in page
    assert "the highest of the run: 20 GB/s and 200 GFLOP/s" in page


def test_adapters_beside_servers_without_them(script: types.ModuleType) -> None:
    result = copy.deepcopy(RESULT) | {"kind": "adapters"}
    result["programs"] = {side: {"version": "3", "command": f"{side} serve"} for side in ("ours", "plain")}
    page = script.render([result])
    assert "## LoRA adapters\n" in page and "### ours 3, plain 3: A & B <9000>, kernels for sse9\n" in page
    assert "| title of c8 | 300 tok/s | 200 tok/s | 1.5 | at least 1.5: met |" in page
    assert "python compare\nours serve\nplain serve\n" in page


def test_clients_beside_each_other(script: types.ModuleType) -> None:
    figures = {name: {"ours": 190.0, "peer": 200.0, "ratio": 0.95} for name in script._CLIENT_FIGURES}
    result = {
        "kind": "clients",
        "note": "",
        "machine": {**MACHINE, "ascend_vllm": "1"},
        "command": "python clients",
        "rounds": 3,
        "sizes": {"num_prompts": 16},
        "peer_version": "2",
        "figures": figures,
    }
    page = script.render([result])
    assert "### ascend-vllm 1 and vllm 2" in page and "Medians of 3; num prompts 16." in page
    assert "| output throughput | 190 tok/s | 200 tok/s | 0.950 |" in page
    figures["median_tpot_ms"]["ratio"] = None
    assert "| time per output token | 190 ms | 200 ms | |" in script.render([result])
