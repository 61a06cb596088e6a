"""The monitoring examples ask for metrics that a server has, and a real Prometheus evaluates them."""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator

import httpx
import msgspec
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ascend_vllm.config.speculation import SpeculativeConfig, SpeculativeMethod
from ascend_vllm.engine.metrics import EngineMetrics
from tests.engine.engine_for_tests import make_config
from tests.server import ROOT, Server, free_port, wait_until

MONITORING = ROOT / "examples" / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
# panels of a server that drafts tokens; those of others show 0
OF_DRAFTS = {expression for expression in EXPRESSIONS if "vllm:spec_decode_" in expression}
VARIABLES = [variable["query"] for variable in DASHBOARD["templating"]["list"]]
# what Grafana puts in place of its variables
GRAFANA = {"$model_name": "tiny", "$__rate_interval": "1m"}

needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs the prometheus program")


def test_every_panel_shows_a_metric_of_the_server(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2}).raise_for_status()
    speculation = SpeculativeConfig(SpeculativeMethod.NGRAM, 2)
    drafting = EngineMetrics(msgspec.structs.replace(make_config(), speculation=speculation))
    of_drafts = [line for line in generate_latest(drafting.registry).decode().splitlines(True) if "spec_de" in line]
    samples = {
        sample.name: set(sample.labels)
        for text in (http.get("/metrics").text, "".join(of_drafts))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    expressions = EXPRESSIONS + VARIABLES
    asked = {name for expression in expressions for name in re.findall(r"vllm:\w+", expression)}
    assert len(asked) > 10
    assert asked <= samples.keys()
    for expression in expressions:
        (label,) = re.findall(r"by\((\w+)\)", expression) or ["model_name"]
        assert all(label in samples[name] for name in re.findall(r"vllm:\w+", expression))
    positions = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(positions)) == len(positions)


def test_prometheus_scrapes_the_default_port(http: httpx.Client) -> None:
    (job,) = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["localhost:8000"]}]
    assert http.get(job["metrics_path"]).status_code == 200


@pytest.fixture
def prometheus(openai_server: Server, tmp_path: pathlib.Path) -> Iterator[httpx.Client]:
    """A Prometheus with the example's configuration, but for the server's address and the interval."""
    config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    config["global"] |= {"scrape_interval": "500ms", "scrape_timeout": "500ms"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{openai_server.port}"]}]
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    flags = [f"--config.file={tmp_path}/prometheus.yaml", f"--storage.tsdb.path={tmp_path}/data"]
    flags += [f"--web.listen-address={address}", "--log.level=warn"]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(["prometheus", *flags], stdout=log, stderr=subprocess.STDOUT) as process,
        httpx.Client(base_url=f"http://{address}/api/v1", timeout=30) as client,
    ):
        try:
            assert wait_until(lambda: num_scrapes(client) >= 2, 60), (tmp_path / "log").read_text()
            yield client
        finally:
            process.terminate()


def query(prometheus: httpx.Client, expression: str) -> list[float]:
    """The values of an expression now."""
    for variable, value in GRAFANA.items():
        expression = expression.replace(variable, value)
    answer = prometheus.get("/query", params={"query": expression})
    assert answer.status_code == 200, (expression, answer.text)
    return [float(result["value"][1]) for result in answer.json()["data"]["result"]]


def num_scrapes(prometheus: httpx.Client) -> float:
    """How often the server was scraped in the last minute; 0 while Prometheus starts."""
    with contextlib.suppress(httpx.TransportError):
        answer = prometheus.get("/query", params={"query": "sum(sum_over_time(up[1m]))"})
        if answer.status_code == 200 and answer.json()["data"]["result"]:
            return float(answer.json()["data"]["result"][0]["value"][1])
    return 0.0


@needs_prometheus
def test_prometheus_evaluates_every_panel(prometheus: httpx.Client, http: httpx.Client) -> None:
    """Each panel has numbers while the server idles, and true ones after a request."""
    assert VARIABLES == ["label_values(vllm:num_requests_running, model_name)"]
    models = prometheus.get("/label/model_name/values", params={"match[]": "vllm:num_requests_running"}).json()
    assert models["data"] == ["tiny"]
    # the server has had other requests, but none since the first of these scrapes
    idle = {expression: query(prometheus, expression) for expression in EXPRESSIONS}
    before = num_scrapes(prometheus)
    http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 8, "ignore_eos": True}).raise_for_status()
    assert wait_until(lambda: num_scrapes(prometheus) >= before + 2, 30)
    busy = {expression: query(prometheus, expression) for expression in EXPRESSIONS}
    for values in (idle, busy):
        wrong = [name for name, found in values.items() if not found or not all(map(math.isfinite, found))]
        assert not wrong
    assert OF_DRAFTS
    for expression in OF_DRAFTS:
        assert (idle[expression], busy[expression]) == ([0], [0]), expression
    for expression in set(EXPRESSIONS) - OF_DRAFTS:
        if "seconds_bucket" in expression or "_tokens_total" in expression:
            assert (idle[expression], min(busy[expression]) > 0) == ([0], True), expression
