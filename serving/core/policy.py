"""The decisions that are policy, each a pure function; the scheduler supplies the mechanics.

Version 3. Who is next: the higher class, aging counted; in it the tenant that was served least for its weight; of it
the earlier request. Decode before prefill; no prompt takes a whole step while others want a part, but for a short one
that is the only stream of its tenant. While others wait, two steps in flight are no larger than one with a full chunk.
For pages the last in turn yields; for a slot a tenant or a class that holds more than its share. A request goes to the
lane where it adds the least work.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from headrace.serving.core.config import PreemptionPolicy
from headrace.serving.core.events import PreemptionAction, PreemptionReason
from headrace.serving.core.fair_share import FIRST_STREAM_TOKENS
from headrace.serving.core.request import Priority
from headrace.serving.core.sequence import Sequence, num_pages_for

POLICY_VERSION = 3

MAX_PAGE_PREEMPTIONS = 2
"""After so many preemptions for pages a request is admitted only with its worst case set aside, and so never again
preempted for pages."""
MAX_YIELDS = 2
"""So often a request yields its slot to another tenant or a higher class."""
MAX_PREEMPTIONS = MAX_PAGE_PREEMPTIONS + MAX_YIELDS
"""Of one request by the scheduler's own choice."""
YIELDS = (PreemptionReason.PRIORITY, PreemptionReason.FAIRNESS)

CLASS_SHARE = {Priority.HIGH: 1.0, Priority.NORMAL: 0.75, Priority.LOW: 0.5}
"""Of the slots, that a class and those below it keep while a higher one waits; what is beyond that yields."""
MIN_RESERVE_SLOTS = 4
"""Of all lanes together; with so many, one is kept for a tenant that paused a moment ago, see ``keeps_a_slot``."""


def class_level(priority: Priority, waited_s: float, aging_s: float) -> int:
    """Level of a class among classes: its own, one higher for each aging_s that it was not served; waited_s: since one
    of its requests was started or preempted last, or since the oldest that waits was submitted, if that is later.

    After two aging_s without service every class is on the highest level. There the tenant that was served least goes
    first, and at equal service the earlier request: as those who go before it are served, its turn comes. Within its
    class a tenant's turn comes by the same rule, and within its tenant a request's by arrival: so none starves.
    That it waits long lifts no request above others of its class: it may just be the last of many of its tenant.
    """
    return max(int(Priority.HIGH), priority - int(max(0.0, waited_s) / aging_s))


Turn = tuple[int, float, int]
"""Lowest first; unique by the arrival in it."""


def tenant_turn(head: Sequence) -> tuple[float, int]:
    """Order of tenants within a class; head: the first that waits of the tenant and class."""
    return head.tenant.turn, head.arrival


def running_turn(sequence: Sequence) -> Turn:
    """Order of those who run, for prefill."""
    return sequence.request.priority, sequence.tenant.turn, sequence.arrival


def page_turn(sequence: Sequence) -> tuple[bool, Turn]:
    """The same for pages: the guarded go first, as theirs are set aside."""
    return not sequence.is_guarded, running_turn(sequence)


def arrival_rank(sequence: Sequence) -> int:
    """Order of the running list and of a tenant's queue; unique and constant for life."""
    return sequence.arrival


def pick_page_victim(wanting: Sequence, running: Iterable[Sequence]) -> Sequence | None:
    """Whom to preempt when wanting lacks a page; running: that may be preempted, of its lane. None: it has to wait.

    The last in turn, and only one behind wanting. So the first in turn is preempted for nobody, progresses, and ends.
    """
    last = max(running, key=page_turn, default=None)
    return None if last is None or page_turn(last) <= page_turn(wanting) else last


def pick_fairness_victim(candidate: Sequence, running: Iterable[Sequence], excess: dict[str, float]) -> Sequence | None:
    """Who yields to a candidate whose tenant runs nothing: the latest of the tenant that is furthest above its share.
    excess: what each tenant holds of what is lacking, as a multiple of its share. None where no tenant is above it, or
    only with requests of a higher class, or with such as would be next again before the candidate."""
    over = [
        s
        for s in running
        if s.request.priority >= candidate.request.priority
        and s.tenant is not candidate.tenant
        and excess[s.tenant.name] > 1.0
        and (s.request.priority > candidate.request.priority or _comes_after(s, candidate))
    ]
    return max(over, key=lambda s: (excess[s.tenant.name], s.arrival), default=None)


def _comes_after(running: Sequence, candidate: Sequence) -> bool:
    """Whether it is behind a candidate of its class once it waits again."""
    return (running.tenant.turn_without(running.num_expected), running.arrival) > tenant_turn(candidate)


def pick_class_victim(
    candidate: Sequence, running: Seq[Sequence], priorities: Iterable[Priority], num_slots: int
) -> Sequence | None:
    """Who yields to a candidate, of running (that may be preempted): the last in turn of the lowest class, if that
    class and those below it hold more than their share of the slots. priorities: of all who run."""
    below = [s for s in running if s.request.priority > candidate.request.priority]
    if not below:
        return None
    victim = max(below, key=running_turn)
    lowest = victim.request.priority
    num_held = sum(priority >= lowest for priority in priorities)
    return victim if num_held > max(1.0, CLASS_SHARE[lowest] * num_slots) else None


def keeps_a_slot(
    candidate: Sequence, running: Iterable[Sequence], num_free: int, num_slots: int, awaits_another: bool
) -> bool:
    """Whether the last free slot stays free: another tenant paused within aging_s, and the candidate's runs already.

    Else each of its requests would preempt one, which then takes its slot back. With few slots one is too much to keep.
    And no slot is kept from a class to which one that runs yields: the slot that was yielded would be the one to keep.
    """
    if not awaits_another or num_free > 1 or num_slots < MIN_RESERVE_SLOTS or not candidate.tenant.num_running:
        return False
    return all(s.request.priority <= candidate.request.priority for s in running)


