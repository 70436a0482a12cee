"""A folder of libraries that this process may load: its own user's, unchanged since they were compiled, a few versions.

Loading a library runs its code, so what another user could have written is never loaded. Each version is a folder named
by its key with the library and a record of its SHA-256; it appears whole, by a rename, or not at all.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from headrace.pallas_kernels.native.compiler import BuildError

LIBRARY = "headrace_kernels.so"
RECORD = "headrace_kernels.json"
KEPT_VERSIONS = 4
LOCK_WAIT_S = 600.0
OTHER = "another cache directory (XDG_CACHE_HOME)"
"""A remedy. The server has no option of its own for it."""
_PARTIAL = ".build-"
_KEY = re.compile(r"[0-9a-f]{20}")
"""Of folders that are ours: another program's, or a user's, may lie beside them and are never touched."""
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH

log = logging.getLogger("headrace.native")


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A verified library. record: what was written beside it: compiler, flags, instruction sets, seconds, warnings."""

    path: Path
    record: dict[str, Any]


def find(directory: Path, key: str) -> Version | None:
    """The version of that key, if it is there and unchanged; a damaged one is reported in the log and not returned.

    Raises BuildError: another user owns or could have changed the directory, the version or its files.
    """
    folder = directory / key
    if not os.path.lexists(folder):
        return None
    check_owned(directory)
    check_owned(folder)
    version = verified(folder)
    if version is not None:
        _mark_used(folder)
    return version


def make(directory: Path, key: str, fill: Callable[[Path], dict[str, Any]], waiting: Callable[[], None]) -> Version:
    """The version of that key, made by fill where it is missing; one process at a time makes versions.

    fill: writes LIBRARY into the folder that it gets, and returns the record. waiting: called once where another
    process has the lock. Raises BuildError, also as fill does.
    """
    try:
        _make_private(directory)
        check_owned(directory)
        with _locked(directory, waiting):
            if (version := find(directory, key)) is not None:
                return version
            for leftover in directory.glob(f"{_PARTIAL}*"):  # of killed processes: we hold the lock
                shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=directory) as work:
                made = Path(work) / "made"
                made.mkdir(mode=0o700)
                record = fill(made)
                write_record(made, record)
                if os.path.lexists(directory / key):
                    (directory / key).rename(Path(work) / "damaged")
                made.rename(directory / key)
            _prune(directory, keep=key)
            version = find(directory, key)
    except OSError as error:
        raise BuildError(
            f"the CPU kernels cannot be kept in {directory}: {error.strerror or error}; make room or give {OTHER}"
        ) from error
    if version is None:
        raise BuildError(f"the library in {directory / key} changed right after it was compiled; is the disk in order?")
    return version


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write record and the library's SHA-256 beside the library."""
    library = folder / LIBRARY
    library.chmod(0o755)
    text = json.dumps(record | {"sha256": _sha256(library)}, indent=2)
    (folder / RECORD).write_text(text + "\n")
    (folder / RECORD).chmod(0o644)


def verified(folder: Path, *, must_be_ours: bool = True) -> Version | None:
    """The version in a folder; None, with a line in the log, where the library is not what its record says.

    must_be_ours: refuse files of other users, or that others may write; not for a folder inside the installed package,
    which whoever could write it could change in many other ways. Raises BuildError.
    """
    library, record_file = folder / LIBRARY, folder / RECORD
    try:
        if must_be_ours:
            check_owned(library)
            check_owned(record_file)
        record = json.loads(record_file.read_bytes())
        expected, found = record["sha256"], _sha256(library)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("the compiled CPU kernels in %s are incomplete (%s) and are not used", folder, error)
        return None
    if expected != found:
        log.warning("the compiled CPU kernels in %s are damaged or were changed and are not used", folder)
        return None
    return Version(path=library, record=record)


def check_owned(path: Path) -> None:
    """Raises BuildError: another user than the process' own owns the file or folder, or others may write it, or
    could put another in its place. OSError: it is not there."""
    status = path.lstat()
    remedy = f"remove it, or give {OTHER}"
    if stat.S_ISLNK(status.st_mode):
        if path.is_dir() and status.st_uid == os.geteuid():
            check_owned(path.resolve())
            return
        raise BuildError(f"{path} is a symbolic link, and code would be loaded through it: {remedy}")
    if status.st_uid != os.geteuid():
        raise BuildError(
            f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}, and code would be loaded from it: {remedy}"
        )
    if status.st_mode & _WRITABLE_BY_OTHERS:
        raise BuildError(
            f"{path} may be written by other users (mode {stat.S_IMODE(status.st_mode):04o}), and code would be loaded "
            f"from it: {remedy}"
        )
    for parent in path.resolve().parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise BuildError(
                f"{parent} may be written by every user (mode {stat.S_IMODE(mode):04o}), who could replace {path}, and "
                f"code would be loaded from there: give {OTHER}"
            )


def _make_private(directory: Path) -> None:
    """Like mkdir with parents, which gives the mode to the last one alone."""
    if not directory.is_dir():
        _make_private(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _mark_used(folder: Path) -> None:
    """Newest first is how versions are kept; where the cache is read-only nothing is ever removed either."""
    try:
        os.utime(folder)
    except OSError as error:
        log.debug("%s cannot be marked as used: %s", folder, error)


def _prune(directory: Path, keep: str) -> None:
    versions = [
        path
        for path in directory.iterdir()
        if _KEY.fullmatch(path.name)
        and path.is_dir()
        and {RECORD, LIBRARY} >= {inside.name for inside in path.iterdir()}
    ]
    others = sorted((path for path in versions if path.name != keep), key=lambda path: path.stat().st_mtime_ns)
    for old in others[: max(0, len(versions) - KEPT_VERSIONS)]:
        shutil.rmtree(old, ignore_errors=True)


class _locked:
    """The directory's lock; says so where another process has it."""

    def __init__(self, directory: Path, waiting: Callable[[], None]) -> None:
        self._lock = FileLock(directory / ".lock", mode=0o600)
        self._waiting = waiting

    def __enter__(self) -> None:
        try:
            self._lock.acquire(timeout=0)
            return
        except Timeout:
            self._waiting()
        try:
            self._lock.acquire(timeout=LOCK_WAIT_S)
        except Timeout:
            raise BuildError(
                f"another process has held {self._lock.lock_file} for {LOCK_WAIT_S / 60:.0f} minutes; end it, or give "
                f"{OTHER}"
            ) from None

    def __exit__(self, *_: object) -> None:
        self._lock.release()
