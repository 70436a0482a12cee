"""OpenAI's JSON shapes: chat and legacy completions, whole and streamed. Pure functions of jobs and outcomes.

Extensions beside OpenAI's fields: ``stop_reason`` in a choice (the stop string or stop id), ``token_ids`` and
``prompt_token_ids`` when asked for, ``token_id`` and ``rank`` in chat logprobs, ``metrics`` (server times in ms).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from headrace.serving.edge.fields import Endpoint
from headrace.serving.edge.generation import ChosenLogprob, Delta, Done, Usage
from headrace.serving.edge.job import Job
from headrace.serving.edge.obfuscation import obfuscation

Json = dict[str, object]

LOWEST_LOGPROB = -9999.0
"""Stands for an infinite chosen logprob: infinities are not JSON. Infinite alternatives are left out."""


def response_id(job: Job) -> str:
    """OpenAI's prefix with the digits of our request id."""
    prefix = "chatcmpl-" if job.endpoint is Endpoint.CHAT else "cmpl-"
    return prefix + job.request_id.removeprefix("req_")


def total_usage(parts: Sequence[Usage]) -> Usage:
    return Usage(
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        completion_tokens=sum(part.completion_tokens for part in parts),
        cached_tokens=sum(part.cached_tokens for part in parts),
    )


def whole(job: Job, results: Sequence[tuple[Delta | None, Done]]) -> Json:
    """The answer of a request that is not streamed; results: one per choice."""
    is_chat = job.endpoint is Endpoint.CHAT
    choices = [
        (_chat_choice if is_chat else _text_choice)(job, index, delta, done)
        for index, (delta, done) in enumerate(results)
    ]
    body = _envelope(job, "chat.completion" if is_chat else "text_completion", choices)
    body["usage"] = total_usage([done.usage for _, done in results]).as_json()
    if is_chat and job.options.return_token_ids:
        body["prompt_token_ids"] = job.prompt_ids(0)
    if len(results) == 1:
        body["metrics"] = metrics(results[0][1])
    return body


def metrics(done: Done) -> Json:
    return {**asdict(done.timings), "cached_tokens": done.usage.cached_tokens}


def _envelope(job: Job, kind: str, choices: list[Json]) -> Json:
    return {
        "id": response_id(job),
        "object": kind,
        "created": job.created,
        "model": job.model,
        "system_fingerprint": job.contract,
        "choices": choices,
    }


def _chat_choice(job: Job, index: int, delta: Delta | None, done: Done) -> Json:
    choice: Json = {
        "index": index,
        "message": {"role": "assistant", "content": delta.text if delta else "", "refusal": None},
        "logprobs": chat_logprobs(delta.logprobs if delta else ()) if job.options.logprobs else None,
        **_ending(done),
    }
    if job.options.return_token_ids:
        choice["token_ids"] = delta.token_ids if delta else ()
    return choice


def _text_choice(job: Job, index: int, delta: Delta | None, done: Done) -> Json:
    choice: Json = {
        "index": index,
        "text": delta.text if delta else "",
        "logprobs": LegacyLogprobs().add(delta.logprobs if delta else ()) if job.options.logprobs else None,
        **_ending(done),
    }
    if job.options.return_token_ids:
        choice["token_ids"] = delta.token_ids if delta else ()
        choice["prompt_token_ids"] = job.prompt_ids(index)
    return choice


def _ending(done: Done | None) -> Json:
    if done is None:
        return {"finish_reason": None, "stop_reason": None}
    return {"finish_reason": done.finish_reason.value, "stop_reason": done.stop_reason}


