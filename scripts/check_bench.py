"""16 streams of 128-word prompts and 64 new tokens: throughput and gaps between tokens, with the engine's own shares.

A closed burst, measured as ``headrace bench`` does: as many requests as streams, all sent at once over one socket,
greedy, ignore_eos, every prompt different (no prefix hit). A delta of n tokens counts as n gaps of its length divided
by n. The host share is the part of the engine loop's busy time that it did not spend waiting for the device.
"""

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.serving.bench.closed_loop import run as run_closed_loop
from headrace.serving.bench.native_target import NativeTarget
from headrace.serving.bench.outcome import summarize
from headrace.serving.bench.targets import Server, contract_of
from headrace.serving.bench.workload import Workload
from scripts import evidence
from scripts.check_load import metrics
from tests.live import LiveServer, start_server

WORKLOAD = Workload(streams=16, requests=16, prompt_words=128, max_tokens=64)
OPTIONS = ("--max-streams", "16", "--context", "1024")
MAX_HOST_SHARE = 0.10


async def burst(server: LiveServer, num_streams: int, seed: int) -> dict[str, Any]:
    before = await asyncio.to_thread(metrics, server)
    workload = replace(WORKLOAD, streams=num_streams, requests=num_streams, seed=seed)
    async with NativeTarget(Server(base=server.url), None) as target:
        found = summarize(await run_closed_loop(workload, target))
    after = await asyncio.to_thread(metrics, server)
    host = after["headrace_engine_host_seconds_total"] - before["headrace_engine_host_seconds_total"]
    device = after["headrace_engine_device_seconds_total"] - before["headrace_engine_device_seconds_total"]
    return {**found, "host_share": round(host / (host + device), 4)}


async def run(server: LiveServer, repeats: int) -> dict[str, Any]:
    await burst(server, 2, 0)
    bursts = {
        f"{n} streams": [await burst(server, n, 100 * n + repeat) for repeat in range(repeats)] for n in (1, 4, 16)
    }
    return {"contract": await contract_of(Server(base=server.url)), "bursts": bursts}


def main() -> int:
    parser = evidence.arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder) / "log", "smollm2-135m", *OPTIONS)
        try:
            found = asyncio.run(run(server, args.repeats))
        finally:
            server.stop()
    bursts = found["bursts"]
    share = max(one["host_share"] for one in bursts["16 streams"])
    failed = sum(one["failed"] for kind in bursts.values() for one in kind)
    workload = (
        f"{WORKLOAD.prompt_words}-word prompts, {WORKLOAD.max_tokens} new tokens, greedy, ignore_eos, closed burst, "
        f"no prefix hits"
    )
    passed = share < MAX_HOST_SHARE and not failed
    return evidence.write(args.out, passed, options=OPTIONS, workload=workload, **found)


if __name__ == "__main__":
    raise SystemExit(main())
