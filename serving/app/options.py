"""Options of ``headrace serve``, resolved and checked before anything is loaded. JAX-free."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from headrace.serving.app.build import EngineOptions
from headrace.serving.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where and for whom to serve; what the engine does is in engine.

    port: 0 takes a free one. model_name: what the API calls the model. api_keys: key file; None = no keys.
    allow_origins, allow_hosts: beyond the server's own. unsafe_bind: serve beyond loopback without keys.
    heartbeat_s: between pings on a WebSocket; a client whose pong or TCP acknowledgement is so late is cut off.
    drain_s: how long running requests may go on after SIGTERM. restart_engine: start a dead engine again.

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

    def __post_init__(self) -> None:
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


def default_compile_cache() -> Path:
    """Where compiled programs are kept between starts."""
    return platformdirs.user_cache_path("headrace") / "compiled"
