"""The report of a comparison: tables with intervals, ratios, checks, and pictures of every request."""

from collections.abc import Mapping
from typing import Any

from headrace.serving.app import bench_html as html
from headrace.serving.app.bench_curves import against_concurrency, medians, percentile_curves, time_line
from headrace.serving.app.compare_report import SHOWN, agreement_text, interval_text, plan_text, ratios_of
from headrace.serving.bench.compare_figures import METRICS


def comparison_page(result: Mapping[str, Any], baseline: str | None) -> str:
    """result: as ``compare_report.comparison_result`` gives it."""
    parts = [
        html.paragraph(
            f"Started {result['started']}; {len(result['turns'])} turns, servers interleaved within each repetition, "
            "with the same prompts, new in each repetition. Medians over repetitions with intervals between two of "
            "their values (95%, or what the number of repetitions allows); ratios are of values of the same "
            "repetition.",
            "soft",
        )
    ]
    if len(result["turns"]) < result["planned_turns"]:
        text = f"Only {len(result['turns'])} of {result['planned_turns']} turns were taken."
        parts.append(html.paragraph(text, "bad"))
    parts.append(html.table(*_servers(result)))
    for name, server in result["servers"].items():
        if server["lost"] is not None:
            parts.append(html.paragraph(f"{name} was lost: {server['lost']}", "bad"))
    if curve := _concurrency(result):
        parts += [html.heading("Throughput against concurrency"), *curve]
    for number, each in enumerate(result["workloads"], 1):
        parts += _workload(result, each, f"w{number}", baseline)
    return html.page("Servers side by side: " + ", ".join(result["servers"]), *parts)


def _servers(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for name, server in result["servers"].items():
        contract = (server["contract"] or {}).get("contract", {})
        memory = server["ready_pss_bytes"]
        rows.append(
            [
                name,
                server["kind"],
                server["url"],
                server["api"],
                str(server["model"] or contract.get("model") or "-")[:60],
                f"{server['ready_s']:.1f} s",
                "-" if memory is None else f"{memory / 1e6:,.0f} MB",
                "stopped" if server["is_stopped_when_idle"] else "watched",
            ]
        )
    return ["server", "kind", "URL", "API", "model", "ready after", "PSS when ready", "while others run"], rows


def _concurrency(result: Mapping[str, Any]) -> list[str]:
    """Of closed workloads that differ in their streams alone, where there are at least two."""
    groups: dict[str, dict[str, list[tuple[int, Mapping[str, Any]]]]] = {}
    for each in result["workloads"]:
        plan = each["plan"]
        if plan["loop"] != "closed":
            continue
        prompt = f"{plan['prompt_words']} words" if "prompt_words" in plan else f"{plan['prompt_tokens']} ids"
        group = groups.setdefault(f"prompts of {prompt}, {plan['max_tokens']} new tokens", {})
        for name, server in each["servers"].items():
            found = server["metrics"].get("output_tokens_per_s")
            if found is not None:
                group.setdefault(name, []).append((plan["streams"], found))
    pictures = []
    for number, (title, group) in enumerate(groups.items(), 1):
        if any(len(points) > 1 for points in group.values()):
            ordered = {name: sorted(points, key=lambda point: point[0]) for name, points in group.items()}
            pictures.append(against_concurrency(ordered, "output tokens/s", title, f"c{number}"))
    return pictures


def _workload(result: Mapping[str, Any], each: Mapping[str, Any], name: str, baseline: str | None) -> list[str]:
    parts = [html.heading(each["name"]), html.paragraph(plan_text(each["plan"], each["rates"]), "soft")]
    head = [METRICS[metric].title + (f" {METRICS[metric].unit}" if METRICS[metric].unit else "") for metric in METRICS]
    rows = [
        [server, *(interval_text(found["metrics"].get(metric)) for metric in METRICS), str(found["turns"])]
        for server, found in each["servers"].items()
    ]
    parts.append(html.table(["server", *head, "turns"], rows))
    ratios = [
        [title, *(interval_text(row.get(metric), "×") for metric in METRICS)]
        for title, row in ratios_of(each, baseline)
    ]
    if ratios:
        parts.append(html.table(["ratio", *(METRICS[metric].title for metric in METRICS)], ratios))
    parts += [
        html.paragraph(agreement_text(pair, found)) for pair, found in each["agreement"].items() if found["answers"]
    ]
    for check in each["checks"]:
        word = "holds" if check["passed"] else "does not hold"
        parts.append(html.paragraph(f"{check['name']}: {word} ({check['text']})", "good" if check["passed"] else "bad"))
    return [*parts, *_pictures(result, each, name)]


def _pictures(result: Mapping[str, Any], each: Mapping[str, Any], name: str) -> list[str]:
    shown = [metric for metric in SHOWN[:1] if all(metric in s["metrics"] for s in each["servers"].values())]
    found = [
        medians(
            {server: figures["metrics"][metric] for server, figures in each["servers"].items()},
            METRICS[metric].title,
            f"{METRICS[metric].title}: median, interval, and each repetition",
            f"{name}-{metric}",
        )
        for metric in shown
    ]
    turns = [turn for turn in result["turns"] if turn["workload"] == each["name"]]
    firsts: dict[str, list[float]] = {server: [] for server in each["servers"]}
    pauses: dict[str, list[float]] = {server: [] for server in each["servers"]}
    points: dict[str, list[tuple[float, float]]] = {server: [] for server in each["servers"]}
    for turn in turns:
        for one in turn["requests"]:
            if one["error"] is None and one["first_token_ms"] is not None:
                start_s = one["sent_s"] if one["planned_s"] is None else one["planned_s"]
                firsts[turn["server"]].append(one["first_token_ms"])
                points[turn["server"]].append((start_s, one["first_token_ms"]))
            pauses[turn["server"]] += one["pauses_ms"]
    if any(firsts.values()):
        found.append(percentile_curves(firsts, "First token, all requests of all repetitions", f"{name}-first"))
        arrivals = [start_s for group in list(points.values())[:1] for start_s, _ in group]
        title = "First token by the request's start in its repetition; below, the first server's arrivals"
        found.append(time_line(points, title, f"{name}-line", arrivals))
    if any(pauses.values()):
        found.append(percentile_curves(pauses, "Between pieces of output", f"{name}-pauses"))
    return found
