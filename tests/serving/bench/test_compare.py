"""``headrace bench compare``: turns, ratios, checks on records by hand; whole runs against servers of known answers."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from headrace.serving.bench.compare import Done, slowest_per_s
from headrace.serving.bench.compare_figures import agreement, checks, common_share, compared, figures_of
from headrace.serving.bench.compare_file import parse_comparison, parse_server
from headrace.serving.bench.compare_plan import ComparedServer, ComparedWorkload, Comparison, Turn
from headrace.serving.bench.dialect import Door
from headrace.serving.bench.intervals import median_of, paired_ratio
from headrace.serving.bench.outcome import Outcome
from headrace.serving.bench.process_tree import ProcessTree
from headrace.serving.core.errors import ConfigError
from tests.serving.bench.live import invoke

FAKE = Path(__file__).with_name("fake_openai.py")
WORK = ComparedWorkload(name="w", max_tokens=4, requests=2, streams=2, prompt_words=3)


def servers(*names: str) -> tuple[ComparedServer, ...]:
    return tuple(ComparedServer(name=name, base=f"http://h:{at}") for at, name in enumerate(names, 1))


def done(
    server: str,
    repetition: int,
    seconds: float,
    *,
    texts: tuple[str, ...] = ("a b", "c d"),
    tokens: int = 4,
    idle: float = 0.0,
    workload: ComparedWorkload = WORK,
) -> Done:
    """Two requests sent at 0, whose answers begin at half of the time."""
    outcomes = tuple(
        Outcome(
            index=index, sent_s=0.0, ended_s=seconds, first_s=seconds / 2, last_s=seconds, prompt_tokens=3,
            output_tokens=tokens, first_tokens=1, gaps_ms=(seconds * 100,) * 3, text=text,
        )
        for index, text in enumerate(texts)
    )  # fmt: skip
    turn = Turn(workload=workload, repetition=repetition, server=servers(server)[0], place=0)
    return Done(turn=turn, outcomes=outcomes, start_s=0.0, seconds=seconds, idle_shares={"other": idle})


# Whose turn it is


def test_each_server_has_each_place_and_nobody_always_follows_the_same_other() -> None:
    for count in (2, 3, 4):
        names = "abcd"[:count]
        plan = Comparison(servers=servers(*names), workloads=(WORK,), repetitions=2 * count)
        orders = ["".join(turn.server.name for turn in turns) for turns in plan.turns(WORK)]
        assert all(sorted(order) == sorted(names) for order in orders)
        for place in range(count):
            assert sorted(order[place] for order in orders) == sorted(names * 2)
        follows = {order[at : at + 2] for order in orders for at in range(count - 1)}
        assert {"ab", "ba"} <= follows


def test_servers_and_workloads_may_be_left_out() -> None:
    plan = parse_comparison(
        'format="headrace-compare/1"\nrepetitions=3\n'
        '[servers.a]\nurl="http://h:1"\n[servers.b]\nurl="http://h:2"\nrepetitions=1\nworkloads=["w"]\n'
        '[[workloads]]\nname="w"\nmax_tokens=2\nprompt_words=3\n[[workloads]]\nname="v"\nmax_tokens=2\nprompt_words=3\n',
        "f",
    )
    assert [len(turns) for turns in plan.turns(plan.workloads[0])] == [2, 1, 1]
    assert [len(turns) for turns in plan.turns(plan.workloads[1])] == [1, 1, 1]
    assert [server.name for server in plan.only(workloads=("v",)).servers] == ["a"]
    short = plan.only(servers=("b",), repetitions=2)
    assert [len(turns) for turns in short.turns(plan.workloads[0])] == [1]
    with pytest.raises(ConfigError, match="no server 'x'; there are a, b"):
        plan.only(servers=("x",))


def test_prompts_are_the_same_for_all_servers_and_new_everywhere_else() -> None:
    other = ComparedWorkload(name="v", max_tokens=4, requests=2, prompt_words=300)
    plan = Comparison(servers=servers("a"), workloads=(WORK, other), repetitions=3)
    prompts = [
        work.closed(plan.seed_of(work, repetition, part)).prompt(index)
        for work in (WORK, other)
        for repetition in range(3)
        for part in ("", "warm-up")
        for index in range(2)
    ]
    starts = [str(prompt)[:12] for prompt in prompts]
    assert len(set(starts)) == len(starts), "two prompts begin alike"
    assert plan.seed_of(WORK, 1) == plan.seed_of(WORK, 1)
    opened = ComparedWorkload(name="o", loop="poisson", rate=2.0, max_tokens=4, requests=200, prompt_words=3)
    first, again = opened.opened(5, 2.0), opened.opened(5, 2.0)
    assert first.hash == again.hash and opened.opened(6, 2.0).hash != first.hash
    gaps = [b.at_s - a.at_s for a, b in zip(first.requests, first.requests[1:], strict=False)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.5, rel=0.2)
    assert sum(gap > 0.5 for gap in gaps) / len(gaps) == pytest.approx(0.37, abs=0.1)  # e^-1 of exponential gaps


# Figures


def test_medians_have_intervals_whose_confidence_is_known() -> None:
    assert median_of([]) is None
    one = median_of([3.0])
    assert one is not None and (one.median, one.low, one.confidence) == (3.0, None, None)
    five = median_of([5.0, 1.0, 3.0, 2.0, 4.0])
    assert five is not None and (five.median, five.low, five.high) == (3.0, 1.0, 5.0)
    assert five.confidence == pytest.approx(1 - 2 * 0.5**5)
    many = median_of([float(value) for value in range(1, 21)])
    assert many is not None and (many.low, many.high) == (6.0, 15.0)  # binomial tables for n = 20
    assert many.confidence == pytest.approx(0.9586, abs=1e-3)


def test_ratios_are_of_the_same_repetition() -> None:
    # Both halve in speed from one repetition to the next; the ratio does not move.
    ratio = paired_ratio([8.0, 4.0, 2.0], [4.0, 2.0, 1.0])
    assert ratio is not None and (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 2.0)
    ratio = paired_ratio([8.0, None, 2.0], [4.0, 2.0, 0.0])
    assert ratio is not None and ratio.count == 1


def test_figures_of_a_turn_and_of_a_comparison() -> None:
    found = figures_of(done("a", 0, 2.0))
    assert found["output_tokens_per_s"] == pytest.approx(4.0)
    assert found["first_token_p95_ms"] == pytest.approx(1000) and found["inter_token_p50_ms"] == pytest.approx(200)
    assert found["per_token_p50_ms"] == pytest.approx(1000 / 3) and found["prefill_tokens_per_s"] is None
    alone = ComparedWorkload(name="w", max_tokens=4, requests=2, prompt_words=3)
    assert figures_of(done("a", 0, 2.0, workload=alone))["prefill_tokens_per_s"] == pytest.approx(3.0)
    turns = [done("a", r, 1.0 + r) for r in range(5)] + [done("b", r, 3.0 + 3 * r) for r in range(5)]
    (work,) = compared(turns)
    ratio = work["ratios"]["a/b"]["output_tokens_per_s"]
    assert (ratio["median"], ratio["low"], ratio["high"], ratio["count"]) == (3.0, 3.0, 3.0, 5)
    assert work["ratios"]["b/a"]["first_token_p50_ms"]["median"] == 3.0
    assert work["servers"]["a"]["metrics"]["output_tokens_per_s"]["median"] == pytest.approx(8 / 3, rel=1e-4)
    assert work["agreement"]["a~b"] == {"answers": 10, "equal": 1.0, "common": 1.0}
    assert slowest_per_s(turns, "w", {"a", "b"}) == pytest.approx(2 / 9)
    assert slowest_per_s(turns, "w", {"a"}) == pytest.approx(2 / 3)
    assert slowest_per_s(turns, "v", {"a"}) is None


def test_agreement_is_what_comes_before_the_first_difference() -> None:
    assert common_share("", "") == 1.0 and common_share("abcd", "abxd") == 0.5 and common_share("ab", "abcd") == 0.5
    one, other = {0: done("a", 0, 1.0, texts=("same", "abcd"))}, {0: done("b", 0, 1.0, texts=("same", "abxx"))}
    assert agreement(one, other) == {"answers": 2, "equal": 0.5, "common": 0.75}
    assert agreement(one, {})["equal"] is None


def test_checks_say_when_the_work_was_another() -> None:
    good = {"a": {0: done("a", 0, 1.0)}, "b": {0: done("b", 0, 1.0)}}
    assert all(check["passed"] for check in checks(good))
    for other, name in (
        (done("b", 0, 1.0, tokens=3), "same output tokens"),
        (done("b", 0, 1.0, idle=0.02), "others idle"),
    ):
        failed = [
            check["name"] for check in checks({"a": {0: done("a", 0, 1.0)}, "b": {0: other}}) if not check["passed"]
        ]
        assert failed == [name]


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
    import os

    with pytest.raises(ConfigError, match="runs this bench, too"):
        ProcessTree(os.getppid()).check()


# Files and flags


def test_servers_of_a_command_line() -> None:
    server = parse_server("llama=http://127.0.0.1:8080/v1,kind=llama,pid=4242,api=chat")
    assert (server.name, server.base, server.kind, server.pid) == ("llama", "http://127.0.0.1:8080", "llama", 4242)
    assert server.door is Door.CHAT and server.stops
    assert not parse_server("a=http://h").stops


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("http://h", "a name has 1 to 64 characters"),
        ("a=h", "is not a server's URL"),
        ("a=http://h,kind=lama", "kind 'lama' is not one of"),
        ("a=http://h,colour=red", "'colour' is none of"),
        ("a=http://h,kind=vllm,api=native", "the native door is headrace's"),
        ("a=http://h,idle=stop", "'idle' stop needs 'command' or 'pid'"),
        ("a=http://h,pid=x", "'pid' must be a whole number"),
    ],
)
def test_what_is_no_server(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_server(text)


HEAD = 'format="headrace-compare/1"\n'
SERVER = '[servers.a]\nurl="http://h:1"\n'
WORKLOAD = '[[workloads]]\nname="w"\nmax_tokens=2\nprompt_words=3\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = [", "f is no TOML"),
        (SERVER + WORKLOAD, "'format' is missing"),
        (HEAD, "0 servers; a comparison has 1 to 16"),
        (HEAD + SERVER, r"no workload; give a table \[\[workloads\]\]"),
        (HEAD + "repetition=3\n" + SERVER, "did you mean 'repetitions'"),
        (HEAD + "[servers.a]\n" + WORKLOAD, r"f, \[servers.a\]: 'url' is missing"),
        (HEAD + SERVER + 'command="run $port"\n' + WORKLOAD, r"names \$port, and \[values\] has nothing"),
        (HEAD + SERVER + 'command="run"\n' + WORKLOAD, "'command' starts a server on this machine"),
        (HEAD + SERVER + "pid=0\n" + WORKLOAD, "'pid' must be a whole number from 1"),
        (HEAD + SERVER + '[servers.b]\nurl="http://h:1/v1"\n' + WORKLOAD, "would find the first one's prompts cached"),
        (HEAD + SERVER + WORKLOAD + WORKLOAD, "two workloads are w"),
        (HEAD + SERVER + WORKLOAD + "prompt_tokens=3\n", "number 1: give one of 'prompt_words' and"),
        (HEAD + SERVER + WORKLOAD + "rate=3\n", "'rate' is of an open loop"),
        (HEAD + SERVER + WORKLOAD + 'loop="poisson"\nrequests=2\n', "has one of 'rate' and 'share_of'"),
        (HEAD + SERVER + WORKLOAD + 'loop="poisson"\nrequests=2\nshare_of="v"\n', "is no closed workload above it"),
        (HEAD + SERVER + 'workloads=["v"]\n' + WORKLOAD, "there is no workload 'v'"),
    ],
)
def test_what_is_no_comparison(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_comparison(text, "f")


def test_values_are_filled_in() -> None:
    text = (
        HEAD
        + '[values]\nport="1"\n[servers.a]\nurl="http://127.0.0.1:$port"\ncommand=["run", "$port", "$$x"]\n'
        + WORKLOAD
    )
    (server,) = parse_comparison(text, "f", {"port": "7"}).servers
    assert (server.base, server.command) == ("http://127.0.0.1:7", ("run", "7", "$x"))
    with pytest.raises(ConfigError, match="--set prot"):
        parse_comparison(text, "f", {"prot": "7"})


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


async def test_a_comparison_from_start_to_report(tmp_path: Path) -> None:
    out, page_file = tmp_path / "out.json", tmp_path / "out.html"
    arguments = ("compare", "--file", str(fake_file(tmp_path)), "--json", str(out), "--html", str(page_file))
    result = await asyncio.to_thread(invoke, *arguments)
    if result.exception is not None:
        raise result.exception
    assert result.return_value == 0, result.stdout
    found = json.loads(out.read_text())
    order = [(turn["workload"], turn["repetition"], turn["server"]) for turn in found["turns"]]
    assert order[:4] == [("w1", 0, "slow"), ("w1", 0, "quick"), ("w1", 1, "quick"), ("w1", 1, "slow")]
    assert len(order) == 12 and not found["interrupted"]
    assert all(turn["idle_shares"] and max(turn["idle_shares"].values()) == 0 for turn in found["turns"])
    first = found["workloads"][0]
    assert first["ratios"]["quick/slow"]["output_tokens_per_s"]["median"] > 1.5
    assert first["agreement"]["slow~quick"] == {"answers": 2, "equal": 1.0, "common": 1.0}
    assert all(check["passed"] for work in found["workloads"] for check in work["checks"])
    assert {one["output_tokens"] for turn in found["turns"] for one in turn["requests"]} == {6}
    assert {one["prompt_tokens"] for turn in found["turns"] for one in turn["requests"]} == {3, 9}
    (rate,) = found["workloads"][2]["rates"]
    slow = found["workloads"][1]["servers"]["slow"]["metrics"]["requests_per_s"]["median"]
    assert rate == pytest.approx(0.5 * slow, rel=1e-3)
    starts = [[one["planned_s"] for one in turn["requests"]] for turn in found["turns"][8:10]]
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
            "ended with 3 before it was ready.*no model",
        ),
        (["/no/such/program"], "No such file"),
    ):
        file = tmp_path / "c.toml"
        file.write_text(
            HEAD + f'[servers.a]\nurl="http://127.0.0.1:{port}"\ncommand={json.dumps(command)}\n' + WORKLOAD
        )
        result = await asyncio.to_thread(invoke, "compare", "--file", str(file), "--logs", str(tmp_path))
        assert result.return_value == 1 and re.search(says, result.stderr, re.DOTALL), result.stderr


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
