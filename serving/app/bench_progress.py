"""How far a bench is, on standard error."""

from typing import Any

from rich.console import Console

PLAIN_TELL_S = 10.0
"""Between two lines of progress where standard error is no terminal."""


class ProgressLine:
    """One line that changes on a terminal; elsewhere a line now and then. Use as a context."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("connecting") if console.is_terminal else None
        self._told_s = 0.0

    def __enter__(self) -> "ProgressLine":
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show_closed(self, standing: Any, title: str = "") -> None:
        """standing: a ``serving.bench.closed_loop.Standing``. title: before it, with what parts it."""
        rate = standing.output_tokens / standing.seconds if standing.seconds else 0.0
        self.show(
            standing.seconds,
            f"{title}{standing.done} of {standing.requests} requests, {standing.failed} failed, "
            f"{standing.output_tokens:,} tokens, {rate:,.1f} tokens/s, {standing.seconds:.0f} s",
        )

    def show_open(self, standing: Any, title: str = "") -> None:
        """standing: a ``serving.bench.open_loop.OpenStanding``. title: before it, with what parts it."""
        good = ""
        if standing.good is not None and standing.ended:
            good = f", {standing.good / standing.ended:.0%} good"
        over_s = standing.seconds - standing.planned_s
        place = f"{standing.seconds:.0f} of {standing.planned_s:.0f} s"
        if over_s > 0:
            place = f"{standing.planned_s:.0f} s and {over_s:.0f} more"
        self.show(
            standing.seconds,
            f"{title}{place}, {standing.sent:,} of {standing.requests:,} sent, {standing.in_flight:,} open, "
            f"{standing.refused:,} refused, {standing.failed:,} failed{good}, up to {standing.late_ms:.1f} ms late",
        )

    def show(self, seconds: float, text: str) -> None:
        """seconds: since the run began, by which lines are spaced where there is no terminal."""
        if self._status is not None:
            self._status.update(text)
            return
        if seconds < self._told_s:  # another run
            self._told_s = 0.0
        if seconds - self._told_s >= PLAIN_TELL_S:
            self._told_s = seconds
            self._console.print(text, highlight=False, soft_wrap=True)
