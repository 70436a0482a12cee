"""Token-level messages between edge and engine, as msgspec tagged structs in length-prefixed msgpack frames.

One frame per step carries the events of all requests. The link is a ``socket.socketpair()``: bounded by the kernel,
and end-of-file the instant that either side dies.
"""

from typing import Any

import msgspec

from headrace.serving.core.events import Finished, Preempted, TokenEvent
from headrace.serving.core.kv_memory import DeviceMemory
from headrace.serving.core.request import CancelReason, Rejection, Request, RequestId
from headrace.serving.engine.ports import ExpertTokens


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


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is served on. platform: cpu, gpu or tpu. device_kind: as its runtime names it. num_devices: of the
    mesh, each with a shard of the model. num_processes: that own them. link: what joins the devices, as far as the
    runtime says; "none" for one device."""

    platform: str
    device_kind: str
    num_devices: int = 1
    num_processes: int = 1
    link: str = "none"

    @property
    def device(self) -> str:
        """Such as "tpu:TPU v6 lite"."""
        return f"{self.platform}:{self.device_kind}"


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The engine serves. model_hash: hex SHA-256 root over per-tensor digests.

    mesh: devices along each axis, such as "tensor=4". hosts: over how many it lies; rank: which of them this is.
    attention: whose kernels run; why: these, for people, with the operations that they leave to the reference.
    activations: in what form products with quantized weights read their inputs: exact, int16 or int8.
    scheme: what each kind of weight is in the files and in memory, for the contract; scheme_lines: for people.
    dtype: of weights and products. weights: how the matrices of products lie in memory. kv_dtype: of pages. kv_bytes:
    of all pools, null pages included. memory: what the number of pages comes from, on each device; None where it was
    given. num_pages, num_slots: of each of num_lanes. family, architecture: of the model, and SHA-256 in hex of its
    configuration. stored_types: how many tensors of each type its files hold.
    numerics: what fixes the bits of a result, by name: versions, device, instruction set, threads, shapes of programs.
    num_swap_pages: host pages of a lane. swap_page_s: what a page takes there and back; 0 without any.
    """

    model_hash: str
    num_pages: int
    page_size: int
    num_slots: int
    max_context: int
    kv_bytes_per_token: int
    weights_bytes: int
    programs: tuple[ProgramInfo, ...]
    topology: Topology
    mesh: str
    attention: str
    dtype: str
    weights: str
    kv_dtype: str
    kv_bytes: int
    memory: DeviceMemory | None
    warmup_seconds: float
    num_lanes: int = 1
    hosts: int = 1
    rank: int = 0
    family: str = ""
    architecture: str = ""
    stored_types: dict[str, int] = {}
    deterministic: bool = False
    num_swap_pages: int = 0
    swap_page_s: float = 0.0
    numerics: dict[str, str] = {}
    activations: str = "exact"
    why: str = ""
    scheme: dict[str, Any] = {}
    scheme_lines: tuple[str, ...] = ()


STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds by which steps are counted; those of vLLM's iteration_tokens_total."""


class Stats(msgspec.Struct, tag="stats", frozen=True):
    """Gauges and counters of the engine. Counters only grow while the process lives.

    preemptions_swapped, preemptions_recomputed: add up to preemptions. swap_pages_*: host pages. deadline_misses:
    accepted requests that their deadline ended. queued_prompt_tokens: of requests that wait. decode_step_ms,
    prefill_token_ms: of a decode step, and what a prompt token adds to a step, as measured lately; 0 while unknown.
    step_tokens: steps by their tokens, up to each of STEP_TOKEN_BOUNDS and above, then the sum of tokens; () = no step.
    journal_bytes: None = there is no journal.
    expert_tokens: by layer and expert, see ``ports.Runner``; None also where this frame leaves them out.
    """

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
    preemptions_swapped: int = 0
    preemptions_recomputed: int = 0
    swap_pages_total: int = 0
    swap_pages_used: int = 0
    deadline_misses: int = 0
    queued_prompt_tokens: int = 0
    decode_step_ms: float = 0.0
    prefill_token_ms: float = 0.0
    step_tokens: tuple[int, ...] = ()
    journal_bytes: int | None = None
    journal_stopped: bool = False
    expert_tokens: ExpertTokens | None = None

    def after(self, earlier: "Stats") -> "Stats":
        """This report, with what it leaves out taken from an earlier one."""
        if self.expert_tokens is not None or earlier.expert_tokens is None:
            return self
        return msgspec.structs.replace(self, expert_tokens=earlier.expert_tokens)


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
    preempted: tuple[Preempted, ...] = ()


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The engine is about to end; message holds no prompt text. is_wanted: it is a rank above 0, and rank 0 ended after
    it was asked to."""

    message: str
    is_wanted: bool = False


ToEngine = Submit | Cancel | Drain | Probe
ToEdge = Starting | Ready | Step | Refused | Stats | Failed

MAX_FRAME_BYTES = 64 << 20
