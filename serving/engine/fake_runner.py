"""A runner without JAX whose tokens can be computed by hand, and which notices wrong use of KV memory.

The KV of a token at a position is ``(token id, position, history)``; history is the chain

    h = int.from_bytes(cache_namespace, "little");  for each token t:  h = (h * 1_000_003 + t + 1) % (2**61 - 1)

up to and with that token. A row reads all earlier positions of its sequence through its page table and must find
exactly its own history there; a stale, foreign, missing or poisoned page raises ``WrongKV``. Where a request has a
shared prefix, the chain starts from shared_namespace, and cache_namespace is added at the first token behind it. Host
pages hold what was copied to them. The next token is

    (h + seed [+ sum of the output ids, if the request has penalties]) % vocab_size

moved up, cyclically, past ids that are not allowed, and past stop ids while output_index < min_tokens. Of the rest of
the sampling parameters only num_logprobs has an effect. ``expected_tokens`` is the same rule without KV.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.serving.core.buckets import padded_tokens, pick_bucket
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.plan import (
    DecodeRow,
    PrefillSegment,
    SampledToken,
    SlotLoad,
    SlotRef,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from headrace.serving.core.request import Request, RequestId
from headrace.serving.engine.ports import CompiledProgram, ExpertTokens, Progress, Ticket

MODULUS = 2**61 - 1
MULTIPLIER = 1_000_003

KV = tuple[int, int, int]
"""(token id, position, history)."""


class WrongKV(AssertionError):
    """A row read or wrote KV that is not its own, or a plan names what it must not."""


def extend_history(history: int, token_id: int) -> int:
    return (history * MULTIPLIER + token_id + 1) % MODULUS


def seed_at(request: Request, position: int) -> int:
    """What a namespace adds to the history before the token at a position."""
    num_shared = request.shared_prefix_tokens
    if position == 0 and num_shared:
        return int.from_bytes(request.shared_namespace, "little") % MODULUS
    return int.from_bytes(request.cache_namespace, "little") % MODULUS if position == num_shared else 0


def sample(request: Request, history: int, outputs: tuple[int, ...], vocab_size: int) -> SampledToken:
    """The token after a history of which outputs are the generated part."""
    sampling, stop = request.sampling, request.stop
    held_off = stop.stop_token_ids if len(outputs) < stop.min_tokens else ()
    start = history + sampling.seed + (sum(outputs) if sampling.has_penalties else 0)
    for step in range(vocab_size):
        token_id = (start + step) % vocab_size
        if token_id not in held_off and (sampling.allowed_token_ids is None or token_id in sampling.allowed_token_ids):
            break
    else:
        raise ValueError("no token is allowed")
    logprobs = None
    if sampling.num_logprobs is not None:
        top = tuple(((token_id + i) % vocab_size, -0.25 * (i + 1)) for i in range(sampling.num_logprobs))
        logprobs = TokenLogprobs(chosen=-0.25, rank=1, top=top)
    return SampledToken(token_id=token_id, logprobs=logprobs)


def expected_tokens(request: Request, vocab_size: int) -> tuple[SampledToken, ...]:
    """All tokens of a request that runs to its end, by the rule above."""
    history = 0
    for position, token_id in enumerate(request.prompt_ids):
        history = extend_history(history + seed_at(request, position), token_id)
    tokens: list[SampledToken] = []
    while len(tokens) < request.stop.max_tokens:
        token = sample(request, history, tuple(t.token_id for t in tokens), vocab_size)
        tokens.append(token)
        position = len(request.prompt_ids) + len(tokens) - 1
        history = extend_history(history + seed_at(request, position), token.token_id)
        if token.token_id in request.stop.stop_token_ids and len(tokens) >= request.stop.min_tokens:
            break
    return tuple(tokens)


@dataclass(slots=True)
class Tenant:
    """What the device would know of a slot: the request and its tokens so far, with their KV if they were all run."""

    slot: SlotRef
    request: Request
    kv: list[KV] = field(default_factory=list)

    def append(self, token_id: int) -> None:
        history = (self.kv[-1][2] if self.kv else 0) + seed_at(self.request, len(self.kv))
        self.kv.append((token_id, len(self.kv), extend_history(history, token_id)))

    @property
    def outputs(self) -> tuple[int, ...]:
        return tuple(token for token, _, _ in self.kv[len(self.request.prompt_ids) :])


@dataclass(frozen=True, slots=True)
class FakeTicket:
    plan: StepPlan

    @property
    def step_id(self) -> int:
        return self.plan.step_id


class FakeRunner:
    """Implements ``ports.Runner``. A plan is checked at dispatch and runs at collect, as late as a device could.

    non_finite: (request id, output index) whose logits are reported as not finite.
    num_layers, num_experts: with experts, each token that runs is counted for expert (token id + layer) % num_experts.
    on_collect: called with the plan before it runs; may wait or raise, as a device does.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        vocab_size: int = 64,
        non_finite: frozenset[tuple[RequestId, int]] = frozenset(),
        num_layers: int = 1,
        num_experts: int = 0,
        on_collect: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._non_finite = non_finite
        self._on_collect = on_collect
        self._pages: list[list[KV | None]] = [
            [None] * config.page_size for _ in range(config.num_lanes * config.num_pages)
        ]
        self._host_pages: list[list[KV | None] | None] = [None] * (config.num_lanes * config.num_swap_pages)
        self._tenants: dict[int, Tenant] = {}
        self._tickets: deque[FakeTicket] = deque()
        self._expert_tokens = [[0] * num_experts for _ in range(num_layers if num_experts else 0)]

    def warm_up(self, progress: Progress) -> tuple[CompiledProgram, ...]:
        programs = []
        buckets = self._config.buckets
        for i, bucket in enumerate(buckets):
            name = f"{bucket.kind}-{bucket.decode_rows}x{bucket.prefill_tokens}"
            progress(name, i, len(buckets))
            programs.append(CompiledProgram(name=name, seconds=0.0, temp_bytes=0, from_cache=False))
        return tuple(programs)

    def dispatch(self, plan: StepPlan) -> FakeTicket:
        self._check_plan(plan)
        if len(self._tickets) >= self._config.max_steps_in_flight:
            raise WrongKV(f"more than {self._config.max_steps_in_flight} steps in flight")
        ticket = FakeTicket(plan)
        self._tickets.append(ticket)
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        if not self._tickets or self._tickets[0] is not ticket:
            raise WrongKV("collect out of dispatch order")
        plan = self._tickets.popleft().plan
        if self._on_collect is not None:
            self._on_collect(plan)
        for copy in plan.swap_out:
            self._host_pages[copy.host_page] = list(self._pages[copy.page])
        for copy in plan.swap_in:
            kept = self._host_pages[copy.host_page]
            if kept is None:
                raise WrongKV(f"step {plan.step_id}: host page {copy.host_page} holds nothing")
            self._pages[copy.page] = list(kept)
        for load in plan.loads:
            self._load(load)
        # As on the device, all rows of a step read what was there before the step or is their own.
        return StepResult(
            step_id=plan.step_id,
            decode=tuple(self._run_decode(row) for row in plan.decode),
            prefill=tuple(self._run_prefill(segment) for segment in plan.prefill),
        )

    def expert_tokens(self) -> ExpertTokens | None:
        """As of the last collected step, which is what a device would say that has finished no other."""
        return tuple(tuple(counts) for counts in self._expert_tokens) if self._expert_tokens else None

    @property
    def swap_page_seconds(self) -> float | None:
        return None

    def compiles_after_ready(self) -> int:
        return 0

    def poison(self, page: int) -> None:
        """Forget the content of a page that the scheduler says is free: whoever reads it now raises."""
        self._pages[page] = [None] * self._config.page_size

    def poison_host(self, host_page: int) -> None:
        """The same for a host page."""
        self._host_pages[host_page] = None

    def _check_plan(self, plan: StepPlan) -> None:
        config, page = self._config, self._config.page_size
        rows = Counter(config.lane_of_slot(row.slot.slot) for row in plan.decode)
        segments = Counter(config.lane_of_slot(segment.slot.slot) for segment in plan.prefill)
        tokens: Counter[int] = Counter()
        for segment in plan.prefill:
            tokens[config.lane_of_slot(segment.slot.slot)] += padded_tokens(len(segment.token_ids), config.block_tokens)
        if plan.bucket != pick_bucket(config, max(rows.values(), default=0), max(tokens.values(), default=0)):
            raise WrongKV(f"step {plan.step_id} has the wrong program")
        if max(segments.values(), default=0) > config.max_segments:
            raise WrongKV(f"step {plan.step_id} has too many prefill segments")
        self._check_copies(plan)
        if config.deterministic and plan.decode and plan.prefill:
            raise WrongKV(f"step {plan.step_id} mixes decode rows and prefill chunks")
        slots = [row.slot.slot for row in plan.decode] + [s.slot.slot for s in plan.prefill]
        if len(set(slots)) != len(slots):
            raise WrongKV(f"step {plan.step_id} names a slot twice")
        for segment in plan.prefill:
            if not segment.token_ids or segment.start % page or (len(segment.token_ids) % page and not segment.samples):
                raise WrongKV(f"step {plan.step_id}: a segment does not keep to page boundaries")

    def _check_copies(self, plan: StepPlan) -> None:
        """Each copy stays in its lane; no page is written twice, and what the step copies in was there before it."""
        config = self._config
        if not plan.decode and not plan.prefill:
            raise WrongKV(f"step {plan.step_id} has no row")
        for copy in plan.swap_out + plan.swap_in:
            if not copy.page % config.num_pages or not 0 <= copy.host_page < len(self._host_pages):
                raise WrongKV(f"step {plan.step_id}: {copy} names a page that does not exist")
            if config.lane_of_page(copy.page) != copy.host_page // config.num_swap_pages:
                raise WrongKV(f"step {plan.step_id}: {copy} leaves its lane")
        written = [copy.page for copy in plan.swap_in]
        outward = [copy.host_page for copy in plan.swap_out]
        inward = [copy.host_page for copy in plan.swap_in]
        if any(len(set(pages)) != len(pages) for pages in (written, outward, inward)) or set(outward) & set(inward):
            raise WrongKV(f"step {plan.step_id}: two copies meet in a page")

    def _load(self, load: SlotLoad) -> None:
        tenant = Tenant(load.slot, load.request)
        for token_id in load.request.prompt_ids + load.output_ids:
            tenant.append(token_id)
        self._tenants[load.slot.slot] = tenant

    def _run_decode(self, row: DecodeRow) -> SampledToken:
        tenant = self._tenant(row.slot)
        if row.position != len(tenant.kv) - 1:
            raise WrongKV(f"{row.slot}: position {row.position}, but the slot has {len(tenant.kv)} tokens")
        if row.input_token is not None and row.input_token != tenant.kv[-1][0]:
            raise WrongKV(f"{row.slot}: the host's last token differs from the device's")
        return self._run(tenant, row.position, row.position + 1, row.page_ids, row.output_index)

    def _run_prefill(self, segment: PrefillSegment) -> SampledToken | None:
        tenant = self._tenant(segment.slot)
        end = segment.start + len(segment.token_ids)
        if segment.token_ids != tuple(token for token, _, _ in tenant.kv[segment.start : end]):
            raise WrongKV(f"{segment.slot}: tokens {segment.start} to {end} are not the request's")
        if segment.samples != (end == len(tenant.kv)):
            raise WrongKV(f"{segment.slot}: a sample must come from the last known token, and only from it")
        if segment.samples:
            return self._run(tenant, segment.start, end, segment.page_ids, segment.output_index)
        self._write(tenant, segment.start, end, segment.page_ids)
        return None

    def _run(self, tenant: Tenant, start: int, end: int, pages: tuple[int, ...], output_index: int) -> SampledToken:
        """Write positions start … end - 1, and sample after the last."""
        outputs = tenant.outputs
        if output_index != len(outputs):
            raise WrongKV(f"{tenant.slot}: output_index {output_index}, but {len(outputs)} tokens were generated")
        self._write(tenant, start, end, pages)
        sampled = sample(tenant.request, tenant.kv[end - 1][2], outputs, self._vocab_size)
        tenant.append(sampled.token_id)
        if (tenant.request.request_id, output_index) in self._non_finite:
            return SampledToken(token_id=0, is_finite=False)
        return sampled

    def _write(self, tenant: Tenant, start: int, end: int, pages: tuple[int, ...]) -> None:
        """Check what lies before start, then write start … end - 1."""
        size = self._config.page_size
        lane = self._config.lane_of_slot(tenant.slot.slot)
        is_own = all(self._config.lane_of_page(p) == lane and p % self._config.num_pages for p in pages)
        if not is_own or len(set(pages)) != len(pages) or len(pages) != -(-end // size):
            raise WrongKV(f"{tenant.slot}: the page table does not cover {end} positions with pages of its own")
        for i, page in enumerate(pages):
            first = i * size
            known = max(0, min(size, start - first))
            if self._pages[page][:known] != tenant.kv[first : first + known]:
                raise WrongKV(f"{tenant.slot}: page {page} does not hold positions {first} to {first + known}")
        for position in range(start, end):
            self._pages[pages[position // size]][position % size] = tenant.kv[position]
            for layer, counts in enumerate(self._expert_tokens):
                counts[(tenant.kv[position][0] + layer) % len(counts)] += 1

    def _tenant(self, slot: SlotRef) -> Tenant:
        tenant = self._tenants.get(slot.slot)
        if tenant is None or tenant.slot != slot:
            raise WrongKV(f"{slot} was not loaded")
        return tenant
