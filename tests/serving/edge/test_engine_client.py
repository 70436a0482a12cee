"""The engine client against real engine processes without a model: kills, stops, restarts, drains, leaks."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
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
    EngineLost,
    EngineStartError,
    EngineUnavailable,
)
from headrace.serving.edge.engine_connection import EngineLaunch
from headrace.serving.engine.fake_runner import expected_tokens
from headrace.serving.engine.lifecycle import EngineState, ProgressLimits
from headrace.serving.engine.messages import Refused, Starting

VOCAB = 256
WAIT_S = 30.0
SLOW = FakeOptions(step_ms=20)


def launch(fake: FakeOptions, **options: int) -> EngineLaunch:
    values = {"num_slots": 8, "context": 2048, "chunk_tokens": 64, **options}
    return engine_launch(EngineOptions(model="none", fake=fake, **values))


@asynccontextmanager
async def running(client: EngineClient) -> AsyncIterator[EngineClient]:
    await client.start()
    try:
        await asyncio.wait_for(client.wait_ready(), WAIT_S)
        yield client
    finally:
        await asyncio.wait_for(client.stop(), WAIT_S)


class Stream:
    """Submits one request and keeps what its sink got."""

    def __init__(self, client: EngineClient, *, max_tokens: int = 1000, num_prompt: int = 10) -> None:
        self.client = client
        self.events: list[EngineEvent] = []
        self.changed = asyncio.Event()
        self.request = Request(
            request_id=client.next_request_id(),
            prompt_ids=tuple(range(num_prompt)),
            sampling=SamplingParams(temperature=0.0),
            stop=StopRule(max_tokens=max_tokens),
        )
        client.submit(self.request, self.take)

    def take(self, event: EngineEvent) -> None:
        self.events.append(event)
        self.changed.set()

    @property
    def ids(self) -> list[int]:
        return [e.token_id for e in self.events if isinstance(e, TokenEvent)]

    @property
    def terminals(self) -> list[EngineEvent]:
        return [e for e in self.events if not isinstance(e, TokenEvent)]

    async def until(self, is_done: Callable[["Stream"], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not is_done(self):
                self.changed.clear()
                await self.changed.wait()

    async def first_token(self) -> None:
        await self.until(lambda s: s.ids)

    async def end(self) -> EngineEvent:
        await self.until(lambda s: s.terminals)
        (terminal,) = self.terminals
        assert self.events[-1] is terminal
        return terminal


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


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


async def kill_nine(client: EngineClient) -> None:
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)


async def test_kill_nine_during_eight_streams() -> None:
    """Each sink hears of it within 2 s, once; not ready from that moment (issue 7, R14)."""
    client = EngineClient(launch(SLOW))
    states: list[tuple[EngineState, int]] = []
    async with running(client):
        streams = [Stream(client) for _ in range(8)]
        for stream in streams:
            await stream.first_token()
        client.on_state_change(lambda state: states.append((state, sum(bool(s.terminals) for s in streams))))
        started_s = time.monotonic()
        await kill_nine(client)
        for stream in streams:
            assert await stream.end() == EngineLost(stream.request.request_id)
        assert time.monotonic() - started_s < 2.0
        assert states == [(EngineState.DEAD, 0)], "the state changes before any stream hears of it"
        assert client.ready_info is None
        assert client.in_flight == 0
        with pytest.raises(EngineUnavailable, match="dead"):
            Stream(client)
        assert "SIGKILL" in await asyncio.wait_for(client.wait_failed(), WAIT_S)
    assert all(len(s.terminals) == 1 for s in streams)


@pytest.mark.parametrize("with_work", [True, False])
async def test_a_stopped_engine_is_noticed_and_killed(with_work: bool) -> None:
    """SIGSTOP with streams, and on an idle engine (R15), with limits shortened tenfold."""
    client = EngineClient(launch(SLOW), limits=ProgressLimits(silent_s=0.9))
    async with running(client):
        streams = [Stream(client) for _ in range(3 if with_work else 0)]
        for stream in streams:
            await stream.first_token()
        assert client.pid is not None
        process = psutil.Process(client.pid)
        process.suspend()
        reason = await asyncio.wait_for(client.wait_failed(), WAIT_S)
        assert "no progress" in reason
        assert not process.is_running()
        assert [s.terminals for s in streams] == [[EngineLost(s.request.request_id)] for s in streams]


async def test_a_hanging_step_is_noticed() -> None:
    client = EngineClient(launch(FakeOptions(fault="hang:5")), limits=ProgressLimits(silent_s=0.9))
    async with running(client):
        stream = Stream(client)
        assert isinstance(await stream.end(), EngineLost)
        assert "no progress" in await asyncio.wait_for(client.wait_failed(), WAIT_S)


async def test_an_idle_and_a_busy_engine_are_left_alone_by_the_watchdog() -> None:
    client = EngineClient(launch(SLOW), limits=ProgressLimits(silent_s=0.6))
    async with running(client):
        await asyncio.sleep(1.5)  # idle for more than twice the limit: probes alone keep it alive
        stream = Stream(client, max_tokens=70)
        assert isinstance(await stream.end(), Finished)
        assert client.state is EngineState.READY


async def test_restart_serves_again_and_old_streams_stay_lost() -> None:
    client = EngineClient(launch(SLOW), restart=True)
    states: list[EngineState] = []
    async with running(client):
        client.on_state_change(states.append)
        for round_number in (1, 2):
            old = Stream(client)
            await old.first_token()
            pid = client.pid
            await kill_nine(client)
            assert isinstance(await old.end(), EngineLost)
            await asyncio.wait_for(client.wait_ready(), WAIT_S)
            assert client.pid != pid
            new = Stream(client, max_tokens=5)
            assert new.request.request_id > old.request.request_id
            assert isinstance(await new.end(), Finished)
            assert new.ids == [t.token_id for t in expected_tokens(new.request, VOCAB)]
            assert len(old.terminals) == 1
            assert client.num_restarts == round_number
    cycle = [EngineState.DEAD, EngineState.STARTING, EngineState.READY]
    assert states == [*cycle, *cycle, EngineState.DRAINING, EngineState.DEAD]


async def test_stop_during_the_back_off_ends_at_once() -> None:
    client = EngineClient(launch(SLOW), restart=True)
    async with running(client):
        await kill_nine(client)
        await until(lambda: client.state is EngineState.DEAD and client.pid is None)
    assert client.state is EngineState.DEAD


async def test_a_failing_step_fails_its_streams_and_the_engine_goes_on() -> None:
    async with running(EngineClient(launch(FakeOptions(step_ms=5, fault="raise:6")))) as client:
        end = await Stream(client).end()
        assert isinstance(end, Finished)
        assert (end.reason, end.error_code) == (FinishReason.ERROR, "step_failed")
        assert isinstance(await Stream(client, max_tokens=5).end(), Finished)
        assert client.state is EngineState.READY


@pytest.mark.parametrize(
    ("fault", "words"), [("raise_always:4", "steps in a row failed"), ("exit:4", "exit code 3")], ids=str
)
async def test_an_engine_that_gives_up_says_why(fault: str, words: str) -> None:
    async with running(EngineClient(launch(FakeOptions(step_ms=5, fault=fault)))) as client:
        streams = [Stream(client) for _ in range(20)]
        for stream in streams:
            assert isinstance(await stream.end(), Finished | EngineLost)
        assert any(isinstance(s.terminals[0], EngineLost) for s in streams)
        assert words in await asyncio.wait_for(client.wait_failed(), WAIT_S)


async def test_a_start_that_fails_says_why_and_is_not_tried_again() -> None:
    client = EngineClient(launch(FakeOptions(fault="fail_start")), restart=True)
    await client.start()
    with pytest.raises(EngineStartError, match=r"fail_start \(exit code 1\)"):
        await asyncio.wait_for(client.wait_ready(), WAIT_S)
    assert client.state is EngineState.DEAD
    assert client.num_restarts == 0
    await client.stop()


async def test_a_program_that_is_no_engine_is_an_error() -> None:
    client = EngineClient(EngineLaunch(command=(sys.executable, "-c", "print(1)"), first_frame=b""))
    await client.start()
    with pytest.raises(EngineStartError, match="exit code 0"):
        await asyncio.wait_for(client.wait_ready(), WAIT_S)
    await client.stop()


async def test_a_program_that_does_not_exist_is_an_error_and_leaks_nothing() -> None:
    before = psutil.Process().num_fds()
    client = EngineClient(EngineLaunch(command=("/nonexistent/python",), first_frame=b""))
    with pytest.raises(OSError, match="nonexistent"):
        await client.start()
    await client.stop()
    assert psutil.Process().num_fds() == before


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


async def test_stop_with_a_stopped_engine_ends_every_stream() -> None:
    client = EngineClient(launch(SLOW), exit_grace_s=0.2)
    async with running(client):
        stream = Stream(client)
        await stream.first_token()
        assert client.pid is not None
        process = psutil.Process(client.pid)
        process.suspend()
        assert await asyncio.wait_for(client.stop(), WAIT_S) == 1
    assert isinstance(await stream.end(), EngineLost)
    assert not process.is_running()


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
    before = (process.num_fds(), threading.active_count(), len(asyncio.all_tasks()))
    await life()
    assert (process.num_fds(), threading.active_count(), len(asyncio.all_tasks())) == before
    assert process.children() == []


async def test_a_submit_storm_is_bounded_and_each_request_ends_once() -> None:
    """Far more than inbox and queue hold, in one burst, with a slow engine."""
    async with running(EngineClient(launch(SLOW, num_slots=2, max_queued_requests=4))) as client:
        streams = [Stream(client, num_prompt=1000, max_tokens=1) for _ in range(1500)]
        for stream in streams:
            await stream.end()
        kinds = {type(s.terminals[0]) for s in streams}
        assert kinds == {Finished, Refused}


EDGE_SCRIPT = """
import asyncio, sys
from headrace.serving.app.build import EngineOptions, FakeOptions, engine_launch
from headrace.serving.edge.engine_client import EngineClient

async def main():
    client = EngineClient(engine_launch(EngineOptions(model="none", fake=FakeOptions(fault=sys.argv[1] or None))))
    await client.start()
    await client.wait_ready()
    print(client.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def spawn_edge(fault: str) -> tuple[asyncio.subprocess.Process, psutil.Process]:
    edge = await asyncio.create_subprocess_exec(
        sys.executable, "-c", EDGE_SCRIPT, fault, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert edge.stdout is not None
    line = await asyncio.wait_for(edge.stdout.readline(), WAIT_S)
    return edge, psutil.Process(int(line))


async def gone(process: psutil.Process) -> None:
    await until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda s: s.name)
async def test_no_orphan_survives_the_edge(number: signal.Signals) -> None:
    edge, engine = await spawn_edge("")
    edge.send_signal(number)
    await edge.wait()
    await gone(engine)


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
