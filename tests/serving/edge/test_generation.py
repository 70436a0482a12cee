"""One choice: events in, merged deltas and exactly one terminal out."""

import asyncio
import time
from typing import Any

import pytest

from headrace.serving.core.events import Finished, TokenEvent
from headrace.serving.core.plan import TokenLogprobs
from headrace.serving.core.request import (
    CancelReason,
    FinishReason,
    Rejection,
    RejectionReason,
    Request,
    RequestId,
    SamplingParams,
    StopRule,
)
from headrace.serving.core.text import Detokenizer, OutputText, StopMatcher
from headrace.serving.edge.engine_client import EngineLost
from headrace.serving.edge.generation import Delta, Done, Failure, Generation
from headrace.serving.engine.messages import Refused
from tests.serving.edge.fakes import EOS, TIMINGS, ByteTokenizer

ID = RequestId(7)


class Watcher:
    def __init__(self) -> None:
        self.tokens: list[float | None] = []
        self.ends: list[Done | Failure] = []
        self.num_unread = 0

    def on_token(self, generation: Generation, now_s: float, previous_s: float | None) -> None:
        self.tokens.append(previous_s)

    def on_end(self, generation: Generation, outcome: Done | Failure, now_s: float) -> None:
        self.ends.append(outcome)

    def on_unread_at_deadline(self, generation: Generation) -> None:
        self.num_unread += 1


class Bench:
    """A generation with everything around it."""

    def __init__(self, *stops: str, include_stop: bool = False, min_tokens: int = 0, **options: Any) -> None:
        self.cancels: list[CancelReason] = []
        self.watcher = Watcher()
        self.num_tokens = 0
        request = Request(
            request_id=ID,
            prompt_ids=(1, 2, 3),
            sampling=SamplingParams(),
            stop=StopRule(max_tokens=10_000, min_tokens=min_tokens, stop_token_ids=(EOS, 33)),
        )
        self.generation = Generation(
            index=0,
            request=request,
            text=OutputText(
                Detokenizer(ByteTokenizer.token_bytes, ByteTokenizer.special_ids),
                StopMatcher(stops, include_stop, min_tokens=min_tokens),
            ),
            token_bytes=ByteTokenizer.token_bytes,
            cancel_engine=lambda _, reason: self.cancels.append(reason),
            watcher=self.watcher,
            include_stop=include_stop,
            **options,
        )

    def tokens(self, ids: bytes | list[int], logprobs: TokenLogprobs | None = None) -> "Bench":
        for token_id in ids:
            event = TokenEvent(request_id=ID, index=self.num_tokens, token_id=token_id, logprobs=logprobs)
            self.generation.on_event(event)
            self.num_tokens += 1
        return self

    def finish(self, reason: FinishReason = FinishReason.LENGTH, **rest: Any) -> "Bench":
        self.generation.on_event(
            Finished(
                request_id=ID, reason=reason, prompt_tokens=3, completion_tokens=self.num_tokens, cached_tokens=2,
                timings=TIMINGS, **rest,
            )
        )  # fmt: skip
        return self

    def delta(self) -> Delta:
        item = self.generation.take()
        assert isinstance(item, Delta)
        return item

    def done(self) -> Done:
        item = self.generation.take()
        assert isinstance(item, Done)
        assert self.generation.take() is None
        return item


def test_unsent_tokens_are_merged_and_the_terminal_comes_last_and_once() -> None:
    bench = Bench().tokens(b"ab")
    assert (delta := bench.delta()) == Delta(text="ab", num_tokens=2, completion_tokens=2, first=True)
    assert delta.token_ids == ()
    assert bench.generation.take() is None
    bench.tokens(b"c").finish()
    assert bench.delta() == Delta(text="c", num_tokens=1, completion_tokens=3, first=False)
    done = bench.done()
    assert (done.finish_reason, done.stop_reason) == (FinishReason.LENGTH, None)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.cached_tokens) == (3, 3, 2)
    assert bench.watcher.ends == [done]


def test_nothing_follows_the_terminal() -> None:
    bench = Bench().finish().tokens(b"zz").finish()
    bench.generation.on_event(EngineLost(ID))
    bench.done()
    assert len(bench.watcher.ends) == 1
    assert bench.watcher.tokens == []


def test_a_stop_id_counts_but_is_not_shown() -> None:
    for stop_id in (EOS, 33):
        bench = Bench(keep_token_ids=True).tokens([97, stop_id]).finish(FinishReason.STOP, stop_token_id=stop_id)
        delta = bench.delta()
        assert (delta.text, delta.token_ids, delta.num_tokens) == ("a", (97, stop_id), 2)
        done = bench.done()
        assert (done.finish_reason, done.stop_reason) == (FinishReason.STOP, stop_id)
        assert done.usage.completion_tokens == 2


def test_the_text_of_a_stop_id_is_shown_where_stop_text_is_included() -> None:
    bench = Bench(include_stop=True).tokens([97, 33]).finish(FinishReason.STOP, stop_token_id=33)
    assert bench.delta().text == "a!"
    hidden = Bench(include_stop=True).tokens([97, EOS]).finish(FinishReason.STOP, stop_token_id=EOS)
    assert hidden.delta().text == "a"


@pytest.mark.parametrize("step", [1, 2, 100])
def test_a_stop_string_ends_the_usage_and_the_engine(step: int) -> None:
    bench = Bench("DEF", keep_token_ids=True)
    text = ""
    ids: list[int] = []
    for start in range(0, 10, step):
        bench.tokens(b"ABCDEFGHIJ"[start : start + step])
        item = bench.generation.take()
        if isinstance(item, Delta):
            text += item.text
            ids += item.token_ids
    assert bench.cancels == [CancelReason.STOP_STRING]
    bench.finish(FinishReason.CANCELLED, cancel_reason=CancelReason.STOP_STRING)
    assert (text, bytes(ids)) == ("ABC", b"ABCDEF")
    done = bench.done()
    assert (done.finish_reason, done.stop_reason, done.usage.completion_tokens) == (FinishReason.STOP, "DEF", 6)


