"""Admission through the service: what is counted, when it is given back, and what each refusal says."""

import asyncio
from dataclasses import dataclass

import pytest

from headrace.serving.core.rate_limit import Rate
from headrace.serving.core.request import CancelReason, FinishReason, Priority, Rejection, RejectionReason, Request
from headrace.serving.core.tenant_policy import Budget, BudgetLimits, TenantPolicy
from headrace.serving.edge.engine_client import Sink
from headrace.serving.edge.errors import ApiError
from headrace.serving.edge.generation import Delta, Done, Failure
from headrace.serving.edge.job import Job
from headrace.serving.edge.load_metrics import load_document
from headrace.serving.edge.service import Service, ServiceConfig
from headrace.serving.edge.shared_prefixes import SharedPrefixes
from headrace.serving.edge.terms import Terms
from headrace.serving.engine.messages import Stats
from tests.serving.edge.fakes import EOS, VOCAB_SIZE, ByteTokenizer, FakeEngine, LineTemplate
from tests.serving.edge.test_service import SlowTokenizer


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


# What is counted


async def test_a_request_is_counted_before_it_is_tokenized_and_corrected_after() -> None:
    tokenizer = SlowTokenizer()
    bench = Bench(tokenizer=tokenizer)
    starting = asyncio.create_task(bench.start("é" * 20))
    await asyncio.to_thread(tokenizer.entered.wait)
    assert bench.used() == {
        "streams": 1, "queued_requests": 1, "queued_tokens": 41, "tokens_in_flight": 49, "pages": 3,
    }  # fmt: skip
    tokenizer.go_on.set()
    await starting
    assert bench.used()["queued_tokens"] == 40
    bench.engine.step()
    assert bench.used() == {
        "streams": 1, "queued_requests": 0, "queued_tokens": 0, "tokens_in_flight": 48, "pages": 3,
    }  # fmt: skip


@pytest.mark.parametrize("how", ["ends", "cancelled", "engine refuses", "engine lost", "invalid", "given up", "unread"])
async def test_everything_is_given_back_exactly_once_however_it_goes(how: str) -> None:
    tokenizer = SlowTokenizer() if how == "given up" else ByteTokenizer()
    bench = Bench(tokenizer=tokenizer)
    engine = bench.engine
    if how == "invalid":
        await bench.refused("a", logit_bias={"9999": 1})
        await bench.refused("a" * 300)
        await bench.refused("")
    elif how == "given up":
        assert isinstance(tokenizer, SlowTokenizer)
        starting = asyncio.create_task(bench.start("a"))
        await asyncio.to_thread(tokenizer.entered.wait)
        starting.cancel()
        await asyncio.wait([starting])
        tokenizer.go_on.set()
    else:
        job = await bench.start(["a", "bc"], deadline_ms=1000)
        assert bench.used()["streams"] == 2
        if how == "ends":
            for _ in range(20):
                engine.step()
        elif how == "cancelled":
            job.cancel(CancelReason.CLIENT)
        elif how == "engine refuses":
            for request in list(engine.submitted):
                engine.refuse(request.request_id, Rejection(reason=RejectionReason.QUEUE_FULL, message="full"))
        elif how == "engine lost":
            engine.die()
        else:
            engine.step()
            bench.clock.now_s += 2
            assert all(isinstance(generation.take(), Failure) for generation in job.generations)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert bench.is_clean()


async def test_an_engine_that_takes_no_more_gets_nothing_counted() -> None:
    class TakesOne(FakeEngine):
        def submit(self, request: Request, sink: Sink) -> None:
            if self.submitted:
                self.die()
            super().submit(request, sink)

    bench = Bench(TakesOne(auto=False))
    with pytest.raises(ApiError):
        await bench.start(["a", "b"])
    await asyncio.sleep(0)
    assert bench.is_clean()


# Limits


