"""Engine processes of two hosts with fake runners: they serve, part, differ and lose each other; and the options."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.serving.app.build import EngineOptions, FakeOptions, check, engine_launch
from headrace.serving.app.hosts import host_facts
from headrace.serving.app.options import ServeOptions, host_place
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.events import Finished
from headrace.serving.edge.engine_client import EngineClient, EngineEvent, EngineLost, EngineStartError
from headrace.serving.engine.host_messages import HostPlace
from headrace.serving.engine.host_start import free_port
from tests.model.tiny import TINY
from tests.serving.engine.bench import request

LIMIT_S = 30.0
PLACE = HostPlace(num_hosts=2, rank=0, coordinator="10.0.0.1:8471")


@asynccontextmanager
async def two(models: tuple[str, str] = ("m", "m"), step_ms: float = 1.0) -> AsyncIterator[list[EngineClient]]:
    """Started, not waited for."""
    place = replace(PLACE, coordinator=f"127.0.0.1:{free_port('127.0.0.1')}", join_s=LIMIT_S)
    fake = FakeOptions(vocab_size=64, step_ms=step_ms)
    clients = [
        EngineClient(engine_launch(EngineOptions(model=model, fake=fake, hosts=replace(place, rank=rank))))
        for rank, model in enumerate(models)
    ]
    try:
        for client in clients:
            await client.start()
        yield clients
    finally:
        for client in clients:
            await client.stop()


async def ready(clients: list[EngineClient]) -> None:
    await asyncio.wait_for(asyncio.gather(*(client.wait_ready() for client in clients)), LIMIT_S)


async def until_end(client: EngineClient, max_tokens: int) -> EngineEvent:
    ended: asyncio.Future[EngineEvent] = asyncio.get_running_loop().create_future()

    def sink(event: EngineEvent) -> None:
        if isinstance(event, Finished | EngineLost):
            ended.set_result(event)

    client.submit(request(client.next_request_id(), max_tokens=max_tokens), sink)
    return await asyncio.wait_for(ended, LIMIT_S)


async def test_two_processes_serve_and_the_second_ends_with_the_first() -> None:
    async with two() as (first, second):
        await ready([first, second])
        shown = [(c.ready_info.hosts, c.ready_info.rank) for c in (first, second) if c.ready_info is not None]
        assert shown == [(2, 0), (2, 1)]
        event = await until_end(first, 20)
        assert isinstance(event, Finished) and event.completion_tokens == 20
        await first.stop()
        await asyncio.wait_for(second.wait_failed(), LIMIT_S)
        assert second.failure is None, "rank 0's end is no failure"


async def test_the_kill_of_one_ends_the_streams_of_the_other_and_is_named() -> None:
    async with two(step_ms=5.0) as (first, second):
        await ready([first, second])
        stream = asyncio.create_task(until_end(first, 1000))
        await asyncio.sleep(0.2)
        assert second.pid is not None
        os.kill(second.pid, signal.SIGKILL)
        assert isinstance(await stream, EngineLost)
        assert "is lost: its connection ended (exit code 1)" in await asyncio.wait_for(first.wait_failed(), LIMIT_S)


async def test_other_weights_end_the_start_of_both_and_are_named() -> None:
    async with two(models=("m", "n")) as clients:
        for client in clients:
            with pytest.raises(
                EngineStartError, match=r"rank 1 \(.*\) does not fit rank 0: tensor fake has other bytes"
            ):
                await asyncio.wait_for(client.wait_ready(), LIMIT_S)


def test_every_option_that_counts_must_agree() -> None:
    options = EngineOptions(model="m", mesh="tensor=2", hosts=PLACE)
    facts = host_facts(options, PLACE, TINY)
    same = replace(options, model="n", compile_cache="c", hosts=replace(PLACE, rank=1, join_s=5.0))
    assert host_facts(same, replace(PLACE, rank=1), TINY) == facts
    for name, value in (
        ("--max-streams", {"num_slots": 3}),
        ("--kv-memory", {"kv_bytes": 5}),
        ("--dtype", {"dtype": "x"}),
    ):
        assert facts[name] != host_facts(replace(options, **value), PLACE, TINY)[name]
    assert (
        facts["the model's num_layers"]
        != host_facts(options, PLACE, replace(TINY, num_layers=3))["the model's num_layers"]
    )
    assert {"headrace", "jax", "jaxlib", "--hosts", "--mesh"} <= facts.keys()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((1, 0, None, None), "--rank belong to several hosts: give --hosts too"),
        ((1, None, "a:1", 5.0), "--coordinator and --join-seconds belong to several hosts"),
        ((2, None, "a:1", None), "--hosts 2 needs --rank"),
        ((2, 0, None, None), "--hosts 2 needs --coordinator"),
        ((2, 2, "a:1", None), "--rank 2 must be from 0 to 1"),
        ((2, -1, "a:1", None), "--rank -1 must be from 0 to 1"),
        ((2, 1, "a", None), "--coordinator: 'a' is not HOST:PORT"),
    ],
    ids=str,
)
def test_options_of_hosts_that_cannot_work_are_named(
    given: tuple[int, int | None, str | None, float | None], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        host_place(*given)
    assert says in str(caught.value)


def test_a_mesh_is_shared_out_evenly() -> None:
    assert host_place(2, 1, "a:1", None) == HostPlace(num_hosts=2, rank=1, coordinator="a:1")
    assert host_place(1, None, None, None) is None
    check(EngineOptions(model="m", mesh="tensor=4", hosts=PLACE), TINY)
    for mesh in (None, "tensor=3"):
        with pytest.raises(ConfigError, match=r"--mesh tensor=.* cannot be shared out evenly over --hosts 2"):
            check(EngineOptions(model="m", mesh=mesh, hosts=PLACE), TINY)


def test_one_engine_of_several_is_not_restarted_alone() -> None:
    with pytest.raises(ConfigError, match="--restart-engine .* with --hosts"):
        ServeOptions(
            model_name="m", model_path=Path("m"), engine=EngineOptions(model="m", hosts=PLACE), restart_engine=True
        )
