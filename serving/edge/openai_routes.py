"""``POST /v1/chat/completions`` and ``/v1/completions``: whole answers and server-sent events.

A client that goes away, at any moment after its body is complete, cancels its request: while it waits for the
tokenizer, in the queue, between tokens. One that stops reading for WRITE_LIMIT_S is cancelled too.

The role travels with the first token and finish_reason with the last, so that clients which time chunks measure tokens
and nothing else. Headers go out at once; a comment every KEEPALIVE_S keeps proxies patient. What goes wrong after that
is an error event and ``[DONE]``.
"""

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from headrace.serving.core.request import CancelReason
from headrace.serving.edge.contract import CONTRACT_HEADER, EXPECT_HEADER
from headrace.serving.edge.errors import ApiError, ErrorCode
from headrace.serving.edge.fields import Endpoint
from headrace.serving.edge.generation import Delta, Done, Failure, Generation
from headrace.serving.edge.http_json import ClientGone, JsonObject, json_response, read_object
from headrace.serving.edge.openai_chunks import ChoiceStream, usage_chunk, whole
from headrace.serving.edge.service import Job, Service
from headrace.serving.edge.terms import terms_of_headers

KEEPALIVE_S = 15.0
WRITE_LIMIT_S = 30.0
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
SSE_HEADERS = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),
)

T = TypeVar("T")


def openai_routes(service: Service) -> list[Route]:
    return [
        Route("/v1/chat/completions", GenerateEndpoint(service, Endpoint.CHAT), methods=["POST"]),
        Route("/v1/completions", GenerateEndpoint(service, Endpoint.COMPLETION), methods=["POST"]),
    ]


class GenerateEndpoint:
    """ASGI application of one path."""

    def __init__(
        self,
        service: Service,
        endpoint: Endpoint,
        *,
        keepalive_s: float = KEEPALIVE_S,
        write_limit_s: float = WRITE_LIMIT_S,
    ) -> None:
        self._service = service
        self._endpoint = endpoint
        self._keepalive_s = keepalive_s
        self._write_limit_s = write_limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        expected = tuple(Request(scope).headers.getlist(EXPECT_HEADER))
        tenant = scope.get("state", {}).get("tenant", "")
        self._service.refuse_unexpected(expected, EXPECT_HEADER, tenant)
        try:
            terms = terms_of_headers(scope["headers"], time.monotonic())
            body = await read_object(scope, receive, max_bytes=self._service.config.max_body_bytes)
        except ClientGone:
            return
        _check_stream_options(body)
        gone = asyncio.create_task(_disconnected(receive), name="http-disconnect")
        job: Job | None = None
        try:
            work = self._service.start(self._endpoint, body, tenant=tenant, terms=terms, expected=expected)
            job = await _unless(gone, work)
            if job.options.stream:
                await _EventStream(job, send, gone, self._keepalive_s, self._write_limit_s).run()
            else:
                response = await _unless(gone, _whole_answer(job))
                await response(scope, receive, send)
        except ClientGone:
            pass
        finally:
            gone.cancel()
            if job is not None:
                job.cancel(CancelReason.DISCONNECT)


def _check_stream_options(body: JsonObject) -> None:
    if body.get("stream_options") is not None and body.get("stream") is not True:
        raise ApiError(ErrorCode.CONFLICTING_FIELDS, "stream_options needs stream to be true.", param="stream_options")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless(gone: asyncio.Task[None], work: Awaitable[T]) -> T:
    """The result of work; ClientGone, with the work cancelled, when the client leaves first."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
        if task.cancelled() or task.exception() is not None:
            raise ClientGone
    return task.result()


def job_headers(job: Job) -> dict[str, str]:
    headers = {"x-request-id": job.request_id, CONTRACT_HEADER: job.contract}
    if job.options.ignored_fields:
        headers["x-headrace-ignored-fields"] = ", ".join(job.options.ignored_fields)
    return headers


async def _whole_answer(job: Job) -> Response:
    results: list[tuple[Delta | None, Done]] = []
    for generation in job.generations:
        await generation.wait_end()
        delta, end = _take_all(generation)
        if isinstance(end, Failure):
            job.cancel(CancelReason.CLIENT)
            raise end.error
        assert end is not None
        results.append((delta, end))
    return json_response(whole(job, results), headers=job_headers(job))


def _take_all(generation: Generation) -> tuple[Delta | None, Done | Failure | None]:
    """What is new, and the end if it is known: one chunk can carry both."""
    item = generation.take()
    if isinstance(item, Delta):
        end = generation.take()
        assert not isinstance(end, Delta)
        return item, end
    return None, item


class _EventStream:
    """Writes one job as server-sent events. All choices share one connection and one wake-up."""

    def __init__(
        self, job: Job, send: Send, gone: asyncio.Task[None], keepalive_s: float, write_limit_s: float
    ) -> None:
        self._job = job
        self._send = send
        self._gone = gone
        self._keepalive_s = keepalive_s
        self._write_limit_s = write_limit_s
        self._wake = asyncio.Event()
        self._choices = [ChoiceStream(job, index) for index in range(len(job.generations))]
        self._ends: dict[int, Done] = {}

    async def run(self) -> None:
        """Until the last byte is written. Raises ClientGone."""
        headers = (*SSE_HEADERS, *job_headers(self._job).items())
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
        await self._write({"type": "http.response.start", "status": 200, "headers": raw})
        self._gone.add_done_callback(lambda _: self._wake.set())
        for generation in self._job.generations:
            generation.set_listener(self._wake.set)
        failure: Failure | None = None
        while failure is None and len(self._ends) < len(self._choices):
            chunks, failure = await self._next_chunks()
            if chunks:
                await self._write({"type": "http.response.body", "body": chunks, "more_body": True})
        await self._write({"type": "http.response.body", "body": self._tail(failure), "more_body": False})

    async def _next_chunks(self) -> tuple[bytes, Failure | None]:
        """Wait for news; chunks of all choices that have some, or a comment after a long silence."""
        try:
            async with asyncio.timeout(self._keepalive_s):
                await self._wake.wait()
        except TimeoutError:
            return PING, None
        self._wake.clear()
        if self._gone.done():
            raise ClientGone
        chunks: list[bytes] = []
        for choice, generation in zip(self._choices, self._job.generations, strict=True):
            delta, end = _take_all(generation)
            done = end if isinstance(end, Done) else None
            if delta is not None or done is not None:
                chunks.append(_event(choice.chunk(delta, done)))
            if done is not None:
                self._ends[choice.index] = done
            elif isinstance(end, Failure):
                self._job.cancel(CancelReason.CLIENT)
                return b"".join(chunks), end
        return b"".join(chunks), None

    def _tail(self, failure: Failure | None) -> bytes:
        if failure is not None:
            return _event(failure.error.event()) + DONE
        if self._job.options.include_usage:
            return _event(usage_chunk(self._job, list(self._ends.values()))) + DONE
        return DONE

    async def _write(self, message: Message) -> None:
        """Bounded in time: a reader that has stopped must not hold the request."""
        try:
            async with asyncio.timeout(self._write_limit_s):
                await self._send(message)
        except TimeoutError:
            self._job.cancel(CancelReason.SLOW_CLIENT)
            raise ClientGone from None
        if self._gone.done():
            raise ClientGone


def _event(value: object) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
