"""The engine client against real engine processes without a model: streams, cancels, drains, leaks."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from headrace.serving.app.build import EngineOptions, FakeOptions, engine_launch
from headrace.serving.core.events import Finished, TokenEvent
from headrace.serving.core.request import (
    CancelReason,
    FinishReason,
    RejectionReason,
    Request,
    SamplingParams,
    StopRule,
)
from headrace.serving.edge.engine_client import (
    EngineClient,
    EngineEvent,
    EngineStartError,
    EngineUnavailable,
)
from headrace.serving.engine.fake_runner import expected_tokens
from headrace.serving.engine.lifecycle import EngineState
from headrace.serving.engine.messages import Refused, Starting
from tests.serving.edge.engine_streams import SLOW, VOCAB, WAIT_S, Stream, kill_nine, launch, running, until


async def test_tokens_arrive_in_order_and_stats_follow() -> None:
    async with running(EngineClient(launch(FakeOptions(vocab_size=VOCAB)))) as client:
        assert client.ready_info is not None
        assert client.ready_info.num_slots == 8
        streams = [Stream(client, max_tokens=n, num_prompt=7 * n) for n in range(1, 20)]
        assert client.in_flight == 19
        assert client.queue_depth == 11
        for stream in streams:
            end = await stream.end()
            assert isinstance(end, Finished)
            assert end.reason is FinishReason.LENGTH
            assert stream.ids == [t.token_id for t in expected_tokens(stream.request, VOCAB)]
            assert [e.index for e in stream.events if isinstance(e, TokenEvent)] == list(range(len(stream.ids)))
        await until(lambda: client.stats.running == 0)
        assert client.in_flight == client.queue_depth == 0
        assert client.stats.generation_tokens == sum(range(1, 20))


async def test_ids_are_never_reused() -> None:
    client = EngineClient(launch(SLOW))
    assert len({client.next_request_id() for _ in range(1000)}) == 1000


async def test_the_client_loads_no_jax() -> None:
    """In a process of its own: another test of this session may have loaded it."""
    script = (
        "import sys\n"
        "import headrace.serving.edge.engine_client, headrace.serving.app.build, headrace.serving.app.engine_process\n"
        "bad = {'jax', 'jaxlib', 'flax'} & set(sys.modules)\n"
        "raise SystemExit(str(bad) if bad else 0)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=WAIT_S).returncode == 0


async def test_a_cancel_ends_its_stream_alone_and_repeats_are_harmless() -> None:
    async with running(EngineClient(launch(SLOW))) as client:
        victim, other = Stream(client), Stream(client, max_tokens=12)
        await victim.first_token()
        for _ in range(3):
            client.cancel(victim.request.request_id, CancelReason.CLIENT)
        end = await victim.end()
        assert isinstance(end, Finished)
        assert end.cancel_reason is CancelReason.CLIENT
        client.cancel(victim.request.request_id, CancelReason.CLIENT)
        client.cancel(client.next_request_id(), CancelReason.CLIENT)
        other_end = await other.end()
        assert isinstance(other_end, Finished)
        assert other_end.reason is FinishReason.LENGTH
        assert len(victim.terminals) == 1


async def test_a_queued_request_is_cancelled_without_touching_the_running_one() -> None:
    """O24: one slot, A runs, B waits."""
    async with running(EngineClient(launch(SLOW, num_slots=1))) as client:
        a = Stream(client, max_tokens=15)
        await a.first_token()
        b = Stream(client)
        client.cancel(b.request.request_id, CancelReason.DISCONNECT)
        end = await b.end()
        assert isinstance(end, Finished)
        assert (end.completion_tokens, end.cancel_reason) == (0, CancelReason.DISCONNECT)
        assert not a.terminals
        assert isinstance(await a.end(), Finished)
        assert a.ids == [t.token_id for t in expected_tokens(a.request, VOCAB)]


async def test_what_does_not_fit_is_refused_through_the_sink() -> None:
    """O23: it can never fit; O28 and queue limits travel the same way."""
    async with running(EngineClient(launch(SLOW, num_slots=1, max_queued_requests=2))) as client:
        too_long = Stream(client, num_prompt=2048)
        end = await too_long.end()
        assert isinstance(end, Refused)
        assert end.rejection.reason is RejectionReason.CONTEXT_EXCEEDED
        streams = [Stream(client) for _ in range(8)]
        await until(lambda: any(s.terminals for s in streams))
        refused = [s.terminals[0] for s in streams if s.terminals]
        assert all(isinstance(r, Refused) and r.rejection.reason is RejectionReason.QUEUE_FULL for r in refused)


async def test_a_sink_that_raises_harms_nobody_else() -> None:
    async with running(EngineClient(launch(FakeOptions()))) as client:

        def bad_sink(event: EngineEvent) -> None:
            raise ValueError("broken stream")

        request = Request(
            request_id=client.next_request_id(),
            prompt_ids=(1,),
            sampling=SamplingParams(),
            stop=StopRule(max_tokens=3),
        )
        client.submit(request, bad_sink)
        assert isinstance(await Stream(client, max_tokens=5).end(), Finished)
        assert client.state is EngineState.READY


async def test_progress_is_reported_before_ready() -> None:
    client = EngineClient(launch(SLOW))
    seen: list[Starting] = []
    client.on_progress(seen.append)
    with pytest.raises(EngineUnavailable):
        Stream(client)
    async with running(client):
        assert client.ready_info is not None
        assert len(seen) == len(client.ready_info.programs)


async def test_drain_lets_streams_finish_and_refuses_new_ones() -> None:
    """O28, R28."""
    async with running(EngineClient(launch(SLOW))) as client:
        streams = [Stream(client, max_tokens=20) for _ in range(8)]
        for stream in streams:
            await stream.first_token()
        draining = asyncio.create_task(client.drain(WAIT_S))
        await asyncio.sleep(0)
        assert client.state is EngineState.DRAINING
        with pytest.raises(EngineUnavailable, match="draining"):
            Stream(client)
        assert await draining == 0
        for stream in streams:
            end = await stream.end()
            assert isinstance(end, Finished)
            assert end.reason is FinishReason.LENGTH


async def test_a_drain_limit_cuts_with_a_typed_end() -> None:
    async with running(EngineClient(launch(SLOW))) as client:
        streams = [Stream(client) for _ in range(4)]
        await streams[0].first_token()
        assert await client.drain(0.1) == 4
        for stream in streams:
            (end,) = stream.terminals
            assert isinstance(end, Finished)
            assert end.cancel_reason is CancelReason.SHUTDOWN


async def test_stop_while_the_engine_starts() -> None:
    client = EngineClient(launch(SLOW))
    await client.start()
    assert client.pid is not None
    process = psutil.Process(client.pid)
    await asyncio.wait_for(client.stop(), WAIT_S)
    assert not process.is_running()
    with pytest.raises(EngineStartError, match="stopped"):
        await client.wait_ready()


async def test_nothing_is_left_behind() -> None:
    """Descriptors, threads, tasks and children are what they were."""

    async def life() -> None:
        client = EngineClient(launch(SLOW), restart=True)
        async with running(client):
            stream = Stream(client)
            await stream.first_token()
            await kill_nine(client)
            await stream.end()
            await asyncio.wait_for(client.wait_ready(), WAIT_S)
            await Stream(client, max_tokens=2).end()

    await life()
    process = psutil.Process()
    before = (process.num_fds(), threading.active_count(), len(asyncio.all_tasks()), process.children())
    await life()
    assert (process.num_fds(), threading.active_count(), len(asyncio.all_tasks()), process.children()) == before


async def test_a_thousand_requests_with_random_cancels_balance() -> None:
    """Every request ends once, without a gap; counters equal the sums over the ends; every page comes back (R33)."""
    rng = random.Random(5)
    async with running(EngineClient(launch(FakeOptions(vocab_size=VOCAB), pages=300))) as client:
        streams: list[Stream] = []
        for _ in range(1000):
            stream = Stream(client, max_tokens=rng.randint(1, 40), num_prompt=rng.randint(1, 200))
            streams.append(stream)
            while client.in_flight >= 64:
                await asyncio.sleep(0)
                if rng.random() < 0.02:
                    client.cancel(rng.choice(streams).request.request_id, CancelReason.DISCONNECT)
        ends = [await stream.end() for stream in streams]
        await until(lambda: client.stats.running == 0)
        finished = [end for end in ends if isinstance(end, Finished)]
        assert len(finished) == len(ends)
        for stream, end in zip(streams, finished, strict=True):
            assert end.completion_tokens == len(stream.ids)
            assert stream.ids == [t.token_id for t in expected_tokens(stream.request, VOCAB)][: len(stream.ids)]
        assert {end.reason for end in finished} == {FinishReason.LENGTH, FinishReason.CANCELLED}
        stats = client.stats
        assert stats.generation_tokens == sum(end.completion_tokens for end in finished)
        assert stats.prompt_tokens == sum(end.prompt_tokens for end in finished)
        assert stats.pages_free + stats.pages_cached == stats.pages_total


async def test_a_submit_storm_is_bounded_and_each_request_ends_once() -> None:
    """Far more than inbox and queue hold, in one burst, with a slow engine."""
    async with running(EngineClient(launch(SLOW, num_slots=2, max_queued_requests=4))) as client:
        streams = [Stream(client, num_prompt=1000, max_tokens=1) for _ in range(1500)]
        for stream in streams:
            await stream.end()
        kinds = {type(s.terminals[0]) for s in streams}
        assert kinds == {Finished, Refused}


async def test_the_terminal_s_signals_do_not_reach_the_engine() -> None:
    """Ctrl-C goes to the edge's process group; a service manager sends SIGTERM to every process of the service."""
    async with running(EngineClient(launch(SLOW))) as client:
        assert client.pid is not None
        assert os.getpgid(client.pid) != os.getpgid(0)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(client.pid, number)
        assert isinstance(await Stream(client, max_tokens=5).end(), Finished)


def test_no_option_shows_in_the_process_list(tmp_path: Path) -> None:
    secret_path = tmp_path / "model-of-a-customer.gguf"
    order = engine_launch(EngineOptions(model=str(secret_path)))
    assert not any("customer" in part for part in order.command)
    assert b"customer" in order.first_frame
