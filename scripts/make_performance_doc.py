"""Writes docs/performance.md and docs/performance.svg from the results in benchmarks/results.

python scripts/make_performance_doc.py            write both
python scripts/make_performance_doc.py --check    exit with 1 if one of them is not up to date
"""

from __future__ import annotations

import argparse
import html
import json
import math
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
CHART = ROOT / "docs" / "performance.svg"

Result = dict[str, Any]

HEADER = """\
# Performance

<!-- Written by scripts/make_performance_doc.py from benchmarks/results/*.json; measure again to change it. -->

Every figure here comes from a file in [benchmarks/results](../benchmarks/results) that holds all single readings,
the machine, the versions and the commands. Absolute figures change with the machine and with its neighbours, so both
sides of a ratio are measured in turns in one run, and a ratio is one of medians. A limit is what the machine allows
at most, by its read bandwidth and its peak of multiply-adds, both measured between the readings it stands beside.
Results from a Zen 5 of commits before f6111eb (2026-11-29) have a peak of bf16 that was measured about 7% too low,
and so limits of prompts and full batches that are too easily reached.
"""

HOW = """
## How to measure

```bash
python scripts/make_random_model.py /tmp/qwen2-0.5b
python scripts/make_random_model.py /tmp/tiny-5m --preset tiny-5m
python benchmarks/compare_servers.py --model /tmp/qwen2-0.5b --tiny-model /tmp/tiny-5m \\
    --peer-program VLLM/bin/vllm --json benchmarks/results/servers.json
python benchmarks/compare_servers.py --tiny-model /tmp/tiny-5m --peer null --json benchmarks/results/null.json
python scripts/make_random_model.py /tmp/qwen2-0.5b-w8a8 --weights w8a8
python scripts/make_random_model.py /tmp/qwen2-0.5b-w4 --weights w4a16
python benchmarks/compare_servers.py --w8a8-model /tmp/qwen2-0.5b-w8a8 --w4-model /tmp/qwen2-0.5b-w4 \\
    --peer-program VLLM/bin/vllm --json benchmarks/results/quantized.json
python benchmarks/compare_offline.py --model /tmp/qwen2-0.5b --peer-model OPENVINO_DIR \\
    --json benchmarks/results/offline.json
python benchmarks/compare_clients.py --model /tmp/qwen2-0.5b --peer-program VLLM/bin/vllm \\
    --json benchmarks/results/clients.json
python benchmarks/compare_adapters.py --model /tmp/qwen2-0.5b --peer-program VLLM/bin/vllm \\
    --json benchmarks/results/adapters.json
python benchmarks/roofline.py --json benchmarks/results/roofline.json
python scripts/make_performance_doc.py
```

The models have random weights: only their shapes matter. Nothing else should run meanwhile; `--note` keeps what did.
Both servers are given the same flags, the same prompts and the same client, which is `ascend-vllm bench serve`'s.
vLLM is bound to every core and gets tcmalloc where the system has it. A single row is measured with `--rows c8`, ours
alone with `--peer none`; the rows `open-ttft` and `open-gap` take five minutes for each server and round, or as long
as `--open-s` says. Larger shapes are measured by `--rows load c1` on the presets `qwen2-1.5b`, `qwen2-3b` and
`qwen2-7b` of `make_random_model.py`. `--peer null` is this server with a device that answers at once. With AMX vLLM
rounds the inputs of W4A16 to 8 bits: `--peer-variables VLLM_CPU_INT4_W4A8=0` keeps it from that, and
`--ours-args=--cpu-int8-activations` has ours do it too. A comparison of servers holds for the other project's client
too as far as `compare_clients.py` finds their figures equal.

`make bench-gate BASE=COMMIT` says in some minutes whether the working tree is slower than a commit, in
kernels, in the engine's host time, and in servers of a tiny and of a 0.5B model. Both are measured in turns; a row
has fallen if the working tree is slower by more than the commit's own readings differ.
"""

_ROOFLINE_TEXT = """\
A kernel's limit is the time to read its operands once, or that of its multiplications and additions at the peak,
whichever is longer. Weights come from memory, as in decoding: calls go round among copies that do not fit into the
caches. The share compares medians of both; "best" the fastest call with the highest limits of the run.
"""


