"""The two threads by which hosts know of each other: one sends signs of life, one looks for those that are missing.

They are threads of their own, since a rank's main thread hangs in a collective as soon as any other rank is gone.
"""

import threading
from collections.abc import Callable, Iterable

from headrace.serving.engine.host_watch import HostLimits, HostWatch
from headrace.serving.engine.ports import Clock


class Pulse:
    """``HostWatch`` for use by any thread, with its clock.

    beat: sends one sign of life to every rank of ranks; it may wait for a peer that reads nothing. on_lost: told once
    of the first rank that is lost, and why.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        *,
        limits: HostLimits,
        clock: Clock,
        beat: Callable[[], None],
        on_lost: Callable[[int, str], None],
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._beat = beat
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._watch = HostWatch(ranks, limits, clock.now_s())
        self._stopped = threading.Event()

    def start(self) -> None:
        for name, run in (("host-beat", self._run_beat), ("host-watch", self._run_watch)):
            threading.Thread(target=run, daemon=True, name=name).start()

    def stop(self) -> None:
        self._stopped.set()

    def heard(self, rank: int, steps: int = 0) -> None:
        """See ``HostWatch.heard``."""
        with self._lock:
            self._watch.heard(rank, self._clock.now_s(), steps)

    def waits_for(self, steps: int | None) -> None:
        """See ``HostWatch.waits_for``."""
        with self._lock:
            self._watch.waits_for(steps, self._clock.now_s())

    def serves(self) -> None:
        """See ``HostWatch.serves``."""
        with self._lock:
            self._watch.serves(self._clock.now_s())

    def _run_beat(self) -> None:
        while not self._stopped.wait(self._limits.beat_s):
            self._beat()

    def _run_watch(self) -> None:
        while not self._stopped.wait(self._limits.tick_s):
            with self._lock:
                lost = self._watch.lost(self._clock.now_s())
            if lost is not None:
                self._stopped.set()
                self._on_lost(*lost)
                return
