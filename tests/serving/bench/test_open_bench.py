"""``headrace bench`` in an open loop against the real edge, by both doors; and ``headrace make-workload``."""

import asyncio
import io
import json
import signal
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from headrace.serving.app.bench_keys import read_keys
from headrace.serving.app.bench_open_report import open_result, print_open
from headrace.serving.app.bench_plot import point_of, save_open_plot
from headrace.serving.app.bench_run import stopping
from headrace.serving.app.workload_command import make_workload
from headrace.serving.bench.native_target import NativeTarget
from headrace.serving.bench.objective import parse_objective
from headrace.serving.bench.open_figures import open_figures
from headrace.serving.bench.open_loop import OpenLoop, OpenRun
from headrace.serving.bench.openai_target import OpenAITarget
from headrace.serving.bench.outcome import Outcome
from headrace.serving.bench.targets import Server
from headrace.serving.bench.workload_file import PlannedRequest, Prompt, WorkloadFile, load_workload
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.request import CancelReason, Rejection, RejectionReason
from headrace.serving.edge.keys import KeyRing, digest_line
from tests.serving.bench.live import invoke, serving
from tests.serving.edge.fakes import FakeEngine

BOTH = pytest.mark.parametrize("api", ["native", "openai"])
REQUEST = PlannedRequest(at_s=0, prompt=Prompt(words=2), max_tokens=5, sampling={"ignore_eos": True})


def target_of(api: str, server: Server, connections: int = 8) -> NativeTarget | OpenAITarget:
    return NativeTarget(server, None) if api == "native" else OpenAITarget(server, "fake", connections)


async def offer(target: NativeTarget | OpenAITarget, *requests: PlannedRequest) -> OpenRun:
    workload = WorkloadFile(requests=requests, duration_s=1)
    async with target:
        return await OpenLoop(workload=workload, target=target).run()


@BOTH
async def test_the_command_reports_each_request_with_the_servers_own_times(api: str, tmp_path: Path) -> None:
    engine, file = FakeEngine(), tmp_path / "out.json"
    plan = ("--rate", "40", "--requests", "8", "--prompt-words", "uniform:2:4", "--max-tokens", "5", "--warmup", "1")
    slo = ("--slo", "ttft=20s,itl=20s", "--json", str(file))
    async with serving(engine) as server:
        done = await asyncio.to_thread(invoke, server.base, "--api", api, *plan, *slo)
    assert done.return_value == 0, done.output
    assert len(engine.submitted) == 9
    found: dict[str, Any] = json.loads(file.read_text())
    assert (found["format"], found["loop"], found["slo"]) == (
        "headrace-bench/2",
        "open",
        "ttft ≤ 20000 ms, itl ≤ 20000 ms",
    )
    assert found["workload"]["requests"] == 8 and found["workload"]["duration_s"] == pytest.approx(0.2, abs=0.2)
    (run,) = found["runs"]
    assert [one["index"] for one in run["requests"]] == list(range(8))
    for one in run["requests"]:
        assert one["planned_s"] <= one["sent_s"] < one["first_s"] <= one["ended_s"]
        assert one["first_token_ms"] == pytest.approx((one["first_s"] - one["planned_s"]) * 1000, abs=0.01)
        assert one["output_tokens"] == 5 and one["error"] is None and one["missed"] == []
        assert one["server"]["queue_ms"] == 1.0 and one["server"]["first_token_ms"] == 4.0
    assert len({one["request_id"] for one in run["requests"]}) == 8
    assert all(one["request_id"].startswith("req_") for one in run["requests"])
    good = run["figures"]["goodput"]
    assert (good["good"], good["of"], good["share_interval"][1]) == (8, 8, 1.0) and good["share_interval"][0] < 0.7
    table = " ".join(done.stdout.split())
    assert (
        "8 requests in" in table and "goodput under ttft" in table and "server: first token 4.0 4.0 4.0 4.0 8" in table
    )
    assert "8 answered, 0 refused, 0 failed of 8; " in table


