"""Admission through the service: what is counted, when it is given back, and what each refusal says."""

import asyncio

import pytest

from headrace.serving.core.rate_limit import Rate
from headrace.serving.core.request import CancelReason, FinishReason, Rejection, RejectionReason, Request
from headrace.serving.core.tenant_policy import BudgetLimits, TenantPolicy
from headrace.serving.edge.engine_client import Sink
from headrace.serving.edge.errors import ApiError
from headrace.serving.edge.generation import Done, Failure
from headrace.serving.edge.shared_prefixes import SharedPrefixes
from tests.serving.edge.admission_bench import Bench
from tests.serving.edge.fakes import ByteTokenizer, FakeEngine
from tests.serving.edge.test_service import SlowTokenizer

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


async def test_many_prompts_in_one_request_are_no_way_around_a_limit() -> None:
    for limits, number in (({"tokens_in_flight": 100}, "144 tokens in flight"), ({"pages": 6}, "9 pages")):
        bench = Bench(policies={"t": TenantPolicy(limits=BudgetLimits(**limits))})
        error = await bench.refused([[1] * 40] * 3)
        assert (error.code, error.retry_after_ms) == ("rate_limited", None)
        assert f"needs {number}" in error.message and "fewer prompts" in error.message
        assert bench.is_clean()
        await bench.start([[1] * 40] * 2)


async def test_many_prompts_that_no_queue_holds_are_not_begun() -> None:
    bench = Bench(max_queued_prompt_tokens=100)
    error = await bench.refused([[1] * 40] * 3)
    assert (error.code, error.status, error.retry_after_ms) == ("queue_full", 429, None)
    assert "needs 120 prompt tokens" in error.message and bench.is_clean()
    await bench.start([[1] * 120])  # A single one passes where nothing waits.


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


async def test_the_bucket_of_tokens_knows_a_prompt_once_it_is_tokenized() -> None:
    bench = Bench(policies={"t": TenantPolicy(tokens=Rate(10.0, 100))})
    await bench.start("x" * 150)  # Nothing says yet how many tokens a byte is.
    assert (await bench.refused("x")).retry_after_ms == pytest.approx(1000 * (10 - (100 - 158)) / 10, abs=1)
    bench.engine.finish(bench.engine.submitted[0].request_id, FinishReason.CANCELLED)
    assert (await bench.refused("x" * 100)).retry_after_ms == pytest.approx(1000 * (100 - (100 - 150)) / 10, abs=1)


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
    lines = bench.service.metrics.exposition().decode().splitlines()
    for name in ("generation_tokens_total", "time_to_first_token_seconds_count"):
        assert [line.split()[-1] for line in lines if line.startswith(f"headrace_{name}{{")] == ["0.0"]
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
