"""What a comparison found: each server's figures with intervals, paired ratios, and whether the work was the same."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any

import numpy as np

from headrace.serving.bench.compare import Done, requests_per_s
from headrace.serving.bench.intervals import median_of, paired_ratio
from headrace.serving.bench.open_figures import waits
from headrace.serving.bench.outcome import MAX_ERROR_TYPES

Figures = dict[str, Any]
MAX_IDLE_SHARE = 0.01
"""Of a core, that a server may use while another is measured."""
MIN_EQUAL_TOKENS = 0.99
"""Share of requests whose counts of tokens must be the same on two servers for their figures to be of the same work."""


@dataclass(frozen=True, slots=True)
class Metric:
    """title: for people. is_rate: more is better."""

    title: str
    unit: str
    is_rate: bool


METRICS: Mapping[str, Metric] = {
    "output_tokens_per_s": Metric("output tokens/s", "", True),
    "requests_per_s": Metric("requests/s", "", True),
    "first_token_p50_ms": Metric("first token, p50", "ms", False),
    "first_token_p95_ms": Metric("first token, p95", "ms", False),
    "first_token_p99_ms": Metric("first token, p99", "ms", False),
    "inter_token_p50_ms": Metric("between pieces of output, p50", "ms", False),
    "inter_token_p95_ms": Metric("between pieces of output, p95", "ms", False),
    "per_token_p50_ms": Metric("a request's mean time per token, p50", "ms", False),
    "whole_answer_p50_ms": Metric("whole answer, p50", "ms", False),
    "prefill_tokens_per_s": Metric("prompt tokens/s until the first token", "", True),
    "pss_mb": Metric("memory (PSS)", "MB", False),
    "cpu_s": Metric("CPU time", "s", False),
}


def figures_of(done: Done) -> dict[str, float | None]:
    """By METRICS; None where there is none. prefill_tokens_per_s: of one stream alone, where a prompt's tokens by the
    time to its first token are the server's rate; the median of its requests."""
    good = [outcome for outcome in done.outcomes if outcome.error is None]
    firsts = [outcome.first_token_ms for outcome in good if outcome.first_token_ms is not None]
    gaps = [gap for outcome in good for gap in outcome.gaps_ms]
    means = [gap for outcome in good if (gap := outcome.mean_gap_ms) is not None]
    seconds = max((outcome.ended_s for outcome in done.outcomes), default=done.start_s) - done.start_s
    is_alone = done.turn.workload.is_closed and done.turn.workload.streams == 1
    prefill = [o.prompt_tokens / (o.first_token_ms / 1000) for o in good if o.first_token_ms and o.prompt_tokens]

    def percentile(values: Sequence[float], percent: float) -> float | None:
        return float(np.percentile(values, percent)) if values else None

    return {
        "output_tokens_per_s": sum(o.output_tokens for o in good) / seconds if good and seconds > 0 else None,
        "requests_per_s": requests_per_s(done),
        **{f"first_token_p{p}_ms": percentile(firsts, p) for p in (50, 95, 99)},
        **{f"inter_token_p{p}_ms": percentile(gaps, p) for p in (50, 95)},
        "per_token_p50_ms": percentile(means, 50),
        "whole_answer_p50_ms": percentile([o.whole_ms for o in good], 50),
        "prefill_tokens_per_s": percentile(prefill, 50) if is_alone else None,
        "pss_mb": None if done.pss_bytes is None else done.pss_bytes / 1e6,
        "cpu_s": done.cpu_s,
    }


def compared(done: Sequence[Done]) -> list[Figures]:
    """Of each workload, in the order of its first turn."""
    groups: dict[str, list[Done]] = defaultdict(list)
    for each in done:
        groups[each.turn.workload.name].append(each)
    return [_workload(name, group) for name, group in groups.items()]


def _workload(name: str, done: Sequence[Done]) -> Figures:
    servers = list(dict.fromkeys(each.turn.server.name for each in sorted(done, key=lambda each: each.turn.place)))
    turns = {server: {d.turn.repetition: d for d in done if d.turn.server.name == server} for server in servers}
    values = {server: {r: figures_of(each) for r, each in own.items()} for server, own in turns.items()}
    return {
        "name": name,
        "rates": sorted({each.rate for each in done if each.rate is not None}),
        "servers": {server: _server(list(turns[server].values()), list(values[server].values())) for server in servers},
        "ratios": {f"{one}/{other}": _ratios(values[one], values[other]) for one, other in permutations(servers, 2)},
        "agreement": {f"{one}~{other}": agreement(turns[one], turns[other]) for one, other in combinations(servers, 2)},
        "checks": checks(turns),
    }


