"""What ``headrace simulate`` predicts against what the real server does: latencies and goodput of three workloads.

A server with a journal serves a calibration: bursts, then open phases at several rates. The step times of that journal
and the clients' waits beyond the engine's own times make the cost model. Then each workload runs on the real server a
few times (other prompts of the same lengths at the same times, so that no prefix is found) and once in simulated time
per repeat. p50 must be within 20% and p95 within 35% of the median of the real runs, or inside their own range.
"""

import asyncio
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from headrace.serving.app.cost_model_fit import config_of, fit_cost_model
from headrace.serving.app.simulate_gate import make_gates
from headrace.serving.app.simulate_run import simulate_traffic
from headrace.serving.bench.make_workload import Lengths, Share, WorkloadPlan, make_workload
from headrace.serving.bench.native_target import NativeTarget
from headrace.serving.bench.objective import Objective
from headrace.serving.bench.open_figures import open_figures
from headrace.serving.bench.open_loop import OpenLoop, OpenRun
from headrace.serving.bench.targets import Server
from headrace.serving.bench.workload_file import WorkloadFile
from headrace.serving.core.cost_model import CostModel
from headrace.serving.edge.keys import digest_line, new_key
from scripts import evidence
from tests.live import LiveServer, start_server

TOLERANCE = {"p50_ms": 0.20, "p95_ms": 0.35}
GOODPUT_TOLERANCE = 0.10
"""Of what was offered."""
SLOTS, CHUNK = 8, 128
OPTIONS = ("--max-streams", str(SLOTS), "--context", "1024", "--chunk-tokens", str(CHUNK))
PROMPT, OUTPUT = (32, 128), (16, 48)
TENANTS = (Share(name="one", share=3.0), Share(name="two", share=1.0))
MEASURES = (("first_token", "time to first token"), ("inter_token", "between tokens"), ("whole_answer", "whole answer"))


def plan(phases: tuple[tuple[float, float], ...], seed: int, *, long_prompts: bool = False) -> WorkloadFile:
    """Prompts of random ids; bursts: every other phase is nearly silent."""
    prompt = Lengths(low=256, high=512) if long_prompts else Lengths(low=PROMPT[0], high=PROMPT[1])
    return make_workload(
        WorkloadPlan(
            phases=phases,
            prompt=prompt,
            max_tokens=Lengths(low=OUTPUT[0], high=OUTPUT[1]),
            is_words=False,
            tenants=TENANTS,
            seed=seed,
        )
    )


async def serve(server: Server, workload: WorkloadFile) -> OpenRun:
    async with NativeTarget(server, None) as target:
        return await OpenLoop(workload=workload, target=target).run()


async def calibrate(server: Server, console: Console) -> tuple[float, list[float]]:
    """(requests per second that it can do, ms that clients waited beyond the engine's own time)."""
    console.print("calibrating: a burst …")
    burst = await serve(server, plan(((400.0, 0.1),), 1))
    errors = {outcome.error for outcome in burst.outcomes if outcome.error is not None}
    if errors:
        raise RuntimeError(f"the server refuses the calibration: {', '.join(sorted(errors))}")
    capacity = len(burst.outcomes) / burst.seconds
    phases = ((0.3 * capacity, 20.0), (0.8 * capacity, 25.0), (1.5 * capacity, 10.0))
    console.print(f"calibrating: {capacity:.2f} requests/s at most; phases …")
    runs = [
        burst,
        await serve(server, plan(phases, 2)),
        await serve(server, plan(((0.2 * capacity, 20.0),), 3, long_prompts=True)),
    ]
    outside = [
        1e3 * (outcome.first_s - outcome.sent_s) - outcome.server["first_token_ms"]
        for run in runs
        for outcome in run.outcomes
        if outcome.first_s is not None and "first_token_ms" in outcome.server
    ]
    return capacity, outside


def workloads(capacity: float) -> dict[str, WorkloadFile]:
    burst = ((1.5 * capacity, 3.0), (0.05 * capacity, 9.0))
    return {
        "light: a third of capacity": plan(((0.33 * capacity, 60.0),), 11),
        "heavy: 85% of capacity": plan(((0.85 * capacity, 60.0),), 12),
        "bursts of long prompts": plan(
            tuple((rate / 2, seconds) for rate, seconds in burst) * 5, 13, long_prompts=True
        ),
    }


