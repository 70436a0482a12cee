"""Prometheus metrics, under our own prefix and, where vLLM has the same quantity, under its names too.

Gauges are read from live state at each scrape, so they are right without traffic. Counters of requests and tokens
are counted here, at the edge, as usage is: they survive an engine restart. Counters that the engine owns start anew
with each engine; what the dead ones had counted is added. No label holds anything that a client sent.
"""

import asyncio
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from headrace.serving.core.request import CancelReason, FinishReason
from headrace.serving.edge.engine_counters import STEP_TOKENS, EngineCounters
from headrace.serving.edge.errors import ERROR_TABLE, ErrorCode
from headrace.serving.edge.expert_metrics import EngineReports, expert_metrics
from headrace.serving.edge.generation import Done, Failure, Generation
from headrace.serving.edge.job import Job
from headrace.serving.engine.lifecycle import EngineState
from headrace.serving.engine.messages import STEP_TOKEN_BOUNDS, Ready, Stats

OWN = "headrace_"
VLLM = "vllm:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# vLLM's bounds, so that its dashboards and recording rules fit (seconds, tokens).
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
NEXT_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

FINISHED_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "abort"}
OLD_NAMES = {
    "inter_token_latency_seconds": "time_per_output_token_seconds",
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
}
"""What older versions of vLLM called them; dashboards still do."""
CHOICES = (1, 2, 5, 10, 20)
CANCELLED_BY = tuple(reason for reason in CancelReason if reason is not CancelReason.STOP_STRING)
PROBE_STATES = ("unrecorded", "pending", "passed", "failed")


class EngineView(EngineReports, Protocol):
    """Live state of the engine as the metrics read it."""

    @property
    def in_flight(self) -> int: ...


ENGINE_COUNTERS: tuple[tuple[str, str, str, bool], ...] = (
    ("prefix_cache_queries", "prefix_queries_tokens", "Prompt tokens looked up in the prefix cache.", True),
    ("prefix_cache_hits", "prefix_hits_tokens", "Prompt tokens found in the prefix cache.", True),
    ("num_preemptions", "preemptions", "Times that a request lost its pages: swapped, or computed again.", True),
    ("deadline_misses", "deadline_misses", "Accepted requests that their deadline ended in the engine.", False),
    ("engine_steps", "steps", "Steps of the engine.", False),
    ("engine_generated_tokens", "generation_tokens", "Tokens sampled, those behind a stop string included.", False),
    ("engine_device_seconds", "device_seconds", "Seconds spent in steps on the device.", False),
    ("engine_host_seconds", "host_seconds", "Seconds spent by the host for steps.", False),
    ("compiles_after_ready", "compiles_after_ready", "Programs compiled while serving; each is a defect.", False),
)
"""(metric without prefix, field of Stats, help, whether vLLM has it too)."""


def _engine_gauges(stats: Stats, ready: Ready | None) -> Iterator[Metric]:
    """As the engine last reported. Pages of host memory hold the KV of preempted requests."""
    page_bytes = 0 if ready is None else ready.kv_bytes_per_token * ready.page_size
    for name, text, value in (
        ("swap_pages_total", "Pages of host memory for preempted requests.", stats.swap_pages_total),
        ("swap_pages_used", "Those that hold one.", stats.swap_pages_used),
        ("swap_bytes_used", "The same in bytes.", stats.swap_pages_used * page_bytes),
        ("queued_prompt_tokens", "Prompt tokens of requests that wait in the engine.", stats.queued_prompt_tokens),
        ("prefill_token_seconds", "What a prompt token adds to a step, lately.", stats.prefill_token_ms / 1000),
    ):
        yield GaugeMetricFamily(name, text, value=value)
    if stats.journal_bytes is not None:
        yield GaugeMetricFamily("journal_bytes", "Size of the journal.", value=stats.journal_bytes)
        is_up = float(not stats.journal_stopped)
        yield GaugeMetricFamily("journal_up", "1 while the journal is written, 0 once it has stopped.", value=is_up)


