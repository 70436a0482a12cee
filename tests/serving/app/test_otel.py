"""OpenTelemetry: spans as its SDK keeps them, the caller's trace goes on, and what is said where it is missing."""

import sys

import pytest

from headrace.serving.app.otel import OtelSink, open_tracer, traces_url
from headrace.serving.core.errors import ConfigError
from headrace.serving.edge.tracing import RequestTrace, Span

TRACE = RequestTrace(
    root=Span(name="chat m", start_ns=1000, end_ns=9000, attributes={"gen_ai.usage.input_tokens": 3}),
    spans=(Span(name="edge", start_ns=1000, end_ns=2000), Span(name="decode", start_ns=3000, end_ns=4000)),
    headers={"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
    error="engine_lost",
)


def test_spans_have_their_times_and_the_callers_trace() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import SpanKind, StatusCode

    exporter = InMemorySpanExporter()
    sink = OtelSink(SimpleSpanProcessor(exporter))
    sink.record(TRACE)
    sink.record(RequestTrace(root=TRACE.root, spans=(), headers={"traceparent": "nonsense"}))
    edge, decode, root, other = exporter.get_finished_spans()
    assert (root.name, root.kind, root.start_time, root.end_time) == ("chat m", SpanKind.SERVER, 1000, 9000)
    assert root.context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert root.parent is not None and root.parent.span_id == 0xB7AD6B7169203331
    assert root.status.status_code is StatusCode.ERROR and root.status.description == "engine_lost"
    assert dict(root.attributes or {}) == {"gen_ai.usage.input_tokens": 3}
    assert (edge.name, edge.parent, decode.start_time, decode.end_time) == ("edge", root.context, 3000, 4000)
    assert other.parent is None and other.status.status_code is StatusCode.UNSET
    assert root.resource.attributes["service.name"] == "headrace"
    sink.close()


def test_without_the_packages_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[otel\]'"):
        open_tracer("http://localhost:4318")


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
        ("https://x.example/otlp/v1/traces", "https://x.example/otlp/v1/traces"),
    ],
)
def test_a_bare_host_gets_the_path_of_traces(given: str, url: str) -> None:
    assert traces_url(given) == url


@pytest.mark.parametrize("given", ["localhost:4318", "grpc://x:4317", "http://", ""])
def test_what_is_no_url_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="no http URL"):
        traces_url(given)
