"""From a body to running generations: admission, queue limits, readiness, cancellation before submission."""

import asyncio
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.serving.core.request import CancelReason, Rejection, RejectionReason
from headrace.serving.edge.errors import ApiError
from headrace.serving.edge.fields import Endpoint, table
from headrace.serving.edge.generation import Delta, Done, Failure
from headrace.serving.edge.preparation import cache_namespace
from headrace.serving.edge.service import Service
from headrace.serving.engine.lifecycle import EngineState
from tests.serving.edge.fakes import BOS, CONTEXT, EOS, ByteTokenizer, FakeEngine, LineTemplate, make_service, ready

HI = [{"role": "user", "content": "hi"}]


async def refusal(service: Service, endpoint: Endpoint, **body: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await service.start(endpoint, body)
    return caught.value


async def test_a_completion_from_body_to_done() -> None:
    engine = FakeEngine(reply=b"Hello")
    job = await make_service(engine).start("completion", {"prompt": "hi", "seed": 5}, tenant="t")
    request = engine.submitted[0]
    assert request.prompt_ids == job.prompt_ids(0) == (104, 105)
    assert (request.sampling.seed, request.tenant, request.stop.max_tokens) == (5, "t", 16)
    assert request.stop.stop_token_ids == (EOS,)
    await job.generations[0].wait_end()
    delta, done = job.generations[0].take(), job.generations[0].take()
    assert isinstance(delta, Delta)
    assert delta.text == "Hello"
    assert isinstance(done, Done)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.stop_reason) == (2, 6, EOS)
    assert job.request_id.startswith("req_")
    assert job.model == "fake"


async def test_a_chat_gets_the_rest_of_the_context() -> None:
    engine = FakeEngine()
    job = await make_service(engine).start("chat", {"messages": HI, "model": "alias"})
    rendered = [BOS, *b"user:hi\n", *b"assistant:"]
    assert list(job.prompt_ids(0)) == rendered
    assert engine.submitted[0].stop.max_tokens == CONTEXT - len(rendered)
    assert job.model == "alias"


async def test_what_the_template_does_not_read_is_named() -> None:
    """The tool calls of a mixed history do not vanish in silence where the model knows no tools."""
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    history = [*HI, {"role": "assistant", "content": None, "tool_calls": calls}] * 20
    job = await make_service(FakeEngine()).start("chat", {"messages": [*history[:2], *HI], "max_tokens": 1})
    assert job.options.ignored_fields == ("messages[1].tool_calls",)
    assert (await make_service(FakeEngine()).start("chat", {"messages": HI})).options.ignored_fields == ()
    long = await make_service(FakeEngine(ready_info=ready(max_context=8192, num_pages=600))).start(
        "chat", {"messages": history}
    )
    assert len(long.options.ignored_fields) == 8


async def test_chat_content_is_text_and_a_raw_prompt_is_read_as_it_stands() -> None:
    service = make_service(FakeEngine())
    chat = await service.start("chat", {"messages": [{"role": "user", "content": "<eos>"}]})
    assert EOS not in chat.prompt_ids(0)
    raw = await service.start("completion", {"prompt": "a<eos>b"})
    assert raw.prompt_ids(0) == (97, EOS, 98)


async def test_the_begin_token_is_added_where_the_tokenizer_wants_it() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.add_bos = True
    service = make_service(FakeEngine())
    service = Service(service.config, engine=FakeEngine(), tokenizer=tokenizer, template=LineTemplate())
    assert (await service.start("completion", {"prompt": "a"})).prompt_ids(0) == (BOS, 97)
    assert (await service.start("completion", {"prompt": [97]})).prompt_ids(0) == (97,)


async def test_each_prompt_of_a_list_is_a_choice_with_its_own_seed() -> None:
    engine = FakeEngine()
    job = await make_service(engine).start("completion", {"prompt": ["a", "b", [99]]})
    assert [job.prompt_ids(i) for i in range(3)] == [(97,), (98,), (99,)]
    assert len({request.sampling.seed for request in engine.submitted}) == 3
    assert len({request.request_id for request in engine.submitted}) == 3


