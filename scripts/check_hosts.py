"""One model over two and over four processes: kill and stop ranks under load, and start with what does not fit.

Shows: the ids of one process; a typed error on each stream within 10 s of a kill or a stop, and then non-zero exit
codes of all ranks; the same commands serve again; a drain ends all ranks with 0; a rank with another weight file,
another option or none at all ends the start of all, by name. Each host is a process with CPU devices of its own.
"""

import asyncio
import json
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx

from headrace.serving.bench.stream_client import StreamClient
from scripts import evidence
from scripts.check_faults import start_streams
from tests.host_processes import SMALL, Hosts, end, options_of, serving, start_host, write_model
from tests.live import start_server

NUM_STREAMS = 6
NOTICE_LIMIT_S = 10.0
START_LIMIT_S = 400.0
PROMPTS = [[104, 101, 97, 100], list(range(40, 120)), [32] * 33]
BODIES = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.8, "seed": 5, "frequency_penalty": 0.5}]


def answers(url: str) -> list[list[int]]:
    """Ids of every prompt with every body."""
    found = []
    for prompt in PROMPTS:
        for body in BODIES:
            asked = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
            answer = httpx.post(f"{url}/v1/completions", json=asked | body, timeout=120).json()
            found.append(answer["choices"][0]["token_ids"])
    return found


def one_process(folder: Path, model: Path, mesh: str) -> list[list[int]]:
    """The same from one process with all the devices."""
    log = folder / "one"
    server = start_server(
        log, str(model), *SMALL, "--mesh", mesh, "--served-model-name", "tiny", ready_timeout_s=START_LIMIT_S
    )
    try:
        return answers(server.url)
    finally:
        server.stop()


async def hit(
    hosts: Hosts, rank: int, sign: signal.Signals, *, command: bool = False, times: int = 1
) -> dict[str, object]:
    """Send a signal to a rank's engine, or to the command that started it, while streams run."""
    async with StreamClient(hosts.server.stream_url) as client:
        histories = await start_streams(client, 900, count=NUM_STREAMS, running=1)
        hit_s = time.monotonic()
        for _ in range(times):
            if command:
                hosts.others[rank - 1].process.send_signal(sign)
            else:
                hosts.engine_of(rank).send_signal(sign)
            await asyncio.sleep(0.1 * (times - 1))
        await asyncio.wait_for(asyncio.gather(*(h.ended.wait() for h in histories)), 2 * NOTICE_LIMIT_S)
        ends = [history.frames[-1] for history in histories]
    last_s = round(max(at_s for at_s, _ in ends) - hit_s, 3)
    codes = await asyncio.to_thread(hosts.exit_codes, 15.0)
    all_ended_s = round(time.monotonic() - hit_s, 3)
    typed = sorted({str(frame["error"]["code"]) for _, frame in ends if frame["type"] == "error"})
    return {
        "last_terminal_after_s": last_s,
        "all_ranks_ended_after_s": all_ended_s,
        "codes": typed,
        "typed_errors": sum(frame["type"] == "error" for _, frame in ends),
        "faults": [fault for history in histories for fault in history.faults()],
        "exit_codes": codes,
        "said": [last_error(log) for log in (hosts.server.log, *(other.log for other in hosts.others))],
        "passed": typed == ["engine_lost"]
        and sum(frame["type"] == "error" for _, frame in ends) == NUM_STREAMS
        and last_s <= NOTICE_LIMIT_S
        and codes[0] == 4
        and 0 not in codes,
    }


def last_error(log: Path) -> str:
    lines = [line for line in log.read_text().splitlines() if " ERROR headrace" in line]
    return lines[-1].partition(" ERROR ")[2] if lines else ""


async def drain(hosts: Hosts) -> dict[str, object]:
    """SIGTERM to every rank at once, as a launcher would: rank 0 drains, the others wait for it."""
    async with StreamClient(hosts.server.stream_url) as client:
        histories = await start_streams(client, 200, count=NUM_STREAMS, running=1)
        for process in (*(other.process for other in hosts.others), hosts.server.process):
            process.send_signal(signal.SIGTERM)
        await asyncio.gather(*(h.ended.wait() for h in histories))
    finished = sum(h.terminals[-1]["type"] == "done" for h in histories)
    codes = await asyncio.to_thread(hosts.exit_codes)
    return {
        "streams_that_ended_whole": finished,
        "exit_codes": codes,
        "passed": finished == NUM_STREAMS and not any(codes),
    }


