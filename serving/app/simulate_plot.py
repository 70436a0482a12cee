"""Pictures of a service in simulated time, by matplotlib, which is an extra."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.serving.app.simulate_report import html_page, write_text
from headrace.serving.app.simulate_run import Simulated
from headrace.serving.core.errors import ConfigError

LINE = {"linewidth": 1, "drawstyle": "steps-post"}


def save_plot(path: Path, result: dict[str, Any], found: Simulated) -> None:
    """Latencies as shares of requests, first tokens over time, queue and rows and pages over time.

    Raises: ConfigError where the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")  # not pyplot: that looks for a display and keeps figures
    firsts, gaps, course, pages = figure.subplots(2, 2).flat
    tenants = sorted({outcome.request.tenant for outcome in found.outcomes})
    for tenant in tenants:
        own = [outcome for outcome in found.outcomes if outcome.request.tenant == tenant]
        label = tenant or "all requests"
        _shares(firsts, [o.first_token_ms for o in own if o.first_token_ms is not None], len(own), label)
        each = [gap for o in own for gap in o.gaps_ms]
        _shares(gaps, each, len(each), label)
    firsts.set(title="First token", xlabel="ms", ylabel="share of offered requests", xscale="log", ylim=(0, 1.02))
    gaps.set(title="Between tokens", xlabel="ms", ylabel="share of gaps", xscale="log", ylim=(0, 1.02))
    for replica in sorted({sample.replica for sample in found.samples}):
        own_samples = [sample for sample in found.samples if sample.replica == replica]
        at_s = [sample.at_s for sample in own_samples]
        suffix = f", replica {replica}" if len({s.replica for s in found.samples}) > 1 else ""
        course.plot(at_s, [s.stats.running for s in own_samples], **LINE, label=f"running{suffix}")
        course.plot(at_s, [s.stats.waiting for s in own_samples], **LINE, label=f"waiting{suffix}")
        used = [s.stats.pages_total - s.stats.pages_free - s.stats.pages_cached for s in own_samples]
        pages.plot(at_s, used, **LINE, label=f"in use{suffix}")
        pages.plot(
            at_s,
            [s.stats.pages_cached for s in own_samples],
            linewidth=1,
            drawstyle="steps-post",
            label=f"cached{suffix}",
        )
    refused = [outcome.at_s for outcome in found.outcomes if outcome.refused is not None]
    course.plot(refused, [0] * len(refused), "|", color="red", label=f"{len(refused)} refused")
    course.set(title="Requests", xlabel="s", ylabel="number")
    pages.set(title="Pages", xlabel="s", ylabel="number")
    for axes in (firsts, gaps):
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="x", which="minor", labelsize=7)
    for axes in (firsts, gaps, course, pages):
        axes.grid(True, alpha=0.2)
        axes.legend(fontsize=7)
    if path.suffix == ".html":
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
        write_text("plot", path, html_page(result, drawn.getvalue()))
        return
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}") from error


def _shares(axes: Any, values_ms: Sequence[float], count: int, label: str) -> None:
    """An empirical distribution; what never came keeps the line below 1."""
    if values_ms:
        ordered = sorted(values_ms)
        axes.step(ordered, [(i + 1) / count for i in range(len(ordered))], where="post", linewidth=1.2, label=label)