def _server(done: Sequence[Done], values: Sequence[Mapping[str, float | None]]) -> Figures:
    outcomes = [outcome for each in done for outcome in each.outcomes]
    good = [outcome for outcome in outcomes if outcome.error is None]
    errors: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            code = outcome.error if outcome.error in errors or len(errors) < MAX_ERROR_TYPES else "other"
            errors[code] = errors.get(code, 0) + 1
    firsts = [o.first_token_ms for o in good if o.first_token_ms is not None]
    found: Figures = {
        "turns": len(done),
        "requests": len(outcomes),
        "failed": len(outcomes) - len(good),
        "errors": errors,
        "cached_tokens": sum(outcome.cached_tokens for outcome in good),
        "first_token": waits(firsts, len(outcomes) - len(firsts)),
        "idle_share": max((share for each in done for share in each.idle_shares.values()), default=None),
        "metrics": {},
    }
    for name in METRICS:
        middle = median_of([value for each in values if (value := each[name]) is not None])
        if middle is not None:
            found["metrics"][name] = {**middle.as_json(), "values": [_short(each[name]) for each in values]}
    return found


def _ratios(one: Mapping[int, Figures], other: Mapping[int, Figures]) -> Figures:
    """Of repetitions that both have, one value by the other's of the same repetition."""
    both = sorted(set(one) & set(other))
    found = {}
    for name in METRICS:
        ratio = paired_ratio([one[r][name] for r in both], [other[r][name] for r in both])
        if ratio is not None:
            found[name] = ratio.as_json()
    return found


def agreement(one: Mapping[int, Done], other: Mapping[int, Done]) -> Figures:
    """How alike the texts of two servers' greedy answers to the same prompts are. equal: share of answers that are the
    same to their end. common: mean share of an answer's characters before the first difference. Servers with other
    arithmetic part ways where two tokens are nearly as likely, and stay apart from there."""
    shares, equal = [], 0
    for repetition in set(one) & set(other):
        texts = {outcome.index: outcome.text for outcome in other[repetition].outcomes if outcome.error is None}
        for outcome in one[repetition].outcomes:
            if outcome.error is None and outcome.index in texts:
                shares.append(common_share(outcome.text, texts[outcome.index]))
                equal += outcome.text == texts[outcome.index]
    count = len(shares)
    return {
        "answers": count,
        "equal": round(equal / count, 4) if count else None,
        "common": round(float(np.mean(shares)), 4) if count else None,
    }


def common_share(one: str, other: str) -> float:
    """Of the longer text's characters, how many come before the first difference; 1 for two empty texts."""
    longest = max(len(one), len(other))
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return same / longest if longest else 1.0


def checks(turns: Mapping[str, Mapping[int, Done]]) -> list[Figures]:
    """Whether the servers did the same work undisturbed, each with a sentence."""
    every = [each for own in turns.values() for each in own.values()]
    failed = sum(outcome.error is not None for each in every for outcome in each.outcomes)
    cached = sum(outcome.cached_tokens for each in every for outcome in each.outcomes)
    idle = [(share, name) for each in every for name, share in each.idle_shares.items()]
    worst, name = max(idle, default=(0.0, ""))
    prompts, answers = _different(turns, "prompt_tokens"), _different(turns, "output_tokens")
    late = [o.sent_s - o.start_s for each in every if not each.turn.workload.is_closed for o in each.outcomes]
    found = [
        _check("all requests answered", not failed, f"{failed} failed"),
        _check("same prompt tokens", prompts <= 1 - MIN_EQUAL_TOKENS, f"{prompts:.1%} of requests differ"),
        _check("same output tokens", answers <= 1 - MIN_EQUAL_TOKENS, f"{answers:.1%} of requests differ"),
        _check("prefix caches cold", not cached, f"{cached:,} prompt tokens were cached, of those that servers tell"),
        _check("others idle", worst < MAX_IDLE_SHARE, f"at most {worst:.2%} of a core {'by ' + name if name else ''}"),
    ]
    if late:
        worst_ms = 1000 * float(np.percentile(late, 99))
        found.append(_check("sent in time", worst_ms < 25, f"p99 {worst_ms:.1f} ms late, by this client"))
    return found


def _check(name: str, passed: bool, text: str) -> Figures:
    return {"name": name, "passed": passed, "text": text.strip()}


def _different(turns: Mapping[str, Mapping[int, Done]], field: str) -> float:
    """Share of requests, answered by several servers, whose counts are not all the same; 0 where there are none."""
    counts: dict[tuple[int, int], list[int]] = defaultdict(list)
    for own in turns.values():
        for repetition, each in own.items():
            for outcome in each.outcomes:
                if outcome.error is None:
                    counts[repetition, outcome.index].append(getattr(outcome, field))
    several = [values for values in counts.values() if len(values) > 1]
    return sum(len(set(values)) > 1 for values in several) / len(several) if several else 0.0


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
