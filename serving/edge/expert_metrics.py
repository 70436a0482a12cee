"""The experts' load as Prometheus metrics: tokens by layer and expert, and how uneven each layer is."""

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

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


class ExpertLoad:
    """Counters over restarts of the engine, as it last reported them."""

    def __init__(self) -> None:
        self._epoch = 0
        self._base: ExpertTokens = ()
        self._last: ExpertTokens = ()

    def update(self, engine: EngineReports) -> None:
        if engine.state is EngineState.DEAD or engine.ready_info is None:
            return
        if engine.num_restarts != self._epoch:
            self._epoch, self._base, self._last = engine.num_restarts, self.totals(), ()
        if engine.stats.expert_tokens is not None:
            self._last = engine.stats.expert_tokens

    def totals(self) -> ExpertTokens:
        """By layer and expert; empty without experts."""
        if not self._base or not self._last:
            return self._base or self._last
        pairs = zip(self._base, self._last, strict=True)
        return tuple(tuple(map(sum, zip(base, last, strict=True))) for base, last in pairs)

    def metrics(self) -> Iterator[Metric]:
        """Nothing without experts; without tokens no imbalance."""
        totals = self.totals()
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
