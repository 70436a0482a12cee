"""Counters that engines own, summed over restarts; every counter is a vector, so that one rule carries all of them."""

from collections.abc import Sequence

from headrace.serving.edge.expert_metrics import EngineReports
from headrace.serving.engine.lifecycle import EngineState
from headrace.serving.engine.ports import ExpertTokens

STEP_TOKENS, EXPERT_TOKENS = "step_tokens", "expert_tokens"


class EngineCounters:
    """Each engine counts from nothing: what the dead ones had reported last is added. fields: of Stats, single numbers
    that only grow."""

    def __init__(self, fields: Sequence[str]) -> None:
        self._fields = tuple(fields)
        self._epoch = 0
        self._num_experts = 0
        self._base: dict[str, tuple[float, ...]] = {}
        self._last: dict[str, tuple[float, ...]] = {}

    def update(self, engine: EngineReports) -> None:
        """Read what the engine reports now; without effect while none is ready."""
        if engine.state is EngineState.DEAD or engine.ready_info is None:
            return
        if engine.num_restarts != self._epoch:
            self._base = {name: self.vector(name) for name in {*self._base, *self._last}}
            self._epoch, self._last = engine.num_restarts, {}
        stats = engine.stats
        for name in self._fields:
            self._last[name] = (float(getattr(stats, name)),)
        if stats.step_tokens:
            self._last[STEP_TOKENS] = stats.step_tokens
        if stats.expert_tokens is not None and stats.expert_tokens:
            self._num_experts = len(stats.expert_tokens[0])
            self._last[EXPERT_TOKENS] = sum(stats.expert_tokens, ())

    def total(self, name: str) -> float:
        """Of a single number; 0 before the first report."""
        return sum(self.vector(name))

    def vector(self, name: str) -> tuple[float, ...]:
        """Empty before the first report."""
        base, last = self._base.get(name, ()), self._last.get(name, ())
        if not base or not last:
            return base or last
        return tuple(map(sum, zip(base, last, strict=True)))

    @property
    def expert_tokens(self) -> ExpertTokens:
        """By layer and expert; empty without experts."""
        flat, width = self.vector(EXPERT_TOKENS), self._num_experts
        return tuple(tuple(map(int, flat[at : at + width])) for at in range(0, len(flat), width or 1))
