"""What steps cost, learned from when they were planned and when their results came.

A step occupies the device from when the one before it was done, or from when it was planned if nothing ran, until its
result is there. Programs have fixed shapes: a decode step costs what its program costs, a mixed one what its program
costs and, for attention, something for each pair of a new token and a position before it. Kernels that skip padding
make a program that is half empty cheaper, so what a prompt token costs is learned from the tokens that were read.
"""

from dataclasses import dataclass

from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.plan import ProgramKind, StepPlan

SMOOTHING = 0.2
"""Weight of the newest step in a running mean: the last ten or so count."""
PAIR_SMOOTHING = 0.02
"""The same for what attention costs, which is the machine's and hardly changes: a slope needs many points, and one
that is off makes long chunks look cheap."""
MAX_SURPRISE = 2.0
"""A step that took more than so many times what was expected counts as so many times: one hiccup changes little, and a
lasting change is followed within a few steps."""
MARGIN = 0.9
"""Of the objective, that a step may take by expectation: times of one program vary by about a tenth."""
DRIFT = 0.02
"""How far each measured step draws the programs that were not measured towards what it says of them. So a program that
was found dear once, and is not chosen any more, gets another chance."""


@dataclass(slots=True)
class _Mean:
    """Of seconds; attention: mean number of pairs in those steps."""

    seconds: float
    attention: float = 0.0


def attention_pairs(plan: StepPlan) -> int:
    """Pairs of a prompt token of the step and a position before its chunk."""
    return sum(len(segment.token_ids) * segment.start for segment in plan.prefill)


