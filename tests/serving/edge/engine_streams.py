"""Engine clients with fake engines, and streams that remember their events."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from headrace.serving.app.build import EngineOptions, FakeOptions, engine_launch
from headrace.serving.core.events import TokenEvent
from headrace.serving.core.request import (
    Request,
    SamplingParams,
    StopRule,
)
from headrace.serving.edge.engine_client import (
    EngineClient,
    EngineEvent,
)
from headrace.serving.edge.engine_connection import EngineLaunch

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


async def kill_nine(client: EngineClient) -> None:
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