@pytest.mark.parametrize(
    ("endpoint", "body", "status", "code", "param"),
    [
        ("completion", {"prompt": ""}, 400, "empty_prompt", "prompt"),
        ("completion", {"prompt": ["a", ""]}, 400, "empty_prompt", "prompt[1]"),
        ("completion", {"prompt": [[]]}, 400, "empty_prompt", "prompt"),
        ("completion", {"prompt": [259, 260]}, 400, "invalid_request", "prompt"),
        ("completion", {"prompt": "a", "logit_bias": {"260": 1}}, 400, "invalid_request", "logit_bias"),
        ("completion", {"prompt": "a", "allowed_token_ids": [999]}, 400, "invalid_request", "allowed_token_ids"),
        ("completion", {"prompt": "a", "stop_token_ids": [999]}, 400, "invalid_request", "stop_token_ids"),
        ("completion", {"prompt": "a" * CONTEXT}, 400, "context_exceeded", "prompt"),
        ("chat", {"messages": [{"role": "user", "content": "a" * CONTEXT}]}, 400, "context_exceeded", "messages"),
        ("completion", {"prompt": "a", "max_tokens": CONTEXT}, 400, "context_exceeded", "max_tokens"),
        ("completion", {"prompt": "a", "max_tokens": 10, "min_tokens": 50}, 400, "invalid_request", "min_tokens"),
        ("chat", {"messages": HI, "min_tokens": 10**9}, 400, "invalid_request", "min_tokens"),
        ("completion", {"prompt": "a" * 3000}, 413, "request_too_large", "prompt"),
        ("completion", {"prompt": "half \ud83d"}, 400, "invalid_value", "prompt"),
        ("chat", {"messages": [{"role": "user", "content": "\udcf0"}]}, 400, "invalid_value", "messages"),
        ("chat", {"messages": [{"role": "user", "content": "refuse me"}]}, 400, "template_failed", "messages"),
        (
            "chat",
            {"messages": HI, "chat_template_kwargs": {"tokenize": True}},
            400,
            "unsupported_field",
            "chat_template_kwargs",
        ),
        (
            "chat",
            {"messages": HI, "chat_template_kwargs": {"messages": 1}},
            400,
            "unsupported_field",
            "chat_template_kwargs",
        ),
        ("completion", {"prompt": "a", "model": "gpt"}, 404, "model_not_found", "model"),
    ],
)
async def test_refusals(endpoint: Endpoint, body: dict[str, object], status: int, code: str, param: str) -> None:
    engine = FakeEngine()
    service = make_service(engine, max_prompt_bytes=2000)
    error = await refusal(service, endpoint, **body)
    assert (error.status, error.code, error.param) == (status, code, param)
    assert engine.submitted == []


async def test_an_endpoint_that_is_none() -> None:
    with pytest.raises(ApiError) as caught:
        await make_service(FakeEngine()).start("embedding", {})
    assert caught.value.param == "endpoint"


async def test_a_model_without_a_template_says_so() -> None:
    engine = FakeEngine()
    service = Service(make_service(engine).config, engine=engine, tokenizer=ByteTokenizer(), template=None)
    error = await refusal(service, Endpoint.CHAT, messages=HI)
    assert error.code == "template_failed"
    assert "/v1/completions" in error.message


async def test_the_queue_is_bounded_in_requests_and_tokens() -> None:
    engine = FakeEngine(auto=False)
    service = make_service(engine, max_queued_requests=2, max_queued_prompt_tokens=100)
    jobs = [await service.start("completion", {"prompt": "a"}) for _ in range(2)]
    error = await refusal(service, Endpoint.COMPLETION, prompt="a")
    assert (error.status, error.code) == (429, "queue_full")
    assert error.retry_after_ms
    engine.step()
    await service.start("completion", {"prompt": "a" * 99})
    error = await refusal(service, Endpoint.COMPLETION, prompt="ab")
    assert error.code == "queue_full"
    for job in jobs:
        job.cancel(CancelReason.CLIENT)
    assert len(engine.submitted) == 3


