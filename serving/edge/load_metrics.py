"""What autoscalers ask: how much work there is, how long it waits, what is refused. For /v1/load and /metrics."""

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.serving.core.tenant_policy import Budget
from headrace.serving.edge.admission import AdmissionControl
from headrace.serving.edge.expert_metrics import EngineReports
from headrace.serving.edge.http_json import JsonObject


class LoadMetrics:
    """The same figures as ``load_document``, without tenants: labels must stay few."""

    def __init__(self, admission: AdmissionControl, engine: EngineReports) -> None:
        self._admission = admission
        self._engine = engine

    def metrics(self) -> Iterator[Metric]:
        admission, stats = self._admission, self._engine.stats
        delay_ms = admission.queue_delay_ms()
        if delay_ms is not None:
            yield _gauge("queue_delay_seconds", "Wait for a first token, by estimate.", delay_ms / 1000)
        objective_ms = admission.config.first_token_ms
        if objective_ms is not None:
            yield _gauge("first_token_objective_seconds", "Beyond it requests are refused.", objective_ms / 1000)
        used = GaugeMetricFamily("budget_used", "What accepted requests hold.", labels=("budget",))
        limits = GaugeMetricFamily("budget_limit", "Most that they may hold.", labels=("budget",))
        for budget in Budget:
            used.add_metric((budget.value,), admission.budgets.used(budget))
            limit = admission.config.limits.of(budget)
            if limit is not None:
                limits.add_metric((budget.value,), limit)
        yield used
        yield limits
        yield _gauge(
            "tenants_waiting", "Tenants with a request that waits.", len(admission.backlog.waiting_by_tenant())
        )
        yield _gauge("decode_step_seconds", "Of a decode step, lately; 0 while unknown.", stats.decode_step_ms / 1000)
        yield CounterMetricFamily(
            "unread_at_deadline",
            "Answers whose deadline passed before the client had read them.",
            value=admission.num_unread_at_deadline,
        )


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def load_document(admission: AdmissionControl, engine: EngineReports, *, tenant: str, now_s: float) -> JsonObject:
    """tenant: who asks. Names of other tenants only where its policy says so."""
    stats, backlog, budgets = engine.stats, admission.backlog, admission.budgets
    held = stats.pages_total - stats.pages_free - stats.pages_cached
    waiting = backlog.waiting_by_tenant()
    policy = admission.policies.of(tenant)
    document: JsonObject = {
        "queue_delay_ms": _rounded(admission.queue_delay_ms()),
        "first_token_objective_ms": admission.config.first_token_ms,
        "retry_after_ms": budgets.retry_after_ms(Budget.QUEUED_REQUESTS, 1, now_s),
        "sequences": {"active": backlog.num_running, "waiting": backlog.num_waiting},
        "tenants_waiting": len(waiting),
        "tokens": {
            "queued_prompt": budgets.used(Budget.QUEUED_TOKENS),
            "in_flight": budgets.used(Budget.TOKENS_IN_FLIGHT),
            "in_flight_per_second": _rounded(budgets.per_second(Budget.TOKENS_IN_FLIGHT)),
        },
        "pages": {
            "total": stats.pages_total,
            "held": held,
            "cached": stats.pages_cached,
            "free": stats.pages_free,
            "occupancy": held / stats.pages_total if stats.pages_total else 0.0,
        },
        "speed": {"decode_step_ms": stats.decode_step_ms, "prefill_token_ms": stats.prefill_token_ms},
        "deadline_misses": {"engine": stats.deadline_misses, "unread": admission.num_unread_at_deadline},
        "preemptions": stats.preemptions,
        "refusals": dict(sorted(admission.refusals.items())),
        "budgets": {
            budget.value: {"used": budgets.used(budget), "limit": admission.config.limits.of(budget)}
            for budget in Budget
        },
        "tenant": {
            "name": tenant,
            "waiting": waiting.get(tenant, 0),
            "budgets": {
                budget.value: {"used": budgets.used(budget, tenant), "limit": policy.limits.of(budget)}
                for budget in Budget
            },
        },
    }
    if policy.sees_tenants:
        document["tenants"] = {
            name: {
                "waiting": waiting.get(name, 0),
                "used": {budget.value: budgets.used(budget, name) for budget in Budget},
            }
            for name in sorted(budgets.tenants)
        }
    return document


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
