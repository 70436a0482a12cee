"""Devices of several hosts as one: JAX's own distributed service, and which of its devices make a mesh."""

import socket
import time
from collections.abc import Sequence

import jax

from headrace.serving.core.errors import ConfigError
from headrace.serving.engine.host_messages import HostsError, parse_address
from headrace.serving.runner.backend import describe_device

CONNECT_S = 60
"""All ranks have just said that they are there."""
REACH_S = 30.0
RETRY_S = 0.2


def connect(service: str, num_hosts: int, rank: int) -> None:
    """Join JAX's distributed service, which rank 0 starts and which listens at that one address; before any other use
    of JAX.

    What it thinks of lost hosts comes too late (100 s) or ends the process without a word, so ours do not wait for it.
    Its SIGTERM handler would take the signal from whoever drains. Raises: HostsError.
    """
    if rank > 0:
        reach(service, rank)
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            service,
            num_hosts,
            rank,
            cluster_detection_method="deactivate",
            initialization_timeout=CONNECT_S,
            coordinator_bind_address=service if rank == 0 else None,
        )
    except RuntimeError as error:
        reason = str(error).partition("\n")[0][:300]
        raise HostsError(f"rank {rank} cannot join JAX's service at {service}: {reason}") from error


def reach(service: str, rank: int, limit_s: float = REACH_S) -> None:
    """Wait until the service listens: JAX ends the process without a word where it never does. Raises: HostsError."""
    end_s = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection(parse_address(service), timeout=max(end_s - time.monotonic(), RETRY_S)).close()
            return
        except OSError as error:
            if time.monotonic() + RETRY_S >= end_s:
                raise HostsError(
                    f"rank {rank} cannot reach JAX's service at {service} ({error.strerror or error}): hosts must "
                    f"reach each other on any port"
                ) from error
            time.sleep(RETRY_S)


def is_here(device: jax.Device) -> bool:
    """Whether a device is one of this host's."""
    return device.process_index == jax.process_index()


def devices_of_hosts(first: jax.Device, num_devices: int, num_hosts: int) -> Sequence[jax.Device] | None:
    """So many devices like the first, as many of each host, hosts one after the other; None = of one host, in JAX's
    order. Raises: ConfigError where a host has too few."""
    if num_hosts == 1:
        return None
    share = num_devices // num_hosts
    chosen: list[jax.Device] = []
    for host in range(num_hosts):
        own = [device for device in jax.devices(first.platform) if device.process_index == host]
        if len(own) < share:
            raise ConfigError(
                f"--mesh: its {num_devices} devices are {share} on each of {num_hosts} hosts, and host {host} has "
                f"{len(own)}: {describe_device(first)}"
            )
        chosen += own[:share]
    return chosen
