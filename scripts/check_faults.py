"""Kill or stop the engine under 8 streams, and drain a loaded server.

Shows: a typed error on each stream within 2 s of a kill, readiness false at once, a non-zero exit code, or ready again
within 15 s with --restart-engine; a stopped (SIGSTOP) engine is noticed; SIGTERM lets running streams end.
"""

import asyncio
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import psutil

from headrace.serving.bench.stream_client import History, StreamClient
from scripts import evidence
from tests.live import LiveServer, start_server

NUM_STREAMS = 8
KILL_LIMIT_S = 2.0
STUCK_LIMIT_S = 15.0
"""The engine's own limit without progress (10 s) and its detection."""
RESTART_LIMIT_S = 15.0
OPTIONS = ("--max-streams", "8", "--context", "1024")


def readiness(server: LiveServer) -> int | None:
    """Status of /readyz; None when the server is gone."""
    try:
        return httpx.get(server.url + "/readyz", timeout=2).status_code
    except httpx.TransportError:
        return None


async def start_streams(
    client: StreamClient, max_tokens: int, *, count: int = NUM_STREAMS, running: int = NUM_STREAMS
) -> list[History]:
    """count streams, as soon as so many are running."""
    body = {"prompt": "The river turns the wheel and", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    histories = [await client.create(f"s{i}", "completion", body) for i in range(count)]
    while sum(bool(history.of_type("delta")) for history in histories) < running:
        await asyncio.sleep(0.02)
    return histories


async def until(condition: Callable[[], bool], limit_s: float) -> float | None:
    """Seconds until it holds; None when it did not within limit_s."""
    start = time.monotonic()
    while time.monotonic() - start < limit_s:
        if await asyncio.to_thread(condition):
            return round(time.monotonic() - start, 3)
        await asyncio.sleep(0.05)
    return None


async def break_engine(server: LiveServer, sign: signal.Signals, limit_s: float) -> dict[str, object]:
    """Send the signal while 8 streams run; what the client saw, and when."""
    async with StreamClient(server.stream_url) as client:
        histories = await start_streams(client, 500)
        hit_s = time.monotonic()
        server.engine.send_signal(sign)
        not_ready_s = await until(lambda: readiness(server) != 200, limit_s)
        await asyncio.wait_for(asyncio.gather(*(h.ended.wait() for h in histories)), limit_s)
        ends = [history.frames[-1] for history in histories]
    return {
        "not_ready_after_s": not_ready_s,
        "last_terminal_after_s": round(max(at_s for at_s, _ in ends) - hit_s, 3),
        "codes": sorted({str(frame["error"]["code"]) for _, frame in ends if frame["type"] == "error"}),
        "typed_errors": sum(frame["type"] == "error" for _, frame in ends),
        "faults": [fault for history in histories for fault in history.faults()],
    }


async def kill_and_exit(server: LiveServer) -> dict[str, object]:
    seen = await break_engine(server, signal.SIGKILL, KILL_LIMIT_S)
    seen["exit_code"] = await asyncio.to_thread(server.process.wait, 30)
    seen["passed"] = seen["typed_errors"] == NUM_STREAMS and not seen["faults"] and seen["exit_code"] != 0
    return seen


async def kill_and_restart(server: LiveServer) -> dict[str, object]:
    seen = await break_engine(server, signal.SIGKILL, KILL_LIMIT_S)
    seen["ready_again_after_s"] = await until(lambda: readiness(server) == 200, RESTART_LIMIT_S)
    async with StreamClient(server.stream_url) as client:
        history = await client.create("after", "completion", {"prompt": "The capital of France is", "max_tokens": 4})
        await history.ended.wait()
    seen["answers_again"] = history.terminals[0]["type"] == "done"
    seen["exit_code"] = await asyncio.to_thread(server.stop)
    seen["passed"] = (
        seen["typed_errors"] == NUM_STREAMS
        and not seen["faults"]
        and seen["ready_again_after_s"] is not None
        and seen["answers_again"]
        and seen["exit_code"] == 0
    )
    return seen


async def stop_and_exit(server: LiveServer) -> dict[str, object]:
    seen = await break_engine(server, signal.SIGSTOP, STUCK_LIMIT_S)
    seen["exit_code"] = await asyncio.to_thread(server.process.wait, 30)
    seen["passed"] = seen["typed_errors"] == NUM_STREAMS and not seen["faults"] and seen["exit_code"] != 0
    return seen


async def drain(server: LiveServer) -> dict[str, object]:
    async with StreamClient(server.stream_url) as client:
        histories = await start_streams(client, 60)
        server.process.send_signal(signal.SIGTERM)
        not_ready_s = await until(lambda: readiness(server) != 200, 2)
        refused = await client.create("late", "completion", {"prompt": "x", "max_tokens": 2})
        await asyncio.gather(*(h.ended.wait() for h in [*histories, refused]))
    children = psutil.Process(server.process.pid).children(recursive=True) if server.process.poll() is None else []
    exit_code = await asyncio.to_thread(server.process.wait, 40)
    finished = sum(h.terminals[-1]["type"] == "done" for h in histories if h.terminals)
    codes = [str(frame["error"]["code"]) for frame in refused.terminals if frame["type"] == "error"]
    left = [child.pid for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    return {
        "not_ready_after_s": not_ready_s,
        "streams_that_ended_whole": finished,
        "late_request": codes,
        "close_code": client.close_code,
        "exit_code": exit_code,
        "children_left": left,
        "passed": finished == NUM_STREAMS and bool(codes) and exit_code == 0 and not left,
    }


CASES: dict[str, tuple[tuple[str, ...], Callable[[LiveServer], Awaitable[dict[str, object]]]]] = {
    "kill -9, exit": ((), kill_and_exit),
    "kill -9, restart": (("--restart-engine",), kill_and_restart),
    "SIGSTOP, exit": ((), stop_and_exit),
    "SIGTERM, drain": ((), drain),
}


def main() -> int:
    args = evidence.arguments(__doc__).parse_args()
    found: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (options, case) in CASES.items():
            server = start_server(Path(folder) / "log", "smollm2-135m", *OPTIONS, *options)
            try:
                found[name] = dict(asyncio.run(case(server)))
            finally:
                if server.process.poll() is None:
                    server.process.kill()
                    server.process.wait()
    passed = all(bool(seen["passed"]) for seen in found.values())
    return evidence.write(args.out, passed, options=OPTIONS, cases=found)


if __name__ == "__main__":
    raise SystemExit(main())
