"""A workload in a file: JSON lines, a header and then one request a line, each with the time of its arrival.

``MEANINGS`` and ``HEADER_MEANINGS`` say what each field is; BENCHMARKS.md has them with examples. Reading is strict: an
unknown field, a field twice, a value of another type or outside its range is a ConfigError that names file, line and
field.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.serving.bench.workload import FIRST_ID, LAST_ID, PROMPTS, WORDS
from headrace.serving.bench.workload_fields import (
    FORMAT,
    HEADER_FIELDS,
    MAX_FILE_BYTES,
    MAX_LINE_BYTES,
    MAX_PROMPT_TOKENS,
    MAX_PROMPT_WORDS,
    MAX_REQUESTS,
    PLAIN_FIELDS,
    SAMPLING_FIELDS,
    FieldError,
    check_all,
    check_name,
    whole,
)
from headrace.serving.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt, or the beginning of several. Exactly one is given: text and ids as they are; words or tokens, so many
    of them drawn from a seed."""

    text: str | None = None
    ids: tuple[int, ...] | None = None
    words: int | None = None
    tokens: int | None = None

    @property
    def is_text(self) -> bool:
        return self.text is not None or self.words is not None

    def drawn(self, seed: str) -> str | list[int]:
        """As it is sent. seed: of the words or ids that are drawn; the same one gives the same ones."""
        if self.text is not None:
            return self.text
        if self.ids is not None:
            return list(self.ids)
        rng = random.Random(seed)
        if self.tokens is not None:
            return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(self.tokens)]
        return " ".join(rng.choices(WORDS, k=self.words or 0))

    def estimated_tokens(self, tokens_per_word: float) -> int:
        """Exact for ids and drawn tokens; for text and drawn words their number of words times tokens_per_word."""
        if self.ids is not None:
            return len(self.ids)
        if self.tokens is not None:
            return self.tokens
        words = len(self.text.split()) if self.text is not None else self.words or 0
        return max(1, round(words * tokens_per_word))

    def as_json(self) -> object:
        if self.text is not None:
            return self.text
        if self.ids is not None:
            return list(self.ids)
        return {"words": self.words} if self.words is not None else {"tokens": self.tokens}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One line. at_s: from the start of the run, never before the one of the line above. shared_prefix: name of the
    prefix in the header that comes before the prompt. cancel_after_s: from at_s on. sampling: body fields by name."""

    at_s: float
    prompt: Prompt
    max_tokens: int
    tenant: str | None = None
    priority: int | str | None = None
    deadline_ms: int | None = None
    cancel_after_s: float | None = None
    shared_prefix: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        plain = {name: getattr(self, name) for name in PLAIN_FIELDS}
        plain["prompt"] = self.prompt.as_json()
        return {name: value for name, value in {**plain, **self.sampling}.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFile:
    """requests: in order of their arrival, at least one. duration_s: over which they were planned, at least the last
    arrival; the offered rate is their number by it. seed: of what is drawn. prefixes: by name."""

    requests: tuple[PlannedRequest, ...]
    duration_s: float
    seed: int = 0
    description: str = ""
    prefixes: Mapping[str, Prompt] = field(default_factory=dict)

    @property
    def tenants(self) -> tuple[str, ...]:
        """Names, sorted."""
        return tuple(sorted({request.tenant for request in self.requests if request.tenant is not None}))

    @property
    def offered_per_s(self) -> float:
        return len(self.requests) / self.duration_s if self.duration_s else float(len(self.requests))

    def prompt(self, index: int) -> str | list[int]:
        """Of the request with that index, with its shared prefix."""
        request = self.requests[index]
        own = request.prompt.drawn(f"{PROMPTS}:{self.seed}:{index}")
        if request.shared_prefix is None:
            return own
        name = request.shared_prefix
        before = self.prefixes[name].drawn(f"{PROMPTS}:{self.seed}:prefix:{name}")
        if isinstance(own, str) and isinstance(before, str):
            return f"{before} {own}"
        return [*before, *own]

    def body(self, index: int) -> dict[str, object]:
        """What both APIs call a completion; deadline and priority are not in it."""
        request = self.requests[index]
        return {"prompt": self.prompt(index), "max_tokens": request.max_tokens, **request.sampling}

    def estimated_prompt_tokens(self, index: int, *, tokens_per_word: float = 1.0) -> int:
        """With the shared prefix. Words that are drawn are common English ones: about one token each."""
        request = self.requests[index]
        parts = [request.prompt]
        if request.shared_prefix is not None:
            parts.append(self.prefixes[request.shared_prefix])
        return sum(part.estimated_tokens(tokens_per_word) for part in parts)

    def lines(self) -> Iterator[str]:
        """The file's lines, without their ends. Reading them gives an equal workload."""
        header: dict[str, object] = {"format": FORMAT, "seed": self.seed, "duration_s": self.duration_s}
        if self.description:
            header["description"] = self.description
        if self.prefixes:
            header["prefixes"] = {name: prefix.as_json() for name, prefix in self.prefixes.items()}
        yield json.dumps(header, ensure_ascii=False)
        for request in self.requests:
            yield json.dumps(request.as_json(), ensure_ascii=False)

    @property
    def hash(self) -> str:
        """SHA-256 over all that fixes the requests; two results with the same one were offered the same work."""
        found = hashlib.sha256(PROMPTS.encode())
        for line in self.lines():
            parsed = json.loads(line)
            parsed.pop("description", None)
            found.update(json.dumps(parsed, sort_keys=True, separators=(",", ":")).encode())
        return found.hexdigest()


