"""Keys that our own clients ask with: one for all, or one for each tenant of a workload. Never shown."""

from pathlib import Path

from headrace.serving.bench.workload_fields import FieldError, check_name
from headrace.serving.core.errors import ConfigError

MAX_KEY_FILE_BYTES = 4096
MAX_KEYS_FILE_BYTES = 1 << 20
MAX_KEY_CHARS = 512


def read_key(path: Path | None) -> str | None:
    """The first line of --api-key-file; None without one. Raises: ConfigError."""
    if path is None:
        return None
    lines = _text("--api-key-file", path, MAX_KEY_FILE_BYTES).splitlines()
    if not lines or not lines[0].strip():
        raise ConfigError(f"--api-key-file {path}: its first line is empty; put the key there")
    return lines[0].strip()


def read_keys(path: Path) -> dict[str, str]:
    """Lines ``tenant:key`` of --keys; '#' starts a comment. Raises: ConfigError naming the line, never a key."""
    found: dict[str, str] = {}
    for number, line in enumerate(_text("--keys", path, MAX_KEYS_FILE_BYTES).splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        name, _, key = (part.strip() for part in text.partition(":"))
        where = f"--keys {path}, line {number}"
        try:
            check_name("tenant", name)
        except FieldError as error:
            raise ConfigError(f"{where}: {error}; a line is tenant:key") from None
        if key.startswith("sha256:"):
            raise ConfigError(f"{where} has a key's digest, as the server keeps it; a client needs the key itself")
        if not key or len(key) > MAX_KEY_CHARS:
            raise ConfigError(f"{where}: a key has 1 to {MAX_KEY_CHARS} characters")
        if name in found:
            raise ConfigError(f"{where}: {name} has a key already")
        found[name] = key
    if not found:
        raise ConfigError(f"--keys {path} has no line tenant:key")
    return found


def _text(option: str, path: Path, most: int) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(most + 1)
        if len(raw) > most:
            raise ConfigError(f"{option} {path} has more than {most:,} bytes")
        return raw.decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path} cannot be read: {error}") from None
