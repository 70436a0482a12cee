"""The page with a scripted ``headrace.v1`` behind it: says what a model would hardly say on request."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from headrace.serving.edge.page import page_route

HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script>\n**not bold** &amp; "q"'
KEY = "sesame"
USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


class ScriptedEdge:
    """Answers by the last user message: slow, hostile, fail, drop, or an echo of the conversation's length.

    url: where it listens. needs_key: refuse a hello without KEY. requests: bodies seen.
    """

    def __init__(self) -> None:
        self.url = ""
        self.needs_key = False
        self.requests: list[dict[str, object]] = []

    async def stream(self, socket: WebSocket) -> None:
        await socket.accept(subprotocol="headrace.v1")
        running: dict[str, asyncio.Event] = {}
        answers: set[asyncio.Task[None]] = set()
        with suppress(WebSocketDisconnect):
            while True:
                frame = await socket.receive_json()
                match frame["type"]:
                    case "hello" if self.needs_key and frame.get("token") != KEY:
                        await socket.close(4401)
                        return
                    case "hello":
                        await socket.send_json(
                            {"type": "welcome", "session": "s_1", "server": "scripted/1", "models": ["scripted"]}
                            | {"limits": {}, "heartbeat_s": 20, "resume_s": 60, "features": []}
                        )
                    case "ping":
                        await socket.send_json({"type": "pong", "t": frame["t"]})
                    case "create":
                        self.requests.append(frame["body"])
                        cancelled = running[frame["id"]] = asyncio.Event()
                        answers.add(asyncio.create_task(self.answer(socket, frame, cancelled)))
                    case "cancel":
                        running[frame["id"]].set()
        for task in answers:
            task.cancel()

    async def answer(self, socket: WebSocket, frame: dict[str, object], cancelled: asyncio.Event) -> None:
        stream_id, body = frame["id"], frame["body"]
        assert isinstance(body, dict)
        text = body["messages"][-1]["content"]
        if text == "drop":
            await socket.close(1001)
            return
        if text == "fail":
            error = {"type": "overloaded", "code": "queue_full", "message": "the queue is full <b>", "param": None}
            await socket.send_json({"type": "error", "id": stream_id, "seq": 1, "status": 429, "error": error})
            return
        say = [HOSTILE] if text == "hostile" else ["Reply ", "to ", f"{len(body['messages'])} messages"]
        for seq, piece in enumerate(say, start=1):
            await socket.send_json({"type": "delta", "id": stream_id, "seq": seq, "index": 0, "text": piece, "n": 1})
            if text == "slow" and seq == 2:
                await cancelled.wait()
                break
        choices = [{"index": 0, "finish_reason": "cancelled" if cancelled.is_set() else "stop"}]
        await socket.send_json({"type": "done", "id": stream_id, "seq": 9, "choices": choices, "usage": USAGE})


@contextmanager
def scripted_edge() -> Iterator[ScriptedEdge]:
    """Served from a thread of this process."""
    edge = ScriptedEdge()
    app = Starlette(routes=[page_route(), WebSocketRoute("/v1/stream", edge.stream)])
    config = uvicorn.Config(app, host="127.0.0.1", port=0, ws="websockets-sansio", log_level="warning", lifespan="off")
    sockets = [config.bind_socket()]
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": sockets})
    thread.start()
    try:
        edge.url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
        yield edge
    finally:
        server.should_exit = True
        thread.join(30)
        sockets[0].close()
