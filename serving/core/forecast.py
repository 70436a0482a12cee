"""When a request would get its first and its last token, from measured step times and the work ahead of it.

The model: a decode step takes ``decode_step_ms`` and gives each running request a token; each prompt token that is
read adds ``prefill_token_ms`` to some step. Rows are taken in turn, but by requests that others make way for. Of the
requests that wait, those of a better class go first, of the same class as many as weighted fair sharing puts ahead, of
a worse class none: aging and requests to come are left out. So the forecast leans to the early side, and only what
would be late even then is refused.
While nothing has been measured there is no forecast, and nothing is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from headrace.serving.core.request import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpeed:
    """decode_step_ms, prefill_token_ms: as measured lately, 0 = unknown. num_rows: requests of a step, over all copies
    of the model. chunk_tokens: most prompt tokens of a step. num_lanes: copies, which read prompts side by side."""

    decode_step_ms: float
    prefill_token_ms: float
    num_rows: int
    chunk_tokens: int
    num_lanes: int = 1

    @property
    def is_known(self) -> bool:
        return self.decode_step_ms > 0


@dataclass(frozen=True, slots=True)
class Work:
    """requests that wait, with their prompt tokens and the tokens that they will generate by estimate."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.output_tokens + other.output_tokens,
        )

    def times(self, share: float) -> "Work":
        return Work(self.requests * share, self.prompt_tokens * share, self.output_tokens * share)

    @property
    def tokens(self) -> float:
        return self.prompt_tokens + self.output_tokens


NO_WORK = Work()


@dataclass(slots=True, eq=False)
class Place:
    """A request in the backlog, from acceptance to its end."""

    tenant: str
    weight: float
    priority: Priority
    prompt_tokens: int
    output_tokens: int
    num_generated: int = 0

    @property
    def work(self) -> Work:
        return Work(1, self.prompt_tokens, self.output_tokens)

    @property
    def remaining_tokens(self) -> int:
        """By estimate; at least 1 while it runs."""
        return max(1, self.output_tokens - self.num_generated)


@dataclass(slots=True)
class _Group:
    """Requests of one tenant and class that wait, added up."""

    weight: float
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def work(self) -> Work:
        return Work(self.requests, self.prompt_tokens, self.output_tokens)


