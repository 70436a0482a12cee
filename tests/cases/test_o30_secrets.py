"""O30: keys are compared as digests and refused before anything is allocated; neither keys nor prompts leak."""

import asyncio
import base64
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import websockets

from headrace.serving.bench.stream_client import StreamClient
from tests.cases import servers
from tests.cases.five_checks import scrape
from tests.live import LiveServer

CANARY = "zebra-canary-4711"
"""Stands in prompts; must never be seen outside answers."""
FAILING_STEP = 1500
"""Behind those of the other tests."""


@dataclass(frozen=True)
class Keyed:
    """A server with two tenants' keys."""

    server: LiveServer
    alice: str
    bob: str
    key_file: Path

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.server.url, headers={"authorization": f"Bearer {self.alice}"}, timeout=60)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("o30")
    made = []
    for name in ("alice", "bob"):
        command = [sys.executable, "-m", "headrace", "key", name, "--file", str(folder / "keys")]
        made.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    log, fault = folder / "log", f"raise:{FAILING_STEP}"
    engine = {"log_format": "json"}
    options = {"api_keys": folder / "keys", "restart_engine": True}
    with servers.fake(log, smollm2_path, fault=fault, engine=engine, **options) as server:
        keyed = Keyed(server, *made, folder / "keys")
        with servers.five_checks(server, key=keyed.alice):
            yield keyed


def changed(key: str, place: int) -> str:
    return key[:place] + ("x" if key[place] != "x" else "y") + key[place + 1 :]


def wrong_headers(key: str) -> dict[str, list[tuple[str, str | bytes]]]:
    bearer = "authorization"
    return {
        "none": [],
        "empty": [(bearer, "")],
        "bare bearer": [(bearer, "Bearer")],
        "first character": [(bearer, f"Bearer {changed(key, 0)}")],
        "last character": [(bearer, f"Bearer {changed(key, len(key) - 1)}")],
        "one too short": [(bearer, f"Bearer {key[:-1]}")],
        "one too long": [(bearer, f"Bearer {key}x")],
        "other case": [(bearer, f"Bearer {key.swapcase()}")],
        "not ASCII": [(bearer, f"Bearer {key}é".encode())],
        "other scheme": [(bearer, f"Basic {key}")],
        "quoted": [(bearer, f'Bearer "{key}"')],
        "long": [(bearer, "Bearer " + "x" * 10_000)],
        "two": [(bearer, f"Bearer {key}"), (bearer, f"Bearer {key}")],
        "cookie": [("cookie", f"api_key={key}; authorization=Bearer {key}")],
        "own header": [("x-api-key", key)],
    }


def test_wrong_keys_over_http_cost_no_engine_and_leave_no_trace(keyed: Keyed) -> None:
    with keyed.http as http, httpx.Client(base_url=keyed.server.url) as stranger:
        before = scrape(http)
        body = {"prompt": CANARY, "max_tokens": 1}
        answers = {
            name: stranger.post("/v1/completions", json=body, headers=headers)  # type: ignore[arg-type]
            for name, headers in wrong_headers(keyed.alice).items()
        }
        answers["query"] = stranger.post(f"/v1/completions?api_key={keyed.alice}&key={keyed.alice}", json=body)
        after = scrape(http)
    for name, answer in answers.items():
        assert answer.status_code in ((403,) if name == "two" else (401, 429)), (name, answer.text)
        assert keyed.alice not in answer.text and CANARY not in answer.text, name
        assert "x-request-id" not in answer.headers
    assert after["requests_accepted_total", ""] == before["requests_accepted_total", ""]


async def test_wrong_keys_are_refused_before_the_upgrade(keyed: Keyed) -> None:
    for name, headers in wrong_headers(keyed.alice).items():
        if name in ("none", "cookie", "own header"):
            continue  # no key: a hello may bring it
        with pytest.raises(websockets.InvalidStatus) as caught:
            await websockets.connect(
                keyed.server.stream_url,
                subprotocols=["headrace.v1"],  # type: ignore[list-item]
                additional_headers=[(k, v if isinstance(v, str) else v.decode("latin-1")) for k, v in headers],
            )
        allowed = {"two": (403,), "long": (401, 429, 431)}.get(name, (401, 429))
        assert caught.value.response.status_code in allowed, name
    offered = base64.urlsafe_b64encode(changed(keyed.alice, 5).encode()).decode().rstrip("=")
    with pytest.raises(websockets.InvalidStatus):
        await websockets.connect(keyed.server.stream_url, subprotocols=["headrace.v1", f"bearer.{offered}"])  # type: ignore[list-item]


@pytest.mark.parametrize("hello", ["none", "wrong", "empty", "of another type", "1 MB", "other message"])
async def test_a_hello_without_the_key_closes_and_starts_nothing(keyed: Keyed, hello: str) -> None:
    first: dict[str, Any] = {
        "none": {"type": "hello"},
        "wrong": {"type": "hello", "token": changed(keyed.alice, 9)},
        "empty": {"type": "hello", "token": ""},
        "of another type": {"type": "hello", "token": [keyed.alice]},
        "1 MB": {"type": "hello", "token": "x" * 1_000_000},
        "other message": {"type": "create", "id": "r", "endpoint": "completion", "body": {"prompt": CANARY}},
    }[hello]
    async with websockets.connect(keyed.server.stream_url, subprotocols=["headrace.v1"]) as socket:  # type: ignore[list-item]
        await socket.send(json.dumps(first))
        with pytest.raises(websockets.ConnectionClosed) as caught:
            await asyncio.wait_for(socket.recv(), 20)
        assert caught.value.rcvd is not None and caught.value.rcvd.code == 4401
        assert keyed.alice not in caught.value.rcvd.reason