@BOTH
async def test_refusals_are_figures_and_failures_are_failures(api: str) -> None:
    engine = FakeEngine(auto=False)
    async with serving(engine) as server:
        running = asyncio.create_task(offer(target_of(api, server), REQUEST, REQUEST, REQUEST))
        while len(engine.live) < 3:
            await asyncio.sleep(0.005)
        refused, invalid, lost = engine.live
        full = Rejection(reason=RejectionReason.QUEUE_FULL, message="full", retry_after_ms=1500)
        engine.refuse(refused, full)
        engine.refuse(invalid, Rejection(reason=RejectionReason.NEVER_FITS, message="too long"))
        while lost in engine.live and len(engine.live) > 1:
            await asyncio.sleep(0.005)
        engine.die()
        run = await running
    errors = {outcome.error: outcome for outcome in run.outcomes}
    assert {code: outcome.is_refused for code, outcome in errors.items()} == {
        "queue_full": True, "never_fits": True, "engine_lost": False,
    }  # fmt: skip
    if api == "native":  # over HTTP the headers were sent before the engine refused
        assert errors["queue_full"].retry_after_ms == 1500


@BOTH
async def test_a_run_without_any_answer_fails(api: str) -> None:
    async with serving(FakeEngine()) as server:
        long = ("--rate", "100", "--requests", "3", "--prompt-words", "200", "--warmup", "0")
        done = await asyncio.to_thread(invoke, server.base, "--api", api, *long)
    assert done.return_value == 1 and "context_exceeded (refused) 3" in " ".join(done.stdout.split())


@BOTH
async def test_a_planned_cancel_reaches_the_server(api: str) -> None:
    engine = FakeEngine(auto=False)
    cancelled, kept = replace(REQUEST, cancel_after_s=0.1), replace(REQUEST, max_tokens=1)
    async with serving(engine) as server:
        running = asyncio.create_task(offer(target_of(api, server), cancelled, kept))
        await engine.cancel_seen.wait()
        while engine.live:
            engine.step()
            await asyncio.sleep(0.005)
        run = await running
    first, second = run.outcomes
    assert (first.is_cancelled, first.error, second.is_cancelled, second.error) == (True, None, False, None)
    assert [reason for _, reason in engine.cancels] == [
        CancelReason.CLIENT if api == "native" else CancelReason.DISCONNECT
    ]


async def test_an_interrupt_ends_the_plan_and_a_second_one_the_run() -> None:
    stop = asyncio.Event()

    async def work() -> None:
        with stopping(stop, Console(quiet=True)):
            signal.raise_signal(signal.SIGINT)
            await stop.wait()
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(20)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(work())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@BOTH
async def test_what_a_stall_holds_up_is_counted_from_the_planned_starts(api: str) -> None:
    engine = FakeEngine(auto=False)
    requests = [replace(REQUEST, at_s=0.15 * number, max_tokens=1) for number in range(4)]
    async with serving(engine) as server:
        running = asyncio.create_task(offer(target_of(api, server), *requests))
        while len(engine.live) < 4:
            await asyncio.sleep(0.005)
        engine.step()
        run = await running
    # All first tokens come at one moment: who came earlier has waited for longer, by the time between.
    firsts = [outcome.first_token_ms or 0.0 for outcome in run.outcomes]
    assert [before - after for before, after in pairwise(firsts)] == pytest.approx([150] * 3, abs=100)


async def test_too_few_connections_make_the_client_late_and_it_says_so() -> None:
    engine = FakeEngine(auto=False)
    async with serving(engine) as server:
        running = asyncio.create_task(offer(target_of("openai", server, 1), REQUEST, REQUEST))
        await engine.submit_seen.wait()
        await asyncio.sleep(0.2)
        assert len(engine.submitted) == 1
        while not running.done():
            engine.step()
            await asyncio.sleep(0.005)
    on_time, late = sorted(outcome.sent_s - outcome.start_s for outcome in running.result().outcomes)
    assert late > on_time + 0.15
    first_ms = max(outcome.first_token_ms or 0.0 for outcome in running.result().outcomes)
    assert first_ms > late * 1000  # it counts as waiting


async def test_requests_take_turns_on_sockets_and_a_lost_one_is_opened_again() -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        async with NativeTarget(server, None, sockets=2) as target:
            body: dict[str, object] = {"prompt": "x", "max_tokens": 2}
            assert [(await target.ask(index, body)).error for index in range(2)] == [None, None]
            clients = [await socket.client() for socket in target._sockets[None]]
            assert len({client.welcome["session"] for client in clients}) == 2
            clients[0].abort()
            while not clients[0].is_closed:
                await asyncio.sleep(0.005)
            assert [(await target.ask(index, body)).error for index in range(2, 4)] == [None, None]
        gone = NativeTarget(server, None)
        async with gone:
            pass
    assert (await gone.ask(9, body)).error == "connection_lost"


