"""Arrivals from a trace: a CSV file with a header, a row for each request, such as those that clouds have published.

``at_s`` (seconds) or ``TIMESTAMP`` (seconds, or a date with a time), and of choice ``prompt_tokens`` or
``ContextTokens``, ``max_tokens`` or ``GeneratedTokens``, ``tenant``. Other columns are not used. Times count from the
first row.
"""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from headrace.serving.bench.workload_fields import (
    MAX_FILE_BYTES,
    MAX_PROMPT_TOKENS,
    MAX_REQUESTS,
    MAX_TIME_S,
    MAX_TOKENS,
    FieldError,
    check_name,
)
from headrace.serving.core.errors import ConfigError

TIMES = ("at_s", "TIMESTAMP")
PROMPTS = ("prompt_tokens", "ContextTokens")
ANSWERS = ("max_tokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """at_s: from the first request on. prompt_tokens, max_tokens: None where the trace does not say."""

    at_s: float
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    tenant: str | None = None


def load_trace(path: Path, *, speed: float = 1.0, most: int | None = None) -> tuple[TracedRequest, ...]:
    """In order of arrival. speed: how many of its seconds pass in one. most: requests, from the first row on.

    Raises: ConfigError naming the file, the row and the column.
    """
    if not 0 < speed <= 1_000_000:
        raise ConfigError(f"--speed is {speed:g}; it must be above 0, to 1,000,000")
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"--trace {path} has more than {MAX_FILE_BYTES:,} bytes")
        with path.open(encoding="utf-8-sig", newline="") as file:
            found = list(_rows(csv.DictReader(file), path, most))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"--trace {path} cannot be read: {error}") from None
    if not found:
        raise ConfigError(f"--trace {path} has no row under its header")
    found.sort(key=lambda request: request.at_s)
    first_s = found[0].at_s
    if (found[-1].at_s - first_s) / speed > MAX_TIME_S:
        raise ConfigError(f"--trace {path} takes longer than {MAX_TIME_S:,.0f} s; give a --speed above 1")
    return tuple(
        TracedRequest(
            at_s=round((one.at_s - first_s) / speed, 6),
            prompt_tokens=one.prompt_tokens,
            max_tokens=one.max_tokens,
            tenant=one.tenant,
        )
        for one in found
    )


def _rows(reader: "csv.DictReader[str]", path: Path, most: int | None) -> Iterator[TracedRequest]:
    names = reader.fieldnames or ()
    time = next((name for name in TIMES if name in names), None)
    if time is None:
        raise ConfigError(f"--trace {path}: its header has none of {', '.join(TIMES)}, but {', '.join(names)[:200]}")
    prompt = next((name for name in PROMPTS if name in names), None)
    answer = next((name for name in ANSWERS if name in names), None)
    for number, row in enumerate(reader, 1):
        if most is not None and number > most:
            return
        if number > MAX_REQUESTS:
            raise ConfigError(f"--trace {path} has more than {MAX_REQUESTS:,} rows; give --requests")
        try:
            yield TracedRequest(
                at_s=_seconds(time, row[time]),
                prompt_tokens=None if prompt is None else _whole(prompt, row[prompt], MAX_PROMPT_TOKENS),
                max_tokens=None if answer is None else _whole(answer, row[answer], MAX_TOKENS),
                tenant=check_name("tenant", row["tenant"]) if row.get("tenant") else None,
            )
        except FieldError as error:
            raise ConfigError(f"--trace {path}, row {number}: {error}") from None


def _seconds(name: str, text: str | None) -> float:
    try:
        found = float(text or "")
    except ValueError:
        try:
            # Published traces have seven digits of a second, of which six are read.
            date, dot, rest = (text or "").strip().partition(".")
            digits = rest.rstrip("Z").split("+")[0]
            found = datetime.fromisoformat(date + (dot + digits[:6].ljust(6, "0") if dot else "")).timestamp()
        except ValueError:
            raise FieldError(f"{name!r} is {text!r:.40}; it must be seconds, or a date and a time") from None
    if not math.isfinite(found):
        raise FieldError(f"{name!r} is {text!r:.40}; it must be finite")
    return found


def _whole(name: str, text: str | None, most: int) -> int:
    """An answer or a prompt of none becomes one token: a request has both."""
    try:
        found = int(text or "")
    except ValueError:
        found = -1
    if not 0 <= found <= most:
        raise FieldError(f"{name!r} is {text!r:.40}; it must be a whole number from 0 to {most:,}")
    return max(1, found)