def worst_case_pages(sequence: Sequence, page_size: int) -> int:
    return num_pages_for(sequence.max_kv_tokens, page_size)


def must_guard(candidate: Sequence, running: Iterable[Sequence], *, page_size: int, num_host_free: int | None) -> bool:
    """Whether the candidate may run only with its worst case set aside: it was preempted for pages often enough, or it
    could not be swapped out.

    num_host_free: free host pages where preemption must swap, None where it may recompute. Then all who run unguarded
    can be swapped out at any time, also when each has grown to its worst case, so nobody ever waits for host pages.
    """
    if candidate.num_preempted_for(PreemptionReason.PAGES) >= MAX_PAGE_PREEMPTIONS:
        return True
    if num_host_free is None:
        return False
    unguarded = sum(worst_case_pages(s, page_size) for s in running if not s.is_guarded)
    return unguarded + worst_case_pages(candidate, page_size) > num_host_free


def guard_fits(candidate: Sequence, running: Iterable[Sequence], *, page_size: int, num_usable: int) -> bool:
    """Whether the worst cases of a guarded candidate and of the guarded of its lane fit together. Those always get
    their pages, since all others can be preempted; so they run to their ends."""
    guarded = sum(worst_case_pages(s, page_size) for s in running if s.is_guarded)
    return guarded + worst_case_pages(candidate, page_size) <= num_usable


def pages_to_keep_free(candidate: Sequence, is_guarded: bool, num_running: int) -> int:
    """Pages that must stay available beyond those of the candidate's known tokens: one for each that runs, which may
    need its next page soon. A guarded one need not leave any: it gets its own back. Nor need the first stream of a
    tenant: others would yield them to it in the next step."""
    return 0 if is_guarded or not candidate.tenant.num_running else num_running


def is_newcomer(sequence: Sequence) -> bool:
    """Whether it is the only stream of its tenant and reads a prompt within FIRST_STREAM_TOKENS."""
    num_others = sequence.tenant.num_running - (sequence.slot is not None)
    return not num_others and sequence.num_tokens <= FIRST_STREAM_TOKENS


SWAP_PAGE_MS = 0.5
"""A page to the host or back while no copy was measured: 1 MB at 2 GB/s."""


def preemption_action(
    policy: PreemptionPolicy, *, num_tokens: int, num_pages: int, num_host_free: int, token_ms: float, page_ms: float
) -> PreemptionAction:
    """What becomes of the KV of num_tokens positions in num_pages pages.

    AUTO: the cheaper of computing them again (token_ms each, 0 = not measured: then swap) and of two copies of each
    page (page_ms, 0 = not measured: SWAP_PAGE_MS). Without host pages enough, or with nothing to keep, they are
    computed again.
    """
    if policy is PreemptionPolicy.RECOMPUTE or num_tokens == 0 or num_pages > num_host_free:
        return PreemptionAction.RECOMPUTED
    is_dearer = token_ms > 0 and 2 * num_pages * (page_ms or SWAP_PAGE_MS) > num_tokens * token_ms
    if policy is PreemptionPolicy.AUTO and is_dearer:
        return PreemptionAction.RECOMPUTED
    return PreemptionAction.SWAPPED


PLACEMENT_STREAM_TOKENS = 128
"""What a running stream weighs in prompt tokens: about what it will still generate, a row of a step each."""


def placement_cost(num_uncached: int, running: Seq[Sequence]) -> int:
    """Of a lane, for a request that would have num_uncached tokens to run there; the lowest gets it.

    Prompt tokens that must run before the first token of the request, and streams that share steps with it. So a cached
    prefix draws requests to its lane until others are that much freer, and then gets a copy there.
    """
    num_queued = sum(s.num_to_prefill - s.num_computed for s in running if s.is_prefilling)
    return num_uncached + num_queued + PLACEMENT_STREAM_TOKENS * len(running)


def share_chunks(
    needs: Seq[int], budget_tokens: int, block_tokens: int, max_segments: int, num_newcomers: int = 0
) -> list[int]:
    """Tokens of each prompt's next chunk, for prompts in turn that have needs tokens left; 0 = none in this step.

    A chunk is all that remains, or whole blocks. While others want a part, a prompt that does not end in this step
    leaves a quarter of the budget (at least a block, if there are two) for them; what they leave over goes to the first
    again. The first num_newcomers, see ``is_newcomer``, leave nothing: each leaves its place with its prompt's end.
    """
    left = budget_tokens // block_tokens
    blocks = [-(-need // block_tokens) for need in needs]
    most = max(1, left - max(1, left // 4)) if len(needs) > 1 else left
    given, whole = [0] * len(needs), left
    for limit in (most, whole):
        for i, wanted in enumerate(blocks[:max_segments]):
            more = max(0, min(wanted, whole if wanted <= whole or i < num_newcomers else limit) - given[i])
            more = min(more, left)
            given[i] += more
            left -= more
    return [min(need, n * block_tokens) for need, n in zip(needs, given, strict=True)]


def share_cells(needs: Seq[int], budget_tokens: int, block_tokens: int, max_segments: int) -> list[int]:
    """The same for deterministic mode: the next whole cell of budget_tokens, or what remains of the prompt, or nothing.

    So where a chunk starts and ends depends on its prompt alone.
    """
    left = budget_tokens
    given = []
    for i, need in enumerate(needs):
        cell = min(need, budget_tokens)
        padded = -(-cell // block_tokens) * block_tokens
        fits = i < max_segments and padded <= left
        left -= padded if fits else 0
        given.append(cell if fits else 0)
    return given
