"""Every message of the native WebSocket, subprotocol ``headrace.v1``: the schema that PROTOCOL.md is made from.

One JSON object per text frame; ``type`` names the message. Envelopes ignore unknown keys, so that either side may be
newer; the body of a ``create`` does not (serving/edge/fields.py lists its fields).
"""

import re
from enum import IntEnum
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from headrace.serving.core.contract import MAX_EXPECTED
from headrace.serving.edge.errors import ApiError, ErrorCode
from headrace.serving.edge.fields import Endpoint
from headrace.serving.edge.message_parts import ChoiceEnd, ErrorDetail, Preemption, SessionLimits, Times
from headrace.serving.edge.strict_json import NotJson, parse
from headrace.serving.edge.terms import MAX_DEADLINE_MS, parse_priority

SUBPROTOCOL = "headrace.v1"
BEARER_PREFIX = "bearer."
"""Of a second subprotocol that carries the key of a browser: ``bearer.`` and the key in unpadded base64url."""
MAX_FRAME_BYTES = 4 << 20
MAX_ID_CHARS = 64
ENDPOINTS = tuple(endpoint.value for endpoint in Endpoint)
ID_PATTERN = r"^[A-Za-z0-9_.-]{1,64}\Z"

StreamId = Annotated[
    str,
    Meta(
        pattern=ID_PATTERN,
        description="Name of the stream, chosen by the client: 1 to 64 characters of `A-Z a-z 0-9 _ . -`.",
    ),
]
Seq = Annotated[int, Meta(ge=0, description="Number of the frame in its stream: 0, 1, 2, … without a gap.")]


ExpectedContract = Annotated[
    str,
    Meta(
        max_length=MAX_EXPECTED,
        description="What must be served: see *Pinning a contract*. In `hello`: for every stream of the socket.",
    ),
]


class CloseCode(IntEnum):
    """Why the server closes a socket. ``CLOSE_MEANINGS`` has the texts."""

    NORMAL = 1000
    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002
    INVALID_UTF8 = 1007
    POLICY = 1008
    TOO_BIG = 1009
    NO_PONG = 1011
    NOT_JSON = 4400
    UNAUTHENTICATED = 4401
    TOO_SLOW = 4408
    CONTRACT_MISMATCH = 4412
    TOO_MANY = 4429


CLOSE_MEANINGS: dict[CloseCode, str] = {
    CloseCode.NORMAL: "Nothing happened on the socket for the idle limit, or the client closed.",
    CloseCode.GOING_AWAY: "The server shuts down; `goaway` came before it.",
    CloseCode.PROTOCOL_ERROR: "A frame broke RFC 6455 (a compressed one, for instance: nothing was negotiated).",
    CloseCode.INVALID_UTF8: "A text frame was not UTF-8.",
    CloseCode.POLICY: "Too many control frames, or the fragments of one message took longer than 10 s.",
    CloseCode.TOO_BIG: "A message had more than `max_frame_bytes` bytes, or more than 1,024 fragments.",
    CloseCode.NO_PONG: "The client did not answer a WebSocket ping in time.",
    CloseCode.NOT_JSON: "A frame was binary, was not JSON, or was not an object.",
    CloseCode.UNAUTHENTICATED: "The API key of `hello` was absent or wrong, or another message came before `hello`.",
    CloseCode.TOO_SLOW: "No `hello` in time, or the client stopped reading for the write limit.",
    CloseCode.CONTRACT_MISMATCH: "The server does not serve the contract that `hello` expects; an `error` came first.",
    CloseCode.TOO_MANY: "The client sent messages without reading the answers, or its key has too many sockets.",
}


class ClientMessage(msgspec.Struct, tag_field="type", kw_only=True, frozen=True):
    """Base of what clients send."""


class Hello(ClientMessage, tag="hello", kw_only=True, frozen=True):
    """Introduces the client. When the server has API keys and the handshake carried none, it must be the first message,
    and `welcome` answers it. Otherwise it is optional and has no answer."""

    token: Annotated[str, Meta(max_length=512, description="API key.")] | None = None
    client: Annotated[
        str, Meta(pattern=r"^[ -~]{0,64}\Z", description="Name and version of the client, for the server's log.")
    ] = ""
    expect_contract: ExpectedContract | None = None


