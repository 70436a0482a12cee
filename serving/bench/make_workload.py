"""Workloads from a few numbers: arrivals by a rate or a trace, lengths from distributions, tenants, prefixes.

Each aspect draws from a stream of its own, so a run with longer answers, say, has the same arrivals as before.
"""

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.serving.bench.trace_file import TracedRequest
from headrace.serving.bench.workload_fields import MAX_REQUESTS, MAX_TIME_S
from headrace.serving.bench.workload_file import PlannedRequest, Prompt, WorkloadFile
from headrace.serving.core.errors import ConfigError

ARRIVALS = ("poisson", "uniform")
MAX_LENGTH = 1_000_000
_NUMBER = r"(\d+(?:\.\d+)?)"
_LENGTHS = re.compile(
    rf"(?P<fixed>\d+)|uniform:(?P<low>\d+):(?P<high>\d+)|lognormal:{_NUMBER}:{_NUMBER}(?::(?P<most>\d+))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Whole numbers from low to high: all alike, or with a sigma the exponential of a normal number around the median,
    cut to that range; else each equally likely."""

    low: int
    high: int
    median: float = 0.0
    sigma: float | None = None

    @property
    def fixed(self) -> int | None:
        return self.low if self.low == self.high else None

    def draw(self, rng: random.Random) -> int:
        if self.sigma is None:
            return rng.randint(self.low, self.high)
        drawn = round(rng.lognormvariate(math.log(self.median), self.sigma))
        return min(max(drawn, self.low), self.high)

    def __str__(self) -> str:
        if self.sigma is not None:
            return f"lognormal:{self.median:g}:{self.sigma:g}:{self.high}"
        return str(self.low) if self.low == self.high else f"uniform:{self.low}:{self.high}"


def parse_lengths(text: str, option: str = "length") -> Lengths:
    """128, uniform:64:256, or lognormal:MEDIAN:SIGMA[:MOST] (without MOST at most 16 medians). Raises: ConfigError."""
    found = _LENGTHS.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{option} {text!r} is no length; write 128, uniform:64:256 or lognormal:MEDIAN:SIGMA[:MOST]")
    if found["fixed"] is not None:
        lengths = Lengths(low=int(found["fixed"]), high=int(found["fixed"]))
    elif found["low"] is not None:
        lengths = Lengths(low=int(found["low"]), high=int(found["high"]))
    else:
        median, sigma = float(found[4]), float(found[5])
        most = int(found["most"] or round(16 * median))
        lengths = Lengths(low=1, high=most, median=median, sigma=sigma)
        if not 1 <= median <= most or sigma > 5:
            raise ConfigError(f"{option} {text!r}: a lognormal length's median is from 1 to its most, its sigma to 5")
    if not 1 <= lengths.low <= lengths.high <= MAX_LENGTH:
        raise ConfigError(f"{option} {text!r}: a length is from 1 to {MAX_LENGTH:,}, the smaller number first")
    return lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Of the requests, in proportion to the other shares. length: of a shared prefix, in words or tokens like the
    prompts; name None: the requests without one."""

    name: str | None
    share: float
    length: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadPlan:
    """phases: (requests per second, seconds), one after the other. requests: instead of the end of the last phase, None
    where that counts. is_words: whether prompts are drawn words, else random ids. tenants, prefixes and priorities:
    empty for none. cancel_share: of requests that the client cancels, cancel_after_s after their planned start. trace:
    arrivals, and what it has of lengths and tenants, instead of phases, which are then empty.

    Raises: ConfigError naming the option and its limit.
    """

    phases: tuple[tuple[float, float], ...]
    prompt: Lengths
    max_tokens: Lengths
    requests: int | None = None
    arrivals: str = "poisson"
    is_words: bool = True
    tenants: tuple[Share, ...] = ()
    prefixes: tuple[Share, ...] = ()
    priorities: tuple[Share, ...] = ()
    deadline_ms: int | None = None
    cancel_share: float = 0.0
    cancel_after_s: float = 1.0
    temperature: float = 0.0
    ignore_eos: bool = True
    seed: int = 0
    trace: tuple[TracedRequest, ...] = ()

    def __post_init__(self) -> None:
        if self.arrivals not in ARRIVALS:
            raise ConfigError(f"--arrivals is {self.arrivals!r}; there are {', '.join(ARRIVALS)}")
        for rate, seconds in self.phases:
            if not 0 < rate <= 100_000 or not 0 < seconds <= MAX_TIME_S:
                raise ConfigError(
                    f"{rate:g} requests/s for {seconds:g} s: a rate is above 0 to 100,000, a time above 0 to "
                    f"{MAX_TIME_S:,.0f} s"
                )
        if self.phases and self.trace:
            raise ConfigError("a trace has the arrivals; leave out --rate, --duration and --phase")
        if not self.phases and not self.trace:
            raise ConfigError("give --rate with --duration or --requests, --phase, or --trace")
        if self.requests is not None and not 1 <= self.requests <= MAX_REQUESTS:
            raise ConfigError(f"--requests is {self.requests}; it must be from 1 to {MAX_REQUESTS:,}")
        expected = sum(rate * seconds for rate, seconds in self.phases)
        if self.requests is None and expected > MAX_REQUESTS:
            raise ConfigError(f"{expected:,.0f} requests are planned; a workload has at most {MAX_REQUESTS:,}")
        for option, value, most in (
            ("--temperature", self.temperature, 100),
            ("--seed", self.seed, 2**63 - 1),
            ("--cancel-share", self.cancel_share, 1),
            ("--cancel-after", self.cancel_after_s, MAX_TIME_S),
        ):
            if not 0 <= value <= most:
                raise ConfigError(f"{option} is {value:g}; it must be from 0 to {most:,.15g}")
        for shares in (self.tenants, self.prefixes, self.priorities):
            if shares and sum(share.share for share in shares) <= 0:
                raise ConfigError("shares of --tenant, --priority and --shared-prefix must not all be 0")


def make_workload(plan: WorkloadPlan, *, is_closed: bool = False) -> WorkloadFile:
    """The same plan gives the same workload. is_closed: the times do not count, and its description names none.

    Raises: ConfigError where no request falls into the time.
    """
    aspects = ("prompt", "answer", "tenant", "prefix", "priority", "cancel")
    streams = {aspect: random.Random(f"{plan.seed}:{aspect}") for aspect in aspects}
    names = {prefix.name: prefix.length for prefix in plan.prefixes if prefix.name is not None}
    requests = []
    for index, at_s in enumerate(_arrivals(plan)):
        length = plan.prompt.draw(streams["prompt"])
        traced = plan.trace[index] if plan.trace else None
        answer = plan.max_tokens.draw(streams["answer"])
        is_cancelled = streams["cancel"].random() < plan.cancel_share
        requests.append(
            PlannedRequest(
                at_s=at_s,
                prompt=_of((traced and traced.prompt_tokens) or length, plan.is_words),
                max_tokens=(traced and traced.max_tokens) or answer,
                tenant=(traced and traced.tenant) or _one_of(plan.tenants, streams["tenant"]),
                shared_prefix=_one_of(plan.prefixes, streams["prefix"]),
                priority=_one_of(plan.priorities, streams["priority"]),
                deadline_ms=plan.deadline_ms,
                cancel_after_s=plan.cancel_after_s if is_cancelled else None,
                sampling=_sampling(plan, index),
            )
        )
    if not requests:
        raise ConfigError("no request falls into the planned time; give a longer --duration or a higher --rate")
    last_s = requests[-1].at_s
    planned_s = sum(seconds for _, seconds in plan.phases)
    if plan.requests is not None and len(plan.phases) == 1:
        planned_s = len(requests) / plan.phases[0][0]
    return WorkloadFile(
        requests=tuple(requests),
        duration_s=round(max(planned_s, last_s), 6),
        seed=plan.seed,
        description=describe(plan, is_closed=is_closed),
        prefixes={name: _of(length, plan.is_words) for name, length in names.items()},
    )


def _sampling(plan: WorkloadPlan, index: int) -> dict[str, object]:
    """Greedy answers need no seed, and some servers refuse one."""
    found: dict[str, object] = {"temperature": plan.temperature}
    if plan.temperature > 0:
        found["seed"] = (plan.seed + index) % (1 << 31)
    if plan.ignore_eos:
        found["ignore_eos"] = True
    return found


def describe(plan: WorkloadPlan, *, is_closed: bool = False) -> str:
    """In a line: how it was made."""
    if plan.trace:
        return f"{len(plan.trace)} requests of a trace" + _shares_text(plan)
    rates = ", then ".join(f"{rate:g} requests/s for {seconds:g} s" for rate, seconds in plan.phases)
    if plan.requests is not None:
        rates = f"{plan.requests} requests at {plan.phases[0][0]:g}/s"
    kind = "words" if plan.is_words else "ids"
    arrivals = [] if is_closed else [f"{rates} ({plan.arrivals})"]
    parts = [*arrivals, f"prompts of {plan.prompt} {kind}", f"{plan.max_tokens} new tokens"]
    return (", ".join(parts) + _shares_text(plan))[:1_000]


def _shares_text(plan: WorkloadPlan) -> str:
    parts = [""]
    for title, shares in (("tenants", plan.tenants), ("priorities", plan.priorities), ("prefixes", plan.prefixes)):
        if shares:
            parts.append(f"{title} " + " ".join(f"{each.name or 'none'}={each.share:g}" for each in shares))
    if plan.cancel_share:
        parts.append(f"{plan.cancel_share:.0%} cancelled after {plan.cancel_after_s:g} s")
    return ", ".join(parts)


def _of(length: int, is_words: bool) -> Prompt:
    return Prompt(words=length) if is_words else Prompt(tokens=length)


def _one_of(shares: tuple[Share, ...], rng: random.Random) -> str | None:
    if not shares:
        return None
    return rng.choices(shares, weights=[share.share for share in shares])[0].name


def _arrivals(plan: WorkloadPlan) -> Iterator[float]:
    """Ascending, in microseconds' steps. Phases join as one process whose rate changes: what is left of a gap when the
    rate changes is stretched or shortened by it."""
    if plan.trace:
        yield from (request.at_s for request in plan.trace)
        return
    rng = random.Random(f"{plan.seed}:arrivals")
    count, start_s = 0, 0.0
    need = 0.0 if plan.arrivals == "uniform" else rng.expovariate(1.0)
    for number, (rate, seconds) in enumerate(plan.phases, 1):
        end_s = start_s + seconds
        # With a number of requests the last phase lasts until they are there.
        is_open = plan.requests is not None and number == len(plan.phases)
        at_s = start_s + need / rate
        while is_open or at_s < end_s:
            if count == (plan.requests or MAX_REQUESTS):
                return
            yield round(at_s, 6)
            count += 1
            at_s += (1.0 if plan.arrivals == "uniform" else rng.expovariate(1.0)) / rate
        need, start_s = (at_s - end_s) * rate, end_s
