"""A picture of an open loop by matplotlib, which is an extra: first tokens, refusals and good answers over time."""

from pathlib import Path
from typing import Any

from headrace.serving.bench.objective import Objective
from headrace.serving.core.errors import ConfigError

KINDS = {
    "first token": ("tab:blue", "."),
    "first token, objective missed": ("tab:orange", "."),
    "refused": ("tab:red", "x"),
    "failed": ("black", "x"),
}


def save_open_plot(result: dict[str, Any], objective: Objective | None, path: Path) -> None:
    """result: as bench_open_report gives it; its first run is shown. Raises: ConfigError where it cannot be written."""
    from matplotlib.figure import Figure

    run = result["runs"][0]
    figure = Figure(figsize=(9, 6), layout="constrained")  # not pyplot: that looks for a display and keeps figures
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    points: dict[str, tuple[list[float], list[float]]] = {kind: ([], []) for kind in KINDS}
    for one in run["requests"]:
        if one["is_cancelled"]:
            continue
        kind, value_ms = point_of(one)
        points[kind][0].append(one["planned_s"])
        points[kind][1].append(value_ms)
    for kind, (times, values) in points.items():
        if times:
            color, marker = KINDS[kind]
            above.plot(times, values, marker, color=color, markersize=5, label=f"{kind} ({len(times):,})")
    if objective is not None and objective.ttft_ms is not None:
        above.axhline(objective.ttft_ms, color="gray", linewidth=1, label=f"ttft ≤ {objective.ttft_ms:g} ms")
    above.set(title=_title(result), ylabel="ms from the planned start", yscale="log")
    above.yaxis.set_major_formatter("{x:g}")
    above.grid(True, which="both", alpha=0.2)
    above.legend(fontsize=7)
    line = run["figures"]["timeline"]
    edges = [*(row["at_s"] for row in line), run["figures"]["planned_s"]]
    for name, color in (("offered", "gray"), ("good", "tab:blue"), ("refused", "tab:red")):
        if name in line[0]:
            counts = [row[name] for row in line]
            below.step(edges, [*counts, counts[-1]], where="post", color=color, label=name)
    below.set(xlabel="s, of planned starts", ylabel="requests in a step")
    below.grid(True, alpha=0.2)
    below.legend(fontsize=7)
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}") from error


def point_of(one: dict[str, Any]) -> tuple[str, float]:
    """A request's record as (kind, ms): its first token, or how long it took to fail."""
    ended_ms = max(0.01, one["whole_ms"])
    if one["is_refused"]:
        return "refused", ended_ms
    if one["error"] is not None or one["first_token_ms"] is None:
        return "failed", ended_ms
    kind = "first token, objective missed" if one.get("missed") else "first token"
    return kind, max(0.01, one["first_token_ms"])


def _title(result: dict[str, Any]) -> str:
    work = result["workload"]
    slo = "" if result["slo"] is None else f"; {result['slo']}"
    return f"{work['requests']:,} requests, {work['offered_per_s']:g}/s, workload {work['hash'][:12]}{slo}"
