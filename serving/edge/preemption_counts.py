"""Preemptions by reason and action, as the events of all engines told them."""

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, Metric

from headrace.serving.core.events import Preempted, PreemptionAction, PreemptionReason


class PreemptionCounts:
    """Counted where the events arrive, so that they survive the engine."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[PreemptionReason, PreemptionAction]] = Counter()
        self._pages: Counter[PreemptionAction] = Counter()

    def add(self, events: Iterable[Preempted]) -> None:
        for event in events:
            self._requests[event.reason, event.action] += 1
            self._pages[event.action] += event.num_pages

    def metrics(self) -> Iterator[Metric]:
        """Every pair is there from the start, at 0."""
        requests = CounterMetricFamily(
            "preemptions", "Running requests that had to make way.", labels=("reason", "action")
        )
        pages = CounterMetricFamily("preempted_pages", "Pages that preempted requests held.", labels=("action",))
        for action in PreemptionAction:
            pages.add_metric((action.value,), self._pages[action])
            for reason in PreemptionReason:
                requests.add_metric((reason.value, action.value), self._requests[reason, action])
        yield requests
        yield pages
