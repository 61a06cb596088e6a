"""OpenTelemetry traces: one span per request, under the names that vLLM gives its attributes.

The packages are an optional extra. They are imported only with --otlp-traces-endpoint, and spans leave the process in
batches, on a thread of their own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ascend_vllm import envs
from ascend_vllm.engine.metrics import FinishedRequest
from ascend_vllm.sampling_params import SamplingParams

# W3C Trace Context: headers that name the caller's trace
TRACE_HEADERS = ("traceparent", "tracestate")

_NS_PER_S = 1_000_000_000


def trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Those of a request's headers that name the caller's trace."""
    return {name: headers[name] for name in TRACE_HEADERS if name in headers}


class RequestTracer:
    """Exports a span for each request that ends.

    Args:
        endpoint: address of a collector.

    Raises:
        ConfigError: OTEL_EXPORTER_OTLP_TRACES_PROTOCOL names an unknown protocol.
    """

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # `shutdown` ends it, not an exit handler
        self._provider = TracerProvider(shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_make_exporter(endpoint)))
        self._tracer = self._provider.get_tracer("ascend_vllm.llm_engine")

    def record(
        self,
        request_id: str,
        params: SamplingParams,
        finished: FinishedRequest,
        num_generation_tokens: int,
        headers: Mapping[str, str] | None,
    ) -> None:
        """Records the span of a request that ends now.

        Args:
            request_id: the caller's id.
            params: of the request.
            finished: its times and its prompt's length.
            num_generation_tokens: of all of its sequences.
            headers: see `trace_headers`.
        """
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(headers) if headers else None
        end_ns = time.time_ns()
        span = self._tracer.start_span(
            "llm_request",
            context,
            SpanKind.SERVER,
            _attributes(request_id, params, finished, num_generation_tokens),
            start_time=end_ns - int(finished.e2e_s * _NS_PER_S),
        )
        span.end(end_ns)

    def shutdown(self) -> None:
        """Sends buffered spans; nothing can be recorded afterwards."""
        self._provider.shutdown()


def _attributes(
    request_id: str, params: SamplingParams, finished: FinishedRequest, num_generation_tokens: int
) -> dict[str, str | int | float]:
    """vLLM's attributes, without those of events that never happened, such as a first token."""
    first_token_s = None
    if finished.queue_s is not None and finished.prefill_s is not None:
        first_token_s = finished.queue_s + finished.prefill_s
    values = {
        "gen_ai.latency.time_to_first_token": first_token_s,
        "gen_ai.latency.e2e": finished.e2e_s,
        "gen_ai.latency.time_in_queue": finished.queue_s,
        "gen_ai.latency.time_in_model_prefill": finished.prefill_s,
        "gen_ai.latency.time_in_model_decode": finished.decode_s,
        "gen_ai.latency.time_in_model_inference": finished.inference_s,
        "gen_ai.usage.prompt_tokens": finished.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": num_generation_tokens,
        "gen_ai.request.id": request_id,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": finished.max_tokens,
        "gen_ai.request.n": finished.n,
    }
    return {name: value for name, value in values.items() if value is not None}


def _make_exporter(endpoint: str) -> Any:
    """The exporter for the protocol in `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`."""
    if envs.otlp_traces_protocol() == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=endpoint)
