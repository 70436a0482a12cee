"""Write PROTOCOL.md from protocol_template.md and the schema of the code; ``--check`` only compares."""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import msgspec.inspect as schema

from headrace.serving.edge import messages
from headrace.serving.edge.errors import ERROR_TABLE
from headrace.serving.edge.fields import (
    DETOKENIZE_FIELDS,
    FIELDS,
    STREAM_OPTION_FIELDS,
    TOKENIZE_FIELDS,
    Field,
    Treatment,
)
from headrace.serving.edge.guards import ConnectionLimits
from headrace.serving.edge.server import ServerConfig
from headrace.serving.edge.session import MAX_UNREAD_ANSWERS, SessionConfig
from headrace.serving.edge.stream_endpoint import StreamConfig
from headrace.serving.edge.strict_json import MAX_COMMAS, MAX_CONTAINERS, MAX_DEPTH, MAX_KEYS

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "PROTOCOL.md"
TEMPLATE = ROOT / "scripts" / "protocol_template.md"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(heads), "|" + "---|" * len(heads), *(line(row) for row in rows)])


# Messages


def messages_part(kinds: Sequence[type[msgspec.Struct]], *, is_sent: bool) -> str:
    return "\n\n".join(message_part(kind, is_sent=is_sent) for kind in kinds)


def message_part(kind: type[msgspec.Struct], *, is_sent: bool) -> str:
    """Heading, text and table of one message or object."""
    info = schema.type_info(kind)
    assert isinstance(info, schema.StructType)
    name = str(info.tag) if info.tag is not None else kind.__name__
    text = " ".join((kind.__doc__ or "").split())
    rows = [
        (f"`{field.encode_name}`", type_text(field.type), presence(field, is_sent=is_sent), description(field.type))
        for field in info.fields
    ]
    return f"### `{name}`\n\n{text}\n\n{table(('field', 'type', 'presence', 'meaning'), rows)}"


def presence(field: schema.Field, *, is_sent: bool) -> str:
    if is_sent:
        return "always" if field.required else "not always"
    return "required" if field.required else "optional"


def description(kind: schema.Type) -> str:
    if isinstance(kind, schema.Metadata):
        return str((kind.extra_json_schema or {}).get("description", "")) or description(kind.type)
    if isinstance(kind, schema.UnionType):
        return next((text for part in kind.types if (text := description(part))), "")
    return ""


def type_text(kind: schema.Type) -> str:
    """A JSON type with its bounds."""
    match kind:
        case schema.Metadata():
            return type_text(kind.type)
        case schema.UnionType():
            return " or ".join(sorted({type_text(part) for part in kind.types}))
        case schema.StrType():
            return "string" if kind.max_length is None else f"string (≤ {kind.max_length} characters)"
        case schema.IntType():
            return "integer" + bounds(kind)
        case schema.FloatType():
            return "number"
        case schema.BoolType():
            return "boolean"
        case schema.NoneType():
            return "null"
        case schema.ListType() | schema.VarTupleType():
            return f"array of {type_text(kind.item_type)}"
        case schema.DictType():
            return "object"
        case schema.StructType():
            return f"[`{kind.cls.__name__}`](#{kind.cls.__name__.lower()})"
        case schema.AnyType():
            return "any"
        case _:
            raise TypeError(f"no text for {kind}")


