"""Engine processes that are killed, stopped, hang, fail or lose their edge, and what the client makes of it."""

import asyncio
import signal
import sys
import time

import psutil
import pytest

from headrace.serving.app.build import FakeOptions
from headrace.serving.core.events import Finished
from headrace.serving.core.request import (
    FinishReason,
)
from headrace.serving.edge.engine_client import (
    EngineClient,
    EngineLost,
    EngineStartError,
    EngineUnavailable,
)
from headrace.serving.edge.engine_connection import EngineLaunch
from headrace.serving.engine.fake_runner import expected_tokens
from headrace.serving.engine.lifecycle import EngineState, ProgressLimits
from tests.serving.edge.engine_streams import SLOW, VOCAB, WAIT_S, Stream, kill_nine, launch, running, until


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
