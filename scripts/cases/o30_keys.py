"""O30: the time of a refusal does not tell how much of a wrong key is right."""

import asyncio
import random
import socket
import statistics
import time
from typing import Any

from headrace.serving.edge.keys import new_key
from scripts.cases.figures import Bounds, Figures, Sizes, mann_whitney_p, quantile, say, smallest_shift_found
from tests.cases.raw import port_of, upgrade
from tests.cases.test_o30_secrets import changed
from tests.live import LiveServer

SIGNIFICANT = 0.01
"""Below this, after Bonferroni's correction, two variants of a wrong key differ in time."""


def key_heads(server: LiveServer, key: str) -> dict[str, dict[str, bytes]]:
    """Door -> variant -> what is sent. All keys are wrong and as long as the right one."""
    wrong = {"another key": new_key()} | {
        f"{name} character changed": changed(key, place)
        for name, place in (("first", 0), ("middle", len(key) // 2), ("last", len(key) - 1))
    }
    get = f"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:{port_of(server)}\r\n"
    return {
        "HTTP": {name: f"{get}Authorization: Bearer {k}\r\n\r\n".encode() for name, k in wrong.items()},
        "WebSocket": {name: upgrade(server, f"Authorization: Bearer {k}") for name, k in wrong.items()},
    }


def time_to_refusal(port: int, head: bytes) -> float:
    """Microseconds from the request to the first bytes of its 401 or 429, on a fresh connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        start_ns = time.perf_counter_ns()
        connection.sendall(head)
        answer = connection.recv(65536)
        took_us = (time.perf_counter_ns() - start_ns) / 1000
        while connection.recv(65536):
            pass
    assert answer[9:12] in (b"401", b"429"), answer
    return took_us


def time_keys(port: int, door: str, heads: dict[str, bytes], tries: int) -> tuple[Figures, dict[str, Any]]:
    """Every round tries all variants, in an order of its own, so that what drifts is the same for all."""
    rng, names = random.Random(1), list(heads)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-50, tries):
        for name in rng.sample(names, len(names)):
            took_us = time_to_refusal(port, heads[name])
            if number >= 0:
                times[name].append(took_us)
        if number > 0 and number % 1000 == 0:
            say(f"O30 {door}: {number} of {tries} tries of each of {len(names)} keys")
    base, *others = names
    p_limit = SIGNIFICANT / (2 * len(others))
    figures: Figures = {"tries_of_each": tries, "median_us": {n: round(statistics.median(times[n]), 2) for n in names}}
    figures["mean_us"] = {n: round(statistics.fmean(times[n]), 2) for n in names}
    figures["p_against_another_key"] = {n: round(mann_whitney_p(times[base], times[n]), 4) for n in others}
    spread = quantile(times[base], 0.9) - quantile(times[base], 0.1)
    shifts = [smallest_shift_found(times[base], times[n], p_limit, spread) for n in others]
    figures["smallest_shift_found_us"] = round(max(shifts), 2)
    least = min(figures["p_against_another_key"].values())
    return figures, {"measured": least, "limit": f">= {p_limit:.5f}", "passed": least >= p_limit}


async def compare_keys(server: LiveServer, sizes: Sizes, key: str) -> tuple[Figures, Bounds]:
    figures, bounds = {}, {}
    for door, heads in key_heads(server, key).items():
        named = f"{door}, least p of Mann-Whitney"
        figures[door], bounds[named] = await asyncio.to_thread(time_keys, port_of(server), door, heads, sizes.tries)
    return figures, bounds
