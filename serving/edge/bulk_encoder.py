"""Long prompts to ids in a process of its own, at a low priority: both ends of its link, and how it is started.

Where the steps run on the cores that the edge runs on, a thread that renders a chat of 1,024 messages takes its 30 ms
from a step of every other stream. A process can be told to let the steps go first, and one that is not the edge holds
no interpreter lock that the event loop waits for.
"""

import contextlib
import logging
import subprocess
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe

import msgspec

from headrace.serving.edge.bodies import ChatPrompt
from headrace.serving.edge.child_process import spawn
from headrace.serving.edge.errors import ApiError, ErrorCode
from headrace.serving.edge.prompt_ids import PromptEncoder

log = logging.getLogger(__name__)

STOP_LIMIT_S = 5.0


class Chat(msgspec.Struct, frozen=True, tag=True):
    chat: ChatPrompt


class Text(msgspec.Struct, frozen=True, tag=True):
    text: str
    add_special: bool


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """First message of the process. content_hash: of what it loaded; another one than the edge's encodes otherwise."""

    content_hash: str


class Ids(msgspec.Struct, frozen=True, tag=True):
    ids: list[int]


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """The fields of an ApiError."""

    code: str
    message: str
    param: str | None


Job = Chat | Text
Answer = Loaded | Ids | Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkLaunch:
    """How to start the process: command gets ``--fd N`` appended, options are the first message that it reads.

    content_hash: of the edge's own tokenizer and template. answer_limit_s: a template has 5 s of CPU time, and the
    process no more than a tenth of a core where steps keep all cores busy.
    """

    command: tuple[str, ...]
    options: bytes
    content_hash: str
    answer_limit_s: float = 120.0


class BulkLost(Exception):
    """The process ended, hung, or is not what was started. The message says which."""


class BulkEncoder:
    """The edge's end: a PromptEncoder, one job at a time.

    A process that is lost fails the job at work alone: the next one starts another.
    """

    def __init__(self, launch: BulkLaunch) -> None:
        self._launch = launch
        self._turn = threading.Lock()
        self._state = threading.Lock()
        """Of process and closed; never held while waiting."""
        self._process: _Process | None = None
        self._is_closed = False

    def start(self) -> None:
        """Without waiting for what it loads. Raises OSError or BulkLost."""
        self._live_process()

    def _live_process(self) -> "_Process":
        with self._state:
            if self._is_closed:
                raise BulkLost("it was closed")
            if self._process is None or not self._process.is_alive:
                self._process = _Process(self._launch)
            return self._process

    def close(self) -> None:
        """Kills it at once; whoever waits for an answer gets an error."""
        with self._state:
            self._is_closed = True
        self._bury()

    def chat_ids(self, chat: ChatPrompt) -> list[int]:
        return self._ask(Chat(chat))

    def text_ids(self, text: str, *, add_special: bool) -> list[int]:
        return self._ask(Text(text, add_special))

    def _ask(self, job: Job) -> list[int]:
        with self._turn:
            answer = self._answer(job)
        if isinstance(answer, Ids):
            return answer.ids
        raise ApiError(ErrorCode(answer.code), answer.message, param=answer.param)

    def _answer(self, job: Job) -> Ids | Refusal:
        try:
            return self._live_process().answer(job)
        except (BulkLost, OSError) as error:
            self._bury()
            log.warning("the process that encodes long prompts is lost: %s", error)
            raise ApiError(
                ErrorCode.INTERNAL, f"The process that encodes long prompts failed: {error}. Send the request again."
            ) from None

    def _bury(self) -> None:
        with self._state:
            process, self._process = self._process, None
        if process is not None:
            process.end()


class _Process:
    """One life of the process."""

    def __init__(self, launch: BulkLaunch) -> None:
        """Raises OSError or BulkLost."""
        self._launch = launch
        self._is_loaded = False
        self._connection, theirs = Pipe()
        with theirs:
            self._process = spawn(launch.command, theirs.fileno())
        self._send(launch.options)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def answer(self, job: Job) -> Ids | Refusal:
        """Raises BulkLost."""
        self._send(msgspec.msgpack.encode(job))
        if not self._is_loaded:
            loaded = self._receive()
            if not isinstance(loaded, Loaded) or loaded.content_hash != self._launch.content_hash:
                raise BulkLost("it loaded other files than the server did; were they changed?")
            self._is_loaded = True
        answer = self._receive()
        if isinstance(answer, Loaded):
            raise BulkLost("it answered out of turn")
        return answer

    def end(self) -> None:
        """From any thread: with the process dead, a thread that waits for its answer stops to. The link closes with the
        last reference to it, which may be that thread's."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_LIMIT_S)

    def _send(self, data: bytes) -> None:
        try:
            self._connection.send_bytes(data)
        except OSError as error:
            raise BulkLost(f"its link broke ({error})") from None

    def _receive(self) -> Answer:
        try:
            limit_s = self._launch.answer_limit_s
            if not self._connection.poll(limit_s):
                raise BulkLost(f"no answer in {limit_s:g} s")
            return msgspec.msgpack.decode(self._connection.recv_bytes(), type=Answer)
        except EOFError:
            raise BulkLost("it ended") from None
        except (OSError, msgspec.MsgspecError) as error:
            raise BulkLost(f"its link broke ({error})") from None


def serve_jobs(connection: Connection, encoder: PromptEncoder, content_hash: str) -> None:
    """The process's end: answer until the edge is gone."""
    connection.send_bytes(msgspec.msgpack.encode(Loaded(content_hash)))
    while True:
        try:
            data = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(msgspec.msgpack.encode(_answer(encoder, msgspec.msgpack.decode(data, type=Job))))


def _answer(encoder: PromptEncoder, job: Job) -> Answer:
    try:
        if isinstance(job, Chat):
            return Ids(encoder.chat_ids(job.chat))
        return Ids(encoder.text_ids(job.text, add_special=job.add_special))
    except ApiError as error:
        return Refusal(error.code, error.message, error.param)
