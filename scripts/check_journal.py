"""A journal of two minutes of mixed traffic on a real server reproduces every plan when it is replayed.

Prompts from 1 to 600 tokens, answers from 1 to 200, shared beginnings, greedy and sampled, cancels, closed sockets,
deadlines, all classes, two tenants, in little KV memory, so that requests are preempted, and swapped out where that is
cheaper. Then one sampled token is altered in a copy, and one prompt in another: the replay has to find both.
"""

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx

from headrace.serving.bench.stream_client import StreamClient
from headrace.serving.engine.journal import Planned, read_journal, read_steps
from scripts import evidence
from tests.live import LiveServer, start_server

RUN_S = 120.0
NUM_CLIENTS = 12
OPTIONS = (
    "--max-streams",
    "8",
    "--pages",
    "70",
    "--chunk-tokens",
    "128",
    "--max-queued",
    "32",
    "--swap-memory",
    "1MiB",
)
COUNTED = (
    "engine_steps_total", "engine_host_seconds_total", "num_preemptions_total", "preempted_pages_total",
    "deadline_misses_total", "journal_up",
)  # fmt: skip
HEAD = list(range(40, 140))
"""Begins some prompts, for the prefix cache."""


def body(rng: random.Random) -> dict[str, object]:
    prompt = [rng.randrange(20, 250) for _ in range(int(rng.paretovariate(0.7) * 4) % 600 + 1)]
    return {
        "prompt": HEAD[: rng.choice((0, 50, 100))] + prompt,
        "max_tokens": rng.choice((1, 5, 30, 100, 200)),
        "temperature": rng.choice((0.0, 0.8)),
        "ignore_eos": rng.random() < 0.8,
        "logprobs": rng.choice((None, 2)),
    }


def envelope(rng: random.Random) -> dict[str, object]:
    return {
        "priority": rng.choice((None, "high", "normal", "low")),
        "deadline_ms": rng.choice((None, None, None, 300, 2000, 20_000)),
    }


async def client(server: LiveServer, key: str, seed: int, until_s: float, seen: Counter[str]) -> None:
    """Sockets one after the other, each with some streams; some are cancelled, some sockets close in the middle."""
    rng = random.Random(seed)
    while time.monotonic() < until_s:
        async with StreamClient(server.stream_url, token=key) as stream:
            histories = [
                await stream.create(f"{seed}-{i}", "completion", body(rng), **envelope(rng))
                for i in range(rng.choice((1, 2, 5)))
            ]
            seen["requests"] += len(histories)
            if rng.random() < 0.15:
                await asyncio.sleep(rng.random())
                seen["closed sockets"] += 1
                continue
            for history in histories:
                if rng.random() < 0.25:
                    await asyncio.sleep(rng.random() / 2)
                    await stream.cancel(history.id)
                    seen["cancels"] += 1
            await asyncio.wait_for(asyncio.gather(*(h.ended.wait() for h in histories)), 120)
            for history in histories:
                end = history.terminals[0]
                reasons = [choice["finish_reason"] for choice in end.get("choices", ())]
                seen[f"ended: {reasons[0] if reasons else end['error']['code']}"] += 1


async def traffic(server: LiveServer, keys: list[str], run_s: float) -> dict[str, int]:
    seen: Counter[str] = Counter()
    until_s = time.monotonic() + run_s
    await asyncio.gather(*(client(server, keys[seed % len(keys)], seed, until_s, seen) for seed in range(NUM_CLIENTS)))
    return dict(sorted(seen.items()))