def load_results(directory: pathlib.Path) -> list[Result]:
    """All results, newest first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.glob("*.json"))]
    return sorted(found, key=lambda result: str(result["machine"]["date"]), reverse=True)


def _number(value: float | None, unit: str = "") -> str:
    if value is None:
        return ""
    text = f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{text} {unit}".rstrip()


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _target(row: Result) -> str:
    (name, value), *_ = row["target"].items()
    text = f"{'at least' if name == 'ratio_at_least' else 'at most'} {value:g}"
    if (most := row["target"].get("at_most")) is not None:
        text += f", and {_number(most, row['unit'])}"
    met = row["meets_target"]
    return text if met is None else f"{text}: {'met' if met else 'missed'}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|" for cells in (heads, *rows)]
    lines.insert(1, "|" + "---|" * len(heads))
    return "\n".join(lines) + "\n"


def _machine(result: Result) -> str:
    """A paragraph on what was measured, where and when."""
    machine = result["machine"]
    lines = [
        f"{machine['cpu']} ({', '.join(machine['flags'])}), {machine['cores']} cores, {machine['memory_gib']:g} GiB, "
        f"Linux {machine['kernel']}, torch {machine['torch']}; {machine['date'][:10]}, commit {machine['commit']}, "
        f"load average at the start {machine['load_average'][0]:g}."
    ]
    if result["note"]:
        lines.append(f"**{result['note']}**")
    return "\n\n".join(lines) + "\n"


def _processor(result: Result) -> str:
    """The processor's description, which distinguishes results of different machines."""
    machine = result["machine"]
    return f"{machine['cpu']}, kernels for {machine['kernels_isa']}"


def _sizes(result: Result) -> str:
    """The lengths and numbers of requests."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in result["sizes"].items())


def _limits(rows: Sequence[Result]) -> str:
    """The range of the machine's limits during the measurement."""
    readings = [reading for row in rows for reading in row["machine_limits"]]
    if not readings:
        return ""
    parts = []
    names = {"bandwidth_gb_s": "GB/s read", "fp32_gflop_s": "GFLOP/s fp32 FMA", "bf16_gflop_s": "GFLOP/s bf16"}
    for name, unit in names.items():
        values = [reading[name] for reading in readings]
        if max(values) > 0:
            parts.append(f"{min(values):.0f} to {max(values):.0f} {unit}")
    return f"\nLimits measured between the readings: {', '.join(parts)}.\n"


def _versus(result: Result) -> Iterator[str]:
    """The section of a comparison of two programs."""
    programs, rows = result["programs"], result["rows"]
    names = [f"{programs[side]['name']} {programs[side]['version']}" for side in programs]
    peer = names[1] if len(names) > 1 else "peer"
    yield f"\n### {' and '.join(names)}: {_processor(result)}\n\n"
    yield _machine(result)
    yield f"\nMedians of {result['rounds']}; {_sizes(result)}.\n\n"
    yield _table(
        ["what", names[0], peer, "ratio", "target", "limit", "of the limit"],
        [
            [
                row["title"],
                _number(row["ours"], row["unit"]),
                _number(row["peer"], row["unit"]),
                _number(row["ratio"]),
                _target(row),
                _number(row["limit"], row["unit"]),
                _percent(row["share_of_limit"]),
            ]
            for row in rows
        ],
    )
    yield _limits(rows)
    commands = dict.fromkeys(command for side in programs.values() for command in side["commands"].values())
    yield "\n```text\n" + "\n".join([result["command"], *commands]) + "\n```\n"