class Create(ClientMessage, tag="create", kw_only=True, frozen=True):
    """Starts a stream. Answered by `created`, or by `error` with this id when the request is refused."""

    id: StreamId
    endpoint: Annotated[str, Meta(description='`"chat"` or `"completion"`: which body fields apply.')]
    body: Annotated[
        dict[str, Any],
        Meta(description="The request, as for `/v1/chat/completions` or `/v1/completions`; see *Body fields*."),
    ]
    expect_contract: ExpectedContract | None = None
    traceparent: (
        Annotated[str, Meta(max_length=128, description="W3C trace context of this request; absent: the handshake's.")]
        | None
    ) = None
    detach: Annotated[
        bool, Meta(description="Go on generating for `resume_s` when the connection is lost, and allow `resume`.")
    ] = False
    deadline_ms: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=MAX_DEADLINE_MS,
                description="From the arrival of this message until the client is given the end of the stream; what "
                "would be later by estimate is refused with `deadline_unmeetable`, what is later ends with "
                "`deadline_exceeded`. Absent: as the key's policy says.",
            ),
        ]
        | None
    ) = None
    priority: (
        Annotated[
            str,
            Meta(
                description='`"high"`, `"normal"` or `"low"`: which requests that wait are taken first. Absent: '
                '`"normal"`, or the best that the key may ask for.'
            ),
        ]
        | None
    ) = None


class Cancel(ClientMessage, tag="cancel", kw_only=True, frozen=True):
    """Ends a stream of this socket. Its terminal frame follows: `done` with `finish_reason` `"cancelled"` and the true
    usage, unless it ended by itself before. Harmless when repeated, or when the stream has just ended."""

    id: StreamId


class Resume(ClientMessage, tag="resume", kw_only=True, frozen=True):
    """Takes over a stream that was created with `detach`, from a lost connection or from one that still seems open.
    The stream goes on under its id on this socket; frames after `after` are sent again with the numbers they had."""

    session: Annotated[str, Meta(max_length=64, description="`session` of the `welcome` of the lost connection.")]
    id: StreamId
    after: Annotated[int, Meta(ge=0, description="`seq` of the last frame received; absent: none.")] | None = None


class Ping(ClientMessage, tag="ping", kw_only=True, frozen=True):
    """Asks for a `pong`: liveness for browsers, which cannot send WebSocket pings."""

    t: Annotated[
        Annotated[int, Meta(ge=-(2**53), le=2**53)] | float | Annotated[str, Meta(max_length=64)] | None,
        Meta(description="Anything; comes back in `pong`."),
    ] = None


class ServerMessage(msgspec.Struct, tag_field="type", kw_only=True, frozen=True, omit_defaults=True):
    """Base of what the server sends."""


class Welcome(ServerMessage, tag="welcome", kw_only=True, frozen=True):
    """The first frame of an authenticated socket, sent without being asked for."""

    session: Annotated[str, Meta(description="Secret for `resume`; only with the same API key. Keep it private.")]
    server: Annotated[str, Meta(description="Name and version of the server.")]
    models: Annotated[tuple[str, ...], Meta(description="Names that `body.model` may have.")]
    features: Annotated[tuple[str, ...], Meta(description="Optional parts that this server has.")]
    limits: Annotated[SessionLimits, Meta(description="What this socket may do.")]
    heartbeat_s: Annotated[float, Meta(description="Seconds between WebSocket pings; a pong is due in as many.")]
    resume_s: Annotated[float, Meta(description="Seconds that a detached stream lives without a connection.")]
    contract: Annotated[
        str | None, Meta(description="Fingerprint of the contract that is served; null while no engine is ready.")
    ]
    numerics: Annotated[str | None, Meta(description="Hash of its numerics; null likewise.")]


class Created(ServerMessage, tag="created", kw_only=True, frozen=True):
    """The request was accepted: the first frame of a stream."""

    id: StreamId
    seq: Seq
    request_id: Annotated[str, Meta(description="The server's name of the request.")]
    model: Annotated[str, Meta(description="Model that answers.")]
    created: Annotated[int, Meta(description="Unix time in seconds.")]
    contract: Annotated[str, Meta(description="Fingerprint of the contract that it is served under.")]
    queue_depth: Annotated[int, Meta(description="Requests that waited for the engine when this one was accepted.")]
    choices: Annotated[int, Meta(description="Choices that the stream has; indexes are 0 to choices - 1.")]
    ignored_fields: Annotated[
        tuple[str, ...],
        Meta(
            description="Unknown body fields that were ignored (--allow-unknown-fields), and fields of messages that "
            "the model's chat template does not read, tool calls as a rule."
        ),
    ] = ()
    prompt_token_ids: (
        Annotated[tuple[tuple[int, ...], ...], Meta(description="Per choice; only with `return_token_ids`.")]
        | UnsetType
    ) = UNSET