@pytest.mark.parametrize(
    ("limits", "code", "status", "number"),
    [
        ({"streams": 1}, "too_many_streams", 429, "1 live streams"),
        ({"queued_requests": 1}, "queue_full", 429, "1 requests that wait"),
        ({"queued_tokens": 8}, "queue_full", 429, "8 prompt tokens"),
        ({"tokens_in_flight": 20}, "rate_limited", 429, "20 tokens in flight"),
        ({"pages": 1}, "rate_limited", 429, "1 pages"),
    ],
)
async def test_a_tenants_own_limits(limits: dict[str, int], code: str, status: int, number: str) -> None:
    bench = Bench(policies={"t": TenantPolicy(limits=BudgetLimits(**limits))})
    await bench.start()
    error = await bench.refused()
    assert (error.code, error.status) == (code, status)
    assert number in error.message and "this key" in error.message and "etry" in error.message
    assert error.headers()["retry-after"]
    await bench.start(tenant="other")


@pytest.mark.parametrize(
    ("config", "code", "status"),
    [
        ({"max_streams": 1}, "overloaded", 503),
        ({"max_tokens_in_flight": 20}, "overloaded", 503),
        ({"max_live_pages": 1}, "overloaded", 503),
        ({"max_queued_requests": 1}, "queue_full", 429),
        ({"max_queued_prompt_tokens": 8}, "queue_full", 429),
    ],
)
async def test_limits_of_the_server(config: dict[str, int], code: str, status: int) -> None:
    bench = Bench(**config)
    await bench.start(tenant="a")
    error = await bench.refused(tenant="b")
    assert (error.code, error.status) == (code, status)
    assert "the server" in error.message
    assert error.retry_after_ms
    assert bench.load()["refusals"] == {code: 1}


async def test_what_never_fits_a_limit_gets_a_remedy_and_no_hint() -> None:
    bench = Bench(policies={"t": TenantPolicy(limits=BudgetLimits(tokens_in_flight=100))})
    error = await bench.refused("a" * 95)
    assert (error.code, error.retry_after_ms) == ("rate_limited", None)
    assert "needs 103 tokens in flight" in error.message and "lower max_tokens" in error.message
    await bench.start("a" * 91)


async def test_output_is_reckoned_as_it_was_before() -> None:
    bench = Bench(FakeEngine(auto=False, reply=b"abc"))
    for _ in range(3):
        await bench.start("x", max_tokens=100)
        assert bench.used()["tokens_in_flight"] in (101, 5)
        for _ in range(4):
            bench.engine.step()
    await bench.start("x", max_tokens=100)
    assert bench.used()["tokens_in_flight"] == 5
    await bench.start("x", max_tokens=100, tenant="new")
    assert bench.used()["tokens_in_flight"] == 5 + 101


async def test_rates_of_requests_and_of_tokens() -> None:
    policy = TenantPolicy(requests=Rate(2.0, 2), tokens=Rate(10.0, 100))
    bench = Bench(policies={"t": policy})
    await bench.start([[1] * 10])
    await bench.start([[1] * 10])
    error = await bench.refused([[1]])
    assert (error.code, error.status, error.retry_after_ms) == ("rate_limited", 429, 500)
    assert "2 requests a second, and 2 at once" in error.message
    bench.clock.now_s += 1
    error = await bench.refused([[1] * 80])
    assert "10 tokens a second" in error.message
    assert error.retry_after_ms == pytest.approx(1000 * (88 - (100 - 36 + 10)) / 10, abs=1)
    # Of the second request only what it really was is paid in the end: 10 + 1 instead of 10 + 8.
    bench.engine.step()
    bench.engine.finish(bench.engine.submitted[0].request_id, FinishReason.CANCELLED)
    assert (await bench.refused([[1] * 80])).retry_after_ms == pytest.approx(700, abs=1)
    await bench.start([[1]], tenant="another")


# Deadlines and objectives


