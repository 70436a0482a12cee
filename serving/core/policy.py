"""The decisions that are policy, each a pure function; the scheduler supplies the mechanics.

Version 2: first come, first served; decode before prefill; the latest arrival of a lane is preempted first; a request
goes to the lane where it adds the least work.
"""

from collections.abc import Sequence as Seq

from headrace.serving.core.sequence import Sequence, num_pages_for

POLICY_VERSION = 2

MAX_OPTIMISTIC_PREEMPTIONS = 2
"""After so many preemptions a request is admitted again only when nothing can preempt it any more."""


def queue_rank(sequence: Sequence) -> int:
    """Order of the waiting and of the running list, lowest first; unique and constant for life."""
    return sequence.arrival


def pick_victim(running: Seq[Sequence]) -> Sequence:
    """Whom to preempt when pages of a lane run out; running, of that lane, is ascending by queue_rank.

    The last in rank: so the first in rank is never preempted for another one, always progresses, and ends.
    """
    return running[-1]


def pages_to_keep_free(candidate: Sequence, running: Seq[Sequence], page_size: int) -> int:
    """Pages that must stay free beyond those that the candidate's known tokens fill, for it to be admitted to the lane
    of running.

    At first one per running sequence: each may need its next page soon. A candidate that was preempted
    MAX_OPTIMISTIC_PREEMPTIONS times waits until the rest of its own worst case and that of all who run fit together.
    As later arrivals are preempted before it, it then runs to its end: no request is preempted more often than that.
    """
    if candidate.preemptions < MAX_OPTIMISTIC_PREEMPTIONS:
        return len(running)
    own = num_pages_for(candidate.max_kv_tokens, page_size) - num_pages_for(candidate.num_tokens, page_size)
    return own + sum(num_pages_for(s.max_kv_tokens, page_size) - len(s.pages) for s in running)


PLACEMENT_STREAM_TOKENS = 128
"""What a running stream weighs in prompt tokens: about what it will still generate, a row of a step each."""


def placement_cost(num_uncached: int, running: Seq[Sequence]) -> int:
    """Of a lane, for a request that would have num_uncached tokens to run there; the lowest gets it.

    Prompt tokens that must run before the first token of the request, and streams that share steps with it. So a cached
    prefix draws requests to its lane until others are that much freer, and then gets a copy there.
    """
    num_queued = sum(s.num_to_prefill - s.num_computed for s in running if s.is_prefilling)
    return num_uncached + num_queued + PLACEMENT_STREAM_TOKENS * len(running)


def chunk_tokens(num_remaining: int, budget_tokens: int, page_size: int) -> int:
    """Tokens of a sequence's next prefill chunk: all that remain, or whole pages within the budget; 0 = none fits."""
    if num_remaining <= budget_tokens:
        return num_remaining
    return budget_tokens // page_size * page_size
