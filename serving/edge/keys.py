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

MAX_KEY_CHARS = 512
MAX_KEYS = 1024
RELOAD_CHECK_S = 1.0
"""How often, at most, the file is looked at."""

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
        self._path = path
        self._clock = clock
        self._stamp = _stamp(path)
        self._entries = _read(path)
        self._checked_s = clock()
        self.warning = _permission_warning(path)
        if self.warning:
            _log.warning("%s", self.warning)

    @property
    def names(self) -> tuple[str, ...]:
        """Distinct names, in file order."""
        return tuple(dict.fromkeys(name for name, _ in self._entries))

    def identify(self, key: str | bytes) -> Identity | None:
        """Whose key it is. The time does not depend on which entry matches, nor on how much of a key is right."""
        self._reload_if_changed()
        if not 0 < len(key) <= MAX_KEY_CHARS:
            return None
        digest = _digest(key)
        found: str | None = None
        for name, expected in self._entries:
            if hmac.compare_digest(digest, expected):
                found = name
        return None if found is None else Identity(found, digest)

    def is_current(self, identity: Identity) -> bool:
        """Whether the key that made this identity is still in the file."""
        self._reload_if_changed()
        return (identity.tenant, identity.digest) in self._entries

    def _reload_if_changed(self) -> None:
        now_s = self._clock()
        if now_s - self._checked_s < RELOAD_CHECK_S:
            return
        self._checked_s = now_s
        try:
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._entries = _read(self._path)
            _log.info("read %d API keys again from %s", len(self._entries), self._path)
        except ConfigError as error:
            _log.error("the API keys stay as they were: %s", error)


def _digest(key: str | bytes) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape") if isinstance(key, str) else key).digest()


def _stamp(path: Path) -> tuple[int, int, int]:
    """Changes when the file is written or replaced."""
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror}") from None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: Path) -> tuple[tuple[str, bytes], ...]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {path} cannot be read: {getattr(error, 'strerror', 'not UTF-8')}") from None
    entries = []
    for number, line in enumerate(lines, 1):
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