async def test_weight_priority_and_the_rest_of_the_deadline_go_to_the_engine() -> None:
    policy = TenantPolicy(weight=3.0, max_priority=Priority.NORMAL, deadline_ms=5000)
    bench = Bench(policies={"t": policy, "late": TenantPolicy(max_priority=Priority.LOW)})
    await bench.start()
    await bench.start(priority=Priority.LOW, deadline_ms=700)
    await bench.start(tenant="late")
    one, two, three = bench.engine.submitted
    assert (one.weight, one.priority, one.deadline_ms) == (3.0, Priority.NORMAL, 5000)
    assert (two.priority, two.deadline_ms) == (Priority.LOW, pytest.approx(700))
    assert (three.weight, three.priority, three.deadline_ms) == (1.0, Priority.LOW, None)
    error = await bench.refused(priority=Priority.HIGH)
    assert (error.status, error.param) == (400, "priority")
    assert "normal, low" in error.message


async def test_time_before_the_engine_counts() -> None:
    bench = Bench()
    terms = Terms(arrival_s=bench.clock.now_s - 0.3, deadline_ms=1000)
    await bench.service.start("completion", {"prompt": "a"}, terms=terms)
    assert bench.engine.submitted[0].deadline_ms == pytest.approx(700)
    with pytest.raises(ApiError) as caught:
        await bench.service.start("completion", {"prompt": "a"}, terms=Terms(arrival_s=0.0, deadline_ms=1000))
    assert (caught.value.code, caught.value.status) == ("deadline_exceeded", 504)


async def test_preparation_is_given_up_at_the_deadline() -> None:
    tokenizer = SlowTokenizer()
    bench = Bench(tokenizer=tokenizer)
    error = await bench.refused(deadline_ms=30)
    assert error.code == "deadline_exceeded"
    tokenizer.go_on.set()
    assert bench.is_clean()


async def test_a_deadline_that_cannot_be_met_is_refused_before_rendering() -> None:
    """Nothing is entered: the tokenizer never sees the text."""
    tokenizer = SlowTokenizer()
    bench = Bench(MeasuredEngine(auto=False), tokenizer=tokenizer)
    error = await bench.refused("text", min_tokens=8, deadline_ms=79)
    assert (error.code, error.status, error.param) == ("deadline_unmeetable", 503, "deadline_ms")
    assert error.retry_after_ms is None and "idle server" in error.message
    assert not tokenizer.entered.is_set()
    tokenizer.go_on.set()
    await bench.start([[1] * 2], min_tokens=8, deadline_ms=83)
    assert (await bench.refused([[1] * 2], min_tokens=8, deadline_ms=81)).code == "deadline_unmeetable"
    assert bench.is_clean() is False


async def test_work_ahead_counts_and_leaves_a_hint() -> None:
    bench = Bench(MeasuredEngine(auto=False))
    for _ in range(4):
        await bench.start([[1] * 10], max_tokens=100, tenant="t")
    bench.engine.step()
    # Four rows are taken for 99 more steps of 10 ms.
    error = await bench.refused([[1] * 10], deadline_ms=500, max_tokens=1)
    assert error.code == "deadline_unmeetable"
    assert error.retry_after_ms == pytest.approx(1010 - 500, abs=10)
    await bench.start([[1] * 10], deadline_ms=1100, max_tokens=1)


async def test_nothing_is_refused_by_estimate_while_nothing_was_measured() -> None:
    engine = MeasuredEngine(auto=False)
    engine.speed = (0.0, 0.0)  # type: ignore[misc]
    bench = Bench(engine, first_token_ms=1)
    for _ in range(20):
        await bench.start(deadline_ms=600_000, min_tokens=8)
    assert bench.load()["queue_delay_ms"] is None


async def test_beyond_the_objective_for_first_tokens_requests_are_refused() -> None:
    bench = Bench(MeasuredEngine(auto=False), first_token_ms=300)
    for _ in range(4):
        await bench.start([[1] * 10], max_tokens=20)
    bench.engine.step()
    await bench.start([[1] * 10], max_tokens=20)
    assert bench.load()["queue_delay_ms"] > 190
    for _ in range(3):
        await bench.start([[1] * 10], max_tokens=20)
    error = await bench.refused([[1] * 10], max_tokens=20)
    assert (error.code, error.status) == ("overloaded", 503)
    assert "objective is 300 ms" in error.message
    assert error.retry_after_ms
    assert bench.load()["first_token_objective_ms"] == 300


