"""What an open loop found: latencies with those that never came, refusals by code, goodput, the server's own times."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.serving.bench.objective import Objective, share_interval
from headrace.serving.bench.open_loop import OpenRun
from headrace.serving.bench.outcome import MAX_ERROR_TYPES, PERCENTILES, Outcome
from headrace.serving.bench.workload_file import WorkloadFile

LATE_MS = 25.0
"""p99 of how late the client sent its requests, above which its figures are in doubt."""
BUSY_CPU_SHARE = 0.9
"""Of one core, above which the client itself may have been what was slow."""
MAX_TENANTS = 100
MAX_STEPS = 240
"""Of the timeline."""

Figures = dict[str, Any]


def waits(values_ms: Sequence[float], never: int) -> Figures:
    """count: of all; never: of those without a value, which count as infinite. Percentiles by linear interpolation;
    None where it would touch what never came. mean_ms: None when some never came. max_ms: likewise."""
    found = sorted(values_ms)
    count = len(found) + never
    whole: Figures = {"mean_ms": None, "max_ms": None}
    if found and not never:
        whole = {"mean_ms": round(float(np.mean(found)), 3), "max_ms": round(found[-1], 3)}
    percentiles: Figures = {}
    for percent in PERCENTILES:
        place = (count - 1) * percent / 100
        is_there = count > 0 and math.ceil(place) < len(found)
        value = float(np.interp(place, np.arange(len(found)), found)) if is_there else None
        percentiles[f"p{percent}_ms"] = None if value is None else round(value, 3)
    return {"count": count, "never": never, **percentiles, **whole}


def open_figures(run: OpenRun, workload: WorkloadFile, objective: Objective | None) -> Figures:
    """Of a whole run, by tenant too where there are several, and by time of arrival.

    Latencies are those of requests that were accepted, refusals have their own. A request that the client planned to
    cancel is in none of them and in no goodput, whether or not it ended before: the quick ones alone would be left.
    """
    found = _part(run.outcomes, run, workload, objective)
    found["client"] = _client(run)
    found["timeline"] = _timeline(run, workload, objective)
    tenants = workload.tenants
    if 1 < len(tenants) <= MAX_TENANTS:
        groups: dict[str, list[Outcome]] = defaultdict(list)
        for outcome in run.outcomes:
            groups[outcome.tenant or ""].append(outcome)
        found["tenants"] = {name: _part(group, run, workload, objective) for name, group in sorted(groups.items())}
    return found


def _part(outcomes: Sequence[Outcome], run: OpenRun, workload: WorkloadFile, objective: Objective | None) -> Figures:
    counted = [outcome for outcome in outcomes if workload.requests[outcome.index].cancel_after_s is None]
    accepted = [outcome for outcome in counted if not outcome.is_refused]
    good = [outcome for outcome in accepted if outcome.error is None]
    tokens = sum(outcome.output_tokens for outcome in outcomes)
    firsts = [outcome.first_token_ms for outcome in accepted if outcome.first_token_ms is not None]
    found: Figures = {
        "requests": len(outcomes),
        "offered_per_s": _rate(len(outcomes), workload.duration_s),
        "planned_s": workload.duration_s,
        "seconds": round(run.seconds, 3),
        "answered": len(good),
        "refused": sum(outcome.is_refused for outcome in outcomes),
        "failed": sum(outcome.error is not None and not outcome.is_refused for outcome in outcomes),
        "cancels": {
            "planned": len(outcomes) - len(counted),
            "sent": sum(outcome.is_cancelled for outcome in outcomes),
        },
        "errors": _errors(outcomes),
        "prompt_tokens": sum(outcome.prompt_tokens for outcome in good),
        "cached_tokens": sum(outcome.cached_tokens for outcome in good),
        "output_tokens": tokens,
        "output_tokens_per_s": _rate(tokens, run.seconds),
        "first_token": waits(firsts, len(accepted) - len(firsts)),
        "inter_token": waits([gap for outcome in accepted for gap in outcome.gaps_ms], 0),
        "mean_gap": waits([gap for outcome in good if (gap := outcome.mean_gap_ms) is not None], 0),
        "largest_pause": waits([max(outcome.pauses_ms) for outcome in good if outcome.pauses_ms], 0),
        "whole_answer": waits([outcome.whole_ms for outcome in good], len(accepted) - len(good)),
        "server": _server(good),
    }
    if objective is not None:
        found["goodput"] = goodput(counted, workload.duration_s, run.start_s, objective)
    return found


def goodput(outcomes: Sequence[Outcome], planned_s: float, start_s: float, objective: Objective) -> Figures:
    """outcomes: all that were offered, in order of arrival. per_s: over the time from the start to the end of the plan,
    or of the last good answer if that is later: a burst is not answered in no time. missed: how many missed which part;
    one may miss several."""
    missed = [objective.missed_by(outcome) for outcome in outcomes]
    flags = [not parts for parts in missed]
    low, high = share_interval(flags)
    share = sum(flags) / len(flags) if flags else 0.0
    names = [name for parts in missed for name in parts]
    ends_s = [outcome.ended_s - start_s for outcome, is_good in zip(outcomes, flags, strict=True) if is_good]
    seconds = max([planned_s, *ends_s])
    return {
        "slo": str(objective),
        "good": sum(flags),
        "of": len(flags),
        "share": round(share, 5),
        "share_interval": [round(low, 5), round(high, 5)],
        "per_s": _rate(sum(flags), seconds),
        "per_s_interval": [_rate(low * len(flags), seconds), _rate(high * len(flags), seconds)],
        "missed": {name: names.count(name) for name in ("answer", "ttft", "itl", "e2e") if name in names},
    }


def _errors(outcomes: Sequence[Outcome]) -> Figures:
    """By code, the most frequent first: how many were refusals, how long they took, when to come again."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.error is not None:
            groups[outcome.error].append(outcome)
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    shown = ordered[:MAX_ERROR_TYPES]
    if rest := [outcome for _, group in ordered[MAX_ERROR_TYPES:] for outcome in group]:
        shown.append(("other", rest))
    return {code: _error(group) for code, group in shown}