def test_a_stop_string_wins_over_the_length_in_the_same_step() -> None:
    bench = Bench("b").tokens(b"ab").finish(FinishReason.LENGTH)
    assert bench.delta().text == "a"
    done = bench.done()
    assert (done.finish_reason, done.stop_reason) == (FinishReason.STOP, "b")


def test_held_back_text_is_sent_at_the_end() -> None:
    bench = Bench("DEFG").tokens(b"xDEF")
    assert bench.delta().text == "x"
    bench.finish(FinishReason.CANCELLED, cancel_reason=CancelReason.CLIENT)
    assert bench.delta() == Delta(text="DEF", num_tokens=0, completion_tokens=4, first=False)
    assert bench.done().finish_reason is FinishReason.CANCELLED


def test_a_stop_string_before_min_tokens_does_not_count() -> None:
    bench = Bench("b", min_tokens=4).tokens(b"ababab").finish()
    assert bench.delta().text == "aba"
    assert bench.done().usage.completion_tokens == 4


def test_a_cut_character_is_one_replacement_at_the_end() -> None:
    bench = Bench().tokens("é😀".encode()[:-1])
    assert bench.delta().text == "é"
    bench.finish()
    assert bench.delta().text == "�"
    assert bench.done().usage.completion_tokens == 5


def test_text_held_back_makes_no_empty_deltas_but_ids_are_not_held() -> None:
    emoji = "😀".encode()
    assert Bench().tokens(emoji[:2]).generation.take() is None
    bench = Bench(keep_token_ids=True).tokens(emoji[:2])
    assert bench.delta().token_ids == tuple(emoji[:2])


def test_logprobs_belong_to_tokens() -> None:
    values = TokenLogprobs(chosen=-0.5, rank=1, top=((97, -0.5), (300, -2.0)))
    delta = Bench("abc").tokens(b"ab", values).finish().delta()
    assert [entry.token_bytes for entry in delta.logprobs] == [b"a", b"b"]
    assert delta.num_tokens == 2
    assert [top.token_bytes for top in delta.logprobs[0].top] == [b"a", b""]


def test_failures() -> None:
    lost = Bench().tokens(b"a")
    lost.generation.on_event(EngineLost(ID))
    assert lost.delta().text == "a"
    failure = lost.generation.take()
    assert isinstance(failure, Failure)
    assert (failure.error.status, failure.error.code) == (503, "engine_lost")

    refused = Bench()
    rejection = Rejection(reason=RejectionReason.QUEUE_FULL, message="full", retry_after_ms=5)
    refused.generation.on_event(Refused(ID, rejection))
    failure = refused.generation.take()
    assert isinstance(failure, Failure)
    assert (failure.error.status, failure.error.code, failure.error.retry_after_ms) == (429, "queue_full", 5)

    broken = Bench().finish(FinishReason.ERROR, error_code="not_finite", error_message="logits are not finite")
    failure = broken.generation.take()
    assert isinstance(failure, Failure)
    assert (failure.error.status, failure.error.code) == (500, "not_finite")


@pytest.mark.parametrize(
    ("reason", "code"), [(CancelReason.SHUTDOWN, "shutting_down"), (CancelReason.SLOW_CLIENT, "slow_client")]
)
def test_cancels_by_the_server_are_errors(reason: CancelReason, code: str) -> None:
    failure = Bench().finish(FinishReason.CANCELLED, cancel_reason=reason).generation.take()
    assert isinstance(failure, Failure)
    assert failure.error.code == code


def test_cancel_is_idempotent_and_without_effect_after_the_end() -> None:
    bench = Bench()
    bench.generation.cancel(CancelReason.CLIENT)
    bench.generation.cancel(CancelReason.DISCONNECT)
    assert bench.cancels == [CancelReason.CLIENT]
    ended = Bench().finish()
    ended.generation.cancel(CancelReason.CLIENT)
    assert ended.cancels == []


async def test_next_waits_and_the_listener_is_called() -> None:
    bench = Bench()
    calls: list[int] = []
    bench.generation.set_listener(lambda: calls.append(1))
    waiting = asyncio.create_task(bench.generation.next())
    await asyncio.sleep(0)
    bench.tokens(b"a")
    assert calls == [1]
    assert (await waiting) == Delta(text="a", num_tokens=1, completion_tokens=1, first=True)
    bench.finish()
    assert isinstance(await bench.generation.next(), Done)
    assert calls == [1, 1]
    with pytest.raises(RuntimeError, match="after the terminal"):
        await bench.generation.next()


def test_a_late_listener_hears_at_once() -> None:
    bench = Bench().tokens(b"a")
    calls: list[int] = []
    bench.generation.set_listener(lambda: calls.append(1))
    assert calls == [1]


def test_work_per_token_does_not_grow() -> None:
    """8,000 tokens that nobody takes: the last 1,000 cost what the first did (a wide margin for a busy machine)."""
    bench = Bench("never-there-1", "never-there-2", keep_token_ids=True)
    costs = []
    for _ in range(8):
        started = time.process_time()
        bench.tokens(b"never-there " * 84)
        costs.append(time.process_time() - started)
    assert min(costs[4:]) < 3 * min(costs[:4])
    assert len(bench.finish().delta().text) == 8 * 84 * 12
