"""A closed loop of requests that are planned as in an open one: tenants, shared prefixes, cancels, drawn lengths."""

import time
from dataclasses import dataclass

from headrace.serving.bench.targets import AS_SOON_AS_ASKED, Terms
from headrace.serving.bench.workload import MAX_TOKENS_IN_ALL
from headrace.serving.bench.workload_file import Prompt, WorkloadFile
from headrace.serving.core.errors import ConfigError

MAX_STREAMS = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedPlan:
    """plan: its requests are taken in order by whichever stream is free; their times do not count. warmup: requests
    before them, which do not count.

    Raises: ConfigError naming the option and its limit.
    """

    plan: WorkloadFile
    streams: int
    warmup: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.streams <= MAX_STREAMS:
            raise ConfigError(f"--streams is {self.streams}; it must be from 1 to {MAX_STREAMS:,}")
        if not 0 <= self.warmup <= 10_000:
            raise ConfigError(f"--warmup is {self.warmup}; it must be from 0 to 10,000")
        tokens = sum(request.max_tokens for request in self.plan.requests)
        if tokens > MAX_TOKENS_IN_ALL:
            raise ConfigError(f"the plan asks for {tokens:,} tokens; {MAX_TOKENS_IN_ALL:,} are the most that are kept")

    @property
    def requests(self) -> int:
        return len(self.plan.requests)

    def body(self, index: int) -> dict[str, object]:
        """Of one request; below 0 of a warm-up like it, with a prompt that no other begins with."""
        if index >= 0:
            return self.plan.body(index)
        like = -1 - index
        body = self.plan.body(like % self.requests)
        length = self.plan.estimated_prompt_tokens(like % self.requests)
        prompt = Prompt(words=length) if isinstance(body["prompt"], str) else Prompt(tokens=length)
        return {**body, "prompt": prompt.drawn(f"warm-up:{self.plan.hash}:{like}")}

    def terms(self, index: int) -> Terms:
        """As it is sent now."""
        if index < 0:
            return AS_SOON_AS_ASKED
        request = self.plan.requests[index]
        after_s = request.cancel_after_s
        return Terms(
            cancel_s=None if after_s is None else time.monotonic() + after_s,
            tenant=request.tenant,
            priority=request.priority,
            deadline_ms=request.deadline_ms,
        )

    def counts(self, index: int) -> bool:
        """Whether its latencies do: not where the client planned to cancel it, or only quick ones would be left."""
        return self.plan.requests[index].cancel_after_s is None

    @property
    def hash(self) -> str:
        return self.plan.hash
