"""The fields of a workload file: what each means, and the strict check of its value."""

import difflib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

FORMAT = "headrace-workload/1"
MAX_FILE_BYTES = 512 << 20
MAX_LINE_BYTES = 8 << 20
MAX_REQUESTS = 1_000_000
MAX_PROMPT_WORDS = 100_000
MAX_PROMPT_TOKENS = 1_000_000
MAX_TOKENS = 100_000
MAX_TIME_S = 7 * 86_400.0
MAX_DEADLINE_MS = 86_400_000
MAX_NAME_CHARS = 64
MAX_STOPS = 16
MAX_TEXT_CHARS = 1_000
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_NAME_CHARS}}}")


class FieldError(ValueError):
    """What is wrong with a line; whoever reads it adds the file and the line."""


Check = Callable[[str, object], Any]
"""(name, value) → the checked value. Raises: FieldError naming the field and what it must be."""


def whole(low: int, high: int) -> Check:
    def check(name: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise FieldError(f"{name!r} must be a whole number from {low:,} to {high:,}")
        return value

    return check


def real(low: float, high: float, *, above_low: bool = False) -> Check:
    def check(name: str, value: object) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not low <= value <= high or (above_low and value == low):  # type: ignore[operator]
            raise FieldError(f"{name!r} must be a number {'above' if above_low else 'from'} {low:g} to {high:,.15g}")
        return value  # type: ignore[return-value]

    return check


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise FieldError(f"{name!r} must be true or false")
    return value


def check_name(name: str, value: object) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise FieldError(f"{name!r}: a name has 1 to {MAX_NAME_CHARS} characters of A-Z a-z 0-9 _ . -")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARS:
        raise FieldError(f"{name!r} must be text of at most {MAX_TEXT_CHARS:,} characters")
    return value


def _priority(name: str, value: object) -> int | str:
    if isinstance(value, str):
        return check_name(name, value)
    checked: int = whole(-(2**31), 2**31 - 1)(name, value)
    return checked


def _stop(name: str, value: object) -> object:
    texts = [value] if isinstance(value, str) else value
    is_good = isinstance(texts, list) and len(texts) <= MAX_STOPS and all(isinstance(t, str) and t for t in texts)
    if not is_good:
        raise FieldError(f"{name!r} must be text, or a list of at most {MAX_STOPS} texts")
    return value


def _ids(name: str, value: object) -> object:
    if not isinstance(value, list) or len(value) > MAX_STOPS:
        raise FieldError(f"{name!r} must be a list of at most {MAX_STOPS} ids")
    return [whole(0, 2**31 - 1)(name, each) for each in value]


def _object(name: str, value: object) -> object:
    if not isinstance(value, dict):
        raise FieldError(f"{name!r} must be an object")
    return value


def _anything(name: str, value: object) -> object:
    return value


HEADER_FIELDS: Mapping[str, Check] = {
    "format": _text,
    "seed": whole(0, 2**63 - 1),
    "duration_s": real(0, MAX_TIME_S),
    "description": _text,
    "prefixes": _object,
}
PLAIN_FIELDS: Mapping[str, Check] = {
    "at_s": real(0, MAX_TIME_S),
    "prompt": _anything,
    "max_tokens": whole(1, MAX_TOKENS),
    "tenant": check_name,
    "priority": _priority,
    "deadline_ms": whole(1, MAX_DEADLINE_MS),
    "cancel_after_s": real(0, MAX_TIME_S),
    "shared_prefix": check_name,
}
"""Of a request, besides those of its sampling. prompt is checked by whoever reads it."""
SAMPLING_FIELDS: Mapping[str, Check] = {
    "temperature": real(0, 100),
    "top_k": whole(0, 2**31 - 1),
    "top_p": real(0, 1, above_low=True),
    "min_p": real(0, 1),
    "seed": whole(0, 2**63 - 1),
    "repetition_penalty": real(0.01, 100),
    "presence_penalty": real(-2, 2),
    "frequency_penalty": real(-2, 2),
    "min_tokens": whole(0, MAX_TOKENS),
    "ignore_eos": flag,
    "stop": _stop,
    "stop_token_ids": _ids,
}
"""They go into the body as they are; a server may have narrower ranges."""

HEADER_MEANINGS: Mapping[str, str] = {
    "format": f'"{FORMAT}"; required, in the first line',
    "seed": "of words and ids that are drawn; default 0",
    "duration_s": "seconds over which the requests were planned, for the offered rate; default: the last at_s",
    "description": "for people",
    "prefixes": "object: name to a prompt, which requests of that shared_prefix begin with",
}
MEANINGS: Mapping[str, str] = {
    "at_s": "seconds from the start at which the request is sent, whatever the others do; required, ascending",
    "prompt": 'text, a list of ids, {"words": n} or {"tokens": n}: so many, drawn from seed and line; required',
    "max_tokens": "most tokens of the answer; required",
    "tenant": "name of the key to use, from the file of --keys; default: --api-key-file",
    "priority": "high, normal or low; a number for other servers' field of that name over HTTP",
    "deadline_ms": "for the server: give up after so long",
    "cancel_after_s": "the client cancels so long after at_s; the request counts in no latency and no goodput",
    "shared_prefix": "name of a prefix in the header that comes before the prompt",
    **dict.fromkeys(SAMPLING_FIELDS, "as in the body of a completion"),
}
"""Of a request's line."""


def check_all(value: Mapping[str, Any], checks: Mapping[str, Check]) -> dict[str, Any]:
    """Every field by its check; null counts as absent. Raises: FieldError for the first that is wrong or unknown."""
    found = {}
    for name, each in value.items():
        check = checks.get(name)
        if check is None:
            near = difflib.get_close_matches(name, checks, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(checks)}"
            raise FieldError(f"unknown field {name!r:.80}{hint}")
        if each is not None:
            found[name] = check(name, each)
    return found
