"""A picture of a plan: every choice, and their Pareto front, by matplotlib, which is an extra."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from headrace.serving.app.plan_front import Choice
from headrace.serving.core.errors import ConfigError

FORMATS = (".svg", ".png", ".pdf")


def check_plot(path: Path) -> None:
    """Before anything is compiled. Raises: ConfigError naming --plot."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"--plot {path}: its name must end in {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.absolute().parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {path} needs matplotlib, which the plot extra of this package brings")


def save_plot(title: str, found: Sequence[Choice], path: Path) -> None:
    """found: as plan_front.choices gives them. Raises: ConfigError where the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")  # not pyplot: that looks for a display and keeps figures
    axes = figure.add_subplot()
    for name in dict.fromkeys((choice.row.topology, choice.row.mesh) for choice in found):
        line = [choice for choice in found if (choice.row.topology, choice.row.mesh) == name]
        axes.plot(
            [1e3 * choice.token_s for choice in line],
            [choice.tokens_per_s_per_chip for choice in line],
            marker="o",
            markersize=4,
            linewidth=1,
            alpha=0.7,
            label=f"{name[0]} {name[1]}",
        )
    best = [choice for choice in found if choice.is_best]
    axes.plot(
        [1e3 * choice.token_s for choice in best],
        [choice.tokens_per_s_per_chip for choice in best],
        color="black",
        linewidth=2,
        zorder=0,
        label="front, with its streams",
    )
    for choice in best:
        at = 1e3 * choice.token_s, choice.tokens_per_s_per_chip
        axes.annotate(f"{choice.streams}", at, textcoords="offset points", xytext=(5, -10), fontsize=7)
    axes.set(
        title=title, xlabel="ms between tokens of a stream", ylabel="tokens/s per chip", xscale="log", yscale="log"
    )
    axes.xaxis.set_minor_formatter("{x:g}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize=7)
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}") from error
