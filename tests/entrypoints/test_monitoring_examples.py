"""The monitoring examples ask for metrics that a server has."""

from __future__ import annotations

import json
import re

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.server import ROOT

MONITORING = ROOT / "examples" / "monitoring"


def test_every_panel_shows_a_metric_of_the_server(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2}).raise_for_status()
    samples = {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for sample in family.samples
    }
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [variable["query"] for variable in dashboard["templating"]["list"]]
    asked = {name for expression in expressions for name in re.findall(r"vllm:\w+", expression)}
    assert len(asked) > 10
    assert asked <= samples.keys()
    for expression in expressions:
        (label,) = re.findall(r"by\((\w+)\)", expression) or ["model_name"]
        assert all(label in samples[name] for name in re.findall(r"vllm:\w+", expression))
    positions = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(positions)) == len(positions)


def test_prometheus_scrapes_the_default_port(http: httpx.Client) -> None:
    (job,) = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["localhost:8000"]}]
    assert http.get(job["metrics_path"]).status_code == 200
