"""Devices of several hosts: how many of each, and a service that cannot be reached."""

import socket
from types import SimpleNamespace

import jax
import pytest

from headrace.serving.core.errors import ConfigError
from headrace.serving.engine.host_messages import HostsError
from headrace.serving.engine.host_start import free_port
from headrace.serving.runner.distributed import devices_of_hosts, reach


def test_a_service_that_nobody_can_reach_is_named_and_not_left_to_jax() -> None:
    service = f"127.0.0.1:{free_port('127.0.0.1')}"
    with pytest.raises(HostsError, match=r"rank 1 cannot reach JAX's service at .* \(Connection refused\)"):
        reach(service, 1, limit_s=0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        reach(f"127.0.0.1:{server.getsockname()[1]}", 1, limit_s=0.5)


def test_each_host_gives_as_many_devices_in_the_order_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    def device(host: int, number: int) -> SimpleNamespace:
        return SimpleNamespace(process_index=host, id=number, platform="cpu", device_kind="cpu")

    found = [device(1, 4), device(0, 0), device(1, 5), device(0, 1), device(1, 6)]
    monkeypatch.setattr(jax, "devices", lambda platform: found)
    chosen = devices_of_hosts(found[0], 4, 2)  # type: ignore[arg-type]
    assert chosen is not None and [one.id for one in chosen] == [0, 1, 4, 5]
    with pytest.raises(ConfigError, match="its 6 devices are 3 on each of 2 hosts, and host 0 has 2"):
        devices_of_hosts(found[0], 6, 2)  # type: ignore[arg-type]
    assert devices_of_hosts(found[0], 6, 1) is None  # type: ignore[arg-type]
