"""A comparison in a file: TOML with servers and workloads. Strict: whatever is unknown or out of range is named.

Strings of ``command``, ``env``, ``url`` and ``model`` may hold $NAME, a value of the table [values] or of --set.
"""

import math
import re
import shlex
import string
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headrace.serving.bench.compare_plan import CLOSED, LOOPS, ComparedServer, ComparedWorkload, Comparison
from headrace.serving.bench.dialect import Door
from headrace.serving.bench.targets import base_of
from headrace.serving.bench.workload_fields import Check, FieldError, check_all, check_name, flag, real, whole
from headrace.serving.core.errors import ConfigError

FORMAT = "headrace-compare/1"
MAX_FILE_BYTES = 1 << 20


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 1_000:
        raise FieldError(f"{name!r} must be text of 1 to 1,000 characters")
    return value


def _texts(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
        raise FieldError(f"{name!r} must be a list of texts, not empty")
    return tuple(value)


def _command(name: str, value: object) -> str | tuple[str, ...]:
    return value if isinstance(value, str) and value.strip() else _texts(name, value)


def _table(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FieldError(f"{name!r} must be a table")
    return value


def _text_table(name: str, value: object) -> dict[str, str]:
    found = _table(name, value)
    if not all(isinstance(each, str) for each in found.values()):
        raise FieldError(f"{name!r} must have texts as values")
    return found


def _one_of(*names: str) -> Check:
    def check(name: str, value: object) -> str:
        if value not in names:
            raise FieldError(f"{name!r} must be one of {', '.join(names)}")
        return str(value)

    return check


SERVER_FIELDS: Mapping[str, Check] = {
    "url": _text,
    "kind": _text,
    "api": _one_of(*Door),
    "model": _text,
    "command": _command,
    "env": _text_table,
    "pid": whole(1, 2**22),
    "ready": _text,
    "ready_s": real(0, 86_400, above_low=True),
    "idle": _one_of("stop", "run"),
    "body": _table,
    "workloads": _texts,
    "repetitions": whole(1, 100),
    "api_key_file": _text,
}
SERVER_MEANINGS: Mapping[str, str] = {
    "url": "where it listens; required",
    "kind": "any, headrace, llama, vllm, sglang or openai: which fields it understands; default any",
    "api": "native, completions or chat; default completions",
    "model": "name to ask for; default: the first that it lists",
    "command": "starts it: a list, or a line that is split once $NAMEs are filled in; without it the server runs",
    "env": "table of environment variables for command",
    "pid": "of a server that runs already, so that it can be stopped while idle and its memory be read",
    "ready": "path that answers 200 when it is ready; default: that of its kind",
    "ready_s": "seconds until then at most; default 900",
    "idle": "stop (default where command or pid is known): by a signal, while others are measured; run: only watched",
    "body": "table of fields for every request, such as cache_prompt = false",
    "workloads": "names of those that it takes part in; default: all",
    "repetitions": "takes part in the first so many only",
    "api_key_file": "file whose first line is its key",
}
WORKLOAD_FIELDS: Mapping[str, Check] = {
    "name": check_name,
    "loop": _one_of(*LOOPS),
    "streams": whole(1, 4_096),
    "requests": whole(1, 100_000),
    "prompt_words": whole(1, 100_000),
    "prompt_tokens": whole(1, 1_000_000),
    "max_tokens": whole(1, 100_000),
    "rate": real(0, 100_000, above_low=True),
    "share_of": check_name,
    "share": real(0, 10, above_low=True),
    "repetitions": whole(1, 100),
    "watch_memory": flag,
}
WORKLOAD_MEANINGS: Mapping[str, str] = {
    "name": "required",
    "loop": "closed (default), poisson or uniform arrivals",
    "streams": "closed: requests at a time; default 1",
    "requests": "in all; default: as many as streams",
    "prompt_words": "words of a prompt, drawn; or prompt_tokens",
    "prompt_tokens": "ids of a prompt, drawn, exactly so many (not for chats)",
    "max_tokens": "of an answer, exactly so many where the server's kind knows ignore_eos; required",
    "rate": "requests per second of an open loop; or share_of and share",
    "share_of": "closed workload above this one: the rate is share × the requests/s of the slowest server there",
    "share": "default 0.7",
    "repetitions": "default: those of the file",
    "watch_memory": "whether PSS is read twice a second while it runs, which costs time; default: once, at the end",
}
FILE_FIELDS: Mapping[str, Check] = {
    "format": _one_of(FORMAT),
    "values": _text_table,
    "repetitions": whole(1, 100),
    "seed": whole(0, 2**31 - 1),
    "timeout_s": real(0, 86_400, above_low=True),
    "pause_s": real(0, 600),
    "servers": _table,
    "workloads": lambda name, value: value,
}
FILE_MEANINGS: Mapping[str, str] = {
    "format": f'"{FORMAT}"; required',
    "values": "table of texts that $NAME stands for; --set NAME=VALUE replaces one",
    "repetitions": "of each workload; default 5",
    "seed": "of prompts and arrivals; default 0",
    "timeout_s": "seconds for one request; default 600",
    "pause_s": "seconds between two turns; default 0.5",
    "servers": "a table [servers.NAME] for each; at least one",
    "workloads": "a table [[workloads]] for each; at least one",
}


def load_comparison(path: Path, settings: Mapping[str, str] | None = None) -> Comparison:
    """settings: of --set. Raises: ConfigError naming the file and what is wrong in it."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} has more than {MAX_FILE_BYTES:,} bytes")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return parse_comparison(text, str(path), settings)


def parse_comparison(text: str, name: str, settings: Mapping[str, str] | None = None) -> Comparison:
    """Raises: ConfigError naming the file, the table and the field."""
    where = name
    try:
        top = check_all(tomllib.loads(text), FILE_FIELDS)
        if "format" not in top:
            raise FieldError(f"'format' is missing; write format = \"{FORMAT}\"")
        values = _values(top.get("values", {}), settings or {})
        servers = []
        for each, table in top.get("servers", {}).items():
            where = f"{name}, [servers.{each}]"
            servers.append(_server(check_name("server", each), _table(each, table), values))
        workloads: list[ComparedWorkload] = []
        tables = top.get("workloads", [])
        for number, table in enumerate(tables if isinstance(tables, list) else [tables], 1):
            where = f"{name}, [[workloads]] number {number}"
            workloads.append(_workload(_table("workloads", table)))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is no TOML: {error}") from None
    except FieldError as error:
        raise ConfigError(f"{where}: {error}") from None
    known = ("repetitions", "seed", "timeout_s", "pause_s")
    try:
        return Comparison(
            servers=tuple(servers), workloads=tuple(workloads), **{key: top[key] for key in known if key in top}
        )
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def parse_server(text: str) -> ComparedServer:
    """``NAME=URL[,kind=llama][,api=chat][,model=M][,pid=4242][,idle=run]`` of a command line. Raises: ConfigError."""
    name, _, rest = text.partition("=")
    url, *others = rest.split(",")
    fields: dict[str, Any] = {"url": url}
    for other in others:
        key, _, value = other.partition("=")
        if key not in ("kind", "api", "model", "pid", "idle", "api_key_file"):
            raise ConfigError(f"{text!r}: {key!r} is none of kind, api, model, pid, idle, api_key_file")
        fields[key] = int(value) if key == "pid" and value.isdecimal() else value
    try:
        return _server(check_name("server", name), fields, {})
    except FieldError as error:
        raise ConfigError(f"{text!r}: {error}; write NAME=URL[,kind=llama][,pid=4242]") from None


def _values(given: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    unknown = [name for name in settings if name not in given]
    if unknown:
        raise FieldError(f"--set {unknown[0]}: [values] has {', '.join(given) or 'nothing'}")
    return {**given, **settings}


def _filled(name: str, text: str, values: Mapping[str, str]) -> str:
    try:
        return string.Template(text).substitute(values)
    except (KeyError, ValueError):
        found = ", ".join(re.findall(r"\$\{?\w+", text)) or text
        raise FieldError(
            f"{name!r} names {found}, and [values] has {', '.join(values) or 'nothing'}; $$ is a plain $"
        ) from None


def _server(name: str, table: Mapping[str, Any], values: Mapping[str, str]) -> ComparedServer:
    found = check_all(table, SERVER_FIELDS)
    if "url" not in found:
        raise FieldError("'url' is missing")
    for key in ("url", "model", "api_key_file"):
        if key in found:
            found[key] = _filled(key, found[key], values)
    command = found.get("command", ())
    if isinstance(command, str):
        found["command"] = _split(_filled("command", command, values))
    else:
        found["command"] = tuple(_filled("command", part, values) for part in command)
    found["env"] = {key: _filled(f"env.{key}", value, values) for key, value in found.get("env", {}).items()}
    if "api" in found:
        found["door"] = Door(found.pop("api"))
    if found["command"] and "pid" in found:
        raise FieldError("'pid' is of a server that runs already; leave it out beside 'command'")
    if found.get("idle") == "stop" and not found["command"] and "pid" not in found:
        raise FieldError("'idle' stop needs 'command' or 'pid': nobody knows which process to stop")
    if not found.get("ready", "/").startswith("/"):
        raise FieldError("'ready' must be a path that begins with /")
    try:
        found["base"] = base_of(found.pop("url"))
        parts = urlsplit(found["base"])
        if found["command"] and parts.hostname not in ("127.0.0.1", "localhost", "::1"):
            raise FieldError(f"'command' starts a server on this machine, and 'url' is {found['base']}")
        return ComparedServer(name=name, **found)
    except ConfigError as error:
        raise FieldError(str(error)) from None


def _split(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise FieldError(f"'command' {text!r} cannot be split as a shell would: {error}") from None


def _workload(table: Mapping[str, Any]) -> ComparedWorkload:
    found = check_all(table, WORKLOAD_FIELDS)
    for key in ("name", "max_tokens"):
        if key not in found:
            raise FieldError(f"{key!r} is missing")
    if ("prompt_words" in found) == ("prompt_tokens" in found):
        raise FieldError("give one of 'prompt_words' and 'prompt_tokens'")
    is_closed = found.get("loop", CLOSED) == CLOSED
    if is_closed and (extra := [key for key in ("rate", "share_of", "share") if key in found]):
        raise FieldError(f'{extra[0]!r} is of an open loop; give loop = "poisson"')
    if not is_closed and ("rate" in found) == ("share_of" in found):
        raise FieldError("an open loop has one of 'rate' and 'share_of'")
    if not is_closed and "streams" in found:
        raise FieldError("'streams' is of a closed loop; an open one has 'rate' or 'share_of', and 'requests'")
    if not is_closed and "requests" not in found:
        raise FieldError("'requests' is missing")
    if not math.isfinite(found.get("rate", 1.0)):
        raise FieldError("'rate' must be finite")
    found.setdefault("requests", found.get("streams", 1))
    return ComparedWorkload(**found)
