"""Files of probe records: JSON in the format ``headrace-probe/1``, read strictly, and those that come with Headrace."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec

from headrace.serving.core.errors import ConfigError
from headrace.serving.core.probe import ProbeRecord, record_fault

MAX_FILE_BYTES = 4 << 20
MAX_FILES = 256
SHIPPED = Path(__file__).with_name("probes")
"""Records of models that Headrace fetches or makes by itself."""


def read_record(path: Path) -> ProbeRecord:
    """Raises: ConfigError naming the file and what is wrong with it."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"probe record {path} cannot be read: {error.strerror}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"probe record {path} has more than {MAX_FILE_BYTES} bytes")
    try:
        record = msgspec.json.decode(raw, type=ProbeRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no probe record: {error}; make one with 'headrace probe record'") from None
    fault = record_fault(record)
    if fault is not None:
        raise ConfigError(f"probe record {path}: {fault}; make it again with 'headrace probe record'")
    return record


def read_records(paths: Sequence[Path]) -> tuple[ProbeRecord, ...]:
    """Of files, and of all ``*.json`` in directories, in order of their names. Raises: ConfigError, also for a
    directory without any."""
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not found:
            raise ConfigError(f"--probe {path} is a directory without a probe record (*.json)")
        files += found
    if len(files) > MAX_FILES:
        raise ConfigError(f"--probe names {len(files)} files; at most {MAX_FILES} are read")
    return tuple(map(read_record, files))


@cache
def shipped_records() -> tuple[ProbeRecord, ...]:
    """Of SHIPPED."""
    return tuple(map(read_record, sorted(SHIPPED.glob("*.json"))))


def record_bytes(record: ProbeRecord) -> bytes:
    """The file: one line for a field or a prompt, so that a change can be read."""
    fields = msgspec.to_builtins(record)
    prompts = fields.pop("prompts")
    lines = [f"{_json(name)}: {_json(value)}" for name, value in fields.items()]
    rows = ",\n  ".join(_json({name: v for name, v in prompt.items() if v is not None}) for prompt in prompts)
    return ("{\n " + ",\n ".join([*lines, f'"prompts": [\n  {rows}\n ]']) + "\n}\n").encode()


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