async def test_a_prompt_that_is_late_on_an_idle_server_is_served_all_the_same() -> None:
    bench = Bench(MeasuredEngine(auto=False), first_token_ms=50)
    await bench.start([[1] * 200])


async def test_output_that_the_client_does_not_read_in_time_is_not_given_later() -> None:
    bench = Bench(FakeEngine(auto=False, reply=b"abc"))
    job = await bench.start(deadline_ms=1000, max_tokens=2)
    [generation] = job.generations
    bench.engine.step()
    assert isinstance(generation.take(), Delta)
    bench.engine.step()
    bench.clock.now_s += 1.001
    failure = generation.take()
    assert isinstance(failure, Failure)
    assert (failure.error.code, failure.error.status) == ("deadline_exceeded", 504)
    assert generation.take() is None
    assert bench.load()["deadline_misses"] == {"engine": 0, "unread": 1}


async def test_output_in_the_making_is_stopped_at_the_deadline_when_it_is_asked_for() -> None:
    bench = Bench()
    job = await bench.start(deadline_ms=1000)
    bench.engine.step()
    bench.clock.now_s += 1.5
    assert isinstance(job.generations[0].take(), Failure)
    assert bench.engine.cancels == [(job.generations[0].request.request_id, CancelReason.DEADLINE)]
    bench.engine.step()
    assert job.generations[0].take() is None


# The cache


async def test_generate_false_computes_the_prompt_and_gives_nothing() -> None:
    bench = Bench(FakeEngine())
    job = await bench.start("warm me", generate=False, max_tokens=50, min_tokens=3, logprobs=2)
    [generation] = job.generations
    await generation.wait_end()
    request, done = bench.engine.submitted[0], generation.take()
    assert (request.stop.max_tokens, request.stop.min_tokens, request.sampling.num_logprobs) == (1, 0, None)
    assert isinstance(done, Done)
    assert (done.finish_reason, done.stop_reason) == ("length", None)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (7, 0)
    assert bench.is_clean()


async def test_generate_false_of_a_model_that_would_end_at_once_ends_the_same_way() -> None:
    bench = Bench(FakeEngine(reply=b""))
    job = await bench.start("warm me", generate=False)
    await job.generations[0].wait_end()
    done = job.generations[0].take()
    assert isinstance(done, Done)
    assert (done.finish_reason, done.stop_reason) == ("length", None)


async def test_declared_prefixes_are_shared_and_nothing_else() -> None:
    prefixes = SharedPrefixes((tuple(b"You are"), tuple(b"You are kind. "), tuple(b"Manual")))
    bench = Bench(prefixes=prefixes)
    for prompt in ("You are kind. Say", "You are ki", "Man", "Other", "xYou are"):
        await bench.start(prompt, tenant="t")
    await bench.start("You are kind. Say", tenant="u")
    assert [r.shared_prefix_tokens for r in bench.engine.submitted] == [14, 10, 3, 0, 0, 14]
    first, other, last = bench.engine.submitted[0], bench.engine.submitted[3], bench.engine.submitted[5]
    assert first.shared_namespace == last.shared_namespace != b""
    assert other.shared_namespace == b""
    assert first.cache_namespace != last.cache_namespace
    assert first.shared_namespace not in (first.cache_namespace, last.cache_namespace)


# /v1/load


async def test_load_names_other_tenants_only_to_whom_may_see_them() -> None:
    bench = Bench(policies={"boss": TenantPolicy(sees_tenants=True)})
    await bench.start(tenant="secret-customer")
    await bench.start(tenant="t")
    mine = bench.load("t")
    assert "secret-customer" not in str(mine)
    assert mine["tenants_waiting"] == 2
    assert (mine["tenant"]["name"], mine["tenant"]["waiting"]) == ("t", 1)
    assert mine["budgets"]["streams"] == {"used": 2, "limit": None}
    assert bench.load("boss")["tenants"]["secret-customer"]["waiting"] == 1
