"""The experts' load as Prometheus metrics: tokens by layer and expert, and how uneven each layer is."""

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.serving.edge.preemption_counts import PreemptionCounts
from headrace.serving.engine.lifecycle import EngineState
from headrace.serving.engine.messages import Ready, Stats
from headrace.serving.engine.ports import ExpertTokens

MAX_SERIES = 1024
"""Of tokens by layer and expert. A scrape runs on the event loop that streams, and 1,024 series took it 21 ms (best of
20, on two cores with other work). Models with more (gpt-oss-120b has 4,608) have the imbalance of each layer only."""


class EngineReports(Protocol):
    """What counters are told of the engine."""

    @property
    def state(self) -> EngineState: ...
    @property
    def ready_info(self) -> Ready | None: ...
    @property
    def stats(self) -> Stats: ...
    @property
    def num_restarts(self) -> int: ...
    @property
    def preemptions(self) -> PreemptionCounts: ...


def expert_metrics(totals: ExpertTokens) -> Iterator[Metric]:
    """totals: by layer and expert, over all engines. Nothing without experts; without tokens no imbalance."""
    if not totals:
        return
    if len(totals) * len(totals[0]) <= MAX_SERIES:
        tokens = CounterMetricFamily("expert_tokens", "Tokens sent to each expert.", labels=("layer", "expert"))
        for layer, counts in enumerate(totals):
            for expert, count in enumerate(counts):
                tokens.add_metric((str(layer), str(expert)), count)
        yield tokens
    uneven = GaugeMetricFamily(
        "expert_imbalance",
        "Tokens of a layer's busiest expert over the mean of its experts.",
        labels=("layer",),
    )
    for layer, counts in enumerate(totals):
        if any(counts):
            uneven.add_metric((str(layer),), max(counts) * len(counts) / sum(counts))
    yield uneven
