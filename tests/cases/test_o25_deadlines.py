"""O25: deadlines are not applied by this version, so they are refused by name instead of being ignored."""

import asyncio

import httpx
import pytest

from headrace.serving.bench.stream_client import StreamClient
from tests.cases.five_checks import FiveChecks
from tests.live import LiveServer

DEADLINES = (50, 1000, 0, -1, 10**12, 1.5, "1000", True)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_deadlines_in_a_body(fake_server: LiveServer, fake_checks: FiveChecks, path: str) -> None:
    wanted: dict[str, object] = (
        {"prompt": "x"} if "chat" not in path else {"messages": [{"role": "user", "content": "x"}]}
    )
    with httpx.Client(base_url=fake_server.url) as http:
        for deadline in DEADLINES:
            answer = http.post(path, json={"max_tokens": 1, "deadline_ms": deadline, **wanted})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_field", "deadline_ms")
        assert http.post(path, json={"max_tokens": 1, "deadline_ms": None, **wanted}).status_code == 200


async def test_deadlines_of_native_streams(fake_server: LiveServer, fake_checks: FiveChecks) -> None:
    """In the envelope and in the body; the socket and its other streams go on."""
    body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
    async with StreamClient(fake_server.stream_url) as client:
        kept = await client.create("kept", "completion", body, deadline_ms=None, priority=None)
        refused = [await client.create(f"e{i}", "completion", body, deadline_ms=d) for i, d in enumerate(DEADLINES)]
        refused += [
            await client.create(f"b{i}", "completion", body | {"deadline_ms": d}) for i, d in enumerate(DEADLINES)
        ]
        await asyncio.gather(*(history.ended.wait() for history in (kept, *refused)))
    fake_checks.watch(kept, *refused)
    assert kept.terminals[0]["type"] == "done"
    for history in refused:
        error = history.terminals[0]["error"]
        assert (error["code"], error["param"]) == ("unsupported_field", "deadline_ms"), error  # type: ignore[index]
