"""The heavy and timing bounds of four public cases, which a test on a shared machine cannot hold.

O15 other streams keep their pace under hostile chats; O30 a wrong key's time does not tell how much of it is right;
O32 2,000 idle WebSockets for ten minutes; O33 no work that a client sends holds up the event loop. Each has a server of
its own with the default model, real sockets, and the five checks that follow every case. It wants a machine with
nothing else on it.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from headrace.serving.edge.keys import digest_line, new_key
from scripts import evidence
from scripts.cases import o15_pace, o30_keys, o32_idle, o33_loop
from scripts.cases.figures import Bounds, Figures, Sizes, exactly, say
from tests.cases.five_checks import CANARY_IDS, FiveChecks
from tests.live import LiveServer, start_server


class OtherWork:
    """How much of the machine is used by others than the server and its client, by which a figure is to be judged."""

    def __init__(self, server: LiveServer) -> None:
        root = psutil.Process(server.process.pid)
        self._measured = [psutil.Process(), root, *root.children(recursive=True)]
        self._start_s = time.monotonic()
        self._start = self._used_s()

    def share(self) -> float:
        """Of all cores, since the beginning; the measured processes must still be there."""
        seconds = (time.monotonic() - self._start_s) * psutil.cpu_count()
        return round(max(0.0, self._used_s() - self._start) / seconds, 3)

    def _used_s(self) -> float:
        """CPU seconds that others have used. Processes that the client had are in its own times once they ended."""
        times = psutil.cpu_times()
        own = [process.cpu_times() for process in self._measured]
        ours = sum(t.user + t.system for t in own) + own[0].children_user + own[0].children_system
        return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0) - ours


Case = Callable[[LiveServer, Sizes], Awaitable[tuple[Figures, Bounds]]]


def run_case(folder: Path, name: str, sizes: Sizes) -> dict[str, Any]:
    """On a server of its own; the five checks after it and a clean end are bounds as well."""
    key, key_file = new_key(), folder / "keys"
    key_file.write_text(digest_line("somebody", key) + "\n")
    cases: dict[str, tuple[Case, tuple[str, ...]]] = {
        "O33": (o33_loop.keep_the_loop_free, o33_loop.OPTIONS),
        "O15": (o15_pace.keep_pace, o15_pace.OPTIONS),
        "O30": (lambda server, sizes: o30_keys.compare_keys(server, sizes, key), ("--api-keys", str(key_file))),
        "O32": (o32_idle.stay_idle, ()),
    }
    case, options = cases[name]
    say(f"{name}: starting a server")
    server = start_server(folder / f"log-{name}", "smollm2-135m", *options)
    start_s = time.monotonic()
    try:
        # Kept alive between requests, its connection would be one that O32 wants for itself.
        limits = httpx.Limits(max_keepalive_connections=0)
        headers = {"authorization": f"Bearer {key}"}
        with httpx.Client(base_url=server.url, headers=headers, limits=limits, timeout=60) as http:
            others = OtherWork(server)
            checks = FiveChecks(http, canary_ids=CANARY_IDS)
            figures, bounds = asyncio.run(case(server, sizes))
            checks.verify()
            figures["share_of_the_machine_used_by_others"] = others.share()
    finally:
        exit_code = server.stop()
    bounds["exit code"] = exactly(exit_code, 0)
    for what, bound in bounds.items():
        say(f"{name} {what}: {bound['measured']} {bound['limit']}: {'passed' if bound['passed'] else 'FAILED'}")
    passed = all(bound["passed"] for bound in bounds.values())
    return {
        "passed": passed,
        "seconds": round(time.monotonic() - start_s),
        "options": [option.replace(f"{folder}/", "") for option in options],
        "bounds": bounds,
        "figures": figures,
    }


def names_of_cases(text: str) -> list[str]:
    names = text.upper().split(",")
    unknown = set(names) - {"O15", "O30", "O32", "O33"}
    if unknown:
        raise argparse.ArgumentTypeError(f"no case here: {', '.join(sorted(unknown))}")
    return names


def main() -> int:
    parser = evidence.arguments(__doc__)
    parser.add_argument("--only", type=names_of_cases, default=["O33", "O15", "O30", "O32"], metavar="O33,O15")
    parser.add_argument("--rounds", type=int, default=3, help="O33: how often each work is done")
    parser.add_argument("--pairs", type=int, default=20, help="O15: runs without and with hostile chats")
    parser.add_argument("--tries", type=int, default=10_000, help="O30: of each key at each door")
    parser.add_argument("--connections", type=int, default=2000, help="O32")
    parser.add_argument("--minutes", type=float, default=10.0, help="O32: how long they stay")
    args = parser.parse_args()
    sizes = Sizes(args.rounds, args.pairs, args.tries, args.connections, args.minutes)
    with tempfile.TemporaryDirectory() as folder:
        found = {name: run_case(Path(folder), name, sizes) for name in args.only}
    return evidence.write(args.out, all(case["passed"] for case in found.values()), cases=found)


if __name__ == "__main__":
    raise SystemExit(main())
