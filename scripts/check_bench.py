"""16 streams of 128-word prompts and 64 new tokens: throughput and gaps between tokens, with the engine's own shares.

A closed burst: all requests are sent at once over one socket, greedy, ignore_eos, every prompt different (no prefix
hit). A delta of n tokens counts as n gaps of its length divided by n. The host share is the part of the engine loop's
busy time that it did not spend waiting for the device.
"""

import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path

from scripts import evidence
from scripts.check_load import WORDS, metrics
from scripts.stream_client import History, StreamClient
from tests.live import LiveServer, start_server

NUM_WORDS, NEW_TOKENS = 128, 64
OPTIONS = ("--max-streams", "16", "--context", "1024")
MAX_HOST_SHARE = 0.10


def percentile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]


def gaps_ms(history: History) -> list[float]:
    deltas = history.of_type("delta")
    pairs = zip(deltas, deltas[1:], strict=False)
    return [
        gap
        for (before_s, _), (at_s, frame) in pairs
        for gap in [(at_s - before_s) * 1000 / int(frame["n"])] * int(frame["n"])
    ]


async def burst(server: LiveServer, num_streams: int, seed: int) -> dict[str, float]:
    rng = random.Random(seed)
    before = await asyncio.to_thread(metrics, server)
    async with StreamClient(server.stream_url) as client:
        start_s = time.monotonic()
        histories = []
        for i in range(num_streams):
            prompt = " ".join(rng.choices(WORDS, k=NUM_WORDS))
            body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
            histories.append(await client.create(f"b{i}", "completion", body))
        await asyncio.gather(*(history.ended.wait() for history in histories))
        total_s = time.monotonic() - start_s
    after = await asyncio.to_thread(metrics, server)
    usage = [history.terminals[0]["usage"] for history in histories]
    tokens = sum(int(u["completion_tokens"]) for u in usage)
    gaps = [gap for history in histories for gap in gaps_ms(history)]
    first = [(history.of_type("delta")[0][0] - history.sent_s) * 1000 for history in histories]
    host = after["headrace_engine_host_seconds_total"] - before["headrace_engine_host_seconds_total"]
    device = after["headrace_engine_device_seconds_total"] - before["headrace_engine_device_seconds_total"]
    return {
        "prompt_tokens": sum(int(u["prompt_tokens"]) for u in usage),
        "output_tokens": tokens,
        "seconds": round(total_s, 2),
        "output_tokens_per_s": round(tokens / total_s, 1),
        "inter_token_p50_ms": round(percentile(gaps, 0.50), 1),
        "inter_token_p95_ms": round(percentile(gaps, 0.95), 1),
        "first_token_p50_ms": round(statistics.median(first), 1),
        "first_token_p95_ms": round(percentile(first, 0.95), 1) if len(first) > 1 else round(first[0], 1),
        "host_share": round(host / (host + device), 4),
    }


async def run(server: LiveServer, repeats: int) -> dict[str, list[dict[str, float]]]:
    await burst(server, 2, 0)
    return {f"{n} streams": [await burst(server, n, 100 * n + repeat) for repeat in range(repeats)] for n in (1, 4, 16)}


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
    share = max(one["host_share"] for one in found["16 streams"])
    workload = f"{NUM_WORDS}-word prompts, {NEW_TOKENS} new tokens, greedy, ignore_eos, closed burst, no prefix hits"
    return evidence.write(args.out, share < MAX_HOST_SHARE, options=OPTIONS, workload=workload, bursts=found)


if __name__ == "__main__":
    raise SystemExit(main())
