"""Pictures of measurements by matplotlib, an extra: percentile curves, time lines, rates against concurrency."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.serving.app.bench_html import COLORS, INK, new_figure, picture

MAX_POINTS = 400
"""Of a curve; more would not be seen, and make the page large."""
MAX_DOTS = 3_000
"""Of a time line."""


def percentile_curves(series: Mapping[str, Sequence[float]], title: str, name: str) -> str:
    """series: by their names, milliseconds. What share of the values lies below, the upper tail stretched: 90, 99 and
    99.9% are as far apart as in a table of percentiles."""
    figure = new_figure()
    axes = figure.add_subplot()
    largest = 0
    for color, (label, values) in zip(_colors(len(series)), series.items(), strict=True):
        if not values:
            continue
        count = len(values)
        largest = max(largest, count)
        # Down to one value in all that there are.
        tails = np.geomspace(1.0, 1.0 / max(2, count), min(MAX_POINTS, 20 * count))
        axes.plot(1 / tails, np.percentile(values, 100 * (1 - tails)), color=color, label=f"{label} ({count:,})")
    ticks = [at for at in (1, 2, 4, 10, 20, 100, 1000, 10_000) if at <= max(2, largest)]
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"p{100 * (1 - 1 / at):.5g}" if at > 1 else "least" for at in ticks])
    axes.minorticks_off()
    axes.set(ylabel="ms", xlabel="percentile", ylim=(0, None))
    axes.legend(fontsize=8)
    return picture(figure, title, name)


def time_line(
    groups: Mapping[str, Sequence[tuple[float, float]]], title: str, name: str, arrivals: Sequence[float]
) -> str:
    """groups: by kind, (seconds of the start, ms until it was answered). arrivals: seconds of all starts, shown as
    their number in each of at most 60 steps."""
    figure = new_figure(height=4.6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for color, (label, points) in zip(_colors(len(groups)), groups.items(), strict=True):
        if points:
            step = -(-len(points) // MAX_DOTS)
            shown = points[::step]
            above.plot(*zip(*shown, strict=True), ".", color=color, markersize=5, label=f"{label} ({len(points):,})")
    above.set(ylabel="ms", yscale="log")
    above.yaxis.set_major_formatter("{x:g}")
    above.legend(fontsize=8)
    if arrivals:
        below.hist(arrivals, bins=min(60, max(1, round(max(arrivals)) or 1)), color=INK, alpha=0.35)
    below.set(xlabel="s", ylabel="arrivals")
    return picture(figure, title, name)


def against_concurrency(
    series: Mapping[str, Sequence[tuple[int, Mapping[str, Any]]]], label: str, title: str, name: str
) -> str:
    """series: by name, (streams, a median as ``intervals`` gives it as JSON) in ascending order."""
    figure = new_figure()
    axes = figure.add_subplot()
    for color, (each, points) in zip(_colors(len(series)), series.items(), strict=True):
        streams = [at for at, _ in points]
        middles = [found["median"] for _, found in points]
        lows = [found["median"] if found["low"] is None else found["low"] for _, found in points]
        highs = [found["median"] if found["high"] is None else found["high"] for _, found in points]
        axes.plot(streams, middles, "o-", color=color, markersize=4, label=each)
        axes.fill_between(streams, lows, highs, color=color, alpha=0.2, linewidth=0)
    every = sorted({at for points in series.values() for at, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(every, [str(at) for at in every])
    axes.minorticks_off()
    axes.set(xlabel="streams", ylabel=label, ylim=(0, None))
    axes.legend(fontsize=8)
    return picture(figure, title, name)


def medians(rows: Mapping[str, Mapping[str, Any]], label: str, title: str, name: str) -> str:
    """rows: by name, a median with its values; each value is a dot, the interval a line."""
    figure = new_figure(height=0.9 + 0.42 * len(rows))
    axes = figure.add_subplot()
    for at, (color, found) in enumerate(zip(_colors(len(rows)), rows.values(), strict=True)):
        values = [value for value in found.get("values", ()) if value is not None]
        axes.barh(at, found["median"], color=color, alpha=0.55, height=0.6)
        axes.plot(values, [at] * len(values), ".", color=INK, markersize=5, alpha=0.7)
        if found["low"] is not None:
            axes.plot([found["low"], found["high"]], [at, at], color=INK, linewidth=1)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set(xlabel=label, xlim=(0, None))
    return picture(figure, title, name)


def _colors(count: int) -> list[str]:
    return [COLORS[at % len(COLORS)] for at in range(count)]
