"""O25: a deadline ends a request wherever it passes, with an error of its own and without work for nothing."""

import asyncio
from pathlib import Path

import httpx
import pytest

from headrace.serving.bench.stream_client import History, StreamClient
from tests.cases import servers
from tests.cases.five_checks import FiveChecks
from tests.live import LiveServer

NO_DEADLINES = (0, -1, 10**12, 1.5, "1000", True)
NUM_SLOTS = 4
STEP_MS = 20.0
LATE_MS = 100.0
"""After its deadline a request has ended."""


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_over_http_it_is_a_header(fake_server: LiveServer, fake_checks: FiveChecks, path: str) -> None:
    wanted: dict[str, object] = (
        {"prompt": "x"} if "chat" not in path else {"messages": [{"role": "user", "content": "x"}]}
    )
    with httpx.Client(base_url=fake_server.url) as http:
        for deadline in ("0", "-1", str(10**12), "1.5", "soon"):
            answer = http.post(path, json={"max_tokens": 1, **wanted}, headers={"x-headrace-deadline-ms": deadline})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "x-headrace-deadline-ms"), error
        error = http.post(path, json={"max_tokens": 1, "deadline_ms": 1000, **wanted}).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_field", "deadline_ms")
        found = http.post(path, json={"max_tokens": 1, **wanted}, headers={"x-headrace-deadline-ms": "60000"})
        assert found.status_code == 200


async def test_values_that_are_no_deadline_are_refused(fake_server: LiveServer, fake_checks: FiveChecks) -> None:
    """The socket and its other streams go on."""
    body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
    async with StreamClient(fake_server.stream_url) as client:
        kept = await client.create("kept", "completion", body, deadline_ms=None, priority=None)
        refused = [await client.create(f"e{i}", "completion", body, deadline_ms=d) for i, d in enumerate(NO_DEADLINES)]
        await asyncio.gather(*(history.ended.wait() for history in (kept, *refused)))
    fake_checks.watch(kept, *refused)
    assert kept.terminals[0]["type"] == "done"
    assert all(history.terminals[0]["error"]["param"] == "deadline_ms" for history in refused)


async def test_in_the_queue_in_prefill_and_between_tokens(tmp_path: Path, smollm2_path: Path) -> None:
    engine = {"num_slots": NUM_SLOTS, "chunk_tokens": 64, "prefix_cache": False}
    with servers.fake(tmp_path / "log", smollm2_path, step_ms=STEP_MS, engine=engine) as server:
        async with StreamClient(server.stream_url) as client:
            # None of them says how long it will be, so none can be refused by estimate.
            held = [await _ask(client, f"held{i}", 4) for i in range(NUM_SLOTS - 2)]
            decoding = await _ask(client, "decoding", 4, deadline_ms=600)
            prefilling = await _ask(client, "prefilling", 2_000, deadline_ms=300)
            await asyncio.gather(*(history.started.wait() for history in (*held, decoding, prefilling)))
            queued = [await _ask(client, f"queued{i}", 4, deadline_ms=50) for i in range(20)]
            ended = [decoding, prefilling, *queued]
            async with asyncio.timeout(30):
                await asyncio.gather(*(history.ended.wait() for history in ended))
            for history in held:
                await client.cancel(history.id)
            await asyncio.gather(*(history.ended.wait() for history in held))
    assert not [fault for history in (*held, *ended) for fault in history.faults()]
    assert [history.terminals[0]["type"] for history in ended] == ["error"] * len(ended)
    assert _code(decoding) == "deadline_exceeded"
    # Once steps were measured, what cannot be in time is refused before it waits.
    assert {_code(history) for history in (prefilling, *queued)} <= {"deadline_exceeded", "deadline_unmeetable"}
    assert decoding.text and not prefilling.text and not any(history.text for history in queued)
    for history, deadline_ms in ((decoding, 600.0), (prefilling, 300.0), *((history, 50.0) for history in queued)):
        assert (history.frames[-1][0] - history.sent_s) * 1e3 < deadline_ms + STEP_MS + LATE_MS


async def _ask(client: StreamClient, name: str, num_prompt: int, **envelope: object) -> History:
    body: dict[str, object] = {"prompt": [100 + i for i in range(num_prompt)], "max_tokens": 1_500, "min_tokens": 0}
    return await client.create(name, "completion", body, **envelope)


def _code(history: History) -> str:
    return str(history.terminals[0]["error"]["code"])
