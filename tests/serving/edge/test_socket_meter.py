"""Writes that clients hold up, as the metrics see them."""

import asyncio

from starlette.types import Message

from headrace.serving.edge import socket_meter
from headrace.serving.edge.metrics import Metrics
from headrace.serving.edge.socket_meter import SocketMeter
from tests.serving.edge.fakes import FakeEngine


def sample(metrics: Metrics, name: str) -> float:
    lines = metrics.exposition().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


async def test_bytes_wait_until_the_client_reads_and_the_time_is_counted() -> None:
    metrics = Metrics("m", FakeEngine())
    meter = SocketMeter(metrics, sockets=lambda: 2, streams=lambda: 3)
    reads = asyncio.Event()

    async def send(message: Message) -> None:
        await reads.wait()

    measured = meter.around(send)
    writes = [asyncio.create_task(measured({"type": "websocket.send", "text": text})) for text in ("héllo", "x")]
    await asyncio.sleep(socket_meter.STALL_S + 0.05)
    assert sample(metrics, "headrace_ws_send_queue_bytes") == 7
    reads.set()
    await asyncio.gather(*writes)
    assert sample(metrics, "headrace_ws_send_queue_bytes") == 0
    assert 2 * socket_meter.STALL_S < sample(metrics, "headrace_ws_send_stall_seconds_total") < 5
    assert sample(metrics, "headrace_ws_connections") == 2
    await measured({"type": "websocket.close", "code": 1000})
    assert sample(metrics, "headrace_ws_send_stall_seconds_total") < 5


async def test_a_lost_connection_leaves_no_bytes_behind() -> None:
    metrics = Metrics("m", FakeEngine())
    meter = SocketMeter(metrics, sockets=lambda: 0, streams=lambda: 0)

    async def send(message: Message) -> None:
        raise OSError

    try:
        await meter.around(send)({"type": "websocket.send", "text": "x"})
    except OSError:
        pass
    else:
        raise AssertionError("the loss is hidden")
    assert sample(metrics, "headrace_ws_send_queue_bytes") == 0
    meter.closed(4999)
    meter.closed(1006)
    text = metrics.exposition().decode()
    assert 'code="other"' in text and 'code="1006"' in text


def test_without_metrics_nothing_is_wrapped() -> None:
    async def send(message: Message) -> None: ...

    assert SocketMeter(None, sockets=lambda: 0, streams=lambda: 0).around(send) is send