class Backlog:
    """The requests that wait for a first token, and those that have one."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, Priority], _Group] = {}
        self._waiting: set[Place] = set()
        self._running: dict[Place, None] = {}
        self._running_by: dict[tuple[str, Priority], int] = {}

    def add(self, place: Place) -> None:
        group = self._groups.setdefault((place.tenant, place.priority), _Group(place.weight))
        group.weight = place.weight
        group.requests += 1
        group.prompt_tokens += place.prompt_tokens
        group.output_tokens += place.output_tokens
        self._waiting.add(place)

    def correct(self, place: Place, prompt_tokens: int, output_tokens: int) -> None:
        """Of a place that waits: its prompt has been tokenized."""
        if place in self._waiting:
            group = self._groups[place.tenant, place.priority]
            group.prompt_tokens += prompt_tokens - place.prompt_tokens
            group.output_tokens += output_tokens - place.output_tokens
        place.prompt_tokens, place.output_tokens = prompt_tokens, output_tokens

    def started(self, place: Place) -> None:
        """It has its first token."""
        if self._leave(place):
            self._running[place] = None
            key = (place.tenant, place.priority)
            self._running_by[key] = self._running_by.get(key, 0) + 1

    def ended(self, place: Place) -> None:
        """However it ended. Idempotent."""
        if not self._leave(place) and place in self._running:
            del self._running[place]
            key = (place.tenant, place.priority)
            self._running_by[key] -= 1
            if not self._running_by[key]:
                del self._running_by[key]

    def _leave(self, place: Place) -> bool:
        if place not in self._waiting:
            return False
        self._waiting.remove(place)
        key = (place.tenant, place.priority)
        group = self._groups[key]
        group.requests -= 1
        group.prompt_tokens -= place.prompt_tokens
        group.output_tokens -= place.output_tokens
        if not group.requests:
            del self._groups[key]
        return True

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def waiting_by_tenant(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for (tenant, _), group in self._groups.items():
            counts[tenant] = counts.get(tenant, 0) + group.requests
        return counts

    def remaining(self) -> list[int]:
        """Tokens that running requests still generate by estimate, ascending."""
        return sorted(place.remaining_tokens for place in self._running)

    def all_waiting(self) -> Work:
        total = Work()
        for group in self._groups.values():
            total += group.work
        return total

    def yields_to(self, place: Place) -> bool:
        """Whether a running request would make way for one that comes now and is not in the backlog yet: of a tenant
        that has several, for one of a tenant that has none; of a worse class, for one of a better class."""
        tenants = {tenant for tenant, _ in (*self._groups, *self._running_by)}
        if place.tenant not in tenants and any(
            number > 1 and priority >= place.priority for (_, priority), number in self._running_by.items()
        ):
            return True
        num_worse = sum(number for (_, priority), number in self._running_by.items() if priority > place.priority)
        num_ahead = sum(group.requests for (_, priority), group in self._groups.items() if priority <= place.priority)
        return num_worse > num_ahead

    def ahead_of(self, place: Place) -> Work:
        """What the scheduler takes before a request that comes now and is not in the backlog yet."""
        own = self._groups.get((place.tenant, place.priority))
        ahead = Work() if own is None else own.work
        own_tokens = ahead.tokens + place.work.tokens
        for (tenant, priority), group in self._groups.items():
            work = group.work
            if priority < place.priority:
                ahead += work
            elif priority == place.priority and tenant != place.tenant:
                fair = own_tokens * group.weight / place.weight
                ahead += work.times(min(1.0, fair / work.tokens) if work.tokens else 1.0)
        return ahead


@dataclass(frozen=True, slots=True)
class Forecast:
    """In ms from now."""

    first_token_ms: float
    last_token_ms: float


def forecast(
    speed: EngineSpeed, prompt_tokens: int, output_tokens: int, ahead: Work = NO_WORK, remaining: Sequence[int] = ()
) -> Forecast | None:
    """Of a request with work ahead of it, beside running requests that still generate so many tokens each (ascending).

    None while speed is unknown.
    """
    if not speed.is_known:
        return None
    num_to_end = ceil(len(remaining) + ahead.requests) - speed.num_rows + 1
    steps = _steps_until_free(num_to_end, remaining, ahead, speed.num_rows)
    # Prompts ahead are read in the steps that are waited for anyway, as far as those have room for them.
    steps = max(steps, ahead.prompt_tokens / (speed.chunk_tokens * speed.num_lanes))
    steps += ceil(max(1, prompt_tokens) / speed.chunk_tokens)
    reading_ms = (ahead.prompt_tokens / speed.num_lanes + prompt_tokens) * speed.prefill_token_ms
    first_ms = steps * speed.decode_step_ms + reading_ms
    return Forecast(first_ms, first_ms + (output_tokens - 1) * speed.decode_step_ms)


def _steps_until_free(num_to_end: int, remaining: Sequence[int], ahead: Work, num_rows: int) -> float:
    """Steps until so many requests have ended, running ones first, and a row is free."""
    if num_to_end <= 0:
        return 0.0
    if num_to_end <= len(remaining):
        return remaining[num_to_end - 1]
    num_requests = len(remaining) + ahead.requests
    tokens = sum(remaining) + ahead.output_tokens
    # When the row is free the other rows are, on average, half way through a request.
    unfinished = (num_rows - 1) * tokens / num_requests / 2
    return max(remaining[-1] if remaining else 0, (tokens - unfinished) / num_rows)


class Correction:
    """A factor on forecasts of first tokens, by how the objective for them was kept.

    It moves up by UP for each accepted request that missed the objective and down by DOWN for each that kept it, so it
    rests where about DOWN / (UP + DOWN) = 5% of them miss it. Only requests that were forecast to wait for a good part
    of it count: those of an idle server say nothing about the border.
    """

    UP = 0.1
    DOWN = 0.005
    RANGE = (1.0, 3.0)

    def __init__(self) -> None:
        self.factor = 1.0

    def observe(self, *, is_late: bool) -> None:
        step = 1 + self.UP if is_late else 1 - self.DOWN
        self.factor = min(max(self.factor * step, self.RANGE[0]), self.RANGE[1])
