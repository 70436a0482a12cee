"""A report of one file: text that is escaped, tables, and pictures in it; readable in light and in dark; no script."""

import importlib.util
import io
import os
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from headrace.serving.core.errors import ConfigError

INK = "#010203"
"""What pictures are drawn in where they take the page's colour: it becomes currentColor."""
COLORS = ("#3b82f6", "#f97316", "#10b981", "#a855f7", "#ef4444", "#eab308", "#06b6d4", "#ec4899")
"""Of series, in the middle between light and dark."""
STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--paper:#fff;--line:#d0d7de;--soft:#57606a;--bad:#b3261e;--good:#1a7f37}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--paper:#0d1117;--line:#30363d;--soft:#9198a1;--bad:#ff7b72;
--good:#3fb950}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:2em auto;max-width:75em;
padding:0 1em}
h1{font-size:1.5em}h2{font-size:1.2em;border-bottom:1px solid var(--line);padding-bottom:.2em;margin-top:2em}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.25em .8em;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
td:first-child,th:first-child{text-align:left}th{font-weight:600;color:var(--soft)}
.bad{color:var(--bad)}.good{color:var(--good)}.soft{color:var(--soft)}
figure{margin:1em 0}figcaption{color:var(--soft)}svg{max-width:100%;height:auto}
"""


def check_html(path: Path) -> None:
    """Before a run of minutes. Raises: ConfigError naming --html."""
    if not path.absolute().parent.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(f"--html {path} cannot be written: is its directory there, and yours?")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--html {path} needs matplotlib for pictures; the plot extra of this package has it")


def write_page(path: Path, text: str) -> None:
    """Raises: ConfigError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path} cannot be written: {error.strerror}") from error


def page(title: str, *parts: str) -> str:
    """parts: HTML, such as the functions below give."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str, kind: str = "") -> str:
    """kind: bad, good or soft, or nothing."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f'<div class="wide"><table><thead>{row(head, "th")}</thead><tbody>{body}</tbody></table></div>'


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def new_figure(width: float = 9, height: float = 3.6) -> Any:
    """A matplotlib figure for ``picture``. Sizes in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")  # not pyplot: that looks for a display


def picture(figure: Any, caption: str, name: str) -> str:
    """The figure as SVG inside the page. name: unlike that of any other in the page: its ids begin with it."""
    from matplotlib import rc_context

    for axes in figure.axes:
        _in_ink(axes)
    drawn = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    text = drawn.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    text = text.replace("xlink:href", "href").replace(INK, "currentColor")
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = text.replace("<svg ", f'<svg role="img" aria-label="{escape(caption)}" ', 1)
    return f"<figure>{text}<figcaption>{escape(caption)}</figcaption></figure>"


def _in_ink(axes: Any) -> None:
    axes.set_facecolor("none")
    axes.tick_params(which="both", colors=INK)
    for spine in axes.spines.values():
        spine.set_edgecolor(INK)
        spine.set_alpha(0.4)
    for label in (axes.xaxis.label, axes.yaxis.label, axes.title):
        label.set_color(INK)
    axes.grid(True, color=INK, alpha=0.12)
    legend = axes.get_legend()
    if legend is not None:
        legend.get_frame().set_visible(False)
        for text in legend.get_texts():
            text.set_color(INK)