def load_workload(path: Path) -> WorkloadFile:
    """Raises: ConfigError naming the file, the line and the field."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} has {size:,} bytes; a workload may have {MAX_FILE_BYTES:,}")
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return parse_workload(raw, str(path))


def parse_workload(raw: bytes, name: str) -> WorkloadFile:
    """The bytes of a file. name: of the file, for errors. Raises: ConfigError naming it, the line and the field."""
    header: dict[str, Any] | None = None
    requests: list[PlannedRequest] = []
    for number, line in enumerate(raw.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            value = _object(line)
            if header is None:
                header = _header(value)
            elif len(requests) == MAX_REQUESTS:
                raise FieldError(f"more than {MAX_REQUESTS:,} requests")
            else:
                requests.append(_request(value, header["prefixes"], requests[-1].at_s if requests else 0.0))
        except FieldError as error:
            raise ConfigError(f"{name}, line {number}: {error}") from None
    if header is None:
        raise ConfigError(f'{name} is empty; its first line must be a header, such as {{"format": "{FORMAT}"}}')
    if not requests:
        raise ConfigError(f"{name} has a header and no request")
    last_s = requests[-1].at_s
    duration_s = header.get("duration_s", last_s)
    if duration_s < last_s:
        raise ConfigError(f"{name}, line 1: duration_s is {duration_s:g}, and the last request comes at {last_s:g} s")
    return WorkloadFile(
        requests=tuple(requests),
        duration_s=duration_s,
        seed=header.get("seed", 0),
        description=header.get("description", ""),
        prefixes=header["prefixes"],
    )


def _object(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise FieldError(f"{len(line):,} bytes; a line may have {MAX_LINE_BYTES:,}")
    try:
        value = json.loads(line.decode(), object_pairs_hook=_without_twins, parse_constant=_no_constant)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise FieldError(f"no JSON ({error})") from None
    if not isinstance(value, dict):
        raise FieldError("not a JSON object")
    return value


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise FieldError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def _no_constant(name: str) -> Any:
    raise FieldError(f"{name} is no number of JSON")


def _header(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("format") != FORMAT:
        raise FieldError(f"the first line must be a header with format {FORMAT!r}, and has {value.get('format')!r:.80}")
    found = check_all(value, HEADER_FIELDS)
    found["prefixes"] = {
        check_name("prefixes", name): _prompt(f"prefixes.{name}", prefix)
        for name, prefix in found.get("prefixes", {}).items()
    }
    return found


def _request(value: dict[str, Any], prefixes: Mapping[str, Prompt], after_s: float) -> PlannedRequest:
    found = check_all(value, {**PLAIN_FIELDS, **SAMPLING_FIELDS})
    for name in ("at_s", "prompt", "max_tokens"):
        if name not in found:
            raise FieldError(f"{name!r} is missing")
    if found["at_s"] < after_s:
        raise FieldError(f"'at_s' is {found['at_s']:g}, before the {after_s:g} of the request above; sort the lines")
    prompt = found["prompt"] = _prompt("prompt", found["prompt"])
    if "shared_prefix" in found:
        prefix = prefixes.get(found["shared_prefix"])
        if prefix is None:
            raise FieldError(f"'shared_prefix' is {found['shared_prefix']!r}, which the header's prefixes have not")
        if prefix.is_text != prompt.is_text:
            raise FieldError("'shared_prefix' and 'prompt' must both be text or words, or both ids or tokens")
    sampling = {name: found.pop(name) for name in SAMPLING_FIELDS if name in found}
    return PlannedRequest(**found, sampling=sampling)


def _prompt(name: str, value: object) -> Prompt:
    """value: text, a list of ids, {"words": n} or {"tokens": n}."""
    if isinstance(value, str) and value:
        return Prompt(text=value)
    if isinstance(value, list) and value:
        if len(value) > MAX_PROMPT_TOKENS:
            raise FieldError(f"{name!r} has {len(value):,} ids; at most {MAX_PROMPT_TOKENS:,}")
        return Prompt(ids=tuple(whole(0, 2**31 - 1)(name, each) for each in value))
    if isinstance(value, dict) and list(value) == ["words"]:
        return Prompt(words=whole(1, MAX_PROMPT_WORDS)(f"{name}.words", value["words"]))
    if isinstance(value, dict) and list(value) == ["tokens"]:
        return Prompt(tokens=whole(1, MAX_PROMPT_TOKENS)(f"{name}.tokens", value["tokens"]))
    raise FieldError(f'{name!r} must be text, a list of ids, {{"words": n}} or {{"tokens": n}}, and not empty')