def _roofline(result: Result) -> Iterator[str]:
    """The section of the kernels and their limits."""
    yield f"\n### Kernels in {result['dtype']}, {result['threads']} threads: {_processor(result)}\n\n"
    yield _machine(result)
    limits, highest = result["limits"], result["highest_limits"]
    alone = [
        f"{limit['bandwidth_gb_s']:.0f} GB/s read and {limit['bf16_gflop_s'] or limit['fp32_gflop_s']:.0f} GFLOP/s "
        f"with {threads} thread{'s' if threads != '1' else ''}"
        for threads, limit in limits.items()
    ]
    yield (
        f"\nBefore the kernels: {', '.join(alone)}; the highest of the run: {highest['bandwidth_gb_s']:.0f} GB/s and "
        f"{highest['bf16_gflop_s'] or highest['fp32_gflop_s']:.0f} GFLOP/s. The peak is that of {result['peak']}.\n\n"
    )
    yield _table(
        ["kernel", "operands", "median", "GB/s", "GFLOP/s", "limited by", "share", "best"],
        [
            [
                row["kernel"],
                row["label"],
                f"{row['median_us']:,.0f} µs",
                f"{row['gb_s']:.1f}",
                f"{row['gflop_s']:.1f}",
                row["limited_by"],
                _percent(row["share"]),
                _percent(row["best_share"]),
            ]
            for row in result["results"]
        ],
    )
    yield f"\n```text\n{result['command']}\n```\n"


_CLIENTS_TEXT = """\
One server, loaded in turns by `ascend-vllm bench serve`, which loaded both servers above, and `vllm bench serve`.
"""

_CLIENT_FIGURES = {
    "output_throughput": ("output throughput", "tok/s"),
    "median_ttft_ms": ("time to the first token", "ms"),
    "median_tpot_ms": ("time per output token", "ms"),
    "median_e2el_ms": ("latency", "ms"),
}


def _clients(result: Result) -> Iterator[str]:
    """The section of a comparison of two clients on one server."""
    peer = f"vllm {result['peer_version']}"
    yield f"\n### ascend-vllm {result['machine']['ascend_vllm']} and {peer}: {_processor(result)}\n\n"
    yield _machine(result)
    yield f"\nMedians of {result['rounds']}; {_sizes(result)}.\n\n"
    yield _table(
        ["what", "ascend-vllm", peer, "ratio"],
        [
            [
                title,
                _number(result["figures"][name]["ours"], unit),
                _number(result["figures"][name]["peer"], unit),
                "" if result["figures"][name]["ratio"] is None else f"{result['figures'][name]['ratio']:.3f}",
            ]
            for name, (title, unit) in _CLIENT_FIGURES.items()
        ],
    )
    yield f"\n```text\n{result['command']}\n```\n"


_ADAPTERS_TEXT = """\
This project's server with --enable-lora, beside the same one without it, which is asked for the model as it is, or
beside vLLM with the same adapters.
"""


def _adapters(result: Result) -> Iterator[str]:
    """The section of a measurement of LoRA adapters."""
    programs = result["programs"]
    names = ", ".join(f"{side} {program['version']}" for side, program in programs.items())
    yield f"\n### {names}: {_processor(result)}\n\n"
    yield _machine(result)
    yield f"\nMedians of {result['rounds']}; {_sizes(result)}.\n\n"
    yield _table(
        ["what", "ours", "beside it", "ratio", "target"],
        [
            [
                row["title"],
                _number(row["ours"], row["unit"]),
                _number(row["peer"], row["unit"]),
                _number(row["ratio"]),
                _target(row),
            ]
            for row in result["rows"]
        ],
    )
    commands = [program["command"] for program in programs.values()]
    yield "\n```text\n" + "\n".join([result["command"], *commands]) + "\n```\n"


_SECTIONS = (
    ("servers", "Servers", "", _versus),
    ("adapters", "LoRA adapters", _ADAPTERS_TEXT, _adapters),
    ("clients", "What two clients say of one server", _CLIENTS_TEXT, _clients),
    ("offline", "Offline, static batches", "", _versus),
    ("roofline", "Kernels and the machine's limits", _ROOFLINE_TEXT, _roofline),
)


def render(results: Sequence[Result]) -> str:
    """The page.

    Args:
        results: the newest first.
    """
    parts = [HEADER]
    if not results:
        parts.append("\nNo result is kept yet.\n")
    if _charted(results) is not None:
        parts.append(f"\n![How many times better than the peer, row by row]({CHART.name})\n")
    for kind, title, text, section in _SECTIONS:
        chosen = [result for result in results if result["kind"] == kind]
        if chosen:
            parts.append(f"\n## {title}\n" + (f"\n{text}" if text else ""))
            for result in chosen:
                parts += section(result)
    return "".join(parts) + HOW


# ---- the chart -----------------------------------------------------------------------------------------------

