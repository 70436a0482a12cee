"""The file of a journal: bounded, written by a thread, and never a reason for the service to stop."""

import logging
import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path

from headrace.serving.core.errors import ConfigError
from headrace.serving.engine.journal import AnyRecord, End, Header, JournalError, encode_record, read_journal

log = logging.getLogger(__name__)

MAX_PENDING_BYTES = 16 << 20
"""A disk that is so far behind does not catch up: the journal stops. One prompt of 128,000 ids takes under 1 MB."""
COLLECT_S = 0.1
"""Between two writes; a crash loses what came since the last."""
MODE = 0o600


def open_journal(path: Path) -> int:
    """A descriptor to append with; makes the file. Only its owner can read it. Raises: ConfigError."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, MODE)
    except OSError as error:
        raise ConfigError(f"--journal {path} cannot be written ({error.strerror}); name another file") from None
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"--journal {path} is no regular file; name another")
        if found.st_size:
            _check(path)
        os.fchmod(file, MODE)
    except BaseException:
        os.close(file)
        raise
    return file


def _check(path: Path) -> None:
    try:
        first = next(read_journal(path), None)
    except (JournalError, OSError) as error:
        raise ConfigError(f"--journal would append to a file of something else: {error}; name another file") from None
    if not isinstance(first, Header):
        raise ConfigError(f"--journal {path} holds something else than a journal; name another file")


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalOptions:
    """limit_bytes: of the whole file, earlier segments included."""

    path: str
    limit_bytes: int


class JournalFile:
    """One segment. ``write`` costs the step loop the encoding of a record, and never waits for the disk.

    Raises: ConfigError as open_journal.
    """

    def __init__(self, options: JournalOptions) -> None:
        self._path = path = Path(options.path)
        self._limit_bytes = options.limit_bytes
        self._file = open_journal(path)
        self._num_bytes = os.fstat(self._file).st_size
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._lock = threading.Lock()
        self._has_work = threading.Event()
        self._closing = threading.Event()
        self._stopped_by: str | None = None
        if self._num_bytes and not _ends_with_line(path):
            self._append(b"\n")
        self._thread = threading.Thread(target=self._write_all, daemon=True, name="journal")
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """Of the file, with what is on its way to it."""
        return self._num_bytes

    @property
    def stopped_by(self) -> str | None:
        """Why nothing is written any more; None while all is well."""
        return self._stopped_by

    def write(self, record: AnyRecord) -> None:
        """Does nothing once the journal has stopped."""
        if self._stopped_by is not None:
            return
        line = encode_record(record)
        if self._num_bytes + len(line) > self._limit_bytes:
            reason = f"the file has reached its limit of {self._limit_bytes} bytes (--journal-limit)"
            if not isinstance(record, Header):
                self._append(encode_record(End(reason=reason)))
            self._stop(reason)
        elif self._pending_bytes + len(line) > MAX_PENDING_BYTES:
            self._stop("the disk is too slow for it")
        else:
            self._append(line)

    def close(self) -> None:
        """Write what is left, and that the segment ends."""
        self.write(End(reason="the engine ended"))
        self._closing.set()
        self._has_work.set()
        self._thread.join()
        os.close(self._file)

    def _append(self, line: bytes) -> None:
        with self._lock:
            self._pending.append(line)
            self._pending_bytes += len(line)
            self._num_bytes += len(line)
        if not self._has_work.is_set():
            self._has_work.set()

    def _write_all(self) -> None:
        """The thread. Several records go in one write."""
        is_last = False
        while not is_last:
            self._has_work.wait()
            is_last = self._closing.wait(COLLECT_S)
            self._has_work.clear()
            with self._lock:
                data, self._pending, self._pending_bytes = b"".join(self._pending), [], 0
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._file, view) :]
            except OSError as error:
                self._stop(f"writing failed ({error.strerror})")
                return

    def _stop(self, reason: str) -> None:
        """One line in the log; the service goes on without a journal."""
        if self._stopped_by is None:
            self._stopped_by = reason
            log.error("the journal %s stops: %s; requests are served on", self._path, reason)


def _ends_with_line(path: Path) -> bool:
    """Whether no crash cut off the last record."""
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
