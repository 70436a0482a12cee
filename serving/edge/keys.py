"""API keys: a file with one ``name:sha256:<64 hex digits>`` per line, never a key itself. '#' starts a comment.

The name is the tenant that requests are accounted to, and that prefix-cache entries belong to. Several lines may have
one name: that is how a key is changed without a gap. The file is read again when it changes; a file that cannot be
read then leaves the keys as they were and is logged, so that a half-written file locks nobody out.
"""

import hashlib
import hmac
import logging
import os
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.serving.core.errors import ConfigError
from headrace.serving.edge.watched_file import WatchedFile, read_text

MAX_KEY_CHARS = 512
MAX_KEYS = 1024
MAX_BYTES = 1 << 20
FILE = "key file"

_LINE = re.compile(r"(?P<name>[A-Za-z0-9_.-]{1,64}):sha256:(?P<digest>[0-9a-fA-F]{64})")
_log = logging.getLogger("headrace.keys")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a request is from. tenant: "" where the server has no keys. digest: of the key."""

    tenant: str
    digest: bytes = b""


ANONYMOUS = Identity("")


def new_key() -> str:
    """A key with 256 random bits."""
    return "hr_" + secrets.token_urlsafe(32)


def digest_line(name: str, key: str) -> str:
    """The line of a key file that accepts key for name. Raises ConfigError for a name that no line can have."""
    line = f"{name}:sha256:{_digest(key).hex()}"
    if _LINE.fullmatch(line) is None:
        raise ConfigError("the name of a key must be 1 to 64 characters of A-Z a-z 0-9 _ . -")
    return line


class KeyRing:
    """The keys of one file."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError naming file and line; it never repeats a line's content."""
        self._file = WatchedFile(path, _read, what=FILE, of="the API keys", log=_log, clock=clock)
        self.warning = _permission_warning(path)
        if self.warning:
            _log.warning("%s", self.warning)

    @property
    def names(self) -> tuple[str, ...]:
        """Distinct names, in file order."""
        return tuple(dict.fromkeys(name for name, _ in self._file.value))

    def identify(self, key: str | bytes) -> Identity | None:
        """Whose key it is. The time does not depend on which entry matches, nor on how much of a key is right."""
        entries = self._file.value
        if not 0 < len(key) <= MAX_KEY_CHARS:
            return None
        digest = _digest(key)
        found: str | None = None
        for name, expected in entries:
            if hmac.compare_digest(digest, expected):
                found = name
        return None if found is None else Identity(found, digest)

    def is_current(self, identity: Identity) -> bool:
        """Whether the key that made this identity is still in the file."""
        return (identity.tenant, identity.digest) in self._file.value


def _digest(key: str | bytes) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape") if isinstance(key, str) else key).digest()


def _read(path: Path) -> tuple[tuple[str, bytes], ...]:
    entries = []
    for number, line in enumerate(read_text(path, FILE, MAX_BYTES).splitlines(), 1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"{path} line {number} is not 'name:sha256:<64 hex digits>'; make a line with 'headrace key NAME'"
            )
        entries.append((match["name"], bytes.fromhex(match["digest"])))
    if not entries:
        raise ConfigError(f"the key file {path} has no keys; make a line with 'headrace key NAME'")
    if len(entries) > MAX_KEYS:
        raise ConfigError(f"the key file {path} has {len(entries)} keys; at most {MAX_KEYS} are supported")
    return tuple(entries)


def _permission_warning(path: Path) -> str | None:
    if os.name == "posix" and path.stat().st_mode & 0o022:
        return f"{path} may be written by other users, who could add keys; run: chmod go-w {path}"
    return None
