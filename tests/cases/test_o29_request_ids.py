"""O29: ids that clients choose are names on their own connection, and nothing else."""

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest
from websockets.frames import Frame, Opcode

from headrace.serving.bench.stream_client import History, StreamClient
from tests.cases import servers
from tests.cases.five_checks import FiveChecks
from tests.live import LiveServer

BODY = {"prompt": "x", "max_tokens": 2, "ignore_eos": True, "temperature": 0, "seed": 0}


@pytest.fixture(autouse=True, scope="module")
def checks(fake_server: LiveServer) -> Iterator[FiveChecks]:
    with servers.five_checks(fake_server) as checks:
        yield checks


async def test_a_duplicate_is_refused_and_the_live_stream_is_untouched(
    fake_server: LiveServer, checks: FiveChecks
) -> None:
    async with StreamClient(fake_server.stream_url) as client, StreamClient(fake_server.stream_url) as other:
        first = await client.create("r", "completion", BODY | {"max_tokens": 200})
        elsewhere = await other.create("r", "completion", BODY | {"max_tokens": 100})
        await first.started.wait()
        client.write(frame({"type": "create", "id": "r", "endpoint": "completion", "body": BODY}))
        client.write(frame({"type": "resume", "id": "r", "session": "s_0"}))
        await asyncio.gather(first.ended.wait(), elsewhere.ended.wait())
    checks.watch(first, elsewhere)
    assert [(f["id"], f["id_rejected"], code(f)) for f in client.others] == [(None, "r", "duplicate_id")] * 2
    assert [tokens(first), tokens(elsewhere)] == [200, 100]


@pytest.mark.parametrize("with_cancel", [False, True])
async def test_an_id_is_free_again_the_moment_that_its_stream_ended(
    fake_server: LiveServer, checks: FiveChecks, with_cancel: bool
) -> None:
    histories = []
    async with StreamClient(fake_server.stream_url) as client:
        for _ in range(250):
            history = await client.create("r", "completion", BODY | {"max_tokens": 2 if not with_cancel else 500})
            if with_cancel:
                await client.cancel("r")
            await history.ended.wait()
            histories.append(history)
        assert client.others == []
    checks.watch(*histories)
    assert {history.terminals[0]["type"] for history in histories} == {"done"}


@pytest.mark.parametrize(
    "stream_id",
    ["", None, 5, True, ["r"], {"a": 1}, "x" * 65, "x" * 1_000_000, "a\nb", "a\0b", "😀", "a/b", "%s%n", "a b", "é"],
    ids=lambda value: repr(value)[:12],
)
async def test_ids_that_are_none(fake_server: LiveServer, checks: FiveChecks, stream_id: object) -> None:
    """An error that is about no stream and does not repeat the id; the socket stays."""
    async with StreamClient(fake_server.stream_url) as client:
        client.write(frame({"type": "create", "id": stream_id, "endpoint": "completion", "body": BODY}))
        client.write(frame({"type": "cancel", "id": stream_id}))
        while len(client.others) < 2:
            await asyncio.sleep(0.001)
        fine = await client.create("fine", "completion", BODY)
        await fine.ended.wait()
    checks.watch(fine)
    for answer in client.others:
        wanted = "invalid_id" if isinstance(stream_id, str) else "invalid_type"
        assert (answer["type"], answer["id"], code(answer)) == ("error", None, wanted), answer
        assert len(json.dumps(answer)) < 500 and "id_rejected" not in answer


async def test_odd_but_allowed_ids(fake_server: LiveServer, checks: FiveChecks) -> None:
    async with StreamClient(fake_server.stream_url) as client:
        names = ["__proto__", "constructor", "..", "-", "0", "x" * 64, "null", "__class__"]
        histories = [await client.create(name, "completion", BODY) for name in names]
        await asyncio.gather(*(history.ended.wait() for history in histories))
    checks.watch(*histories)
    assert [tokens(history) for history in histories] == [2] * len(histories)


def test_the_request_id_is_the_servers_and_log_lines_cannot_be_forged(
    fake_server: LiveServer, checks: FiveChecks
) -> None:
    with httpx.Client(base_url=fake_server.url) as http:
        headers = {"x-request-id": "mine", "user-agent": "x\tforged-agent"}
        answers = [http.post("/v1/completions", json=BODY | {"user": "mine"}, headers=headers) for _ in range(2)]
        ids = {answer.headers["x-request-id"] for answer in answers} | {answer.json()["id"] for answer in answers}
        assert "mine" not in ids and len(ids) >= 2
        assert http.get("/x%0A2026-01-01 INFO forged-line%1b[31m").status_code == 404
    log = fake_server.log.read_text()
    assert "forged-agent" not in log and "\x1b[31m" not in log
    assert not [line for line in log.splitlines() if line.startswith("2026-01-01")]


def frame(message: object) -> bytes:
    return Frame(Opcode.TEXT, json.dumps(message).encode()).serialize(mask=True)


def code(answer: dict[str, object]) -> str:
    return str(answer["error"]["code"])  # type: ignore[index]


def tokens(history: History) -> int:
    return int(history.terminals[0]["usage"]["completion_tokens"])  # type: ignore[index]
