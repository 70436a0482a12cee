"""What every answer must look like, whatever was asked: typed, from the published table, and never a fault of ours."""

import json
from typing import Any

from headrace.serving.edge.errors import ERROR_TABLE, ErrorCode

PLAIN_STATUS = frozenset({400, 403, 405, 408, 413, 426, 431, 503, 505})
"""Of answers below the application, which are plain text: HTTP that cannot be read, and refused upgrades."""


class Wrong(Exception):
    """The server did what it must not; the text says what."""


def check_error(error: Any, status: int) -> str:
    """Of an error object with its status; returns the code."""
    if not isinstance(error, dict) or error.keys() != {"message", "type", "param", "code"}:
        raise Wrong(f"an error of another shape: {str(error):.200}")
    code = str(error["code"])
    if code == ErrorCode.INTERNAL or code not in set(ErrorCode):
        raise Wrong(f"error code {code}: {error['message']}")
    rule = ERROR_TABLE[ErrorCode(code)]
    if (rule.status, rule.type) != (status, error["type"]):
        raise Wrong(f"{code} came with status {status} and type {error['type']}")
    if not error["message"] or len(error["message"]) > 1000:
        raise Wrong(f"{code} has a message of {len(error['message'])} characters")
    return code


def check_frame(message: Any) -> None:
    """Of any frame of the native WebSocket."""
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise Wrong(f"a frame of another shape: {str(message):.200}")
    if message["type"] == "error":
        check_error(message["error"], message["status"])


def check_http(status: int, headers: dict[str, str], body: bytes) -> str:
    """Of an HTTP answer; returns "ok", or the error's code, or "plain 400" and the like."""
    kind = headers.get("content-type", "")
    if kind.startswith("text/plain") and status in PLAIN_STATUS:
        return f"plain {status}"
    if kind.startswith("text/event-stream") and status == 200:
        return _check_events(body)
    try:
        value = json.loads(body)
    except ValueError:
        raise Wrong(f"{status} with a body that is not JSON: {body[:200]!r}") from None
    if status == 200:
        if "error" in value:
            raise Wrong(f"200 with an error: {str(value):.200}")
        return "ok"
    return check_error(value.get("error"), status)


def _check_events(body: bytes) -> str:
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    if not events or not body.endswith(b"\n\n"):
        raise Wrong(f"an event stream without an end: {body[-200:]!r}")
    for event in events:
        if event != b"[DONE]" and "error" in (value := json.loads(event)):
            error = {name: part for name, part in value["error"].items() if name != "retry_after_ms"}
            return check_error(error, ERROR_TABLE[ErrorCode(error["code"])].status)
    if events[-1] != b"[DONE]":
        raise Wrong(f"an event stream that ends with {events[-1][:200]!r}")
    return "ok"