def _error(group: Sequence[Outcome]) -> Figures:
    hints = [outcome.retry_after_ms for outcome in group if outcome.retry_after_ms is not None]
    return {
        "count": len(group),
        "refusals": sum(outcome.is_refused for outcome in group),
        "latency": waits([(outcome.ended_s - outcome.sent_s) * 1000 for outcome in group], 0),
        "retry_after": waits(hints, 0) if hints else None,
    }


def _server(outcomes: Sequence[Outcome]) -> Figures:
    """The server's own times, by its names; and outside_ms: how much later the client saw the first token than the
    server had it after submission (sockets, parsing, tokenizing, and the client itself)."""
    values: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        for name, value in outcome.server.items():
            values[name].append(value)
        own_ms = outcome.server.get("first_token_ms")
        if own_ms is not None and outcome.first_s is not None:
            values["outside_ms"].append((outcome.first_s - outcome.sent_s) * 1000 - own_ms)
    return {
        name: waits(each, 0) if name.endswith("_ms") else {"count": len(each), "sum": sum(each), "max": max(each)}
        for name, each in values.items()
    }


def _timeline(run: OpenRun, workload: WorkloadFile, objective: Objective | None) -> list[Figures]:
    """By planned arrival, in steps of a second, or longer ones where there would be more than MAX_STEPS; steps without
    a request are left out. at_s: where a step begins."""
    step_s = max(1.0, workload.duration_s / MAX_STEPS)
    groups: dict[int, list[Outcome]] = defaultdict(list)
    for outcome in run.outcomes:
        groups[int(workload.requests[outcome.index].at_s / step_s)].append(outcome)
    found = []
    for number, group in sorted(groups.items()):
        counted = [outcome for outcome in group if workload.requests[outcome.index].cancel_after_s is None]
        accepted = [outcome for outcome in counted if not outcome.is_refused]
        firsts = [outcome.first_token_ms for outcome in accepted if outcome.first_token_ms is not None]
        row: Figures = {
            "at_s": round(number * step_s, 3),
            "offered": len(group),
            "refused": sum(outcome.is_refused for outcome in group),
            "failed": sum(outcome.error is not None and not outcome.is_refused for outcome in group),
            "first_token": waits(firsts, len(accepted) - len(firsts)),
        }
        if objective is not None:
            row["good"] = sum(not objective.missed_by(outcome) for outcome in counted)
        found.append(row)
    return found


def _client(run: OpenRun) -> Figures:
    """How late requests were sent, and in words what that means."""
    late = waits([(outcome.sent_s - outcome.start_s) * 1000 for outcome in run.outcomes], 0)
    share = run.cpu_s / run.seconds if run.seconds > 0 else 0.0
    warnings = []
    if late["p99_ms"] is not None and late["p99_ms"] > LATE_MS:
        warnings.append(
            f"one request in a hundred was sent {late['p99_ms']:,.0f} ms late or more: the client was the bottleneck; "
            "give it a machine of its own, over HTTP more --connections, or a lower rate"
        )
    if share > BUSY_CPU_SHARE:
        warnings.append(f"this client used {share:.0%} of a core: its own times are in doubt")
    if unsent := sum(outcome.error == "not_sent" for outcome in run.outcomes):
        warnings.append(f"{unsent:,} requests were not sent: more were open than --max-in-flight allows")
    if any(outcome.error == "too_many_streams" for outcome in run.outcomes):
        warnings.append("the server refused streams because a socket had too many; give more --sockets")
    return {"late": late, "cpu_share": round(share, 3), "warnings": warnings}


def _rate(number: float, seconds: float) -> float:
    return round(number / seconds, 4) if seconds > 0 else 0.0
