"""The fairness benchmark runs on a tiny model, has the right rows and detects a pause."""

from __future__ import annotations

import json
import pathlib

import pytest

from tests.benchmark_modules import load_benchmark
from tests.tiny_models import tiny_model


def test_rows_beside_a_victim(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = load_benchmark("bench_fairness")
    words = [
        "--model",
        tiny_model("qwen2"),
        "--rows",
        "pages",
        "abandoned",
        "--seconds",
        "1.5",
        "--quiet-seconds",
        "1",
    ]
    words += ["--server-args", "--kv-cache-memory-bytes 16M", "--json", str(tmp_path / "r.json")]
    monkeypatch.setattr("sys.argv", ["bench_fairness.py", *words])
    # times do not matter here, since other tests run at the same time
    monkeypatch.setattr(program, "ALLOWED_S", 30.0)
    program.main()
    content = json.loads((tmp_path / "r.json").read_text())
    abandoned, pages = content["rows"]
    assert (abandoned["name"], pages["name"]) == ("abandoned", "pages") and pages["is_fair"] and abandoned["is_fair"]
    assert pages["attacker"]["statuses"].keys() == {"200", "404"} and pages["failures"] == {}
    assert sum(abandoned["attacker"]["statuses"].values()) > 10
    for row in (pages, abandoned):
        for work in ("completion", "health"):
            assert row[work]["num_attacked"] > 5
            assert 0 < row[work]["attacked"]["p50_ms"] <= row[work]["attacked"]["p99_ms"]


def test_a_pause_is_unfair() -> None:
    """A server that pauses for a second delays everything due in that second, not one answer."""
    program = load_benchmark("bench_fairness")
    quiet = program.Sample({}, {"completion": [0.02] * 100, "health": [0.01] * 200}, {})
    late = program.Sample({}, {"completion": [0.02] * 90 + [0.9] * 10, "health": [0.01] * 200}, {})
    (attack, *_) = load_benchmark("fairness.attacks").ATTACKS
    attacker = {"statuses": {"200": 3}}
    for sample, fair in ((quiet, True), (late, False)):
        result = program.RowResult(attack, quiet, sample, 0.0, attacker, [])
        assert result.is_fair is fair and attack.name in result.line()
    assert result.allowed_ms("completion") == pytest.approx(310)
    assert not program.RowResult(attack, quiet, quiet, 0.0, attacker, ["the server ended"]).is_fair


def test_every_row_can_be_sent() -> None:
    """All requests are complete, except for the row with unfinished ones."""
    attacks = load_benchmark("fairness.attacks").ATTACKS
    attacker = load_benchmark("fairness.attacker").Attacker
    assert len({attack.name for attack in attacks}) == len(attacks)
    for attack in attacks:
        assert hasattr(attacker, f"_{attack.how}"), attack.name
        for request in attack.make():
            head, _, body = request.partition(b"\r\n\r\n")
            length = int(head.partition(b"Content-Length: ")[2].partition(b"\r")[0] or 0)
            assert len(body) == length or attack.name == "connections", attack.name