class StepCost:
    """pair_s: seconds for each pair of ``attention_pairs``. page_s: for each copied page. Both 0 while unknown."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._decode: dict[int, _Mean] = {}
        self._mixed: dict[int, _Mean] = {}
        self._variance = 0.0
        self._covariance = 0.0
        self._last_result_s: float | None = None
        self._last_rung = 0
        self._reading_s = 0.0
        self._read_tokens = 0.0
        self.decode_s = 0.0
        self.page_s = config.swap_page_s / 2

    @property
    def pair_s(self) -> float:
        return max(0.0, self._covariance / self._variance) if self._variance else 0.0

    @property
    def prefill_token_s(self) -> float:
        """What a prompt token added to the last ten or so steps that read any; 0 while none did."""
        return self._reading_s / self._read_tokens if self._read_tokens else 0.0

    @property
    def least_prefill_token_s(self) -> float:
        """What a prompt token adds to a full step, by the largest program that was measured; 0 while none was."""
        if not self._mixed:
            return 0.0
        tokens = max(self._mixed)
        seconds = self._mixed[tokens].seconds
        # Without a decode step to compare with, the rows of the program are counted with its tokens.
        return max(0.0, seconds - min(self.decode_s, 0.9 * seconds)) / tokens

    def learn(self, plan: StepPlan, planned_s: float, result_s: float) -> None:
        """A step has its result; in order of the plans."""
        started_s = planned_s if self._last_result_s is None else max(planned_s, self._last_result_s)
        self._last_result_s = result_s
        seconds = result_s - started_s
        if seconds <= 0:
            return
        num_copies = len(plan.swap_out) + len(plan.swap_in)
        if num_copies:
            self._learn_copies(plan, seconds, num_copies)
        elif plan.bucket.kind is ProgramKind.DECODE:
            self._learn_decode(plan.bucket.decode_rows, seconds)
        else:
            self._learn_reading(plan, seconds)
            self._learn_mixed(plan.bucket.prefill_tokens, attention_pairs(plan), seconds)
            if plan.decode:
                self._last_rung = self._config.prefill_tokens.index(plan.bucket.prefill_tokens)

    def forget_gap(self) -> None:
        """A step had no result: what follows it is not measured from the one before."""
        self._last_result_s = None

    def mixed_s(self, prefill_tokens: int, pairs: int) -> float | None:
        """Expected seconds of a mixed program with so many pairs; None while no mixed step was measured."""
        mean = self._mixed.get(prefill_tokens)
        if mean is None:
            if not self._mixed:
                return None
            nearest = min(self._mixed, key=lambda tokens: abs(tokens - prefill_tokens))
            mean = _Mean(self._scaled(nearest, prefill_tokens), self._mixed[nearest].attention)
        return mean.seconds + self.pair_s * (pairs - mean.attention)

    def budget_tokens(self, start: int) -> int:
        """Prompt tokens of a step in which streams run, if its chunk begins at start: of the largest program that keeps
        to the objective, or a part of it where only attention is too dear; never less than a block.
        """
        config = self._config
        if config.inter_token_s is None:
            return config.chunk_tokens
        limit_s = MARGIN * config.inter_token_s
        best = config.block_tokens
        # One rung at a time: a forecast for a program that did not run lately may be far off.
        for tokens in config.prefill_tokens[: self._last_rung + 2]:
            empty_s, full_s = self.mixed_s(tokens, 0), self.mixed_s(tokens, tokens * start)
            if empty_s is None or full_s is None:
                # Nothing is known: the smallest program is the least risk, and measures.
                return config.prefill_tokens[0]
            if full_s <= limit_s:
                best = max(best, tokens)
            elif empty_s < limit_s and full_s > empty_s:
                part = int(tokens * (limit_s - empty_s) / (full_s - empty_s))
                best = max(best, part // config.block_tokens * config.block_tokens)
        return best

    def _learn_decode(self, rows: int, seconds: float) -> None:
        self._decode[rows] = _Mean(_moved(self._decode.get(rows), seconds))
        self.decode_s = self._decode[rows].seconds

    def _learn_reading(self, plan: StepPlan, seconds: float) -> None:
        """Sums of steps: a quotient of sums is not drawn up by steps that read next to nothing."""
        expected_s = self.mixed_s(plan.bucket.prefill_tokens, attention_pairs(plan))
        if expected_s is not None:
            seconds = min(seconds, MAX_SURPRISE * expected_s)
        # Without a decode step to compare with, the rows of the program are counted with its tokens.
        reading_s = max(0.0, seconds - min(self.decode_s, 0.9 * seconds))
        read = sum(len(segment.token_ids) for segment in plan.prefill)
        weight = SMOOTHING if self._read_tokens else 1.0
        self._reading_s += weight * (reading_s - self._reading_s)
        self._read_tokens += weight * (read - self._read_tokens)

    def _learn_mixed(self, tokens: int, pairs: int, seconds: float) -> None:
        mean = self._mixed.get(tokens)
        if mean is None:
            self._mixed[tokens] = _Mean(seconds, pairs)
        else:
            surprise = min(seconds, MAX_SURPRISE * mean.seconds) - mean.seconds
            more = pairs - mean.attention
            self._variance += PAIR_SMOOTHING * (more * more - self._variance)
            self._covariance += PAIR_SMOOTHING * (more * surprise - self._covariance)
            mean.seconds += SMOOTHING * surprise
            mean.attention += SMOOTHING * more
        for other, its in self._mixed.items():
            if other != tokens:
                its.seconds += DRIFT * (self._scaled(tokens, other) - its.seconds)

    def _learn_copies(self, plan: StepPlan, seconds: float, num_copies: int) -> None:
        if plan.bucket.kind is ProgramKind.DECODE:
            mean = self._decode.get(plan.bucket.decode_rows)
            expected_s = None if mean is None else mean.seconds
        else:
            expected_s = self.mixed_s(plan.bucket.prefill_tokens, attention_pairs(plan))
        if expected_s is not None:
            page_s = max(0.0, seconds - expected_s) / num_copies
            self.page_s = page_s if self.page_s == 0 else self.page_s + SMOOTHING * (page_s - self.page_s)

    def _scaled(self, measured: int, wanted: int) -> float:
        """From one mixed program to another: what tokens add grows with them, the decode rows stay."""
        seconds = self._mixed[measured].seconds
        rows_s = min(self.decode_s, seconds)
        return rows_s + (seconds - rows_s) * wanted / measured


def _moved(mean: _Mean | None, seconds: float) -> float:
    if mean is None:
        return seconds
    return mean.seconds + SMOOTHING * (min(seconds, MAX_SURPRISE * mean.seconds) - mean.seconds)
