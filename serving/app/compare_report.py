"""What a comparison found, as tables for a person and as JSON with every request."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.serving.app.bench_report import client_versions, record_of
from headrace.serving.bench.compare import ComparisonRun, Done
from headrace.serving.bench.compare_figures import METRICS, compared, figures_of

FORMAT = "headrace-comparison/1"
SHOWN = (
    "output_tokens_per_s", "first_token_p50_ms", "first_token_p95_ms", "inter_token_p50_ms", "prefill_tokens_per_s",
    "pss_mb",
)  # fmt: skip


def comparison_result(started: str, run: ComparisonRun) -> dict[str, Any]:
    """interrupted: on purpose; fewer turns than planned come of limited time, too, and of lost servers."""
    plan = run.comparison
    planned = sum(len(turns) for turns in plan.all_turns())
    return {
        "format": FORMAT,
        "started": started,
        "seed": plan.seed,
        "repetitions": plan.repetitions,
        "client": client_versions(),
        "interrupted": run.stop.is_set(),
        "planned_turns": planned,
        "servers": {
            name: {
                "url": subject.server.base,
                "kind": subject.server.kind,
                "api": subject.server.door.value,
                "model": subject.model,
                "command": list(subject.server.command),
                "body": dict(subject.server.body),
                "is_stopped_when_idle": subject.server.stops,
                "ready_s": round(subject.ready_s, 2),
                "ready_pss_bytes": subject.ready_pss_bytes,
                "contract": subject.contract,
                "lost": run.lost.get(name),
            }
            for name, subject in run.subjects.items()
        },
        "workloads": [_described(run, figures) for figures in compared(run.done)],
        "turns": [_turn(done) for done in run.done],
    }


def _described(run: ComparisonRun, figures: dict[str, Any]) -> dict[str, Any]:
    (workload,) = (each for each in run.comparison.workloads if each.name == figures["name"])
    fields = ("loop", "streams", "requests", "prompt_words", "prompt_tokens", "max_tokens", "rate", "share_of", "share")
    plan = {field: value for field in fields if (value := getattr(workload, field)) not in (None, 0)}
    if workload.is_closed:
        plan.pop("share", None)
    else:
        plan.pop("streams", None)
    return {"plan": plan, **figures}


def _turn(done: Done) -> dict[str, Any]:
    return {
        "workload": done.turn.workload.name,
        "repetition": done.turn.repetition,
        "server": done.turn.server.name,
        "place": done.turn.place,
        "seconds": round(done.seconds, 3),
        "rate": done.rate,
        "figures": {name: None if value is None else float(f"{value:.6g}") for name, value in figures_of(done).items()},
        "idle_shares": {name: round(share, 5) for name, share in done.idle_shares.items()},
        "requests": [record_of(outcome, done.start_s) for outcome in done.outcomes],
    }


def turn_text(done: Done) -> str:
    """In a line, as soon as it is there."""
    figures = figures_of(done)
    parts = [
        f"{METRICS[name].title} {number_text(figures[name])}{unit_text(name)}"
        for name in SHOWN[:5]
        if figures[name] is not None
    ]
    failed = sum(outcome.error is not None for outcome in done.outcomes)
    parts += [f"{failed} FAILED"] if failed else []
    return f"{done.turn.workload.name}, {done.turn.repetition + 1}, {done.turn.server.name}: " + ", ".join(parts)


def plan_text(plan: Mapping[str, Any], rates: list[float]) -> str:
    """Of a workload, in words."""
    prompt = f"{plan['prompt_words']} words" if "prompt_words" in plan else f"{plan['prompt_tokens']} ids"
    if plan["loop"] == "closed":
        how = f"{plan['requests']} requests in {plan['streams']} streams"
    else:
        at = " and ".join(f"{rate:.3g}" for rate in rates) or "no rate"
        how = f"{plan['requests']} requests at {at}/s ({plan['loop']})"
        if "share_of" in plan:
            how += f", {plan['share']:.0%} of the slowest server's in {plan['share_of']}"
    return f"{how}, prompts of {prompt}, {plan['max_tokens']} new tokens"


def print_comparison(result: Mapping[str, Any], baseline: str | None, console: Console) -> None:
    """Of each workload: figures with intervals, ratios, checks."""
    for each in result["workloads"]:
        console.print(f"\n{each['name']}: {plan_text(each['plan'], each['rates'])}", style="bold", highlight=False)
        servers = each["servers"]
        table = _table("median", *servers)
        for name in SHOWN:
            found = [server["metrics"].get(name) for server in servers.values()]
            if any(found):
                cells = ("-" if one is None else number_text(one["median"]) for one in found)
                table.add_row(METRICS[name].title + unit_text(name), *cells)
        table.add_row("turns", *(str(server["turns"]) for server in servers.values()))
        console.print(table, highlight=False)
        rows = list(ratios_of(each, baseline))
        ratios = _table("ratio", *(title for title, _ in rows))
        for name in SHOWN:
            if any(name in row for _, row in rows):
                ratios.add_row(METRICS[name].title, *(interval_text(row.get(name), "×") for _, row in rows))
        if ratios.row_count:
            console.print(ratios, highlight=False)
        shown = baseline or next(iter(servers), "")
        for pair, found in each["agreement"].items():
            if found["answers"] and shown in pair.split("~"):
                console.print(agreement_text(pair, found), highlight=False, soft_wrap=True)
        for check in each["checks"]:
            if not check["passed"]:
                text = f"not comparable: {check['name']}: {check['text']}"
                console.print(text, style="yellow", highlight=False, soft_wrap=True)
    for name, server in result["servers"].items():
        if server["lost"] is not None:
            console.print(f"\n{name} was lost: {server['lost']}", style="red", highlight=False, soft_wrap=True)
    if len(result["turns"]) < result["planned_turns"]:
        console.print(f"\n{len(result['turns'])} of {result['planned_turns']} planned turns were taken", style="yellow")


def ratios_of(workload: Mapping[str, Any], baseline: str | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(title, by metric): each server to the baseline; without one, the first server to each other."""
    first = next(iter(workload["servers"]), "")
    for pair, row in workload["ratios"].items():
        one, _, other = pair.partition("/")
        if other == baseline or (baseline is None and one == first):
            yield f"{one} / {other}", row


def agreement_text(pair: str, found: Mapping[str, Any]) -> str:
    one, _, other = pair.partition("~")
    return (
        f"{one} and {other}: {found['equal']:.0%} of {found['answers']} answers are the same, {found['common']:.0%} of "
        "their characters come before the first difference"
    )


def interval_text(found: Mapping[str, Any] | None, sign: str = "") -> str:
    """A median with its interval, such as 12.3 (11.8 to 13.1)."""
    if found is None:
        return "-"
    middle = number_text(found["median"]) + sign
    if found["low"] is None:
        return middle
    return f"{middle} ({number_text(found['low'])} to {number_text(found['high'])})"


def number_text(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def unit_text(name: str) -> str:
    return f" {METRICS[name].unit}" if METRICS[name].unit else ""


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table
