"""An engine, a tokenizer and a template whose answers a reader can work out by hand."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import uvicorn
from starlette.types import ASGIApp

from headrace.model.chat_template import ChatTemplateError
from headrace.serving.core.events import Finished, Timings, TokenEvent
from headrace.serving.core.plan import TokenLogprobs
from headrace.serving.core.request import CancelReason, FinishReason, Rejection, Request, RequestId
from headrace.serving.edge.app import build_app
from headrace.serving.edge.engine_client import EngineLost, EngineUnavailable, Sink
from headrace.serving.edge.preemption_counts import PreemptionCounts
from headrace.serving.edge.service import Service, ServiceConfig
from headrace.serving.engine.lifecycle import EngineState
from headrace.serving.engine.messages import Ready, Refused, Stats, Topology
from headrace.serving.engine.ports import ExpertTokens

BOS, EOS = 256, 257
VOCAB_SIZE = 260
SPECIALS = {BOS: "<bos>", EOS: "<eos>"}
TIMINGS = Timings(queue_ms=1.0, prefill_ms=2.0, decode_ms=3.0, first_token_ms=4.0, preemptions=0)
CONTEXT = 256


class ByteTokenizer:
    """Id = byte; two control tokens."""

    token_bytes: Sequence[bytes] = tuple(bytes([i]) for i in range(256)) + (b"<bos>", b"<eos>")
    special_ids = frozenset(SPECIALS)
    bos_id = BOS
    add_bos = False
    content_hash = "byte-tokenizer"

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        if allow_special:
            for token_id, name in SPECIALS.items():
                if name in text:
                    before, after = text.split(name, 1)
                    return [*self.encode(before, allow_special=True), token_id, *self.encode(after, allow_special=True)]
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return b"".join(self.token_bytes[i] for i in ids if not (skip_special and i in SPECIALS)).decode(
            errors="replace"
        )


class LineTemplate:
    """``<bos>role:content\\n`` for each message, then ``assistant:``."""

    content_hash = "line-template"
    shows_date = False
    variables = frozenset({"enable_thinking"})
    unread_fields = ("tool_calls",)

    def render_ids(
        self,
        tokenizer: ByteTokenizer,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] = {},
    ) -> list[int]:
        if any(message["content"] == "refuse me" for message in messages):
            raise ChatTemplateError("the template refuses this conversation")
        ids = []
        for message in messages:
            ids += [BOS, *tokenizer.encode(f"{message['role']}:{message['content']}\n")]
        if continue_final_message:
            return ids[:-1]
        return ids + tokenizer.encode("assistant:" if add_generation_prompt else "")


def ready(**changes: object) -> Ready:
    values: dict[str, object] = {
        "model_hash": "ab" * 32, "num_pages": 65, "page_size": 16, "num_slots": 4, "max_context": CONTEXT,
        "kv_bytes_per_token": 1024, "weights_bytes": 1, "programs": (), "warmup_seconds": 0.0,
        "topology": Topology(platform="fake", device_kind="fake"),
        "mesh": "tensor=1", "attention": "none", "dtype": "float32", "kv_dtype": "float32", "memory": None,
        "kv_bytes": 65 * 16 * 1024, "weights": "native",
    }  # fmt: skip
    return Ready(**{**values, **changes})  # type: ignore[arg-type]


@dataclass(slots=True)
class Live:
    request: Request
    sink: Sink
    num_tokens: int = 0


@dataclass(slots=True)
class FakeEngine:
    """Answers every request with ``reply``, one byte a step, then the end id (or on and on where it is ignored).

    auto: step by itself while requests live. Otherwise the test calls ``step``.
    """

    reply: bytes = b"Hello, world"
    auto: bool = True
    state: EngineState = EngineState.READY
    failure: str | None = None
    ready_info: Ready | None = field(default_factory=ready)
    num_restarts: int = 0
    generated: int = 0
    expert_tokens: ExpertTokens | None = None
    step_tokens: tuple[int, ...] = ()
    swap_pages_used: int = 0
    journal_bytes: int | None = None
    live: dict[RequestId, Live] = field(default_factory=dict)
    submitted: list[Request] = field(default_factory=list)
    cancels: list[tuple[RequestId, CancelReason]] = field(default_factory=list)
    choose: Callable[[Request, int], int] | None = None
    cancel_seen: asyncio.Event = field(default_factory=asyncio.Event)
    submit_seen: asyncio.Event = field(default_factory=asyncio.Event)
    preemptions: PreemptionCounts = field(default_factory=PreemptionCounts)
    _last_id: int = 0
    _task: asyncio.Task[None] | None = None

    @property
    def stats(self) -> Stats:
        running = min(len(self.live), 4)
        return Stats(
            running=running,
            waiting=len(self.live) - running,
            pages_total=64,
            pages_free=64 - running,
            generation_tokens=self.generated,
            preemptions=3,
            expert_tokens=self.expert_tokens,
            step_tokens=self.step_tokens,
            swap_pages_used=self.swap_pages_used,
            journal_bytes=self.journal_bytes,
        )

    @property
    def in_flight(self) -> int:
        return len(self.live)

    @property
    def queue_depth(self) -> int:
        return max(0, len(self.live) - 4)

    def next_request_id(self) -> RequestId:
        self._last_id += 1
        return RequestId(self._last_id)

    def submit(self, request: Request, sink: Sink) -> None:
        if self.state is not EngineState.READY:
            raise EngineUnavailable(self.state)
        self.submitted.append(request)
        self.submit_seen.set()
        self.live[request.request_id] = Live(request, sink)
        if self.auto and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self.live:
            await asyncio.sleep(0)
            self.step()

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        if request_id in self.live:
            self.cancels.append((request_id, reason))
            self.cancel_seen.set()
            asyncio.get_running_loop().call_soon(self._cancelled, request_id, reason)

    def _cancelled(self, request_id: RequestId, reason: CancelReason) -> None:
        if request_id in self.live:
            self.finish(request_id, FinishReason.CANCELLED, cancel_reason=reason)

    def token(self, request: Request, index: int) -> int:
        if self.choose is not None:
            return self.choose(request, index)
        if index < len(self.reply):
            return self.reply[index]
        return EOS if EOS in request.stop.stop_token_ids else self.reply[index % len(self.reply)]

    def step(self) -> None:
        """One token for each request."""
        for request_id, live in list(self.live.items()):
            if request_id in self.live:
                self._one_token(request_id, live)

    def _one_token(self, request_id: RequestId, live: Live) -> None:
        index, stop = live.num_tokens, live.request.stop
        token_id = self.token(live.request, index)
        live.num_tokens += 1
        self.generated += 1
        wanted = live.request.sampling.num_logprobs
        logprobs = None
        if wanted is not None:
            top = tuple((i, -0.5 - i) for i in range(wanted))
            logprobs = TokenLogprobs(chosen=-1.25, rank=2, top=top)
        live.sink(TokenEvent(request_id=request_id, index=index, token_id=token_id, logprobs=logprobs))
        if token_id in stop.stop_token_ids:
            self.finish(request_id, FinishReason.STOP, stop_token_id=token_id)
        elif live.num_tokens == stop.max_tokens:
            self.finish(request_id, FinishReason.LENGTH)

    def finish(self, request_id: RequestId, reason: FinishReason, **rest: object) -> None:
        live = self.live.pop(request_id)
        live.sink(
            Finished(
                request_id=request_id,
                reason=reason,
                prompt_tokens=len(live.request.prompt_ids),
                completion_tokens=live.num_tokens,
                cached_tokens=0,
                timings=TIMINGS,
                **rest,  # type: ignore[arg-type]
            )
        )

    def refuse(self, request_id: RequestId, rejection: Rejection) -> None:
        self.live.pop(request_id).sink(Refused(request_id=request_id, rejection=rejection))

    def die(self) -> None:
        """As EngineClient does: not ready first, then every stream hears of it."""
        self.state, self.ready_info, self.failure = EngineState.DEAD, None, "killed by SIGKILL"
        for request_id, live in list(self.live.items()):
            del self.live[request_id]
            live.sink(EngineLost(request_id))


def make_service(engine: FakeEngine, **changes: object) -> Service:
    values: dict[str, object] = {"model_names": ("fake", "alias"), "vocab_size": VOCAB_SIZE, "eos_ids": (EOS,)}
    config = ServiceConfig(**{**values, **changes})  # type: ignore[arg-type]
    return Service(config, engine=engine, tokenizer=ByteTokenizer(), template=LineTemplate())  # type: ignore[arg-type]


class _QuietServer(uvicorn.Server):
    """Leaves signals alone: two servers that end in another order would leave each other's handlers behind."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class RunningServer:
    """A real uvicorn on a loopback port, on the test's own loop."""

    def __init__(self, app: ASGIApp) -> None:
        self._server = _QuietServer(uvicorn.Config(app, port=0, log_level="error", ws="none", lifespan="off"))
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    async def __aenter__(self) -> "RunningServer":
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            assert not self._task.done()
            await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        await self._task


def open_app(service: Service) -> ASGIApp:
    return build_app(service, security=lambda app: app)
