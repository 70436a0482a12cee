"""The step loop with the fake runner, a clock that only the steps move, and an outlet that plays the edge."""

from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.events import Finished, TokenEvent
from headrace.serving.core.plan import StepPlan, StepResult
from headrace.serving.core.request import (
    Request,
    RequestId,
    SamplingParams,
    StopRule,
)
from headrace.serving.core.scheduler import Scheduler
from headrace.serving.engine.engine import Engine, StepLoop
from headrace.serving.engine.fake_runner import FakeRunner, expected_tokens
from headrace.serving.engine.inbox import Inbox
from headrace.serving.engine.journaled import JournaledRunner, JournaledScheduler, Records, header
from headrace.serving.engine.messages import Refused, Stats, Step, ToEdge
from headrace.serving.engine.ports import CompiledProgram, ExpertTokens, Progress, Runner, Ticket

VOCAB, NUM_EXPERTS = 64, 8
HOST_S, DEVICE_S = 0.25, 2.0


class StepClock:
    """Stands still but for what a test adds."""

    def __init__(self) -> None:
        self.now = 100.0

    def now_s(self) -> float:
        return self.now


class TracingRunner:
    """The fake runner; writes down the order of calls, moves the clock, and fails on demand."""

    def __init__(self, config: SchedulerConfig, clock: StepClock) -> None:
        self._inner = FakeRunner(config, vocab_size=VOCAB, num_layers=2, num_experts=NUM_EXPERTS)
        self._clock = clock
        self.calls: list[str] = []
        self.step_s = DEVICE_S
        self.fail_dispatch: Callable[[StepPlan], Exception | None] = lambda plan: None
        self.fail_experts: Exception | None = None
        self.fail_collect: Callable[[int], Exception | None] = lambda step_id: None

    def warm_up(self, progress: Progress) -> tuple[CompiledProgram, ...]:
        return self._inner.warm_up(progress)

    def dispatch(self, plan: StepPlan) -> Ticket:
        self._clock.now += HOST_S
        self.calls.append(f"d{plan.step_id}")
        error = self.fail_dispatch(plan)
        if error is not None:
            raise error
        return self._inner.dispatch(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        self._clock.now += self.step_s
        self.calls.append(f"c{ticket.step_id}")
        result = self._inner.collect(ticket)
        error = self.fail_collect(ticket.step_id)
        if error is not None:
            raise error
        return result

    def expert_tokens(self) -> ExpertTokens | None:
        error = self.fail_experts
        if error is not None:
            raise error
        return self._inner.expert_tokens()

    @property
    def swap_page_seconds(self) -> float | None:
        return None

    def compiles_after_ready(self) -> int:
        return self._inner.compiles_after_ready()


@dataclass
class FakeEdge:
    """Takes the engine's messages; script runs after each, and may put commands into the inbox."""

    inbox: Inbox
    script: Callable[["FakeEdge"], None]
    messages: list[ToEdge] = field(default_factory=list)

    def send(self, message: ToEdge) -> None:
        self.messages.append(message)
        self.script(self)

    @property
    def steps(self) -> list[Step]:
        return [m for m in self.messages if isinstance(m, Step)]

    @property
    def tokens(self) -> list[TokenEvent]:
        return [t for step in self.steps for t in step.tokens]

    @property
    def finished(self) -> list[Finished]:
        return [f for step in self.steps for f in step.finished]

    @property
    def refused(self) -> list[Refused]:
        return [r for step in self.steps for r in step.refused]

    def ids(self, number: int) -> list[int]:
        return [t.token_id for t in self.tokens if t.request_id == number]


def config_of(**config: int) -> SchedulerConfig:
    values = {"num_slots": 4, "num_pages": 65, "max_context": 128, **config}
    return SchedulerConfig(
        page_size=4,
        chunk_tokens=16,
        block_tokens=8,
        decode_rows=(values["num_slots"],),
        prefill_tokens=(8, 16),
        **values,
    )


class Bench:
    """Everything joined; ``run`` lets the engine run until the edge closes."""

    def __init__(self, records: Records | None = None, **config: int) -> None:
        """records: where a journal goes; None = none."""
        self.config = config_of(**config)
        self.clock = StepClock()
        self.runner = TracingRunner(self.config, self.clock)
        self.scheduler = Scheduler(self.config)
        runner: Runner = self.runner
        if records is not None:
            records.write(header(self.config, now_s=self.clock.now, model_hash="fake"))
            runner = timed = JournaledRunner(self.runner, self.clock)
            self.scheduler = JournaledScheduler(self.config, records, timed, self.clock)
        self.loop = StepLoop(self.scheduler, runner, self.clock, max_steps_in_flight=self.config.max_steps_in_flight)
        self.inbox = Inbox()

    def run(self, script: Callable[[FakeEdge], None]) -> FakeEdge:
        edge = FakeEdge(self.inbox, script)
        Engine(self.loop, self.clock, self.inbox, edge).run()
        return edge


def request(number: int, *, num_prompt: int = 6, max_tokens: int = 5) -> Request:
    return Request(
        request_id=RequestId(number),
        prompt_ids=tuple((number * 7 + i) % VOCAB for i in range(num_prompt)),
        sampling=SamplingParams(temperature=0.0),
        stop=StopRule(max_tokens=max_tokens),
    )


def expected_ids(r: Request) -> list[int]:
    return [t.token_id for t in expected_tokens(r, VOCAB)]


def close_when_idle(edge: FakeEdge) -> None:
    """A Stats frame comes when the engine is idle; others answer a probe or tell the experts' load."""
    last = edge.messages[-1]
    if isinstance(last, Stats) and last.nonce is None and last.running == last.waiting == 0:
        edge.inbox.close()