def replay(path: Path) -> dict[str, object]:
    """The command's own report, its exit code and its seconds."""
    started_s = time.monotonic()
    command = [sys.executable, "-m", "headrace", "replay", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report: dict[str, object] = {"exit_code": done.returncode, "seconds": round(time.monotonic() - started_s, 1)}
    with contextlib.suppress(ValueError):
        report |= json.loads(done.stdout)
    if done.stderr and done.returncode not in (0, 1):
        report["stderr"] = done.stderr[-500:]
    return report


def altered(path: Path, kind: str) -> Path:
    """A copy with another first sampled token, or last prompt token of a request that ran, from the middle."""
    lines = path.read_bytes().splitlines(keepends=True)
    ran = {
        request_id
        for record in read_journal(path)
        if isinstance(record, Planned) and record.plan is not None
        for _, _, request_id in record.plan.loads
    }
    for place in range(len(lines) // 2, len(lines)):
        record = json.loads(lines[place])
        if kind == "token" and record["type"] == "result" and record.get("decode"):
            record["decode"][0] ^= 1
            break
        if kind == "prompt" and record["type"] == "submit" and record["request"]["request_id"] in ran:
            record["request"]["prompt_ids"][-1] ^= 1
            break
    else:
        raise AssertionError(f"no {kind} to alter in {path}")
    lines[place] = json.dumps(record).encode() + b"\n"
    copy = path.with_suffix(f".{kind}")
    copy.write_bytes(b"".join(lines))
    return copy


def step_figures(path: Path) -> dict[str, object]:
    """That the journal has what a model of step times is fitted from."""
    by_bucket: dict[str, list[float]] = {}
    last_s = 0.0
    for step in read_steps(path):
        done_s = step.times.collected_s or 0.0
        name = f"{step.plan.bucket.kind} {step.plan.bucket.decode_rows}+{step.plan.bucket.prefill_tokens}"
        by_bucket.setdefault(name, []).append(done_s - max(step.times.dispatch_s, last_s))
        last_s = done_s
    return {
        name: {"steps": len(times), "median_ms": round(sorted(times)[len(times) // 2] * 1e3, 2)}
        for name, times in sorted(by_bucket.items())
    }


def make_keys(path: Path) -> list[str]:
    """Of two tenants."""
    command = [sys.executable, "-m", "headrace", "key"]
    return [
        subprocess.run([*command, name, "--file", str(path)], check=True, capture_output=True, text=True).stdout.strip()
        for name in ("alice", "bob")
    ]


def metric(server: LiveServer, key: str, name: str) -> float:
    text = httpx.get(server.url + "/metrics", timeout=10, headers={"authorization": f"Bearer {key}"}).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def main() -> int:
    parser = evidence.arguments(__doc__ or "")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--seconds", type=float, default=RUN_S)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        keys = make_keys(Path(folder) / "keys")
        access = ("--api-keys", str(Path(folder) / "keys"))
        server = start_server(Path(folder) / "log", options.model, *OPTIONS, *access, "--journal", str(path))
        try:
            seen = asyncio.run(traffic(server, keys, options.seconds))
            counted = {name: metric(server, keys[0], f"headrace_{name}") for name in COUNTED}
        finally:
            server.stop()
        mode, size = path.stat().st_mode & 0o777, path.stat().st_size
        whole = replay(path)
        planted = {kind: replay(altered(path, kind)) for kind in ("token", "prompt")}
        figures = step_figures(path)
    passed = (
        whole["exit_code"] == 0
        and whole.get("equal") is True
        and whole.get("steps") == counted["engine_steps_total"]
        and all(report["exit_code"] == 1 and report.get("difference") for report in planted.values())
        and mode == 0o600
        and counted["journal_up"] == 1
        and counted["num_preemptions_total"] > 0
        and counted["deadline_misses_total"] > 0
        and seen.get("cancels", 0) > 0
    )
    return evidence.write(
        options.out,
        passed,
        traffic=seen,
        counted=counted,
        journal={
            "bytes": size,
            "bytes_per_step": round(size / max(counted["engine_steps_total"], 1)),
            "mode": oct(mode),
        },
        replay=whole,
        planted=planted,
        steps_by_program=figures,
    )


if __name__ == "__main__":
    raise SystemExit(main())
