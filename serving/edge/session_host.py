"""What a session of the native WebSocket asks of the server around it."""

from typing import TYPE_CHECKING, Protocol

from headrace.serving.edge.errors import ApiError
from headrace.serving.edge.keys import Identity

if TYPE_CHECKING:
    from headrace.serving.edge.session import Session


class SessionHost(Protocol):
    """What a session asks of the server around it; every call returns at once."""

    @property
    def model_names(self) -> tuple[str, ...]: ...
    @property
    def max_context(self) -> int: ...
    @property
    def contract_hashes(self) -> tuple[str | None, str | None]:
        """Of the contract and of its numerics; None while no engine is ready."""

    def contract_fault(self, expected: str) -> ApiError | None:
        """Why an expectation is refused now, if it is."""

    def identify(self, key: str) -> Identity | None:
        """Whose key it is; None for a wrong one."""

    def has_room_for(self, identity: Identity) -> bool:
        """Whether its key may open one more socket."""

    def is_current(self, identity: Identity) -> bool:
        """Whether that key is still accepted."""

    def find_session(self, secret: str) -> "Session | None":
        """The session, connected or lost, with that secret."""