@dataclass(slots=True)
class ChoiceStream:
    """Chunks of one choice, in order."""

    job: Job
    index: int
    _offsets: "LegacyLogprobs" = field(default_factory=lambda: LegacyLogprobs())
    _is_first: bool = True

    def chunk(self, delta: Delta | None, done: Done | None) -> Json:
        """One chunk for what is new, for the end, or for both at once."""
        job = self.job
        if job.endpoint is Endpoint.CHAT:
            choice = self._chat(delta)
            body = _envelope(job, "chat.completion.chunk", [choice])
        else:
            choice = self._text(delta)
            body = _envelope(job, "text_completion", [choice])
        choice.update(_ending(done))
        if job.options.return_token_ids:
            choice["token_ids"] = delta.token_ids if delta else ()
            if self._is_first and job.endpoint is Endpoint.CHAT:
                body["prompt_token_ids"] = job.prompt_ids(self.index)
            elif self._is_first:
                choice["prompt_token_ids"] = job.prompt_ids(self.index)
        if job.options.include_usage:
            body["usage"] = self._usage(delta, done) if job.options.continuous_usage else None
        if job.options.include_obfuscation:
            text = delta.text if delta else ""
            body["obfuscation"] = obfuscation(text, choice.get("token_ids"), choice["logprobs"])
        self._is_first = False
        return body

    def _chat(self, delta: Delta | None) -> Json:
        content: Json = {"role": "assistant"} if self._is_first else {}
        if delta is not None or self._is_first:
            content["content"] = delta.text if delta else ""
        wanted = self.job.options.logprobs and delta is not None and delta.logprobs
        return {
            "index": self.index,
            "delta": content,
            "logprobs": chat_logprobs(delta.logprobs) if delta is not None and wanted else None,
        }

    def _text(self, delta: Delta | None) -> Json:
        wanted = self.job.options.logprobs and delta is not None and delta.logprobs
        return {
            "index": self.index,
            "text": delta.text if delta else "",
            "logprobs": self._offsets.add(delta.logprobs) if delta is not None and wanted else None,
        }

    def _usage(self, delta: Delta | None, done: Done | None) -> Json:
        if done is not None:
            return done.usage.as_json()
        return Usage(
            prompt_tokens=len(self.job.prompt_ids(self.index)),
            completion_tokens=delta.completion_tokens if delta else 0,
            cached_tokens=0,
        ).as_json()


def usage_chunk(job: Job, ends: Sequence[Done]) -> Json:
    """The last chunk when stream_options.include_usage was set: usage of all choices, no choices."""
    kind = "chat.completion.chunk" if job.endpoint is Endpoint.CHAT else "text_completion"
    body = _envelope(job, kind, [])
    body["usage"] = total_usage([done.usage for done in ends]).as_json()
    if len(ends) == 1:
        body["metrics"] = metrics(ends[0])
    return body


def token_text(token_bytes: bytes) -> str:
    """The token's text; bytes that are no text of their own in OpenAI's ``bytes:\\xNN`` spelling."""
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


def chat_logprobs(entries: Sequence[ChosenLogprob]) -> Json:
    """One entry per token, alternatives sorted downwards."""
    content = [
        {
            **_named(entry.token_id, entry.token_bytes, _finite(entry.logprob)),
            "rank": entry.rank,
            "top_logprobs": [
                _named(top.token_id, top.token_bytes, top.logprob) for top in entry.top if math.isfinite(top.logprob)
            ],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _named(token_id: int, token_bytes: bytes, logprob: float) -> Json:
    return {"token": token_text(token_bytes), "token_id": token_id, "logprob": logprob, "bytes": list(token_bytes)}


@dataclass(slots=True)
class LegacyLogprobs:
    """Logprobs of /v1/completions; text_offset counts characters of token texts from the start of the output."""

    _offset: int = 0

    def add(self, entries: Sequence[ChosenLogprob]) -> Json:
        tokens = [token_text(entry.token_bytes) for entry in entries]
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(entry.token_bytes.decode(errors="replace"))
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [_legacy_top(entry) for entry in entries],
            "text_offset": offsets,
        }


def _legacy_top(entry: ChosenLogprob) -> dict[str, float]:
    """Text → logprob with the chosen token always in it. Two ids with one text: the later is named by its id."""
    found: dict[str, float] = {}
    chosen_listed = False
    for top in entry.top:
        if math.isfinite(top.logprob):
            name = token_text(top.token_bytes)
            found[f"token_id:{top.token_id}" if name in found else name] = top.logprob
            chosen_listed = chosen_listed or top.token_id == entry.token_id
    if not chosen_listed:
        name = token_text(entry.token_bytes)
        found[f"token_id:{entry.token_id}" if name in found else name] = _finite(entry.logprob)
    return found
