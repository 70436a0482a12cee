"""A service with a clock of the test's own, policies by tenant, and an engine that says how fast it is."""

from dataclasses import dataclass

import pytest

from headrace.serving.core.tenant_policy import Budget, TenantPolicy
from headrace.serving.edge.errors import ApiError
from headrace.serving.edge.job import Job
from headrace.serving.edge.load_metrics import load_document
from headrace.serving.edge.service import Service, ServiceConfig
from headrace.serving.edge.shared_prefixes import SharedPrefixes
from headrace.serving.edge.terms import Terms
from headrace.serving.engine.messages import Stats
from tests.serving.edge.fakes import EOS, VOCAB_SIZE, ByteTokenizer, FakeEngine, LineTemplate


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class OnePolicyEach:
    policies: dict[str, TenantPolicy]

    def of(self, tenant: str) -> TenantPolicy:
        return self.policies.get(tenant, TenantPolicy())


class MeasuredEngine(FakeEngine):
    """With step times: 10 ms a decode step, 1 ms a prompt token, four rows."""

    speed = (10.0, 1.0)

    @property
    def stats(self) -> Stats:
        return Stats(decode_step_ms=self.speed[0], prefill_token_ms=self.speed[1], pages_total=64, pages_free=60)


class Bench:
    def __init__(
        self,
        engine: FakeEngine | None = None,
        policies: dict[str, TenantPolicy] | None = None,
        *,
        tokenizer: ByteTokenizer | None = None,
        prefixes: SharedPrefixes | None = None,
        **config: object,
    ) -> None:
        self.clock = Clock()
        self.engine = engine or FakeEngine(auto=False)
        values: dict[str, object] = {"model_names": ("fake",), "vocab_size": VOCAB_SIZE, "eos_ids": (EOS,)}
        self.service = Service(
            ServiceConfig(**{**values, **config}),  # type: ignore[arg-type]
            engine=self.engine,
            tokenizer=tokenizer or ByteTokenizer(),  # type: ignore[arg-type]
            template=LineTemplate(),  # type: ignore[arg-type]
            policies=OnePolicyEach(policies or {}),
            shared_prefixes=prefixes,
            clock=self.clock,
        )

    async def start(self, prompt: object = "hello", *, tenant: str = "t", **options: object) -> Job:
        """options: of Terms, where they belong there; else of the body."""
        terms = {name: options.pop(name) for name in ("deadline_ms", "priority") if name in options}
        return await self.service.start(
            "completion",
            {"prompt": prompt, "max_tokens": 8, **options},
            tenant=tenant,
            terms=Terms(arrival_s=self.clock.now_s, **terms),  # type: ignore[arg-type]
        )

    async def refused(self, prompt: object = "hello", **options: object) -> ApiError:
        before = len(self.engine.submitted)
        with pytest.raises(ApiError) as caught:
            await self.start(prompt, **options)
        assert len(self.engine.submitted) == before
        return caught.value

    def used(self) -> dict[str, int]:
        return {budget.value: self.service.admission.budgets.used(budget) for budget in Budget}

    def is_clean(self) -> bool:
        control = self.service.admission
        return not any(self.used().values()) and not control._choices and not control.backlog.num_waiting

    def load(self, tenant: str = "t") -> dict:
        return load_document(self.service.admission, self.engine, tenant=tenant, now_s=self.clock())