def compare(real: list[dict[str, Any]], predicted: list[dict[str, Any]]) -> tuple[bool, dict[str, object]]:
    """Medians over the repeats of each side, beside the range of the real ones."""
    rows: dict[str, object] = {}
    passed = True
    for name, text in MEASURES:
        for key, tolerance in TOLERANCE.items():
            measured = [figures[name][key] for figures in real]
            guessed = [figures[name][key] for figures in predicted]
            if None in measured or None in guessed:
                continue
            middle, guess = statistics.median(measured), statistics.median(guessed)
            error = guess / middle - 1
            is_near = abs(error) <= tolerance or min(measured) <= guess <= max(measured)
            passed &= is_near
            rows[f"{text} {key}"] = {
                "measured": measured,
                "predicted": round(guess, 3),
                "error": round(error, 4),
                "own_spread": round((max(measured) - min(measured)) / middle, 4),
                "within": is_near,
            }
    shares = [figures["goodput"]["share"] for figures in real]
    guess = statistics.median(figures["goodput"]["share"] for figures in predicted)
    is_near = abs(guess - statistics.median(shares)) <= GOODPUT_TOLERANCE
    rows["goodput share"] = {"measured": shares, "predicted": guess, "within": is_near}
    return passed and is_near, rows


async def run(live: LiveServer, keys: dict[str, str], journal: Path, repeats: int, console: Console) -> dict[str, Any]:
    server = Server(base=live.url, keys=keys)
    capacity, outside = await calibrate(server, console)
    await asyncio.sleep(2)  # The journal's thread writes behind.
    calibration = journal.with_name("calibration.jsonl")
    calibration.write_bytes(journal.read_bytes().rpartition(b"\n")[0] + b"\n")
    cost = fit_cost_model(calibration, outside)
    config = config_of(cost, "the fit")
    found: dict[str, Any] = {}
    passed = True
    for name, workload in workloads(capacity).items():
        objective = Objective(ttft_ms=2e3 / capacity * SLOTS / 4, itl_ms=3e3 * step_s(cost))
        real, predicted = [], []
        for repeat in range(repeats):
            console.print(f"{name}, run {repeat + 1} of {repeats}: {len(workload.requests)} requests …")
            again = replace(workload, seed=workload.seed + 1_000 * (repeat + 1))
            real.append(open_figures(await serve(server, again), again, objective))
            gates, policies = make_gates(1, config, None, None, again.tenants)
            predicted.append(
                simulate_traffic(
                    again, cost, config, gates, policies=policies, objective=objective, seed=repeat
                ).figures
            )
        is_near, rows = compare(real, predicted)
        passed &= is_near
        found[name] = {"requests": len(workload.requests), "slo": str(objective), "passed": is_near, "rows": rows}
    return {
        "passed": passed,
        "requests_per_s": round(capacity, 3),
        "edge_ms_p50": round(statistics.median(outside), 3),
        "programs": {
            program: {"steps": each.num_steps, "base_ms": round(1e3 * each.base_s, 3), "spread": each.spread[1::13]}
            for program, each in cost.programs.items()
        },
        "workloads": found,
    }


def step_s(cost: CostModel) -> float:
    """Of a decode step with all rows, about."""
    name = f"decode-{SLOTS}"
    each = cost.program(name)
    return each.base_s + SLOTS * each.row_s + SLOTS * 100 * each.context_s


def main() -> int:
    parser = evidence.arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = {str(share.name): new_key() for share in TENANTS}
        key_file, journal = Path(folder) / "keys", Path(folder) / "journal.jsonl"
        key_file.write_text("".join(digest_line(name, key) + "\n" for name, key in keys.items()))
        key_file.chmod(0o600)
        extra = ("--api-keys", str(key_file), "--journal", str(journal))
        live = start_server(Path(folder) / "log", options.model, *OPTIONS, *extra)
        try:
            found = asyncio.run(run(live, keys, journal, options.repeats, Console(stderr=True)))
        finally:
            live.stop()
    passed = bool(found.pop("passed"))
    return evidence.write(options.out, passed, options=OPTIONS, tolerance=TOLERANCE, **found)


if __name__ == "__main__":
    raise SystemExit(main())