async def test_a_cancelled_request_leaves_the_queue() -> None:
    engine = FakeEngine(auto=False)
    service = make_service(engine, max_queued_requests=1)
    job = await service.start("completion", {"prompt": "a"})
    job.cancel(CancelReason.CLIENT)
    done = await job.generations[0].next()
    assert isinstance(done, Done)
    assert done.finish_reason == "cancelled"
    await service.start("completion", {"prompt": "a"})


async def test_the_engine_may_still_refuse() -> None:
    engine = FakeEngine(auto=False)
    job = await make_service(engine).start("completion", {"prompt": "a"})
    rejection = Rejection(reason=RejectionReason.QUEUE_FULL, message="full", retry_after_ms=250)
    engine.refuse(engine.submitted[0].request_id, rejection)
    failure = await job.generations[0].next()
    assert isinstance(failure, Failure)
    assert failure.error.retry_after_ms == 250


async def test_readiness_follows_the_engine_and_the_drain() -> None:
    engine = FakeEngine(auto=False)
    service = make_service(engine)
    assert service.is_ready().ready
    job = await service.start("completion", {"prompt": "a"})
    engine.die()
    readiness = service.is_ready()
    assert not readiness.ready
    assert "SIGKILL" in readiness.reason
    assert isinstance(await job.generations[0].next(), Failure)
    error = await refusal(service, Endpoint.CHAT, messages=HI)
    assert (error.status, error.code) == (503, "not_ready")
    engine.state = EngineState.STARTING
    assert "starting" in service.is_ready().reason


async def test_a_drain_refuses_new_work_and_lets_running_work_end() -> None:
    engine = FakeEngine(auto=False, reply=b"ab")
    service = make_service(engine)
    job = await service.start("completion", {"prompt": "a"})
    service.drain()
    assert not service.is_ready().ready
    error = await refusal(service, Endpoint.CHAT, messages=HI)
    assert (error.status, error.code) == (503, "shutting_down")
    for _ in range(3):
        engine.step()
    assert isinstance(await job.generations[0].next(), Delta)
    assert isinstance(await job.generations[0].next(), Done)