_WIDTH, _LABELS, _RIGHT, _ROW, _TOP = 860, 330, 90, 30, 74
_AHEAD, _BEHIND, _TARGET, _TEXT, _GRID = "#1f6feb", "#c2410c", "#111827", "#1f2937", "#d1d5db"


def _charted(results: Sequence[Result]) -> Result | None:
    """The newest comparison with another server in the row c8."""
    for result in results:
        if result["kind"] == "servers" and any(row["name"] == "c8" and row["ratio"] for row in result["rows"]):
            return result
    return None


def _times_better(row: Result, ratio: float) -> float:
    return ratio if row["better"] == "higher" else 1 / ratio


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 13, colour: str = _TEXT) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">'
        f"{html.escape(text)}</text>\n"
    )


def chart(results: Sequence[Result]) -> str | None:
    """The chart of each row's ratio to the peer's, on a logarithmic scale; None: there is no peer.

    Args:
        results: the newest first.
    """
    result = _charted(results)
    if result is None:
        return None
    rows = [row for row in result["rows"] if row["ratio"] is not None]
    values = [_times_better(row, row["ratio"]) for row in rows]
    targets = [_times_better(row, next(iter(row["target"].values()))) for row in rows]
    low = min(-1, math.floor(min(math.log2(value) for value in (*values, *targets))))
    high = max(1, math.ceil(max(math.log2(value) for value in (*values, *targets))))

    def x_of(value: float) -> float:
        return _LABELS + (math.log2(value) - low) / (high - low) * (_WIDTH - _LABELS - _RIGHT)

    height = _TOP + _ROW * len(rows) + 16
    programs = result["programs"]
    title = f"{programs['ours']['name']} against {programs['peer']['name']} {programs['peer']['version']}"
    about = f"{_processor(result)}, {result['machine']['cores']} cores, {result['machine']['date'][:10]}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">\n',
        f"<title>{html.escape(title)}</title>\n",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>\n',
        _text(16, 24, f"{title}: times better", size=16),
        _text(16, 44, f"{about}; bars: medians of {result['rounds']}, ticks: targets", size=12),
    ]
    for power in range(low, high + 1):
        x, label = x_of(2.0**power), f"{2**power}×" if power >= 0 else f"1/{2**-power}×"
        colour = _TEXT if power == 0 else _GRID
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{height - 12}" stroke="{colour}"/>\n')
        parts.append(_text(x, _TOP - 8, label, anchor="middle", size=12))
    for index, (row, value, target) in enumerate(zip(rows, values, targets, strict=True)):
        parts.append(_bar(_TOP + index * _ROW, row, value, x_of(1), x_of(value), x_of(target)))
    return "".join(parts) + "</svg>\n"


def _bar(y: float, row: Result, value: float, x_one: float, x_value: float, x_target: float) -> str:
    left, width = min(x_one, x_value), abs(x_value - x_one)
    colour = _AHEAD if value >= 1 else _BEHIND
    short = row["title"] if len(row["title"]) <= 50 else row["title"][:49] + "…"
    shown = f"{value:.2f}×"
    return (
        _text(_LABELS - 10, y + 19, short, anchor="end", size=12)
        + f'<rect x="{left:.1f}" y="{y + 5}" width="{width:.1f}" height="{_ROW - 10}" fill="{colour}"/>\n'
        + f'<line x1="{x_target:.1f}" y1="{y + 2}" x2="{x_target:.1f}" y2="{y + _ROW - 2}" stroke="{_TARGET}" '
        'stroke-width="3"/>\n' + _text(_WIDTH - _RIGHT + 10, y + 19, shown, size=13, colour=colour)
    )


def main() -> int:
    """Writes or checks both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is out of date")
    args = parser.parse_args()
    results = load_results(RESULTS)
    wanted = {PAGE: render(results), CHART: chart(results)}
    stale = [path for path, text in wanted.items() if (path.read_text() if path.is_file() else None) != text]
    if not args.check:
        for path, text in wanted.items():
            if text is None:
                path.unlink(missing_ok=True)
            else:
                path.write_text(text, encoding="utf-8")
        return 0
    for path in stale:
        print(f"{path} is out of date: run scripts/make_performance_doc.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
