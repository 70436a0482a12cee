"""Objects inside the messages of the native WebSocket, ``messages``."""

from typing import Annotated

import msgspec
from msgspec import Meta


class SessionLimits(msgspec.Struct, kw_only=True, frozen=True):
    """What this socket may do."""

    max_streams: Annotated[int, Meta(description="Live streams at once.")]
    max_frame_bytes: Annotated[int, Meta(description="Bytes of one message.")]
    max_context: Annotated[int, Meta(description="Tokens of prompt and output; 0 while the engine starts.")]


class ChoiceEnd(msgspec.Struct, kw_only=True, frozen=True):
    """How one choice ended."""

    index: Annotated[int, Meta(description="Which choice.")]
    finish_reason: Annotated[str, Meta(description='`"stop"`, `"length"` or `"cancelled"`.')]
    stop_reason: Annotated[
        str | int | None, Meta(description="The stop string or the stop token id that ended it, else null.")
    ]


class Preemption(msgspec.Struct, kw_only=True, frozen=True):
    """How often a request had to make way for one reason, and what became of its memory."""

    reason: Annotated[
        str,
        Meta(
            description='`"pages"`: others needed its memory; `"priority"`: a better class came; `"fairness"`: a '
            'tenant came that had nothing running; `"forced"`: for a test.'
        ),
    ]
    action: Annotated[str, Meta(description='`"swapped"`: kept in host memory; `"recomputed"`: computed again later.')]
    count: Annotated[int, Meta(description="How often.")]


class Times(msgspec.Struct, kw_only=True, frozen=True):
    """Times as the server measured them; over several choices the longest."""

    queue_ms: Annotated[float, Meta(description="Waiting for the engine.")]
    prefill_ms: Annotated[float, Meta(description="From running to the first token.")]
    first_token_ms: Annotated[float | None, Meta(description="From submission to the first token; null: no token.")]
    decode_ms: Annotated[float, Meta(description="From the first token to the last.")]
    preemptions: Annotated[int, Meta(description="How often it had to make way for others.")]
    preempted_ms: Annotated[
        float, Meta(description="Of `prefill_ms` and `decode_ms`: back in the queue after it had to make way.")
    ]
    preempted: Annotated[tuple[Preemption, ...], Meta(description="Why and how; the counts add up to `preemptions`.")]
    cached_tokens: Annotated[int, Meta(description="Prompt tokens that were found in the cache, over all choices.")]


class ErrorDetail(msgspec.Struct, kw_only=True, frozen=True):
    """What went wrong; the same object as in HTTP answers."""

    type: Annotated[str, Meta(description="Class of the error.")]
    code: Annotated[str, Meta(description="Stable name; see *Error codes*.")]
    message: Annotated[str, Meta(description="For people: field, limit, remedy. Never repeats what was sent.")]
    param: Annotated[str | None, Meta(description="The field at fault, where it is one.")]
