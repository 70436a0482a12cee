"""Options of ``headrace serve``, resolved and checked before anything is loaded. JAX-free."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from headrace.serving.app.build import EngineOptions
from headrace.serving.app.tenant_flags import LimitOptions
from headrace.serving.core.errors import ConfigError
from headrace.serving.engine.host_messages import HostPlace, parse_address


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where and for whom to serve; what the engine does is in engine.

    port: 0 takes a free one. model_name: what the API calls the model. api_keys: key file; None = no keys.
    allow_origins, allow_hosts: beyond the server's own. unsafe_bind: serve beyond loopback without keys.
    heartbeat_s: between pings on a WebSocket; a client whose pong or TCP acknowledgement is so late is cut off.
    drain_s: how long running requests may go on after SIGTERM. restart_engine: start a dead engine again.
    probes: files or directories of probe records, one of which the server must match. require_probe: not ready without
    a record. probe_interval_s, probe_limit_s: between two runs of the probe, and of one run.
    otlp_endpoint: URL that traces go to; None = none are made.
    limits: what tenants and all requests together may use.

    Raises: ConfigError naming option and remedy.
    """

    model_name: str
    model_path: Path
    engine: EngineOptions
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: Path | None = None
    allow_origins: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    unsafe_bind: bool = False
    heartbeat_s: float = 20.0
    drain_s: float = 30.0
    restart_engine: bool = False
    allow_unknown_fields: bool = False
    probes: tuple[Path, ...] = ()
    require_probe: bool = False
    probe_interval_s: float = 300.0
    probe_limit_s: float = 60.0
    otlp_endpoint: str | None = None
    limits: LimitOptions = LimitOptions()

    def __post_init__(self) -> None:
        if self.restart_engine and self.engine.hosts is not None:
            raise ConfigError(
                "--restart-engine restarts one engine process, and with --hosts all would have to come back; leave it "
                "out, and let whatever starts the hosts start all of them again"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key belong together: give both or neither")
        if not self.is_loopback and self.api_keys is None and not self.unsafe_bind:
            raise ConfigError(
                f"--host {self.host} is reachable from other machines and no --api-keys are set: anyone there could "
                f"use this server. Make a key file with 'headrace key' and pass --api-keys FILE, or say --unsafe-bind"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def scheme(self) -> str:
        return "http" if self.tls_cert is None else "https"


def host_place(num_hosts: int, rank: int | None, coordinator: str | None, join_s: float | None) -> HostPlace | None:
    """From --hosts, --rank, --coordinator and --join-seconds, None where they were not given; None = one host.

    Raises: ConfigError naming option and remedy.
    """
    given = {"--rank": rank, "--coordinator": coordinator, "--join-seconds": join_s}
    if num_hosts == 1:
        extra = [flag for flag, value in given.items() if value is not None]
        if extra:
            raise ConfigError(f"{' and '.join(extra)} belong to several hosts: give --hosts too, or leave them out")
        return None
    if rank is None or coordinator is None:
        missing = "--rank" if rank is None else "--coordinator"
        raise ConfigError(f"--hosts {num_hosts} needs {missing}: the same HOST:PORT on all, ranks from 0")
    if not 0 <= rank < num_hosts:
        raise ConfigError(f"--rank {rank} must be from 0 to {num_hosts - 1}, since --hosts is {num_hosts}")
    try:
        parse_address(coordinator)
    except ValueError as error:
        raise ConfigError(f"--coordinator: {error}") from error
    limits = {} if join_s is None else {"join_s": join_s}
    return HostPlace(num_hosts=num_hosts, rank=rank, coordinator=coordinator, **limits)


def default_compile_cache() -> Path:
    """Where compiled programs are kept between starts."""
    return platformdirs.user_cache_path("headrace") / "compiled"
