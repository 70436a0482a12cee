"""Errors as clients see them, and the one table from internal outcomes to status, type and code.

Both doors use it: HTTP sends ``body()`` with ``status``; the native WebSocket puts the same fields in an ``error``
frame. A message names the field, the limit and the remedy, and never repeats a value that the caller sent.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from headrace.serving.core.events import Finished
from headrace.serving.core.request import CancelReason, Rejection, RejectionReason


class ErrorCode(StrEnum):
    """Stable, machine-readable; documented in PROTOCOL.md."""

    MALFORMED_JSON = "malformed_json"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    REQUEST_TOO_LARGE = "request_too_large"
    REQUEST_TIMEOUT = "request_timeout"
    UNKNOWN_FIELD = "unknown_field"
    UNSUPPORTED_FIELD = "unsupported_field"
    MISSING_FIELD = "missing_field"
    INVALID_TYPE = "invalid_type"
    INVALID_VALUE = "invalid_value"
    CONFLICTING_FIELDS = "conflicting_fields"
    INVALID_REQUEST = "invalid_request"
    CONTRACT_MISMATCH = "contract_mismatch"
    INVALID_MESSAGE = "invalid_message"
    TEMPLATE_FAILED = "template_failed"
    EMPTY_PROMPT = "empty_prompt"
    CONTEXT_EXCEEDED = "context_exceeded"
    NEVER_FITS = "never_fits"
    INVALID_API_KEY = "invalid_api_key"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    MODEL_NOT_FOUND = "model_not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    QUEUE_FULL = "queue_full"
    OVERLOADED = "overloaded"
    RATE_LIMITED = "rate_limited"
    DEADLINE_UNMEETABLE = "deadline_unmeetable"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    TOO_MANY_STREAMS = "too_many_streams"
    SHUTTING_DOWN = "shutting_down"
    NOT_READY = "not_ready"
    ENGINE_LOST = "engine_lost"
    SLOW_CLIENT = "slow_client"
    INTERNAL = "internal_error"
    # Of one stream or frame on the native WebSocket.
    INVALID_ID = "invalid_id"
    DUPLICATE_ID = "duplicate_id"
    UNKNOWN_ID = "unknown_id"
    UNKNOWN_TYPE = "unknown_type"
    RESUME_GONE = "resume_gone"


class ErrorType(StrEnum):
    INVALID_REQUEST = "invalid_request_error"
    AUTHENTICATION = "authentication_error"
    PERMISSION = "permission_error"
    NOT_FOUND = "not_found_error"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "service_unavailable"
    SERVER = "server_error"


@dataclass(frozen=True, slots=True)
class ErrorRule:
    """status: HTTP status, also carried in WebSocket error frames. meaning: one line for PROTOCOL.md."""

    status: int
    type: ErrorType
    meaning: str


_BAD = ErrorType.INVALID_REQUEST

ERROR_TABLE: dict[ErrorCode, ErrorRule] = {
    ErrorCode.MALFORMED_JSON: ErrorRule(400, _BAD, "The body is not strict JSON, or not an object."),
    ErrorCode.UNSUPPORTED_MEDIA_TYPE: ErrorRule(415, _BAD, "The content type is not application/json in UTF-8."),
    ErrorCode.REQUEST_TOO_LARGE: ErrorRule(413, _BAD, "The body or the prompt has more bytes than the limit."),
    ErrorCode.REQUEST_TIMEOUT: ErrorRule(408, _BAD, "The body did not arrive in time."),
    ErrorCode.UNKNOWN_FIELD: ErrorRule(400, _BAD, "No such field; the nearest known name is suggested."),
    ErrorCode.UNSUPPORTED_FIELD: ErrorRule(400, _BAD, "A known field that is not applied yet, not at its default."),
    ErrorCode.MISSING_FIELD: ErrorRule(400, _BAD, "A required field is absent."),
    ErrorCode.INVALID_TYPE: ErrorRule(400, _BAD, "The value has another JSON type than the field."),
    ErrorCode.INVALID_VALUE: ErrorRule(400, _BAD, "The value lies outside the field's range."),
    ErrorCode.CONFLICTING_FIELDS: ErrorRule(400, _BAD, "Two fields contradict each other."),
    ErrorCode.INVALID_REQUEST: ErrorRule(400, _BAD, "Admission refused a value of the request."),
    ErrorCode.CONTRACT_MISMATCH: ErrorRule(412, _BAD, "Another contract is served than the client expects."),
    ErrorCode.INVALID_MESSAGE: ErrorRule(400, _BAD, "A chat message has a role or content that is not supported."),
    ErrorCode.TEMPLATE_FAILED: ErrorRule(400, _BAD, "The chat template refused the messages."),
    ErrorCode.EMPTY_PROMPT: ErrorRule(400, _BAD, "The prompt has no tokens."),
    ErrorCode.CONTEXT_EXCEEDED: ErrorRule(400, _BAD, "Prompt and requested output exceed the context."),
    ErrorCode.NEVER_FITS: ErrorRule(400, _BAD, "The request needs more cache pages than the server has."),
    ErrorCode.INVALID_API_KEY: ErrorRule(401, ErrorType.AUTHENTICATION, "The API key is absent or wrong."),
    ErrorCode.FORBIDDEN: ErrorRule(403, ErrorType.PERMISSION, "The Origin or Host is not allowed."),
    ErrorCode.NOT_FOUND: ErrorRule(404, ErrorType.NOT_FOUND, "No such path."),
    ErrorCode.MODEL_NOT_FOUND: ErrorRule(404, ErrorType.NOT_FOUND, "This server does not serve that model."),
    ErrorCode.METHOD_NOT_ALLOWED: ErrorRule(405, _BAD, "The path exists, the method does not."),
    ErrorCode.QUEUE_FULL: ErrorRule(429, ErrorType.OVERLOADED, "The queue is full; retry after the given time."),
    ErrorCode.OVERLOADED: ErrorRule(503, ErrorType.OVERLOADED, "A budget of the server is used up; retry later."),
    ErrorCode.RATE_LIMITED: ErrorRule(429, ErrorType.OVERLOADED, "Too many requests or failed keys; retry later."),
    ErrorCode.DEADLINE_UNMEETABLE: ErrorRule(503, ErrorType.OVERLOADED, "By estimate the deadline cannot be met."),
    ErrorCode.DEADLINE_EXCEEDED: ErrorRule(504, ErrorType.OVERLOADED, "The deadline passed; the request was ended."),
    ErrorCode.TOO_MANY_STREAMS: ErrorRule(429, ErrorType.OVERLOADED, "Too many live streams on this connection."),
    ErrorCode.SHUTTING_DOWN: ErrorRule(503, ErrorType.UNAVAILABLE, "The server drains and takes no new work."),
    ErrorCode.NOT_READY: ErrorRule(
        503, ErrorType.UNAVAILABLE, "The server is starting or not ready; /readyz says why."
    ),
    ErrorCode.ENGINE_LOST: ErrorRule(503, ErrorType.UNAVAILABLE, "The engine died or hung during the request."),
    ErrorCode.SLOW_CLIENT: ErrorRule(408, _BAD, "The client stopped reading and its streams were cancelled."),
    ErrorCode.INTERNAL: ErrorRule(500, ErrorType.SERVER, "A fault of the server; the request failed alone."),
    ErrorCode.INVALID_ID: ErrorRule(400, _BAD, "A stream id is 1 to 64 characters of A-Z a-z 0-9 _ . -"),
    ErrorCode.DUPLICATE_ID: ErrorRule(409, _BAD, "A live stream of this socket has that id."),
    ErrorCode.UNKNOWN_ID: ErrorRule(404, _BAD, "This socket has no stream with that id."),
    ErrorCode.UNKNOWN_TYPE: ErrorRule(400, _BAD, "No such frame type."),
    ErrorCode.RESUME_GONE: ErrorRule(410, _BAD, "The stream to resume is over, expired or never was detached."),
}

_REJECTIONS: dict[RejectionReason, ErrorCode] = {
    RejectionReason.QUEUE_FULL: ErrorCode.QUEUE_FULL,
    RejectionReason.OVERLOADED: ErrorCode.OVERLOADED,
    RejectionReason.RATE_LIMITED: ErrorCode.RATE_LIMITED,
    RejectionReason.DEADLINE: ErrorCode.DEADLINE_UNMEETABLE,
    RejectionReason.CONTEXT_EXCEEDED: ErrorCode.CONTEXT_EXCEEDED,
    RejectionReason.NEVER_FITS: ErrorCode.NEVER_FITS,
    RejectionReason.SHUTTING_DOWN: ErrorCode.SHUTTING_DOWN,
    RejectionReason.INVALID: ErrorCode.INVALID_REQUEST,
}


class ApiError(Exception):
    """A refusal or failure for one request. code is an ErrorCode, or the engine's own code of a failed request (500).

    retry_after_ms: when trying again makes sense; HTTP rounds it up to whole seconds for Retry-After.
    """

    def __init__(
        self, code: ErrorCode | str, message: str, *, param: str | None = None, retry_after_ms: int | None = None
    ) -> None:
        super().__init__(message)
        rule = ERROR_TABLE[code if isinstance(code, ErrorCode) else ErrorCode.INTERNAL]
        self.status = rule.status
        self.type: str = rule.type.value
        self.code = str(code)
        self.message = message
        self.param = param
        self.retry_after_ms = retry_after_ms

    def body(self) -> dict[str, dict[str, object]]:
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def event(self) -> dict[str, dict[str, object]]:
        """``body`` in the middle of a stream, whose headers are gone: retry_after_ms is in it."""
        body = self.body()
        if self.retry_after_ms is not None:
            body["error"] = {**body["error"], "retry_after_ms": self.retry_after_ms}
        return body

    def headers(self) -> dict[str, str]:
        """Retry-After in seconds, and in ms as the OpenAI SDKs read it."""
        if self.retry_after_ms is None:
            return {}
        return {
            "retry-after": str(max(1, math.ceil(self.retry_after_ms / 1000))),
            "retry-after-ms": str(self.retry_after_ms),
        }


def from_rejection(rejection: Rejection) -> ApiError:
    return ApiError(
        _REJECTIONS[rejection.reason],
        rejection.message,
        param=rejection.param,
        retry_after_ms=rejection.retry_after_ms,
    )


def engine_lost() -> ApiError:
    return ApiError(
        ErrorCode.ENGINE_LOST,
        "The engine stopped during the request; what it produced is incomplete. See /readyz, then retry.",
        retry_after_ms=5000,
    )


def shutting_down() -> ApiError:
    return ApiError(
        ErrorCode.SHUTTING_DOWN, "The server is shutting down; retry with another replica.", retry_after_ms=5000
    )


def deadline_exceeded() -> ApiError:
    """In preparation, in the engine, or while the client did not read."""
    return ApiError(
        ErrorCode.DEADLINE_EXCEEDED,
        "The deadline of the request passed before its end was given to the client; it was ended. Allow more time, or "
        "ask for fewer tokens.",
    )


def from_finished(finished: Finished) -> ApiError | None:
    """The error that a terminal event stands for; None where it is a result (stop, length, cancelled by the client)."""
    if finished.error_code is not None:
        return ApiError(finished.error_code, finished.error_message or "The request failed in the engine.")
    if finished.cancel_reason is CancelReason.DEADLINE:
        return deadline_exceeded()
    if finished.cancel_reason is CancelReason.SHUTDOWN:
        return shutting_down()
    if finished.cancel_reason is CancelReason.SLOW_CLIENT:
        return ApiError(
            ErrorCode.SLOW_CLIENT, "The client did not read for longer than the write limit; the stream was cancelled."
        )
    return None