def refused(folder: Path, commands: list[tuple[Path, int, tuple[str, ...]]], words: str) -> dict[str, object]:
    """Ranks of a start that cannot work: how each ends, and whether each says why."""
    started_s = time.monotonic()
    ranks = [start_host(folder / f"refused-{rank}", model, rank, options) for model, rank, options in commands]
    try:
        codes = [rank.process.wait(START_LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            end(rank.process)
    said = [" ".join(rank.log.read_text().split()) for rank in ranks]
    return {
        "seconds": round(time.monotonic() - started_s, 1),
        "exit_codes": codes,
        "said": [last_error(rank.log) for rank in ranks],
        "passed": 0 not in codes and all(words in text for text in said),
    }


def starts_that_cannot_work(folder: Path, model: Path, other: Path) -> dict[str, dict[str, object]]:
    two = options_of(2)
    found = {
        "another weight file": refused(
            folder, [(model, 0, two), (other, 1, two)], "does not fit rank 0: tensor model.embed_tokens.weight"
        )
    }
    two = options_of(2)
    found["another option"] = refused(
        folder, [(model, 0, two), (model, 1, (*two, "--kv-dtype", "int8"))], "--kv-dtype is int8, and auto on rank 0"
    )
    four = (*options_of(4), "--join-seconds", "8")
    found["two ranks missing"] = refused(folder, [(model, 0, four), (model, 2, four)], "ranks 1, 3 did not come")
    lonely = (*options_of(2), "--join-seconds", "3")
    found["no rank 0"] = refused(folder, [(model, 1, lonely)], "rank 0 was not found at")
    return found


SERVICE: dict[str, tuple[int, str, Callable[[Hosts], Awaitable[dict[str, object]]]]] = {
    "2: kill -9 rank 1": (2, "tensor=2", lambda hosts: hit(hosts, 1, signal.SIGKILL)),
    "2: kill -9 the command of rank 1": (2, "tensor=2", lambda hosts: hit(hosts, 1, signal.SIGKILL, command=True)),
    "2: SIGSTOP rank 1": (2, "tensor=2", lambda hosts: hit(hosts, 1, signal.SIGSTOP)),
    "2: kill -9 rank 0": (2, "tensor=2", lambda hosts: hit(hosts, 0, signal.SIGKILL)),
    "2: SIGSTOP rank 0": (2, "tensor=2", lambda hosts: hit(hosts, 0, signal.SIGSTOP)),
    "2: SIGTERM twice to rank 1": (
        2,
        "tensor=2",
        lambda hosts: hit(hosts, 1, signal.SIGTERM, command=True, times=2),
    ),
    "2: SIGTERM to all, drain": (2, "tensor=2", drain),
    "2, lanes: SIGTERM to all, drain": (2, "data=2", drain),
    "2, stages: kill -9 rank 1": (2, "stage=2", lambda hosts: hit(hosts, 1, signal.SIGKILL)),
    "2, two devices each: SIGTERM to all, drain": (2, "data=2,tensor=2", drain),
    "4: kill -9 rank 2": (4, "tensor=4", lambda hosts: hit(hosts, 2, signal.SIGKILL)),
    "4: SIGSTOP rank 3": (4, "tensor=4", lambda hosts: hit(hosts, 3, signal.SIGSTOP)),
}
"""Number of hosts, mesh, and what happens to them."""


def main() -> int:
    parser = evidence.arguments(__doc__)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    args = parser.parse_args()
    found: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, other = write_model(folder / "model"), write_model(folder / "other", seed=8)
        expected: dict[str, list[list[int]]] = {}
        for title, (num_hosts, mesh, case) in SERVICE.items():
            if args.only not in title:
                continue
            if mesh not in expected:
                expected[mesh] = one_process(folder, model, mesh)
            # Each start after the first is a restart with the same model: it has to serve again.
            with serving(folder, model, num_hosts, mesh=mesh, ready_timeout_s=START_LIMIT_S) as hosts:
                same = answers(hosts.server.url) == expected[mesh]
                seen = dict(asyncio.run(case(hosts)))
            found[title] = seen | {"ids_equal_one_process": same, "passed": bool(seen["passed"]) and same}
            print(title, json.dumps(found[title]), flush=True)
        if args.only in "starts":
            found |= starts_that_cannot_work(folder, model, other)
    passed = all(bool(seen["passed"]) for seen in found.values())
    return evidence.write(args.out, passed, cases=found)


if __name__ == "__main__":
    raise SystemExit(main())