class Delta(ServerMessage, tag="delta", kw_only=True, frozen=True):
    """New output of one choice. A client that reads slowly gets fewer and longer deltas, never fewer tokens."""

    id: StreamId
    seq: Seq
    index: Annotated[int, Meta(description="Which choice.")]
    text: Annotated[str, Meta(description="New text; may be empty while a character or stop string is incomplete.")]
    n: Annotated[int, Meta(description="Tokens that this frame reports; more than one when deltas were merged.")]
    role: Annotated[str, Meta(description='`"assistant"` in the first delta of a chat choice.')] | UnsetType = UNSET
    token_ids: Annotated[tuple[int, ...], Meta(description="Only with `return_token_ids`.")] | UnsetType = UNSET
    logprobs: (
        Annotated[
            list[dict[str, Any]],
            Meta(description="One per token, as in OpenAI's `logprobs.content`, with `token_id` and `rank`."),
        ]
        | UnsetType
    ) = UNSET
    obfuscation: Annotated[str, Meta(description="Padding, only with `include_obfuscation`.")] | UnsetType = UNSET


class Done(ServerMessage, tag="done", kw_only=True, frozen=True):
    """The good terminal frame: every choice has ended."""

    id: StreamId
    seq: Seq
    choices: Annotated[tuple[ChoiceEnd, ...], Meta(description="One entry per choice.")]
    usage: Annotated[dict[str, Any], Meta(description="Tokens, as in OpenAI's `usage`, over all choices.")]
    metrics: Annotated[Times, Meta(description="Server times.")]
    contract: Annotated[str, Meta(description="As in `created`.")]


class Error(ServerMessage, tag="error", kw_only=True, frozen=True):
    """With an `id`: the bad terminal frame of that stream. With `id` null: a message was not carried out, and no
    stream is touched; `id_rejected` then repeats the id that the message named, when it was well-formed."""

    id: Annotated[str | None, Meta(description="The stream that ended, or null.")]
    seq: Annotated[int, Meta(ge=0, description="Only with an id: as in every frame of a stream.")] | UnsetType = UNSET
    status: Annotated[int, Meta(description="The HTTP status that this error would have.")]
    error: Annotated[ErrorDetail, Meta(description="What went wrong.")]
    retry_after_ms: (
        Annotated[int, Meta(description="When to try again, where trying again makes sense.")] | UnsetType
    ) = UNSET
    id_rejected: Annotated[str, Meta(description="The id named by a message that was not carried out.")] | UnsetType = (
        UNSET
    )


class Pong(ServerMessage, tag="pong", kw_only=True, frozen=True):
    """Answers `ping`."""

    t: Annotated[int | float | str | None, Meta(description="`t` of the ping.")]


class Goaway(ServerMessage, tag="goaway", kw_only=True, frozen=True):
    """The server shuts down. Running streams go on; new ones are refused. Connect elsewhere."""

    reason: Annotated[str, Meta(description='`"shutdown"`.')]
    deadline_ms: Annotated[int, Meta(description="After this time running streams end with `shutting_down`.")]


CLIENT_MESSAGES: tuple[type[ClientMessage], ...] = (Hello, Create, Cancel, Resume, Ping)
SERVER_MESSAGES: tuple[type[ServerMessage], ...] = (Welcome, Created, Delta, Done, Error, Pong, Goaway)
NESTED_OBJECTS: tuple[type[msgspec.Struct], ...] = (SessionLimits, ChoiceEnd, Preemption, Times, ErrorDetail)

AnyClientMessage = Hello | Create | Cancel | Resume | Ping

_BY_TYPE: dict[str, type[ClientMessage]] = {str(kind.__struct_config__.tag): kind for kind in CLIENT_MESSAGES}
_ID = re.compile(ID_PATTERN)
_ENCODER = msgspec.json.Encoder()