@BOTH
async def test_each_tenant_asks_with_its_own_key(api: str, tmp_path: Path) -> None:
    ring, keys, workload = tmp_path / "ring", tmp_path / "keys", tmp_path / "w.jsonl"
    ring.write_text("\n".join(digest_line(name, f"key-of-{name}") for name in ("gold", "free")))
    keys.write_text("# of the bench\ngold: key-of-gold\nfree:key-of-free\n")
    lines = [replace(REQUEST, tenant=name).as_json() for name in ("gold", "free", "gold")]
    workload.write_text("\n".join(map(json.dumps, [{"format": "headrace-workload/1"}, *lines])))
    engine = FakeEngine()
    async with serving(engine, keys=KeyRing(ring)) as server:
        arguments = (server.base, "--api", api, "--workload", str(workload), "--warmup", "0")
        done = await asyncio.to_thread(invoke, *arguments, "--keys", str(keys))
        assert done.return_value == 0, done.output
        assert Counter(request.tenant for request in engine.submitted) == {"gold": 2, "free": 1}
        assert "gold" in done.stdout and "key-of" not in done.output
        keys.write_text("gold:key-of-gold\n")
        refused = await asyncio.to_thread(invoke, *arguments, "--keys", str(keys))
    assert isinstance(refused.exception, ConfigError) and "--keys has no key for free" in str(refused.exception)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no line tenant:key"),
        ("gold", "line 1: a key has 1 to 512"),
        ("a b:secret", "line 1: 'tenant': a name has"),
        ("a:x\na:secret", "line 2: a has a key already"),
        ("a:sha256:secret", "line 1 has a key's digest"),
    ],
)
def test_key_files_that_are_wrong_are_named_without_the_key(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        read_keys(path)
    assert "secret" not in str(caught.value)


async def test_several_runs_have_new_prompts_and_a_spread(tmp_path: Path) -> None:
    engine, file = FakeEngine(), tmp_path / "out.json"
    plan = ("--rate", "50", "--requests", "3", "--prompt-words", "2", "--repeat", "2", "--warmup", "0")
    async with serving(engine) as server:
        done = await asyncio.to_thread(invoke, server.base, *plan, "--json", str(file))
    assert done.return_value == 0, done.output
    found = json.loads(file.read_text())
    assert [run["seed"] for run in found["runs"]] == [0, 1]
    assert len({request.prompt_ids for request in engine.submitted}) == 6
    times = [[one["planned_s"] for one in run["requests"]] for run in found["runs"]]
    assert times[0] == pytest.approx(times[1], abs=1e-5)
    spread = found["spread"]["first token p50"]
    assert spread["min"] <= spread["median"] <= spread["max"] and "over 2 runs" in done.stdout


def test_tables_and_pictures_have_what_was_good_and_what_was_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    objective = parse_objective("ttft=1s")
    server = {"preemptions": 2, "preempted_pages_swapped": 2, "preempted_ms": 30.0}
    good = Outcome(index=0, planned_s=5.0, sent_s=5.0, first_s=5.1, ended_s=5.2, output_tokens=1, server=server)
    refused = Outcome(index=1, planned_s=6.0, sent_s=6.0, ended_s=6.1, error="queue_full", is_refused=True)
    cancelled = Outcome(index=2, planned_s=7.0, sent_s=7.0, ended_s=7.1, is_cancelled=True)
    run = OpenRun(outcomes=(good, refused, cancelled), start_s=5.0, seconds=2.1, cpu_s=0.1)
    requests = (REQUEST, replace(REQUEST, at_s=1), replace(REQUEST, at_s=2, cancel_after_s=0.1))
    workload = WorkloadFile(requests=requests, duration_s=3)
    figures = [open_figures(run, workload, objective)]
    result = open_result("http://h", "native", "now", workload, "w.jsonl", None, objective, figures, [run])
    with (console := Console(file=io.StringIO())).capture() as shown:
        print_open(result, console)
    assert "2 preemptions: 2 pages_swapped\n" in shown.get() and "1 of 1 planned cancels were sent" in shown.get()
    assert "h (native), which has no contract" in shown.get()
    save_open_plot(result, objective, tmp_path / "out.svg")
    picture = (tmp_path / "out.svg").read_text()
    assert "<!-- first token (1) -->" in picture and "<!-- refused (1) -->" in picture
    assert "objective missed" not in picture and "<!-- ttft ≤ 1000 ms -->" in picture
    with pytest.raises(ConfigError, match="cannot be written"):
        save_open_plot(result, None, tmp_path / "no" / "out.svg")


def test_what_a_picture_shows_of_a_request() -> None:
    one = {"whole_ms": 9.0, "first_token_ms": 4.0, "is_refused": False, "error": None}
    assert point_of(one) == point_of({**one, "missed": ()}) == ("first token", 4.0)
    assert point_of({**one, "missed": ("ttft",)}) == ("first token, objective missed", 4.0)
    assert point_of({**one, "is_refused": True}) == ("refused", 9.0)
    assert point_of({**one, "first_token_ms": None}) == point_of({**one, "error": "x"}) == ("failed", 9.0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--rate", "1"), "give --rate with either --duration or --requests"),
        (("--rate", "1", "--duration", "1", "--streams", "2"), "--streams is of a closed loop"),
        (("--duration", "1"), "--duration needs an open loop; give --rate, --phase, --trace or --workload"),
        (("--workload", "FILE", "--seed", "1", "--rate", "1"), "--workload has what --rate, --seed would say"),
        (("--rate", "1", "--requests", "2", "--max-tokens", "x"), "--max-tokens 'x' is no length"),
        (("--prompt-words", "1", "--prompt-tokens", "1"), "either --prompt-words or --prompt-tokens"),
        (("--rate", "1", "--requests", "1", "--slo", "ttft=1"), "--slo 'ttft=1': ttft is '1'"),
        (("--api", "openai", "--sockets", "2"), "--sockets is of --api native"),
        (("--plot", "x.svg"), "--plot needs an open loop"),
        (("--rate", "1", "--requests", "1", "--plot", "x.txt"), "its name must end in"),
        (("--rate", "9999", "--requests", "300", "--max-tokens", "100000"), "asks for 30,000,000 tokens"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text("")
    result = invoke("http://127.0.0.1:9", *(str(path) if each == "FILE" else each for each in arguments))
    with pytest.raises(ConfigError, match=says):
        raise result.exception or AssertionError(result.output)


def make(*arguments: str) -> Result:
    return CliRunner().invoke(make_workload, list(arguments), standalone_mode=False)


def test_make_workload_writes_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    phases = ("--phase", "20:2", "--phase", "100:1", "--tenant", "a=3", "--tenant", "b", "--priority", "high")
    prefixes = ("--shared-prefix", "sys=20:0.5", "--cancel-share", "0.2", "--deadline-ms", "900")
    done = make(*phases, *prefixes, "-o", str(path))
    assert done.return_value == 0, done.output
    found = load_workload(path)
    assert found.tenants == ("a", "b") and found.duration_s == 3 and set(found.prefixes) == {"sys"}
    assert {request.priority for request in found.requests} == {"high"}
    assert f"{len(found.requests)} requests in 3 s" in done.stderr and found.hash[:12] in done.stderr
    written = path.read_text()
    assert make(*phases, *prefixes, "-o", str(path)).return_value == 0 and path.read_text() == written


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give --rate with either --duration or --requests, or --phase"),
        (("--phase", "1:1", "--rate", "1"), "leave out --rate"),
        (("--phase", "1"), "--phase '1' must be RATE:SECONDS"),
        (("--tenant", "a b=1"), "--tenant 'a b=1'"),
        (("--tenant", "a=x"), "--tenant 'a=x': its share must be a number"),
        (("--shared-prefix", "a=0"), "must be NAME=LENGTH"),
        (("--shared-prefix", "a=1:2"), "its share must be a number from 0 to 1"),
        (("--shared-prefix", "a=1:0.7", "--shared-prefix", "b=1:0.7"), "add up to more than 1"),
        (("--shared-prefix", "a=1:0.3", "--shared-prefix", "a=1:0.3"), "have one name"),
        (("--rate", "1", "--requests", "1", "-o", "/no/where"), "--out /no/where cannot be written"),
    ],
    ids=str,
)
def test_what_make_workload_refuses(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    result = make("-o", str(tmp_path / "w"), *arguments)
    with pytest.raises(ConfigError, match=says):
        raise result.exception or AssertionError(result.output)


def test_the_help_has_the_format() -> None:
    text = CliRunner().invoke(make_workload, ["--help"]).output
    assert "Each further line, a JSON object with" in text and "cancel_after_s" in text


def test_a_file_of_keys_that_is_too_long_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("a:" + "k" * 100 + "\n" + "#" * (1 << 20))
    with pytest.raises(ConfigError, match=r"--keys .*keys has more than 1,048,576 bytes"):
        read_keys(path)