def test_repeated_failures_are_limited_and_a_right_key_still_passes(keyed: Keyed) -> None:
    with httpx.Client(base_url=keyed.server.url, headers={"authorization": "Bearer no"}) as stranger:
        answers = [stranger.get("/v1/models") for _ in range(20)]
    assert answers[-1].status_code == 429
    assert int(answers[-1].headers["retry-after"]) >= 1
    with keyed.http as http:
        assert http.get("/v1/models").status_code == 200


async def test_a_key_taken_away_during_a_stream(keyed: Keyed) -> None:
    """What runs may end; from a second later nothing new starts, on the open socket either. The other key stays."""
    lines = keyed.key_file.read_text()
    async with StreamClient(keyed.server.stream_url, token=keyed.bob) as client:
        running = await client.create("r", "completion", {"prompt": "x", "max_tokens": 900, "ignore_eos": True})
        await running.started.wait()
        keyed.key_file.write_text("".join(line for line in lines.splitlines(True) if not line.startswith("bob:")))
        try:
            codes = []
            end_s = time.monotonic() + 20
            while "invalid_api_key" not in codes and time.monotonic() < end_s:
                late = await client.create(f"late{len(codes)}", "completion", {"prompt": "x", "max_tokens": 1})
                await late.ended.wait()
                codes.append(late.terminals[0].get("error", {}).get("code"))  # type: ignore[attr-defined]
                await asyncio.sleep(0.1)
            await running.ended.wait()
        finally:
            keyed.key_file.write_text(lines)
    assert codes[-1] == "invalid_api_key"
    assert running.terminals[0]["type"] == "done"
    with keyed.http as http:
        assert http.get("/v1/models").status_code == 200


async def test_prompts_and_keys_are_in_no_log_metric_error_or_process_list(keyed: Keyed) -> None:
    """Prompts in every place of a request, in bodies that are refused for every reason, and under a failing step."""
    chat = {"messages": [{"role": "user", "content": CANARY}]}
    wrong: list[tuple[str, Any]] = [
        ("/v1/completions", {"prompt": CANARY, "max_tokens": -1}),
        ("/v1/completions", {"prompt": CANARY, "model": CANARY}),
        ("/v1/completions", {"prompt": CANARY, "suffix": CANARY}),
        ("/v1/completions", {"prompt": CANARY * 50_000}),
        ("/v1/completions", {"prompt": [CANARY, 5]}),
        ("/v1/completions", {"prompt": CANARY, "temperature": CANARY}),
        ("/v1/completions", {"prompt": CANARY, "logit_bias": {CANARY: 1}}),
        ("/v1/completions", {"prompt": CANARY, "max_tokens": 2, "stop": [CANARY] * 99}),
        ("/v1/completions", {"prompt": CANARY + "\ud800"}),
        ("/v1/chat/completions", {"messages": [{"role": CANARY, "content": CANARY}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": {"type": CANARY}}]}),
        ("/v1/chat/completions", chat | {"chat_template_kwargs": {CANARY: CANARY}}),
        ("/v1/chat/completions", chat | {"response_format": {"type": CANARY}}),
        ("/tokenize", {"prompt": CANARY, "messages": CANARY}),
        ("/v1/completions", f'{{"prompt": "{CANARY}", }}'),
        ("/v1/completions", f'{{"prompt": "{CANARY}'),
        ("/v1/completions", f'"{CANARY}"'),
    ]
    with keyed.http as http:
        for path, body in wrong:
            content = body if isinstance(body, str) else json.dumps(body)
            answer = http.post(path, content=content, headers={"content-type": "application/json"})
            assert answer.status_code >= 400, body
            assert CANARY not in answer.text, (body if len(content) < 500 else path, answer.text)
        statuses: list[int] = []
        while 500 not in statuses and len(statuses) < 20:
            answer = http.post("/v1/chat/completions", json=chat | {"max_tokens": 200, "ignore_eos": True})
            statuses.append(answer.status_code)
            assert CANARY not in answer.text
        metrics = http.get("/metrics").text
    async with StreamClient(keyed.server.stream_url, token=keyed.alice) as client:
        for number, (path, body) in enumerate(wrong):
            if isinstance(body, dict):
                history = await client.create(CANARY + str(number), "chat" if "chat" in path else "completion", body)
                await history.ended.wait()
                assert CANARY not in json.dumps(history.terminals[0]["error"]), body
        await client.create("junk", CANARY, {})
        client.write(b"")
    root = psutil.Process(keyed.server.process.pid)
    processes = [root, *root.children(recursive=True)]
    seen = {
        "log": keyed.server.log.read_text(),
        "metrics": metrics,
        "process list": json.dumps([[p.cmdline(), p.environ()] for p in processes]),
        "key file": keyed.key_file.read_text(),
    }
    assert f"step {FAILING_STEP} failed" in seen["log"] and "POST /v1/completions 400" in seen["log"]
    lines = [json.loads(line) for line in seen["log"].splitlines()]
    assert {line["process"] for line in lines} == {"edge", "engine"}
    assert {"accepted", "finished", "refused"} <= {line.get("event") for line in lines}
    for name, text in seen.items():
        for secret in (CANARY, keyed.alice, keyed.bob):
            assert secret not in text, (name, secret)
