"""The report of a bench of one server: what was asked, tables, and pictures of every request."""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.serving.app import bench_html as html
from headrace.serving.app.bench_curves import against_concurrency, percentile_curves, time_line
from headrace.serving.app.bench_levels import METRICS, work_text
from headrace.serving.app.bench_report import goodput_text, server_text
from headrace.serving.app.compare_report import interval_text

LATENCIES = {
    "first_token": "first token",
    "inter_token": "between tokens",
    "mean_gap": "their mean in a request",
    "largest_pause": "longest pause",
    "whole_answer": "whole answer",
}
COLUMNS = ("p50_ms", "p95_ms", "p99_ms")


def bench_page(result: Mapping[str, Any]) -> str:
    """result: of a closed loop, of several, or of an open one, as their reports give it."""
    work = result["workload"]
    parts = [html.paragraph(f"Started {result['started']}.", "soft")]
    if result["loop"] == "open":
        how = work["description"] or work["file"] or "no description"
        text = f"{work['requests']:,} requests in {work['duration_s']:g} s ({work['offered_per_s']:g}/s): {how}"
        parts.append(html.paragraph(f"{text}; workload {work['hash'][:12]}"))
    else:
        levels = result.get("levels") or [{"streams": work["streams"]}]
        parts.append(html.paragraph(work_text(dict(work), ", ".join(str(level["streams"]) for level in levels))))
    parts.append(html.paragraph(server_text(dict(result["server"])), "soft"))
    if result["loop"] == "levels":
        parts += _levels(result["levels"])
    for number, run in enumerate(result.get("runs") or [result], 1):
        parts += _run(run, number, result)
    return html.page(f"headrace bench: {result['server']['url']}", *parts)


def _levels(levels: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        [str(level["streams"]), *(interval_text(level["metrics"].get(name)) for name in METRICS), str(level["failed"])]
        for level in levels
    ]
    parts = [html.table(["streams", *(title for title, _ in METRICS.values()), "failed"], rows)]
    for name in ("output_tokens_per_s", "first_token_p50_ms", "inter_token_p50_ms"):
        points = [(level["streams"], level["metrics"][name]) for level in levels if name in level["metrics"]]
        if points:
            title = METRICS[name][0]
            shown = sorted(points, key=lambda point: point[0])
            parts.append(against_concurrency({title: shown}, title, f"{title} against concurrency", f"level-{name}"))
    return parts


def _run(run: Mapping[str, Any], number: int, result: Mapping[str, Any]) -> list[str]:
    figures = run["figures"]
    title = "Requests"
    if "streams" in run:
        title = f"Run {number}: {run['streams']} streams"
    elif len(result.get("runs") or ()) > 1:
        title = f"Run {number}: seed {run['seed']}"
    parts = [html.heading(title), _latencies(figures)]
    answered = figures.get("answered", figures["requests"] - figures["failed"])
    parts.append(
        html.paragraph(
            f"{answered:,} of {figures['requests']:,} answered, {figures.get('refused', 0):,} refused, "
            f"{figures['failed']:,} failed; {figures['output_tokens_per_s']:,.1f} output tokens/s; "
            f"{figures['prompt_tokens']:,} prompt tokens, of which {figures['cached_tokens']:,} were cached."
        )
    )
    if "goodput" in figures:
        parts.append(html.paragraph(goodput_text(figures["goodput"])))
    for warning in figures.get("client", {}).get("warnings", ()):
        parts.append(html.paragraph(warning, "bad"))
    for code, found in figures["errors"].items():
        count = found if isinstance(found, int) else found["count"]
        parts.append(html.paragraph(f"{count:,} × {code}", "bad"))
    return [*parts, *_pictures(run["requests"], f"r{number}")]


def _latencies(figures: Mapping[str, Any]) -> str:
    rows = []
    for name, title in LATENCIES.items():
        if name in figures:
            found = figures[name]
            never = found.get("never", 0)
            cells = ["never" if never and found[key] is None else html.number(found[key]) for key in COLUMNS]
            rows.append([title, *cells, f"{found['count']:,}"])
    return html.table(["ms", "p50", "p95", "p99", "of"], rows)


def _pictures(requests: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    counted = [one for one in requests if not one["is_cancelled"]]
    good = [one for one in counted if one["error"] is None]
    curves = {
        "first token": [one["first_token_ms"] for one in counted if one["first_token_ms"] is not None],
        "between pieces of output": [pause for one in counted for pause in one["pauses_ms"]],
        "whole answer": [one["whole_ms"] for one in good],
    }
    groups: dict[str, list[tuple[float, float]]] = {"first token": [], "refused": [], "failed": []}
    arrivals = []
    for one in counted:
        start_s = one["sent_s"] if one["planned_s"] is None else one["planned_s"]
        arrivals.append(start_s)
        if one["is_refused"]:
            groups["refused"].append((start_s, max(0.01, one["whole_ms"])))
        elif one["first_token_ms"] is None:
            groups["failed"].append((start_s, max(0.01, one["whole_ms"])))
        else:
            groups["first token"].append((start_s, max(0.01, one["first_token_ms"])))
    found = []
    for label, values in curves.items():
        if values:
            key = label.split()[0]
            found.append(percentile_curves({label: values}, f"Percentiles: {label}", f"{name}-{key}"))
    if arrivals:
        title = "By time of arrival: until the first token, or until it was refused or failed"
        found.append(time_line({k: v for k, v in groups.items() if v}, title, f"{name}-line", arrivals))
    return found