class SlowTokenizer(ByteTokenizer):
    """Holds every encode until the test lets it go on."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        self.entered.set()
        assert self.go_on.wait(30)
        return super().encode(text, allow_special=allow_special)


async def test_a_caller_who_leaves_while_the_tokenizer_works_starts_nothing() -> None:
    engine, tokenizer = FakeEngine(), SlowTokenizer()
    service = Service(make_service(engine).config, engine=engine, tokenizer=tokenizer, template=None)
    starts = [asyncio.create_task(service.start("completion", {"prompt": "a"})) for _ in range(4)]
    await asyncio.to_thread(tokenizer.entered.wait, 30)
    for start in starts:
        start.cancel()
    await asyncio.wait(starts)
    tokenizer.go_on.set()
    assert all(start.cancelled() for start in starts)
    await service.start("completion", {"prompt": "b"})
    assert [request.prompt_ids for request in engine.submitted] == [(98,)]


async def test_the_loop_turns_while_the_tokenizer_works() -> None:
    engine, tokenizer = FakeEngine(), SlowTokenizer()
    service = Service(make_service(engine).config, engine=engine, tokenizer=tokenizer, template=None)
    start = asyncio.create_task(service.start("completion", {"prompt": "a"}))
    await asyncio.to_thread(tokenizer.entered.wait, 30)
    assert service.is_ready().ready
    assert not start.done()
    tokenizer.go_on.set()
    assert (await start).prompt_ids(0) == (97,)


async def test_tenants_never_share_a_cache_namespace() -> None:
    engine = FakeEngine()
    service = make_service(engine)
    for tenant in ("a", "b", "a"):
        await service.start("completion", {"prompt": "x"}, tenant=tenant)
    spaces = [request.cache_namespace for request in engine.submitted]
    assert spaces[0] == spaces[2] != spaces[1]
    assert all(len(space) == 32 for space in spaces)


def test_every_part_of_the_cache_identity_counts() -> None:
    parts = {"model_hash": "m", "tokenizer_hash": "t", "template_hash": "c", "kv_dtype": "f", "tenant": "x"}
    spaces = {cache_namespace(**parts)} | {cache_namespace(**(parts | {name: "other"})) for name in parts}
    assert len(spaces) == 6
    shifted = parts | {"model_hash": "mt", "tokenizer_hash": ""}
    assert cache_namespace(**shifted) != cache_namespace(**parts)


async def test_the_contract_changes_with_weights_types_and_kernels() -> None:
    engine = FakeEngine()
    service = make_service(engine)
    first = service.contract_hashes
    assert all(hashed is not None and len(hashed) == 67 for hashed in first)
    assert service.contract_hashes == first
    for other in (
        {"model_hash": "cd" * 32},
        {"dtype": "bfloat16"},
        {"weights": "int8"},
        {"kv_dtype": "int8"},
        {"attention": "tpu"},
        {"stored_types": {"Q4_0": 2}},
        {"deterministic": True},
        {"max_context": 64},
    ):
        engine.ready_info = ready(**other)
        assert service.contract_hashes[0] != first[0]
        assert service.contract_hashes[1] == first[1]
    engine.ready_info = ready(numerics={"jax": "9"})
    assert service.contract_hashes[0] == first[0]
    assert service.contract_hashes[1] != first[1]
    engine.die()
    assert service.contract_hashes == (None, None)


async def test_pages_of_another_type_have_another_cache_namespace() -> None:
    engine = FakeEngine()
    service = make_service(engine)
    for kv_dtype in ("float32", "int8", "float32"):
        engine.ready_info = ready(kv_dtype=kv_dtype)
        await service.start("completion", {"prompt": "x"})
    spaces = [request.cache_namespace for request in engine.submitted]
    assert spaces[0] == spaces[2] != spaces[1]


EDGES = st.sampled_from((
    None, True, False, 0, 1, -1, 2, 20, 21, 32, 256, 257, 2**31, 2**63, 10**400, 0.0, -0.0, 0.5, 1.0, 1e-30, 1e300,
    float("nan"), float("inf"), -float("inf"), "", "0.5", "x", "\ud83d", "\0", "x" * 5000, [], {}, [None], [0], [259],
    [260], [-1], [1.5], ["x"], [[]], [[1]], [[259], "x"], list(range(300)), {"0": 1}, {"260": 1}, {"259": -100},
    {"x": 1}, {"0": 1e9}, {"type": "text"}, {"include_usage": True}, {"include_usage": 1}, [{"role": "user"}],
    [{"role": "user", "content": "x"}],
))  # fmt: skip


@pytest.mark.parametrize("endpoint", Endpoint)
@given(data=st.data())
@settings(max_examples=250, deadline=None)
def test_whatever_a_body_says_is_served_or_refused_by_name(endpoint: Endpoint, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(table(endpoint))), max_size=4, unique=True))
    body: dict[str, object] = {"messages": HI} if endpoint is Endpoint.CHAT else {"prompt": "hi"}
    body |= {name: data.draw(EDGES) for name in names}

    async def run() -> None:
        engine = FakeEngine()
        service = make_service(engine, max_prompt_bytes=2000)
        try:
            job = await service.start(endpoint, body)
        except ApiError as error:
            assert 400 <= error.status < 500
            assert engine.submitted == []
            return
        finally:
            service.close()
        for generation in job.generations:
            await generation.wait_end()
            assert generation.completion_tokens >= 1

    asyncio.run(run())