class Metrics(Collector):
    """One set per server, in a registry of its own."""

    def __init__(self, model_name: str, engine: EngineView) -> None:
        self._engine = engine
        self._labels = {"model_name": model_name, "engine": "0"}
        self._counters = EngineCounters([field for _, field, _, _ in ENGINE_COUNTERS])
        self._sources: list[Callable[[], Iterator[Metric]]] = []
        self._shared: list[Counter | Histogram] = []
        self._own: list[Counter | Gauge | Histogram] = []
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_S)
        self._next_token = self._histogram("inter_token_latency_seconds", "Gap between two tokens.", NEXT_TOKEN_S)
        self._whole = self._histogram("e2e_request_latency_seconds", "Admission to the end.", REQUEST_S)
        self._queue = self._histogram("request_queue_time_seconds", "Submitted to running.", REQUEST_S)
        self._prefill = self._histogram("request_prefill_time_seconds", "Running to first token.", REQUEST_S)
        self._decode = self._histogram("request_decode_time_seconds", "First token to the last.", REQUEST_S)
        self._prompt_sizes = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._output_sizes = self._histogram("request_generation_tokens", "Output tokens of a request.", TOKENS)
        self._computed_sizes = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt, less what was cached.", TOKENS
        )
        self._max_tokens = self._histogram("request_params_max_tokens", "Tokens that a choice may have.", TOKENS)
        self._longest = self._histogram("request_max_num_generation_tokens", "Tokens of a choice.", TOKENS)
        self._choices = self._histogram("request_params_n", "Choices of a request.", CHOICES)
        self._inference = self._histogram("request_inference_time_seconds", "Running to the end.", REQUEST_S)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean gap of tokens of a request.", NEXT_TOKEN_S
        )
        self._cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests.")
        self._output_tokens = self._counter("generation_tokens", "Output tokens, as in usage.")
        self._finished = self._counter("request_success", "Ended requests by how they ended.", "finished_reason")
        for reason in (*FINISHED_REASONS.values(), "error"):
            self._finished.labels(reason)
        self._accepted = self._own_counter("requests_accepted", "Requests given to the engine.")
        self._refusals = self._own_counter("requests_refused", "Requests refused before the engine.", "code")
        self._failures = self._own_counter("requests_failed", "Accepted requests that ended in an error.", "code")
        self._cancels = self._own_counter("requests_cancelled", "Requests ended from outside, by why.", "by")
        for by in CANCELLED_BY:
            self._cancels.labels(by.value)
        self._probe_runs = self._own_counter("probe_runs", "Runs of the readiness probe by result.", "result")
        self._probe_state = self._own_gauge("probe_state", "1 for the state of the readiness probe.", "state")
        self.probe_is("unrecorded")
        self.ws_connections = self._own_gauge("ws_connections", "Open native WebSockets.")
        self.ws_streams = self._own_gauge("ws_streams_active", "Live streams on native WebSockets.")
        self.ws_waiting_bytes = self._own_gauge("ws_send_queue_bytes", "Bytes of writes that sockets have not taken.")
        self.ws_stalled_seconds = self._own_counter("ws_send_stall_seconds", "Time in writes that clients held up.")
        self.ws_closes = self._own_counter("ws_closes", "Closed native WebSockets by close code.", "code")
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    # What happens

    def add(self, source: Callable[[], Iterator[Metric]]) -> None:
        """Metrics from elsewhere, asked for at each scrape; they get our prefix and labels."""
        self._sources.append(source)

    def accepted(self) -> None:
        self._accepted.inc()

    def started(self, job: Job) -> None:
        """A whole request, with all of its choices."""
        self._choices.observe(len(job.generations))
        for generation in job.generations:
            self._max_tokens.observe(generation.request.stop.max_tokens)

    def cancelled(self, reason: CancelReason) -> None:
        """The engine is told to stop. A stop string found by the edge is an end like any other."""
        if reason in CANCELLED_BY:
            self._cancels.labels(reason.value).inc()

    def refused(self, code: str) -> None:
        self._refusals.labels(_known(code)).inc()

    def first_token(self, seconds: float) -> None:
        self._output_tokens.inc()
        self._first_token.observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._output_tokens.inc()
        self._next_token.observe(seconds)

    def probe_ran(self, result: str) -> None:
        self._probe_runs.labels(result).inc()

    def probe_is(self, status: str) -> None:
        """status: one of PROBE_STATES."""
        for state in PROBE_STATES:
            self._probe_state.labels(state).set(state == status)

    def ended(self, generation: Generation, outcome: Done | Failure, now_s: float) -> None:
        """Exactly once per accepted request."""
        self._update()
        prompt_tokens = len(generation.request.prompt_ids)
        self._prompt_tokens.inc(prompt_tokens)
        self._whole.observe(now_s - generation.created_s)
        if isinstance(outcome, Failure):
            self._finished.labels("error").inc()
            self._failures.labels(_known(outcome.error.code)).inc()
            return
        self._finished.labels(FINISHED_REASONS[outcome.finish_reason]).inc()
        self._prompt_sizes.observe(prompt_tokens)
        self._output_sizes.observe(generation.completion_tokens)
        self._longest.observe(generation.completion_tokens)
        self._cached_tokens.inc(outcome.usage.cached_tokens)
        self._computed_sizes.observe(prompt_tokens - outcome.usage.cached_tokens)
        timings = outcome.timings
        self._queue.observe(timings.queue_ms / 1000)
        self._prefill.observe(timings.prefill_ms / 1000)
        self._decode.observe(timings.decode_ms / 1000)
        self._inference.observe((timings.prefill_ms + timings.decode_ms) / 1000)
        if generation.completion_tokens > 1:
            self._per_token.observe(timings.decode_ms / 1000 / (generation.completion_tokens - 1))

    # Scraping

    def exposition(self) -> bytes:
        """Everything in Prometheus's text format (CONTENT_TYPE)."""
        return generate_latest(self._registry)

    def _update(self) -> None:
        """Before what the engine counted may be lost with it."""
        self._counters.update(self._engine)

    def collect(self) -> Iterator[Metric]:
        self._update()
        for kept in self._shared:
            for metric in kept.collect():
                yield self._prefixed(metric, OWN)
                yield from self._as_vllm(metric)
        for own in self._own:
            for metric in own.collect():
                yield self._prefixed(metric, OWN)
        for name, field, text, is_shared in ENGINE_COUNTERS:
            counter = CounterMetricFamily(name, text, value=self._counters.total(field))
            yield self._prefixed(counter, OWN)
            if is_shared:
                yield self._prefixed(counter, VLLM)
        steps = self._step_tokens()
        yield self._prefixed(steps, OWN)
        yield self._prefixed(steps, VLLM)
        for own_metric in (*expert_metrics(self._counters.expert_tokens), *self._engine.preemptions.metrics()):
            yield self._prefixed(own_metric, OWN)
        for source in self._sources:
            for found in source():
                yield self._prefixed(found, OWN)
        for gauge, is_shared in self._gauges():
            yield self._prefixed(gauge, OWN)
            if is_shared:
                yield from self._as_vllm(gauge)

    def _gauges(self) -> Iterator[tuple[Metric, bool]]:
        """A request that the edge has given up counts no more, whatever the engine last reported."""
        engine, stats, ready = self._engine, self._engine.stats, self._engine.ready_info
        in_flight = engine.in_flight
        running = min(stats.running, in_flight)
        yield GaugeMetricFamily("num_requests_running", "Requests in the step.", value=running), True
        yield GaugeMetricFamily("num_requests_waiting", "Requests that wait.", value=in_flight - running), True
        held = stats.pages_total - stats.pages_free - stats.pages_cached
        used = held / stats.pages_total if stats.pages_total and in_flight else 0.0
        yield GaugeMetricFamily("kv_cache_usage_perc", "Share of pages that requests hold, 0 to 1.", value=used), True
        yield from ((gauge, False) for gauge in _engine_gauges(stats, ready))
        yield (
            GaugeMetricFamily("kv_pages_cached", "Pages that hold a prefix for reuse only.", value=stats.pages_cached),
            False,
        )
        # As the engine last reported, whatever the edge knows: a leak shows here.
        yield GaugeMetricFamily("kv_pages_held", "Pages that requests hold.", value=held), False
        tasks = len(asyncio.all_tasks())
        yield GaugeMetricFamily("event_loop_tasks", "Tasks of the edge's event loop.", value=tasks), False
        is_up = float(engine.state is EngineState.READY)
        yield GaugeMetricFamily("engine_up", "1 while the engine is ready.", value=is_up), False
        restarts = float(engine.num_restarts)
        yield GaugeMetricFamily("engine_restarts", "Times that the engine was started again.", value=restarts), False
        if ready is not None:
            info = GaugeMetricFamily(
                "cache_config_info", "Sizes of the cache.", labels=("block_size", "num_gpu_blocks")
            )
            info.add_metric((str(ready.page_size), str(ready.num_lanes * ready.num_pages)), 1)
            yield info, True

    def _step_tokens(self) -> Metric:
        """Non-cumulative counts and the sum, as the engine has them, in Prometheus's form."""
        *counts, total = self._counters.vector(STEP_TOKENS) or (0.0,) * (len(STEP_TOKEN_BOUNDS) + 2)
        bounds = (*map(str, STEP_TOKEN_BOUNDS), "+Inf")
        buckets = list(zip(bounds, accumulate(counts), strict=True))
        return HistogramMetricFamily("iteration_tokens_total", "Tokens of a step.", buckets=buckets, sum_value=total)

    def _as_vllm(self, metric: Metric) -> Iterator[Metric]:
        yield self._prefixed(metric, VLLM)
        if metric.name in OLD_NAMES:
            yield self._prefixed(_renamed(metric, OLD_NAMES[metric.name]), VLLM)

    def _prefixed(self, metric: Metric, prefix: str) -> Metric:
        renamed = Metric(prefix + metric.name, metric.documentation, metric.type)
        renamed.samples = [
            Sample(prefix + sample.name, {**self._labels, **sample.labels}, sample.value)
            for sample in metric.samples
            if not sample.name.endswith("_created")
        ]
        return renamed

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        made = Histogram(name, text, buckets=bounds, registry=None)
        self._shared.append(made)
        return made

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        made = Counter(name, text, labels, registry=None)
        self._shared.append(made)
        return made

    def _own_counter(self, name: str, text: str, *labels: str) -> Counter:
        made = Counter(name, text, labels, registry=None)
        self._own.append(made)
        return made

    def _own_gauge(self, name: str, text: str, *labels: str) -> Gauge:
        made = Gauge(name, text, labels, registry=None)
        self._own.append(made)
        return made


def _renamed(metric: Metric, name: str) -> Metric:
    renamed = Metric(name, metric.documentation, metric.type)
    renamed.samples = [s._replace(name=name + s.name.removeprefix(metric.name)) for s in metric.samples]
    return renamed


def _known(code: str) -> str:
    """The engine's own error codes are free text to us; labels stay a closed set."""
    return code if code in _CODES else ErrorCode.INTERNAL.value


_CODES = frozenset(code.value for code in ERROR_TABLE)
