"""Kinds of servers and doors: what is sent to each, on servers of known answers that refuse what they do not know."""

import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headrace.serving.bench.dialect import KINDS, Door, dialect_of
from headrace.serving.bench.openai_target import OpenAITarget
from headrace.serving.bench.targets import Server
from headrace.serving.core.errors import ConfigError
from tests.serving.bench.fake_openai import Handler
from tests.serving.bench.live import invoke


@contextmanager
def faking(*, is_strict: bool = False) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """URL of a server, and the bodies that it gets."""
    seen: list[dict[str, Any]] = []

    class Own(Handler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["content-length"]))
            seen.append(json.loads(raw))
            self.rfile = io.BytesIO(raw)
            super().do_POST()

    Own.is_strict = is_strict
    server = ThreadingHTTPServer(("127.0.0.1", 0), Own)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def test_every_kind_but_openais_own_is_asked_for_exact_lengths() -> None:
    body = {"prompt": "a b", "max_tokens": 7, "ignore_eos": True}
    for kind, dialect in KINDS.items():
        assert dialect.body(body, Door.COMPLETIONS).get("ignore_eos", False) == (kind != "openai")
        chat = dialect.body(body, Door.CHAT)
        assert chat["messages"] == [{"role": "user", "content": "a b"}] and "prompt" not in chat
        assert chat["max_completion_tokens" if kind == "openai" else "max_tokens"] == 7
    with pytest.raises(ConfigError, match="kind 'lama' is not one of any, headrace"):
        dialect_of("lama")
    with pytest.raises(ConfigError, match="a chat takes text"):
        dialect_of("vllm").body({"prompt": [1, 2], "max_tokens": 7}, Door.CHAT)


@pytest.mark.parametrize("door", [Door.COMPLETIONS, Door.CHAT])
async def test_text_and_counts_of_both_doors(door: Door) -> None:
    with faking() as (url, seen):
        async with OpenAITarget(Server(base=url), "m", 1, door=door, extra={"x": 1}, keeps_text=True) as target:
            outcome = await target.ask(0, {"prompt": "a b c", "max_tokens": 4, "ignore_eos": True})
    assert outcome.error is None and outcome.text == "w3 w4 w5 w6 "
    assert (outcome.prompt_tokens, outcome.output_tokens, len(outcome.gaps_ms)) == (3, 4, 3)
    assert seen[0]["x"] == 1 and seen[0]["stream"] is True


