"""What is compared: servers, workloads, and who has which turn, so that what disturbs the machine hits all alike."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from headrace.serving.bench.dialect import Dialect, Door, dialect_of
from headrace.serving.bench.make_workload import Lengths, WorkloadPlan, make_workload
from headrace.serving.bench.workload import Workload
from headrace.serving.bench.workload_file import WorkloadFile
from headrace.serving.core.errors import ConfigError

CLOSED = "closed"
LOOPS = (CLOSED, "poisson", "uniform")
MAX_SERVERS = 16
WARM_TOKENS = 8
"""Most new tokens of a warm-up request, which does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedServer:
    """base: as ``targets.base_of`` gives it. command: starts it, empty for one that runs already; pid: of such a one.
    ready: a path, None for that of its kind. idle: stop or run while others are measured, None for stop where its
    processes are known. body: fields over those of each request. workloads: names, None for all. repetitions: takes
    part in so many, None for all.

    Raises: ConfigError for an unknown kind, or a native door of another kind than headrace.
    """

    name: str
    base: str
    kind: str = "any"
    door: Door = Door.COMPLETIONS
    model: str | None = None
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    pid: int | None = None
    ready: str | None = None
    ready_s: float = 900.0
    idle: str | None = None
    body: Mapping[str, object] = field(default_factory=dict)
    workloads: tuple[str, ...] | None = None
    repetitions: int | None = None
    api_key_file: str | None = None

    def __post_init__(self) -> None:
        dialect_of(self.kind)
        if self.door is Door.NATIVE and self.kind not in ("any", "headrace"):
            raise ConfigError(f"server {self.name}: the native door is headrace's; a {self.kind} has completions, chat")
        if self.door is Door.NATIVE and self.body:
            raise ConfigError(f"server {self.name}: body is of HTTP; leave it out with the native door")

    @property
    def dialect(self) -> Dialect:
        return dialect_of(self.kind)

    @property
    def stops(self) -> bool:
        """Whether it is stopped while others are measured."""
        return self.idle != "run" and (bool(self.command) or self.pid is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedWorkload:
    """loop: closed, or the arrivals of an open one. rate: requests per second, None for a share of the slowest
    server's requests per second in the closed workload share_of."""

    name: str
    max_tokens: int
    requests: int
    loop: str = CLOSED
    streams: int = 1
    prompt_words: int = 0
    prompt_tokens: int = 0
    rate: float | None = None
    share_of: str | None = None
    share: float = 0.7
    repetitions: int | None = None
    watch_memory: bool = False

    @property
    def is_closed(self) -> bool:
        return self.loop == CLOSED

    def closed(self, seed: int) -> Workload:
        return Workload(
            streams=self.streams,
            requests=self.requests,
            prompt_words=self.prompt_words,
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.max_tokens,
            seed=seed,
        )

    def opened(self, seed: int, rate: float) -> WorkloadFile:
        """The same seed and rate give the same arrivals and prompts, whoever is asked."""
        length = self.prompt_words or self.prompt_tokens
        return make_workload(
            WorkloadPlan(
                phases=((rate, self.requests / rate),),
                requests=self.requests,
                arrivals=self.loop,
                prompt=Lengths(low=length, high=length),
                is_words=bool(self.prompt_words),
                max_tokens=Lengths(low=self.max_tokens, high=self.max_tokens),
                seed=seed,
            )
        )

    def warm(self, seed: int, *, is_whole: bool) -> Workload:
        """One request before a turn. is_whole: with a prompt as long as those that count, for a server's first turn."""
        words = self.prompt_words if is_whole or not self.prompt_words else min(self.prompt_words, 16)
        tokens = self.prompt_tokens if is_whole or not self.prompt_tokens else min(self.prompt_tokens, 16)
        return Workload(
            streams=1,
            requests=1,
            prompt_words=words,
            prompt_tokens=tokens,
            max_tokens=min(self.max_tokens, WARM_TOKENS),
            seed=seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One server's measurement of one workload. repetition: from 0. place: in the order of that repetition."""

    workload: ComparedWorkload
    repetition: int
    server: ComparedServer
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Raises: ConfigError for names or URLs that are there twice, or point nowhere."""

    servers: tuple[ComparedServer, ...]
    workloads: tuple[ComparedWorkload, ...]
    repetitions: int = 5
    seed: int = 0
    timeout_s: float = 600.0
    pause_s: float = 0.5

    def __post_init__(self) -> None:
        if not 1 <= len(self.servers) <= MAX_SERVERS:
            raise ConfigError(f"{len(self.servers)} servers; a comparison has 1 to {MAX_SERVERS}")
        if not self.workloads:
            raise ConfigError("no workload; give a table [[workloads]]")
        for what, names in (
            ("servers", [server.name for server in self.servers]),
            ("servers' URLs (a second turn would find the first one's prompts cached)", [s.base for s in self.servers]),
            ("workloads", [workload.name for workload in self.workloads]),
        ):
            if twice := {name for name in names if names.count(name) > 1}:
                raise ConfigError(f"two {what} are {min(twice)}; give each its own")
        before: set[str] = set()
        for workload in self.workloads:
            if workload.share_of is not None and workload.share_of not in before:
                raise ConfigError(
                    f"workload {workload.name}: share_of {workload.share_of!r} is no closed workload above it"
                )
            before |= {workload.name} if workload.is_closed else set()
        known = {workload.name for workload in self.workloads}
        for server in self.servers:
            for name in server.workloads or ():
                if name not in known:
                    raise ConfigError(f"server {server.name}: there is no workload {name!r}")

    def only(
        self,
        *,
        servers: tuple[str, ...] = (),
        workloads: tuple[str, ...] = (),
        repetitions: int | None = None,
    ) -> "Comparison":
        """Those of the names; empty for all. repetitions: instead of the file's, but of a workload
        that has fewer. Raises: ConfigError naming what is not there."""
        for what, names, there in (
            ("server", servers, [server.name for server in self.servers]),
            ("workload", workloads, [workload.name for workload in self.workloads]),
        ):
            for name in names:
                if name not in there:
                    raise ConfigError(f"there is no {what} {name!r}; there are {', '.join(there)}")
        kept = [workload for workload in self.workloads if not workloads or workload.name in workloads]
        kept_names = {workload.name for workload in kept}
        chosen = []
        for server in self.servers:
            if servers and server.name not in servers:
                continue
            own = None if server.workloads is None else tuple(name for name in server.workloads if name in kept_names)
            if own != ():
                chosen.append(replace(server, workloads=own))
        if repetitions is not None:
            kept = [
                replace(workload, repetitions=min(repetitions, workload.repetitions or repetitions))
                for workload in kept
            ]
        return replace(
            self,
            servers=tuple(chosen),
            workloads=tuple(kept),
            repetitions=self.repetitions if repetitions is None else repetitions,
        )

    def taking(self, workload: ComparedWorkload) -> tuple[ComparedServer, ...]:
        """Servers that take part in it."""
        return tuple(server for server in self.servers if server.workloads is None or workload.name in server.workloads)

    def repetitions_of(self, workload: ComparedWorkload) -> int:
        return workload.repetitions or self.repetitions

    def turns(self, workload: ComparedWorkload, repetition: int) -> tuple[Turn, ...]:
        """Of one repetition, in their order, which begins one server later each time, and after a round of them runs
        backwards for as long, so that nobody always follows the same other. Empty where nobody takes part."""
        taking = [
            server for server in self.taking(workload) if server.repetitions is None or repetition < server.repetitions
        ]
        if not taking or repetition >= self.repetitions_of(workload):
            return ()
        first = repetition % len(taking)
        order = taking[first:] + taking[:first]
        if repetition // len(taking) % 2:
            order = order[::-1]
        return tuple(
            Turn(workload=workload, repetition=repetition, server=server, place=place)
            for place, server in enumerate(order)
        )

    def all_turns(self) -> Iterator[tuple[Turn, ...]]:
        """The first repetition of each workload, then the second one of each: when time runs out all have as many, and
        what disturbs the machine for a while is in one repetition of each."""
        for repetition in range(max(self.repetitions_of(workload) for workload in self.workloads)):
            for workload in self.workloads:
                if turns := self.turns(workload, repetition):
                    yield turns

    def seed_of(self, workload: ComparedWorkload, repetition: int, part: str = "") -> int:
        """Of prompts and arrivals: the same for all servers, another for each workload and repetition, so that no
        prompt is in any cache. part: for what does not count, such as warm-up."""
        text = f"{self.seed}:{workload.name}:{repetition}:{part}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1
