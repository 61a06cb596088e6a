"""Traces of requests over gRPC; those over HTTP are tested with the server."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from ascend_vllm.engine.output_processor import OutputProcessor
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.engine.tracing import RequestTracer, trace_headers
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.messages import FinishReason
from tests.engine.engine_for_tests import FakeEngine


class GrpcCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector of OpenTelemetry traces."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def Export(self, request: Any, _context: Any) -> Any:  # noqa: N802 - the service's name
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def stop(self) -> None:
        self._server.stop(0).wait()


@pytest.fixture
def collector() -> Iterator[GrpcCollector]:
    collector = GrpcCollector()
    yield collector
    collector.stop()


def test_spans_of_requests_that_ended(
    collector: GrpcCollector, byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", raising=False)
    engine = FakeEngine(byte_level)
    engine.output = OutputProcessor(byte_level, tracer=RequestTracer(f"http://127.0.0.1:{collector.port}"))
    for request_id in ("whole", "aborted", "open"):
        engine.add(SamplingParams(max_tokens=5), request_id, {"prompt_token_ids": [5, 6, 7]}, arrival_time=10.0)
    engine.give([8], "whole", now=10.5, first_scheduled_time=10.25)
    engine.give([8, 9], "whole", now=11.5, finish_reason=FinishReason.LENGTH)
    engine.output.abort("aborted", engine.stats)
    # sends buffered spans; a second call does nothing
    engine.output.shutdown()
    engine.output.shutdown()
    spans = {}
    for span in collector.spans:
        found = {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}
        spans[found["gen_ai.request.id"]] = (span, found)
    assert sorted(spans) == ["aborted", "whole"]
    span, found = spans["whole"]
    assert (span.name, span.parent_span_id) == ("llm_request", b"")
    times = {
        "e2e": 1.5,
        "time_in_queue": 0.25,
        "time_to_first_token": 0.5,
        "time_in_model_prefill": 0.25,
        "time_in_model_decode": 1.0,
        "time_in_model_inference": 1.25,
    }
    assert {name: found[f"gen_ai.latency.{name}"] for name in times} == times
    assert span.end_time_unix_nano - span.start_time_unix_nano == 1_500_000_000
    assert (found["gen_ai.usage.prompt_tokens"], found["gen_ai.usage.completion_tokens"]) == (3, 3)
    # events that never happened have no attributes
    assert "gen_ai.latency.time_to_first_token" not in spans["aborted"][1]


def test_headers_of_a_trace() -> None:
    headers = {"traceparent": "00-a-b-01", "tracestate": "x=1", "authorization": "secret"}
    assert trace_headers(headers) == {"traceparent": "00-a-b-01", "tracestate": "x=1"}
    assert trace_headers({}) == {}
