"""Token-level messages between edge and engine, as msgspec tagged structs in length-prefixed msgpack frames.

One frame per step carries the events of all requests. The link is a ``socket.socketpair()``: bounded by the kernel,
and end-of-file the instant that either side dies.
"""

import msgspec

from headrace.serving.core.events import Finished, TokenEvent
from headrace.serving.core.kv_memory import DeviceMemory
from headrace.serving.core.request import CancelReason, Rejection, Request, RequestId


class Submit(msgspec.Struct, tag="submit", frozen=True):
    request: Request


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    request_id: RequestId
    reason: CancelReason


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Refuse new work; finish what runs. The edge ends the process by closing the link."""


class Probe(msgspec.Struct, tag="probe", frozen=True):
    """Ask for a Stats frame now; the answer shows that the loop turns."""

    nonce: int


class Starting(msgspec.Struct, tag="starting", frozen=True):
    """Progress before Ready."""

    what: str
    done: int
    total: int


class ProgramInfo(msgspec.Struct, frozen=True):
    name: str
    seconds: float
    temp_bytes: int
    from_cache: bool


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The engine serves. model_hash: hex SHA-256 root over per-tensor digests.

    device: platform and kind. mesh: devices along each axis, such as "tensor=4". attention: whose kernels run. dtype:
    of weights and products. weights: how the matrices of products lie in memory. kv_dtype: of pages. kv_bytes: of the
    pool, null page included. memory: what the number of pages comes from, on each device; None where it was given.
    """

    model_hash: str
    num_pages: int
    page_size: int
    num_slots: int
    max_context: int
    kv_bytes_per_token: int
    weights_bytes: int
    programs: tuple[ProgramInfo, ...]
    device: str
    mesh: str
    attention: str
    dtype: str
    weights: str
    kv_dtype: str
    kv_bytes: int
    memory: DeviceMemory | None
    warmup_seconds: float


class Stats(msgspec.Struct, tag="stats", frozen=True):
    """Gauges and counters of the engine. Counters only grow while the process lives."""

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    preemptions: int = 0
    compiles_after_ready: int = 0
    device_seconds: float = 0.0
    host_seconds: float = 0.0
    nonce: int | None = None


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The terminal answer to a Submit that was not taken; alone when not even the inbox had room for it."""

    request_id: RequestId
    rejection: Rejection


class Step(msgspec.Struct, tag="step", frozen=True):
    """Everything that one step made known, in order."""

    step_id: int
    tokens: tuple[TokenEvent, ...]
    finished: tuple[Finished, ...]
    refused: tuple[Refused, ...]
    stats: Stats


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The engine is about to end; message holds no prompt text."""

    message: str


ToEngine = Submit | Cancel | Drain | Probe
ToEdge = Starting | Ready | Step | Refused | Stats | Failed

MAX_FRAME_BYTES = 64 << 20