def test_the_command_asks_chats_and_strict_servers() -> None:
    work = ("--requests", "3", "--streams", "2", "--prompt-words", "3", "--max-tokens", "5", "--warmup", "0")
    with faking() as (url, seen):
        done = invoke(url, "--api", "chat", "--kind", "vllm", "--body", '{"top_k": 1}', *work)
        assert done.return_value == 0, done.stderr
        assert {body["top_k"] for body in seen} == {1} and all("messages" in body for body in seen)
        assert "(15 in" in " ".join(done.stdout.split())  # tokens by its usage
    with faking(is_strict=True) as (url, _):
        assert invoke(url, "--api", "openai", *work).return_value == 1  # ignore_eos is refused
        short = invoke(url, "--api", "chat", "--kind", "openai", *work)
        assert short.return_value == 0 and "(6 in" in " ".join(short.stdout.split())  # it ended where it liked


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--kind", "vllm"), "--kind is of HTTP"),
        (("--body", "{}"), "--body is of HTTP"),
        (("--api", "openai", "--body", "x"), "--body is no JSON"),
        (("--api", "openai", "--body", "[]"), "--body must be a JSON object"),
        (("--api", "openai", "--kind", "openai", "--ignore-eos"), "does not know it"),
        (("--api", "chat", "--prompt-tokens", "3"), "a chat takes text"),
        (("--streams", "1,x"), "--streams '1,x' must be a number, or several"),
        (("--streams", "2,2"), "give each number once"),
        (("--streams", "0", "--tenant", "a=1"), "--streams is 0"),
        (("--rate", "1", "--requests", "1", "--streams", "2"), "--streams is of a closed loop"),
        (("--speed", "2"), "--speed needs an open loop"),
        (("--trace", "TRACE", "--rate", "1"), "--trace has the arrivals"),
        (("--html", "/no/such/place.html"), "--html .* cannot be written"),
    ],
)
def test_what_the_command_refuses(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("at_s\n0\n")
    result = invoke("http://127.0.0.1:9", *(str(trace) if each == "TRACE" else each for each in arguments))
    with pytest.raises(ConfigError, match=says):
        raise result.exception or AssertionError(result.output)


def test_several_numbers_of_streams_and_repetitions(tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    work = ("--requests", "4", "--prompt-words", "30", "--max-tokens", "3", "--warmup", "0")
    with faking() as (url, seen):
        done = invoke(
            url, "--api", "openai", "--streams", "1,2", "--repeat", "3", *work, "--json", str(out), "--html", str(page)
        )
    assert done.return_value == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["loop"] == "levels" and [run["streams"] for run in found["runs"]] == [1, 2, 1, 2, 1, 2]
    assert [level["streams"] for level in found["levels"]] == [1, 2]
    rate = found["levels"][0]["metrics"]["output_tokens_per_s"]
    assert rate["count"] == 3 and rate["low"] <= rate["median"] <= rate["high"] and rate["confidence"] == 0.75
    assert len({body["prompt"] for body in seen}) == 24, "a prompt came twice"
    assert "medians of 3 runs, with 75.0% intervals" in done.stdout
    text = page.read_text()
    assert "against concurrency" in text and text.count("<svg") >= 3 and "http" not in text.replace(url, "")


def test_a_closed_loop_with_tenants_prefixes_cancels_and_drawn_lengths(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    keys = tmp_path / "keys"
    keys.write_text("gold:g\nfree:f\n")
    with faking() as (url, seen):
        done = invoke(
            url, "--api", "openai", "--requests", "20", "--streams", "4", "--prompt-words", "uniform:2:5",
            "--max-tokens", "9", "--tenant", "gold=1", "--tenant", "free=1", "--keys", str(keys),
            "--shared-prefix", "sys=6:0.5", "--cancel-share", "0.3", "--cancel-after", "0", "--warmup", "0",
            "--json", str(out),
        )  # fmt: skip
    assert done.return_value == 0, (done.stderr, done.exception)
    found = json.loads(out.read_text())
    assert {one["tenant"] for one in found["requests"]} == {"gold", "free"}
    cancelled = [one for one in found["requests"] if one["is_cancelled"]]
    assert 2 <= len(cancelled) <= 11 and found["figures"]["first_token"]["count"] == 20 - len(cancelled)
    starts = [" ".join(body["prompt"].split()[:6]) for body in seen if len(body["prompt"].split()) > 6]
    assert len(starts) >= 4 and len(set(starts)) == 1
    assert "prefixes sys=0.5" in found["workload"]["description"]


def test_a_trace_gives_arrivals_and_lengths(tmp_path: Path) -> None:
    out, trace, page = tmp_path / "out.json", tmp_path / "t.csv", tmp_path / "out.html"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,3,4\n2023-11-16 18:15:47.6805900,7,2\n2023-11-16 18:15:46.8805900,5,0\n"
    )
    with faking() as (url, _):
        done = invoke(
            url, "--api", "openai", "--trace", str(trace), "--speed", "10", "--prompt-tokens", "9", "--warmup", "0",
            "--json", str(out), "--html", str(page),
        )  # fmt: skip
    assert done.return_value == 0, (done.stderr, done.exception)
    requests = json.loads(out.read_text())["runs"][0]["requests"]
    assert [round(one["planned_s"], 3) for one in requests] == [0.0, 0.02, 0.1]
    assert [(one["prompt_tokens"], one["output_tokens"]) for one in requests] == [(3, 4), (5, 1), (7, 2)]
    assert "By time of arrival" in page.read_text()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("when\n0\n", "its header has none of at_s, TIMESTAMP, but when"),
        ("at_s\n", "has no row"),
        ("at_s\nsoon\n", "row 1: 'at_s' is 'soon'; it must be seconds"),
        ("at_s\nnan\n", "must be finite"),
        ("at_s,max_tokens\n0,-1\n", "row 1: 'max_tokens' is '-1'"),
        ("at_s,tenant\n0,a b\n", "row 1: 'tenant': a name has"),
        ("at_s\n0\n9999999\n", "give a --speed above 1"),
    ],
)
def test_what_is_no_trace(text: str, says: str, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(text)
    result = invoke("http://127.0.0.1:9", "--trace", str(trace))
    with pytest.raises(ConfigError, match=says):
        raise result.exception or AssertionError(result.output)


def test_without_matplotlib_the_report_is_refused_before_anything_runs(tmp_path: Path) -> None:
    script = (
        "import sys\nsys.modules['matplotlib'] = None\n"
        "from pathlib import Path\nfrom headrace.serving.app.bench_html import check_html\n"
        f"check_html(Path({str(tmp_path / 'x.html')!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "the plot extra of this package has it" in done.stderr, done.stderr
