"""Traces as OpenTelemetry spans, sent by OTLP over HTTP; needs the extra ``otel``."""

import threading
from collections.abc import Callable
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from headrace.serving.core.errors import ConfigError
from headrace.serving.edge.tracing import RequestTrace, Span

REMEDY = "--otlp-endpoint needs OpenTelemetry: pip install 'headrace[otel]'"
TRACES_PATH = "/v1/traces"
MAX_QUEUED_SPANS = 4096
"""Spans that wait to be sent; what is beyond is dropped, as where nobody answers."""
SEND_TIMEOUT_S = 5.0
CLOSE_S = 3.0


def traces_url(endpoint: str) -> str:
    """The path that OTLP has for traces is added to a bare host. Raises: ConfigError."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--otlp-endpoint {endpoint} is no http URL; write it like http://localhost:4318")
    return endpoint if parts.path not in ("", "/") else endpoint.rstrip("/") + TRACES_PATH


def open_tracer(endpoint: str) -> "OtelSink":
    """Spans go to a collector at endpoint in batches, from a thread. Raises: ConfigError naming the remedy."""
    url = traces_url(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(REMEDY) from None
    exporter = OTLPSpanExporter(endpoint=url, timeout=SEND_TIMEOUT_S)
    return OtelSink(BatchSpanProcessor(exporter, max_queue_size=MAX_QUEUED_SPANS))


class OtelSink:
    """A ``TraceSink``. Sampling and resource attributes come from OpenTelemetry's own settings (OTEL_…)."""

    def __init__(self, processor: Any) -> None:
        """processor: a SpanProcessor of the SDK. Raises: ConfigError without the SDK."""
        try:
            from opentelemetry import trace as api
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise ConfigError(REMEDY) from None
        resource = Resource.create({"service.name": "headrace", "service.version": version("headrace")})
        self._api: Any = api
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("headrace", version("headrace"))
        self._extract: Callable[..., Any] = TraceContextTextMapPropagator().extract

    def record(self, trace: RequestTrace) -> None:
        """See ``TraceSink``."""
        api = self._api
        root = self._start(trace.root, self._extract(dict(trace.headers)), api.SpanKind.SERVER)
        if trace.error is not None:
            root.set_status(api.Status(api.StatusCode.ERROR, trace.error))
        inside = api.set_span_in_context(root)
        for span in trace.spans:
            self._start(span, inside, api.SpanKind.INTERNAL).end(end_time=span.end_ns)
        root.end(end_time=trace.root.end_ns)

    def _start(self, span: Span, context: Any, kind: Any) -> Any:
        return self._tracer.start_span(
            span.name, context=context, kind=kind, attributes=dict(span.attributes), start_time=span.start_ns
        )

    def close(self) -> None:
        """Send what waits, for CLOSE_S at most: without a collector the SDK tries each batch for seconds."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True, name="otel-close")
        closing.start()
        closing.join(CLOSE_S)