def bounds(kind: schema.IntType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" ({kind.ge} to {kind.le})"
    return "" if kind.ge is None else f" (≥ {kind.ge})"


# Body fields


def fields_part(fields: Iterable[Field], *, with_endpoints: bool = True) -> str:
    heads = (
        ("field", "endpoint", "value", "default", "note") if with_endpoints else ("field", "value", "default", "note")
    )
    rows = []
    for field in fields:
        where = (", ".join(endpoint.value for endpoint in field.endpoints),) if with_endpoints else ()
        rows.append((f"`{field.name}`", *where, field.kind.describe(), field.default, field.note))
    return table(heads, rows)


def treated(treatment: Treatment) -> list[Field]:
    return [field for field in FIELDS if field.treatment is treatment]


def short_part(fields: Iterable[Field], *, with_value: bool) -> str:
    heads = ("field", "endpoint", "accepted", "note") if with_value else ("field", "endpoint", "note")
    rows = []
    for field in fields:
        value = (field.kind.describe().removeprefix("only "),) if with_value else ()
        rows.append((f"`{field.name}`", ", ".join(item.value for item in field.endpoints), *value, field.note))
    return table(heads, rows)


# Codes and limits


def error_codes() -> str:
    rows = [(f"`{code}`", str(rule.status), f"`{rule.type}`", rule.meaning) for code, rule in ERROR_TABLE.items()]
    return table(("code", "status", "type", "meaning"), rows)


def close_codes() -> str:
    rows = [(str(int(code)), messages.CLOSE_MEANINGS[code]) for code in messages.CloseCode]
    return table(("code", "meaning"), rows)


def limits() -> str:
    server, connection = ServerConfig(), ConnectionLimits()
    session = SessionConfig(server="")
    stream = StreamConfig(session=session)
    rows = [
        ("connections", f"{connection.max_connections:,}; {stream.max_sockets_per_key} sockets of one key; "
         f"{stream.max_unauthenticated} sockets without a hello", "503; 429; 429"),
        ("head of a request", f"{connection.max_head_bytes:,} bytes, {connection.max_headers} headers, "
         f"{connection.head_s:g} s", "431, 431, 408"),
        ("body of a request", f"{connection.body_s:g} s", "the connection ends"),
        ("time for `hello`", f"{stream.hello_s:g} s", "4408"),
        ("live streams of a socket", str(session.max_streams), "`too_many_streams`"),
        ("message", f"{messages.MAX_FRAME_BYTES:,} bytes in {connection.max_fragments:,} fragments, "
         f"{connection.message_s:g} s between the first and the last", "1009, 1009, 1008"),
        ("JSON", f"nesting {MAX_DEPTH}, {MAX_CONTAINERS:,} arrays and objects, {MAX_KEYS:,} keys, "
         f"{MAX_COMMAS:,} commas between values", "4400"),
        ("WebSocket pings and pongs from the client", f"{connection.control_per_s:g} per second, "
         f"{connection.control_burst:g} at once", "1008"),
        ("answers that wait to be read", f"{MAX_UNREAD_ANSWERS:,}", "4429"),
        ("a write that the client does not take", f"{stream.write_stall_s:g} s", "4408"),
        ("WebSocket ping of the server", f"every {server.ping_interval_s:g} s, pong within "
         f"{server.ping_timeout_s:g} s", "1011"),
        ("a socket without streams and messages", f"{stream.idle_s:g} s", "1000"),
        ("log of a detached stream", f"{session.replay_bytes >> 20} MiB, {stream.replay_total_bytes >> 20} MiB "
         f"of all; {stream.max_parked} lost sessions", "`resume_gone`"),
        ("shutdown", f"{server.drain_s:g} s", "`shutting_down`, 1001"),
    ]  # fmt: skip
    return table(("what", "limit", "beyond it"), rows)


PARTS: dict[str, Callable[[], str]] = {
    "client messages": lambda: messages_part(messages.CLIENT_MESSAGES, is_sent=False),
    "server messages": lambda: messages_part(messages.SERVER_MESSAGES, is_sent=True),
    "nested objects": lambda: messages_part(messages.NESTED_OBJECTS, is_sent=True).replace("### ", "#### "),
    "applied fields": lambda: fields_part(treated(Treatment.APPLIED)),
    "stream options": lambda: fields_part(STREAM_OPTION_FIELDS, with_endpoints=False),
    "inert fields": lambda: short_part(treated(Treatment.INERT), with_value=False),
    "refused fields": lambda: short_part(treated(Treatment.REFUSED), with_value=True),
    "error codes": error_codes,
    "close codes": close_codes,
    "limits": limits,
    "tokenize fields": lambda: fields_part(TOKENIZE_FIELDS, with_endpoints=False),
    "detokenize fields": lambda: fields_part(DETOKENIZE_FIELDS, with_endpoints=False),
}


def protocol_text() -> str:
    """The whole page. Raises ValueError for a mark without a part or a part without its mark."""
    text = TEMPLATE.read_text("utf-8")
    for name, make in PARTS.items():
        mark = f"<!-- {name} -->"
        if text.count(mark) != 1:
            raise ValueError(f"{TEMPLATE.name} must have {mark} exactly once")
        text = text.replace(mark, make())
    if "<!--" in text:
        raise ValueError(f"{TEMPLATE.name} has a mark that nothing fills")
    return text


def main(arguments: Sequence[str]) -> int:
    text = protocol_text()
    if "--check" not in arguments:
        TARGET.write_text(text, "utf-8")
        return 0
    if TARGET.exists() and TARGET.read_text("utf-8") == text:
        return 0
    print("PROTOCOL.md is not what the code says; run: make protocol", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
