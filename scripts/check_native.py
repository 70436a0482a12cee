"""CPU kernels' thread team under stress: 64 independent calls in one program on a pool of two threads, 10,000 runs.

A handler that waits for tasks of its own pool hangs in such a program sooner or later. Then one program in each of
several threads at once, and the rate of a pure read with the same threads. Each result is checked in every run.
"""

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from scripts import evidence

NUM_CALLS = 64
ROW = 257
NUM_CALLERS = 4
STREAM_BYTES = 256 << 20
ITEMS = (1, 2, 3, 16, 61, 300)
DEFAULT_RUNS = 10_000
DEFAULT_LIMIT_S = 900.0


def measure(runs: int, threads: int) -> dict[str, object]:
    """In a process of its own, whose pool has as many threads as it may use processors."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    import jax
    import jax.numpy as jnp

    from headrace.pallas_kernels.native.library import load
    from headrace.pallas_kernels.native.probes import nop

    library = load()

    def program(seed: int) -> Callable[[jax.Array, int], tuple[jax.Array, jax.Array]]:
        """Counts wrong values of all calls; the calls depend on nothing but their own row."""

        def run(x_CN: jax.Array, start: int) -> tuple[jax.Array, jax.Array]:
            x_CN = x_CN + start
            out = [nop(x_CN[i], ITEMS[(i + seed) % len(ITEMS)]) for i in range(NUM_CALLS)]
            wrong = jnp.sum(jnp.stack([y for y, _ in out]) != x_CN + 1)
            return wrong, jnp.min(jnp.concatenate([pool for _, pool in out]))

        return jax.jit(run)

    x_CN = jnp.arange(NUM_CALLS * ROW, dtype=jnp.int32).reshape(NUM_CALLS, ROW)
    first = program(0)
    pool_threads = int(first(x_CN, 0)[1])
    start_s = time.monotonic()
    wrong = sum(int(first(x_CN, run)[0]) for run in range(runs))
    one_s = time.monotonic() - start_s

    counts = [0] * NUM_CALLERS
    rounds = max(1, runs // (4 * NUM_CALLERS))
    programs = [program(place) for place in range(NUM_CALLERS)]
    wrong += sum(int(compiled(x_CN, 0)[0]) for compiled in programs)

    def call(place: int) -> None:
        counts[place] = sum(int(programs[place](x_CN, run)[0]) + 1 for run in range(rounds))

    callers = [threading.Thread(target=call, args=(place,)) for place in range(NUM_CALLERS)]
    start_s = time.monotonic()
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    several_s = time.monotonic() - start_s
    wrong += sum(counts) - rounds * NUM_CALLERS

    return {
        "isa": library.isa,
        "pool_threads": pool_threads,
        "calls_per_run": NUM_CALLS,
        "runs": runs,
        "ms_per_run": round(one_s / runs * 1e3, 3),
        "callers": NUM_CALLERS,
        "runs_of_each_caller": rounds,
        "ms_per_run_of_all_callers": round(several_s / rounds * 1e3, 3),
        "wrong_values": wrong,
        "stream_gb_per_s": stream_rates(),
    }


def stream_rates() -> dict[str, float]:
    """GB/s of a pure read of STREAM_BYTES by all threads of the pool."""
    import jax
    import jax.numpy as jnp

    from headrace.pallas_kernels.native.probes import stream

    buffer = jnp.ones(STREAM_BYTES // 4, jnp.int32)
    read = jax.jit(stream)
    read(buffer).block_until_ready()
    seconds = []
    for _ in range(15):
        start_s = time.monotonic()
        read(buffer).block_until_ready()
        seconds.append(time.monotonic() - start_s)
    seconds.sort()
    return {"best": round(STREAM_BYTES / seconds[0] / 1e9, 1), "median": round(STREAM_BYTES / seconds[7] / 1e9, 1)}


def stress(runs: int, threads: int, limit_s: float) -> dict[str, object]:
    """measure() in a child; a child that hangs says where, and is ended at the limit."""
    command = [sys.executable, "-m", "scripts.check_native", "--out", os.devnull, "--measure"]
    command += ["--runs", str(runs), "--threads", str(threads), "--limit-s", str(limit_s)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s + 30)
    except subprocess.TimeoutExpired:
        return {"failure": f"hangs: no end within {limit_s + 30:.0f} s"}
    if done.returncode != 0:
        return {"failure": f"exit code {done.returncode}: {done.stderr[-3000:]}"}
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def arguments() -> argparse.Namespace:
    parser = evidence.arguments(__doc__ or "")
    parser.add_argument("--runs", type=int, default=DEFAULT_RUNS)
    parser.add_argument("--threads", type=int, default=2, help="processors that the process may use")
    parser.add_argument("--limit-s", type=float, default=DEFAULT_LIMIT_S)
    parser.add_argument("--measure", action="store_true", help="in this process; print a line of JSON")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if args.measure:
        faulthandler.dump_traceback_later(args.limit_s, exit=True)
        print(json.dumps(measure(args.runs, args.threads)))
        return 0
    found = stress(args.runs, args.threads, args.limit_s)
    passed = "failure" not in found and found["wrong_values"] == 0 and found["pool_threads"] == args.threads
    return evidence.write(Path(args.out), passed, stress=found)


if __name__ == "__main__":
    sys.exit(main())
