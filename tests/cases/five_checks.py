"""What must hold of a server after every case, whatever the case did to it.

1 the canary prompt still gives its known ids. 2 Nothing runs or waits, and no page is held. 3 The server says that it
is ready. 4 Nothing was compiled. 5 Every accepted request had exactly one terminal event: by the server's own count,
and by what the clients of the case saw.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from headrace.serving.bench.stream_client import History

CANARY = {"prompt": "The capital of France is", "temperature": 0, "seed": 0, "max_tokens": 8, "return_token_ids": True}
CANARY_IDS = [7042, 30, 198, 198, 504, 2988, 314, 42]
"""The reference's for the default model, with gaps to the second best of 0.2 and more."""
SETTLE_S = 20.0
"""How long gauges may take; cancelled requests leave the engine within two steps, which a busy machine stretches."""
ENDINGS = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True)
class Gauges:
    """Readings of one scrape. pages_held: by requests; free pages and those of the prefix cache are not."""

    running: float
    waiting: float
    pages_held: float
    compiles: float
    accepted: float
    ended: float

    @property
    def is_idle(self) -> bool:
        return self.running == self.waiting == self.pages_held == 0 and self.accepted == self.ended


def scrape(http: httpx.Client) -> dict[tuple[str, str], float]:
    """(name without our prefix, label value that tells its samples apart or "") to value; histograms left out."""
    readings: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(http.get("/metrics").raise_for_status().text):
        if family.name.startswith("headrace_") and family.type != "histogram":
            for sample in family.samples:
                told_apart = [v for k, v in sample.labels.items() if k in ("finished_reason", "code")]
                readings[sample.name.removeprefix("headrace_"), "".join(told_apart)] = sample.value
    return readings


def read_gauges(http: httpx.Client) -> Gauges:
    found = scrape(http)
    return Gauges(
        running=found["num_requests_running", ""],
        waiting=found["num_requests_waiting", ""],
        pages_held=found["kv_pages_held", ""],
        compiles=found["compiles_after_ready_total", ""],
        accepted=found["requests_accepted_total", ""],
        ended=sum(found["request_success_total", ending] for ending in ENDINGS),
    )


def settled(http: httpx.Client, *, within_s: float = SETTLE_S) -> Gauges:
    """The gauges once nothing is left of any request; the last ones read when that does not come in time."""
    end_s = time.monotonic() + within_s
    while not (gauges := read_gauges(http)).is_idle and time.monotonic() < end_s:
        time.sleep(0.05)
    return gauges


def ask_canary(http: httpx.Client) -> list[int]:
    answer = http.post("/v1/completions", json=CANARY)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


class FiveChecks:
    """Made before a case; ``verify`` after it. http: its base_url is the server's. canary_ids: of its model."""

    def __init__(self, http: httpx.Client, *, canary_ids: Sequence[int] = CANARY_IDS) -> None:
        self._http = http
        self._canary_ids = list(canary_ids)
        self._compiles = read_gauges(http).compiles
        self._histories: list[History] = []

    def watch(self, *histories: History) -> None:
        """What a client of the native WebSocket saw is held to promise 5 as well."""
        self._histories += histories

    def verify(self) -> None:
        faults = [fault for history in self._histories for fault in history.faults()]
        assert not faults
        gauges = settled(self._http)
        assert gauges.is_idle, gauges
        assert ask_canary(self._http) == self._canary_ids
        gauges = settled(self._http)
        assert gauges.is_idle, gauges
        assert gauges.compiles == self._compiles
        ready = self._http.get("/readyz")
        assert (ready.status_code, ready.json()["reason"]) == (200, "ready")


def only_terminal(kinds: Sequence[str], terminals: Sequence[str]) -> bool:
    """Whether the last of the kinds is a terminal and no other is."""
    return [kind for kind in kinds if kind in terminals] == list(kinds[-1:])
