"""Whole runs of ``headrace bench compare`` against servers of known answers; and processes, stopped and continued."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from headrace.serving.bench.process_tree import ProcessTree
from headrace.serving.core.errors import ConfigError
from tests.serving.bench.live import invoke

FAKE = Path(__file__).with_name("fake_openai.py")
HEAD = 'format="headrace-compare/1"\n'
WORKLOAD = '[[workloads]]\nname="w"\nmax_tokens=2\nprompt_words=3\n'


# Processes


def test_a_tree_of_processes_is_stopped_and_continued_as_one() -> None:
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'while True: pass'], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "while True: pass\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    tree = ProcessTree(process.pid)
    try:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert tree.pids() == [process.pid, child]  # in a session of its own, and still found
        assert (tree.pss_bytes() or 0) > 1_000_000
        tree.pause()
        assert tree.is_paused()
        before_s = tree.cpu_s()
        time.sleep(0.2)
        assert tree.cpu_s() == before_s
        tree.resume()
        until_s = time.monotonic() + 20
        while tree.cpu_s() <= before_s and time.monotonic() < until_s:
            time.sleep(0.05)
        assert tree.cpu_s() > before_s and not tree.is_paused()
    finally:
        tree.end(signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    assert tree.pids() == []
    with pytest.raises(ConfigError, match="there is no process"):
        tree.check()


def test_a_process_that_this_one_depends_on_is_never_stopped() -> None:
    with pytest.raises(ConfigError, match="runs this bench, too"):
        ProcessTree(os.getppid()).check()


# A whole run


class Page(HTMLParser):
    """What stands in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            self.ids += [value or ""] if name == "id" else []
            self.references += [value or ""] if name in ("href", "src", "srcset", "data") else []

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def fake_file(folder: Path) -> Path:
    tables = []
    for name, step_ms, more in (("slow", 20, 'kind="vllm"'), ("quick", 5, 'kind="llama"\nbody={cache_prompt=false}')):
        port = free_port()
        command = json.dumps([sys.executable, str(FAKE), str(port), "<b>&" + name, str(step_ms)])
        tables.append(f'[servers.{name}]\nurl="http://127.0.0.1:{port}"\ncommand={command}\n{more}\n')
    work = '[[workloads]]\nname="w%d"\nstreams=%d\nmax_tokens=6\nprompt_words=3\n'
    opened = (
        '[[workloads]]\nname="o"\nloop="poisson"\nrequests=5\nshare_of="w2"\nshare=0.5\nmax_tokens=6\nprompt_tokens=9\n'
    )
    file = folder / "c.toml"
    file.write_text(HEAD + "repetitions=2\npause_s=0\n" + "".join(tables) + work % (1, 1) + work % (2, 2) + opened)
    return file


def exit_code_of(found: dict[str, Any]) -> int:
    """Of a run whose checks hold, but for one that a loaded machine may fail: that requests were sent in time."""
    failed = {check["name"] for work in found["workloads"] for check in work["checks"] if not check["passed"]}
    assert failed <= {"sent in time"}, failed
    return 1 if failed else 0


async def test_a_comparison_from_start_to_report(tmp_path: Path) -> None:
    out, page_file = tmp_path / "out.json", tmp_path / "out.html"
    arguments = ("compare", "--file", str(fake_file(tmp_path)), "--json", str(out), "--html", str(page_file))
    result = await asyncio.to_thread(invoke, *arguments)
    if result.exception is not None:
        raise result.exception
    found = json.loads(out.read_text())
    assert result.return_value == exit_code_of(found), result.stdout
    order = [(turn["workload"], turn["repetition"], turn["server"]) for turn in found["turns"]]
    assert order[:2] == [("w1", 0, "slow"), ("w1", 0, "quick")] and order[2][0] == "w2"
    assert order[6:8] == [("w1", 1, "quick"), ("w1", 1, "slow")]
    assert len(order) == 12 and not found["interrupted"]
    assert all(turn["idle_shares"] and max(turn["idle_shares"].values()) == 0 for turn in found["turns"])
    first = found["workloads"][0]
    assert first["ratios"]["quick/slow"]["output_tokens_per_s"]["median"] > 1.5
    assert first["agreement"]["slow~quick"] == {"answers": 2, "equal": 1.0, "common": 1.0}
    assert {one["output_tokens"] for turn in found["turns"] for one in turn["requests"]} == {6}
    assert {one["prompt_tokens"] for turn in found["turns"] for one in turn["requests"]} == {3, 9}
    rates = found["workloads"][2]["rates"]
    slow = found["workloads"][1]["servers"]["slow"]["metrics"]["requests_per_s"]["values"]
    assert sorted(rates) == pytest.approx(sorted([0.5 * slow[0], 0.25 * (slow[0] + slow[1])]), rel=1e-3)
    starts = [[one["planned_s"] for one in turn["requests"]] for turn in found["turns"] if turn["workload"] == "o"]
    assert starts[0] == starts[1], "not the same trace"
    assert found["servers"]["slow"]["ready_pss_bytes"] > 1_000_000
    page = Page(page_file.read_text())
    assert page.tags.count("svg") >= 8 and page.tags.count("table") >= 7
    assert "script" not in page.tags and "b" not in page.tags and "<b>&slow" in page.texts  # a model's name, escaped
    assert len(page.ids) == len(set(page.ids)), "an id is there twice"
    assert all(reference.startswith("#") and reference[1:] in page.ids for reference in page.references)
    text = page_file.read_text()
    assert not re.search(r"(?:src|href|url\()\s*=?\s*[\"']?(?:https?:)?//|@import", text)
    assert "prefers-color-scheme:dark" in text and "currentColor" in text and "#010203" not in text


