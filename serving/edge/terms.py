"""What a caller asks for around a request, beside its body: a deadline and a class. On both doors."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.serving.core.request import Priority
from headrace.serving.edge.errors import ApiError, ErrorCode

MAX_DEADLINE_MS = 600_000
DEADLINE_HEADER = "x-headrace-deadline-ms"
PRIORITY_HEADER = "x-headrace-priority"
PRIORITIES: dict[str, Priority] = {priority.name.lower(): priority for priority in Priority}


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """deadline_ms: 1 to MAX_DEADLINE_MS, from arrival to the last byte given to the socket; None = the tenant's
    default. priority: None = the tenant's default. arrival_s: when the request came, on the service's clock."""

    deadline_ms: int | None = None
    priority: Priority | None = None
    arrival_s: float


def parse_priority(name: str, value: str) -> Priority:
    """name: of the field or header. Raises ApiError."""
    priority = PRIORITIES.get(value)
    if priority is None:
        raise ApiError(ErrorCode.INVALID_VALUE, f"{name} must be one of {', '.join(PRIORITIES)}.", param=name)
    return priority


def terms_of_headers(headers: Sequence[tuple[bytes, bytes]], arrival_s: float) -> Terms:
    """Of an HTTP request. Raises ApiError."""
    deadline, priority = _one(headers, DEADLINE_HEADER), _one(headers, PRIORITY_HEADER)
    return Terms(
        deadline_ms=None if deadline is None else _deadline_ms(deadline),
        priority=None if priority is None else parse_priority(PRIORITY_HEADER, priority),
        arrival_s=arrival_s,
    )


def _deadline_ms(text: str) -> int:
    # A number of six digits at most: int() of a long one takes time.
    value = int(text) if re.fullmatch(r"[0-9]{1,6}", text) else 0
    if not 1 <= value <= MAX_DEADLINE_MS:
        limit = f"an integer from 1 to {MAX_DEADLINE_MS}, in ms"
        raise ApiError(ErrorCode.INVALID_VALUE, f"{DEADLINE_HEADER} must be {limit}.", param=DEADLINE_HEADER)
    return value


def _one(headers: Sequence[tuple[bytes, bytes]], name: str) -> str | None:
    found = [value for key, value in headers if key == name.encode()]
    if len(found) > 1:
        raise ApiError(ErrorCode.INVALID_VALUE, f"The {name} header must not be repeated.", param=name)
    return found[0].decode("latin-1").strip() if found else None