class Fatal(Exception):
    """The frame shows a broken client; the socket closes with 4400. The message is the close reason."""


class Invalid(Exception):
    """The frame cannot be carried out; the socket stays open. named_id: the well-formed id that it names.
    is_create: it would have started a stream of that id, so the error is that stream's end."""

    def __init__(self, error: ApiError, named_id: str | None, *, is_create: bool) -> None:
        super().__init__(error.message)
        self.error = error
        self.named_id = named_id
        self.is_create = is_create


def encode(message: ServerMessage) -> str:
    """The text of a frame."""
    return _ENCODER.encode(message).decode()


def error_frame(
    error: ApiError, *, stream_id: str | None = None, seq: int | None = None, id_rejected: str | None = None
) -> Error:
    """Of a stream (stream_id and seq), or of a message (neither)."""
    return Error(
        id=stream_id,
        seq=UNSET if seq is None else seq,
        status=error.status,
        error=ErrorDetail(type=error.type, code=error.code, message=error.message, param=error.param),
        retry_after_ms=UNSET if error.retry_after_ms is None else error.retry_after_ms,
        id_rejected=UNSET if id_rejected is None else id_rejected,
    )


def decode(text: str) -> AnyClientMessage:
    """One client message. Raises Fatal or Invalid.

    JSON that can be read but must be refused (a lone surrogate from a cut emoji, say) does not cost the client its
    other streams: it is Invalid.
    """
    if len(text) > MAX_FRAME_BYTES:
        raise Fatal(f"longer than {MAX_FRAME_BYTES} bytes")
    try:
        parsed = parse(text)
    except NotJson as error:
        raise Fatal(str(error)) from None
    value = parsed.value
    if not isinstance(value, dict):
        raise Fatal("a frame must be a JSON object")
    try:
        if parsed.fault is not None:
            raise ApiError(ErrorCode.MALFORMED_JSON, f"The frame is refused: {parsed.fault}.")
        return _convert(value)
    except ApiError as error:
        named_id = value.get("id")
        is_named = isinstance(named_id, str) and is_id(named_id)
        is_create = value.get("type") == Create.__struct_config__.tag
        raise Invalid(error, named_id if is_named else None, is_create=is_create and is_named) from None


def is_id(text: str) -> bool:
    return _ID.match(text) is not None


def _convert(value: dict[str, Any]) -> AnyClientMessage:
    name = value.get("type")
    kind = _BY_TYPE.get(name) if isinstance(name, str) else None
    if kind is None:
        code = ErrorCode.UNKNOWN_TYPE if "type" in value else ErrorCode.MISSING_FIELD
        raise ApiError(code, f"'type' must be one of {', '.join(_BY_TYPE)}.", param="type")
    try:
        message = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), value) from None
    assert isinstance(message, AnyClientMessage)
    if isinstance(message, Create):
        _check_create(message)
    return message


def _check_create(message: Create) -> None:
    if message.endpoint not in ENDPOINTS:
        text = f"'endpoint' must be one of {', '.join(ENDPOINTS)}."
        raise ApiError(ErrorCode.INVALID_VALUE, text, param="endpoint")
    if message.priority is not None:
        parse_priority("priority", message.priority)


def _explain(text: str, value: dict[str, Any]) -> ApiError:
    """msgspec names types and places, never values; its path becomes param."""
    missing = re.match(r"Object missing required field `(\w+)`", text)
    if missing:
        return ApiError(ErrorCode.MISSING_FIELD, f"'{missing[1]}' is required.", param=missing[1])
    what, _, place = text.partition(" - at `$.")
    name = re.split(r"[.`\[]", place)[0] or None
    if name in ("id", "session") and isinstance(value.get(name), str):
        code = ErrorCode.INVALID_ID if name == "id" else ErrorCode.INVALID_VALUE
        limit = f"1 to {MAX_ID_CHARS} characters of A-Z a-z 0-9 _ . -" if name == "id" else "at most 64 characters"
        return ApiError(code, f"'{name}' must be {limit}.", param=name)
    is_type = re.fullmatch(r"Expected `[^`]+`, got `[^`]+`", what) is not None
    code = ErrorCode.INVALID_TYPE if is_type else ErrorCode.INVALID_VALUE
    return ApiError(code, f"'{name}': {what[0].lower()}{what[1:]}.", param=name)