async def test_a_server_that_does_not_start_or_does_not_answer_is_named(tmp_path: Path) -> None:
    port = free_port()
    for command, says in (
        (
            [sys.executable, "-c", "print('no model'); raise SystemExit(3)"],
            "ended with 3 when it should be ready.*no model",
        ),
        (["/no/such/program"], "No such file"),
    ):
        file = tmp_path / "c.toml"
        file.write_text(
            HEAD + f'[servers.a]\nurl="http://127.0.0.1:{port}"\ncommand={json.dumps(command)}\n' + WORKLOAD
        )
        result = await asyncio.to_thread(invoke, "compare", "--file", str(file), "--logs", str(tmp_path))
        assert result.return_value == 1 and re.search(says, result.stderr, re.DOTALL), result.stderr


async def test_when_time_runs_out_each_workload_has_had_its_first_repetition(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ("compare", "--file", str(fake_file(tmp_path)), "--json", str(out), "--minutes", "0.001")
    result = await asyncio.to_thread(invoke, *arguments)
    found = json.loads(out.read_text())
    assert result.return_value == exit_code_of(found), result.stdout
    assert [turn["repetition"] for turn in found["turns"]] == [0] * 6 and found["planned_turns"] == 12
    assert "6 of 12 planned turns were taken" in result.stdout


async def test_a_server_that_ends_loses_its_turns_and_the_others_go_on(tmp_path: Path) -> None:
    file, out = tmp_path / "c.toml", tmp_path / "out.json"
    tables = []
    for name, answers in (("a", "0"), ("b", "3")):
        port = free_port()
        command = json.dumps([sys.executable, str(FAKE), str(port), name, "1", "die-after", answers])
        tables.append(f'[servers.{name}]\nurl="http://127.0.0.1:{port}"\ncommand={command}\n')
    file.write_text(HEAD + "repetitions=4\npause_s=0\n" + "".join(tables) + WORKLOAD)
    result = await asyncio.to_thread(invoke, "compare", "--file", str(file), "--json", str(out))
    assert result.return_value == 1
    found = json.loads(out.read_text())
    turns = [turn["server"] for turn in found["turns"]]
    assert turns.count("a") == 4 and 1 <= turns.count("b") <= 2
    assert found["servers"]["a"]["lost"] is None
    assert re.search("ended with 7|does not answer", found["servers"]["b"]["lost"])
    assert "b was lost" in result.stdout and "of 8 planned turns were taken" in result.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_whatever_ends_the_command_ends_its_servers_and_leaves_none_stopped(tmp_path: Path, number: int) -> None:
    ours, theirs = free_port(), free_port()
    running = subprocess.Popen([sys.executable, str(FAKE), str(ours), "x", "300"], start_new_session=True)
    file = tmp_path / "c.toml"
    command = json.dumps([sys.executable, str(FAKE), str(theirs), "y", "300"])
    file.write_text(
        HEAD + f'[servers.a]\nurl="http://127.0.0.1:{ours}"\npid={running.pid}\n'
        f'[servers.b]\nurl="http://127.0.0.1:{theirs}"\ncommand={command}\n' + WORKLOAD
    )
    log = tmp_path / "b.log"
    arguments = ["bench", "compare", "--file", str(file), "--logs", str(tmp_path), "--repetitions", "50"]
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        while not any(server in process.stderr.readline() for server in ("w, 1, a", "w, 1, b")):
            assert process.poll() is None
        process.send_signal(number)
        assert process.wait(60) == 130
        assert log.exists() and not ProcessTree(running.pid).is_paused()
        with socket.socket() as there:
            assert there.connect_ex(("127.0.0.1", theirs)) != 0, "the server that was started is still there"
        with socket.socket() as there:
            assert there.connect_ex(("127.0.0.1", ours)) == 0, "the server that ran already is gone"
    finally:
        for each in (process, running):
            each.kill()
            each.wait()
        if process.stderr is not None:
            process.stderr.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give servers as NAME=URL, or a --file"),
        (("a=http://h", "--rate", "3"), "--rate is of --loop poisson"),
        (("a=http://h", "--loop", "poisson"), "--rate is of --loop poisson"),
        (("a=http://h", "--set", "x=1"), "are about a --file"),
        (("a=http://h", "--baseline", "b"), "--baseline 'b' is none of a"),
        (("a=http://h", "--prompt-words", "3", "--prompt-tokens", "3"), "give either"),
        (("a=http://h", "--html", "/no/such/place.html"), "--html .* cannot be written"),
    ],
)
def test_the_command_refuses_before_it_starts_anything(arguments: tuple[str, ...], says: str) -> None:
    result = invoke("compare", *arguments)
    with pytest.raises(ConfigError, match=says):
        raise result.exception or AssertionError("not refused")
