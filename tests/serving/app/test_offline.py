"""Batches of requests without a server, on the fake runner: text, stop strings, refusals, interrupts."""

import signal
from collections.abc import Iterator

import pytest

from headrace.serving.app.offline import Completion, RequestError, complete
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.plan import StepPlan
from headrace.serving.core.request import FinishReason, Request, RequestId, SamplingParams, StopRule
from headrace.serving.core.scheduler import Scheduler
from headrace.serving.core.text import Detokenizer, OutputText, StopMatcher
from headrace.serving.engine.engine import StepLoop
from headrace.serving.engine.fake_runner import FakeRunner, expected_tokens
from headrace.serving.engine.lifecycle import SystemClock

VOCAB = 26
LETTERS = [bytes([97 + i]) for i in range(VOCAB)]


class Offline:
    """A step loop whose tokens are letters."""

    def __init__(self, **config: int) -> None:
        self.interrupt_at: int | None = None
        values = {"num_slots": 3, "num_pages": 60, "max_context": 64, **config}
        self.config = SchedulerConfig(
            page_size=4,
            chunk_tokens=16,
            block_tokens=8,
            decode_rows=(values["num_slots"],),
            prefill_tokens=(8, 16),
            **values,
        )
        self.scheduler = Scheduler(self.config)
        runner = FakeRunner(self.config, vocab_size=VOCAB, on_collect=self._on_collect)
        self.loop = StepLoop(self.scheduler, runner, SystemClock())
        self._num_requests = 0

    def _on_collect(self, plan: StepPlan) -> None:
        if plan.step_id == self.interrupt_at:
            signal.raise_signal(signal.SIGINT)

    def request(self, prompt_ids: tuple[int, ...], *, max_tokens: int = 8, stop_ids: tuple[int, ...] = ()) -> Request:
        self._num_requests += 1
        return Request(
            request_id=RequestId(self._num_requests),
            prompt_ids=prompt_ids,
            sampling=SamplingParams(num_logprobs=1),
            stop=StopRule(max_tokens=max_tokens, stop_token_ids=stop_ids),
        )

    def run(self, *requests: Request, stop: tuple[str, ...] = (), include_stop: bool = False) -> list[Completion]:
        work = [(r, OutputText(Detokenizer(LETTERS), StopMatcher(stop, include_stop))) for r in requests]
        return complete(self.loop, work, include_stop=include_stop)


def letters(request: Request) -> str:
    return "".join(chr(97 + t.token_id) for t in expected_tokens(request, VOCAB))


def test_results_come_in_the_order_of_the_prompts() -> None:
    offline = Offline()
    requests = [offline.request(tuple(range(n)), max_tokens=1 + (7 * n) % 10) for n in range(1, 20)]
    for request, completion in zip(requests, offline.run(*requests), strict=True):
        assert completion.text == letters(request)
        assert completion.prompt_token_ids == request.prompt_ids
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.usage.completion_tokens == len(completion.token_ids) == request.stop.max_tokens
        assert completion.logprobs is not None
        assert len(completion.logprobs) == request.stop.max_tokens


def test_more_prompts_than_the_queue_holds_are_fed_in_turn() -> None:
    offline = Offline(max_queued_requests=2)
    requests = [offline.request((n % VOCAB,), max_tokens=3) for n in range(50)]
    assert [c.text for c in offline.run(*requests)] == [letters(r) for r in requests]


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_string_ends_text_tokens_and_usage_together(include_stop: bool) -> None:
    offline = Offline()
    request, other = offline.request((1, 2), max_tokens=20), offline.request((3,), max_tokens=20)
    full = letters(request)
    stop = full[3:5]
    cut = full.index(stop)
    completion, untouched = offline.run(request, other, stop=(stop,), include_stop=include_stop)
    assert completion.text == full[: cut + 2 * include_stop]
    assert completion.finish_reason is FinishReason.STOP
    assert completion.stop_reason == stop
    assert completion.usage.completion_tokens == len(completion.token_ids) == cut + 2
    assert stop in letters(other) or untouched.text == letters(other)
    offline.run(offline.request((5,)))
    offline.scheduler.check()


def test_a_stop_id_counts_as_a_token_and_shows_no_text() -> None:
    offline = Offline()
    plain = letters(offline.request((4, 4)))
    stop_id = ord(plain[2]) - 97
    first = plain.index(plain[2])
    (completion,) = offline.run(offline.request((4, 4), stop_ids=(stop_id,)))
    assert completion.text == plain[:first]
    assert completion.token_ids[-1] == completion.stop_reason == stop_id
    assert completion.usage.completion_tokens == first + 1


def test_a_refused_prompt_names_its_place_and_leaves_nothing_behind() -> None:
    offline = Offline()
    good = offline.request((1,))
    with pytest.raises(RequestError, match="prompt 1: .*context of 64") as caught:
        offline.run(good, offline.request(tuple([1] * 70)))
    assert caught.value.index == 1
    again = offline.request((2,))
    (completion,) = offline.run(again)
    assert completion.text == letters(again)
    assert offline.scheduler.stats().running == 0


@pytest.fixture
def python_handles_interrupts() -> Iterator[None]:
    """As in a program of the user's; an event loop that another test ran may have left a handler of its own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)


@pytest.mark.usefixtures("python_handles_interrupts")
def test_an_interrupt_leaves_an_engine_that_still_works() -> None:
    offline = Offline()
    offline.interrupt_at = 3
    with pytest.raises(KeyboardInterrupt):
        offline.run(*[offline.request((n,)) for n in range(6)])
    assert offline.scheduler.stats().waiting == offline.scheduler.stats().running == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    again = [offline.request((n, n)) for n in range(6)]
    assert [c.text for c in offline.run(*again)] == [letters(r) for r in again]


def test_json_holds_plain_values() -> None:
    offline = Offline()
    (completion,) = offline.run(offline.request((1, 2, 3), max_tokens=2))
    shown = completion.as_json()
    assert shown["prompt_token_ids"] == [1, 2, 3]
    assert shown["finish_reason"] == "length"
    assert shown["usage"]["total_tokens"] == 5
    times = {"queue_ms", "prefill_ms", "decode_ms", "first_token_ms", "preempted_ms"}
    assert set(shown["metrics"]) == times | {"preemptions", "preempted"}
    assert not shown["metrics"]["preempted"]
    assert len(shown["logprobs"]) == 2
    assert "error" not in shown
