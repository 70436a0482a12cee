"""Hypothesis looks for a sequence of commands that breaks pool, cache or scheduler, and shrinks it."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from headrace.serving.core.events import Finished
from headrace.serving.core.request import FinishReason, RejectionReason, Request
from headrace.serving.core.scheduler import Scheduler
from headrace.serving.core.simulator import weak_page_hash
from tests.serving.core.driver import Drive, ids_alone, make_config, make_request


class SchedulerMachine(RuleBasedStateMachine):
    """Plans and results come in any legal order; prompts of two tokens meet in the cache all the time."""

    @initialize(
        num_slots=st.integers(1, 3),
        num_pages=st.integers(4, 9),
        page_size=st.sampled_from([1, 2]),
        steps_in_flight=st.integers(1, 2),
        num_digests=st.sampled_from([1, 3, 256]),
        prefix_cache=st.booleans(),
    )
    def start(
        self,
        num_slots: int,
        num_pages: int,
        page_size: int,
        steps_in_flight: int,
        num_digests: int,
        prefix_cache: bool,
    ) -> None:
        config = make_config(
            num_slots=num_slots,
            num_pages=num_pages,
            page_size=page_size,
            block_tokens=2,
            chunk_tokens=4,
            max_context=16,
            max_steps_in_flight=steps_in_flight,
            max_queued_requests=4,
            prefix_cache=prefix_cache,
        )
        self.drive = Drive(config, Scheduler(config, hash_page=weak_page_hash(num_digests)))
        self.requests: dict[int, Request] = {}
        self.num_submitted = 0

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=15), max_tokens=st.integers(1, 8))
    def submit(self, prompt: list[int], max_tokens: int) -> None:
        request = make_request(self.num_submitted, tuple(prompt), max_tokens, stop_ids=(3, 4, 5))
        self.num_submitted += 1
        rejection = self.drive.scheduler.submit(request, self.drive.now_s)
        if rejection is None:
            self.requests[request.request_id] = request
            self.drive.tokens[request.request_id] = []
        else:
            assert rejection.reason in (
                RejectionReason.CONTEXT_EXCEEDED,
                RejectionReason.NEVER_FITS,
                RejectionReason.QUEUE_FULL,
            )

    @rule(back=st.integers(0, 9))
    def cancel(self, back: int) -> None:
        request_id = self.num_submitted - back
        is_live = request_id in self.requests and request_id not in self.drive.finished
        events = self.drive.cancel(request_id)
        assert sum(isinstance(event, Finished) for event in events) == is_live

    @rule()
    def plan(self) -> None:
        was_busy = not self.drive.scheduler.is_idle
        plan = self.drive.plan()
        if was_busy:
            assert plan is not None or self.drive.in_flight, "work, but nothing runs"

    @precondition(lambda self: self.drive.in_flight)
    @rule()
    def collect(self) -> None:
        self.drive.collect()

    @precondition(lambda self: self.drive.in_flight)
    @rule()
    def fail(self) -> None:
        self.drive.fail()

    def teardown(self) -> None:
        if not hasattr(self, "drive"):
            return
        self.drive.run()
        stats = self.drive.scheduler.stats()
        assert stats.pages_free + stats.pages_cached == stats.pages_total
        assert self.drive.finished.keys() == self.requests.keys()
        for request_id, request in self.requests.items():
            alone, ids = ids_alone(request), self.drive.ids(request_id)
            ran_to_its_end = self.drive.finished[request_id].reason in (FinishReason.STOP, FinishReason.LENGTH)
            assert ids == (alone if ran_to_its_end else alone[: len(ids)])


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
