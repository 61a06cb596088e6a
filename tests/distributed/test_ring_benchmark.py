"""The benchmark of the ring runs, and measures what it says."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.server import ROOT


def test_both_ways_are_measured() -> None:
    command = [sys.executable, "benchmarks/bench_ring.py", "--workers", "2", "--requests", "16", "--steps", "20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    result = json.loads(done.stdout)
    assert (result["workers"], result["requests"]) == (2, 16)
    for way in ("ring", "pickle_and_pipes"):
        for times in result[way].values():
            assert times["send_us"] > 0
            assert times["all_us"] > 0
    assert result["decode_bytes"] < result["decode_and_grow_bytes"]
