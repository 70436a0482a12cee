"""Any OpenAI-compatible endpoint that streams over HTTP, as a target; the server's own times where it sends them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from headrace.serving.bench.dialect import KINDS, Dialect, Door
from headrace.serving.bench.outcome import (
    MAX_KEPT_CHARS,
    Outcome,
    cached_of,
    clean_id,
    gaps_of,
    is_refusal,
    server_times,
)
from headrace.serving.bench.targets import (
    AS_SOON_AS_ASKED,
    MAX_ERROR_BYTES,
    Server,
    Terms,
    bounded,
    code_of,
    retry_hint_of,
    type_of,
)


@dataclass(slots=True)
class _Answer:
    """Of one streamed HTTP answer, while it comes. sent_s: when it had a connection to be sent on, None before.
    texts: pieces that are kept, at most so many characters (chars_left)."""

    times: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    chars_left: int = 0
    sent_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int | None = None
    finish: object = None
    error: str | None = None
    is_refused: bool = False
    retry_after_ms: int | None = None
    request_id: str | None = None
    server: dict[str, float] = field(default_factory=dict)

    async def trace(self, event: str, _: object) -> None:
        """For httpx: the first event of a request comes when the pool has given it a connection."""
        if self.sent_s is None:
            self.sent_s = time.monotonic()

    def take(self, data: str) -> None:
        """One event of the stream, with the time of now."""
        try:
            event = json.loads(data)
            choices = event.get("choices") or [{}]
            if event.get("error"):
                self.fail(data.encode(), 200)
            if text := _text_of(choices[0]):
                self.times.append(time.monotonic())
                if self.chars_left > 0:
                    self.texts.append(text[: self.chars_left])
                    self.chars_left -= len(text)
            self.finish = choices[0].get("finish_reason") or self.finish
            self.request_id = self.request_id or clean_id(event.get("id"))
            self.server = server_times(event.get("metrics")) or self.server
            if usage := event.get("usage"):
                self.prompt_tokens, self.cached_tokens = int(usage["prompt_tokens"]), cached_of(usage)
                self.output_tokens = int(usage["completion_tokens"])
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            self.error = "not_openai"

    def fail(self, raw: bytes, status: int) -> None:
        """raw: an error body."""
        self.error = code_of(raw, status).replace("http_200", "unnamed")
        self.retry_after_ms = self.retry_after_ms or retry_hint_of(raw)
        self.is_refused = not self.times and is_refusal(self.error, type_of(raw), None if status == 200 else status)


def _text_of(choice: Mapping[str, Any]) -> str:
    """Of a completion's piece, or a chat's; what a model thinks before it answers is output, too."""
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""


class OpenAITarget:
    """A POST with server-sent events to one door, a connection for each stream, at most so many.

    Such servers do not say how many tokens a piece of text has: gaps are those between pieces, each counted once.
    extra: fields of every body, over those of the workload. keeps_text: of answers, for comparing them.
    """

    def __init__(
        self,
        server: Server,
        model: str,
        streams: int,
        *,
        door: Door = Door.COMPLETIONS,
        dialect: Dialect = KINDS["any"],
        extra: Mapping[str, object] | None = None,
        keeps_text: bool = False,
    ) -> None:
        self._server = server
        self._path = "/v1/chat/completions" if door is Door.CHAT else "/v1/completions"
        self._door = door
        self._dialect = dialect
        self._extra = dict(extra or {})
        self._kept_chars = MAX_KEPT_CHARS if keeps_text else 0
        self._fields = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        self._client = server.client(streams)

    async def __aenter__(self) -> "OpenAITarget":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ask(self, index: int, body: dict[str, object], terms: Terms = AS_SOON_AS_ASKED) -> Outcome:
        answer = _Answer(chars_left=self._kept_chars)
        fields = self._fields | terms.body_fields | self._dialect.body(body, self._door) | self._extra
        asked_s = time.monotonic()
        is_cancelled = False
        cancel = asyncio.timeout(None if terms.cancel_s is None else max(0.0, terms.cancel_s - asked_s))
        try:
            async with asyncio.timeout(self._server.limit_s), cancel:
                await self._stream(fields, terms, answer)
        except (TimeoutError, httpx.TimeoutException):
            is_cancelled = cancel.expired()
            answer.error = None if is_cancelled else "timeout"
        except httpx.HTTPError:
            answer.error = answer.error or "connection_lost"
        ended_s = time.monotonic()
        if answer.error is None and answer.finish is None and not is_cancelled:
            answer.error = "no_end"
        times = answer.times
        gaps = gaps_of(times, [1] * len(times))
        return Outcome(
            index=index,
            planned_s=terms.planned_s,
            sent_s=asked_s if answer.sent_s is None or terms.planned_s is None else answer.sent_s,
            ended_s=ended_s,
            first_s=times[0] if times else None,
            last_s=times[-1] if times else None,
            error=answer.error,
            is_refused=answer.is_refused,
            is_cancelled=is_cancelled,
            retry_after_ms=answer.retry_after_ms,
            tenant=terms.tenant,
            request_id=answer.request_id,
            server=answer.server,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=len(times) if answer.output_tokens is None else answer.output_tokens,
            first_tokens=1 if times else 0,
            gaps_ms=gaps,
            pauses_ms=gaps,
            text="".join(answer.texts),
        )

    async def _stream(self, body: dict[str, object], terms: Terms, answer: _Answer) -> None:
        key = self._server.key_of(terms.tenant)
        headers = terms.headers if key is None else {**terms.headers, "authorization": f"Bearer {key}"}
        url, extensions = self._server.base + self._path, {"trace": answer.trace}
        async with self._client.stream("POST", url, json=body, headers=headers, extensions=extensions) as response:
            answer.request_id = clean_id(response.headers.get("x-request-id"))
            if response.status_code != 200:
                answer.retry_after_ms = _retry_after_ms(response.headers)
                answer.fail(await bounded(response, MAX_ERROR_BYTES), response.status_code)
                return
            async for data in _events(response):
                answer.take(data)


def _retry_after_ms(headers: httpx.Headers) -> int | None:
    """Of a refusal, from the header in ms, or the one in seconds; None where there is none, or a date."""
    for name, factor in (("retry-after-ms", 1), ("retry-after", 1000)):
        try:
            return max(0, round(float(headers[name]) * factor))
        except (KeyError, ValueError, OverflowError):
            continue
    return None


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of server-sent events, each on one line, up to [DONE]; what follows is read, so that the connection can
    be used again."""
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield data
