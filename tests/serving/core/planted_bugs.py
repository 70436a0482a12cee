"""Faults that the simulator must find: real functions of the scheduler with one place of their source changed."""

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType

from headrace.serving.core import page_memory, planner, tenancy
from headrace.serving.core.draft import Draft
from headrace.serving.core.page_memory import PageMemory
from headrace.serving.core.planner import Planner
from headrace.serving.core.prefix_cache import Entry, PrefixCache
from headrace.serving.core.scheduler import Scheduler
from headrace.serving.core.sequence import Sequence
from headrace.serving.core.tenancy import Tenancies
from headrace.serving.core.waiting_queue import WaitingQueue

Owner = type | ModuleType
"""A module as owner means the name that the module looks up."""

# (owner, function, original text, text with the bug)
PLANTED: dict[str, tuple[Owner, str, str, str]] = {
    "free pages that a plan in flight names": (PageMemory, "release", "if is_in_flight:", "if False:"),
    "forget to free": (PageMemory, "release", "self._give_back(pages)", "pass"),
    "free one page too few": (PageMemory, "settle", "_give_back(hold.pages)", "_give_back(hold.pages[1:])"),
    "let go of held pages one step early": (PageMemory, "settle", "due = [h for h in self._holds if "
                                            "oldest_in_flight is None or h.last_step < oldest_in_flight]",
                                            "due = list(self._holds)"),
    "full hit computes nothing": (PageMemory, "_hits", "(sequence.num_tokens - 1) //", "sequence.num_tokens //"),
    "hit is not retained": (PageMemory, "admit", "self.pool.retain(entry.page)", "pass"),
    "revived pages are counted as available": (PageMemory, "admit", " - num_revived", ""),
    "page missing at a page edge": (PageMemory, "grow", "sequence.num_computed <", "sequence.num_computed <="),
    "publish before the last KV is there": (PageMemory, "publish", "sequence.num_tokens - 1", "sequence.num_tokens"),
    "digest taken for identity": (Entry, "holds", "self.key.token_ids == key.token_ids", "True"),
    "namespace not compared": (Entry, "holds", "self.key.namespace == key.namespace", "True"),
    "parent not compared": (Entry, "holds", "self.parent is parent", "True"),
    "entry outlives its page": (PrefixCache, "_forget", "del self._by_digest[entry.key.digest]", "pass"),
    "children outlive their parent": (PrefixCache, "_forget", "stack.extend(entry.children.values())", "pass"),
    "page table one short": (Draft, "add_decode", "position + 1)", "position)"),
    "stale token from the host": (Draft, "add_decode", "None if sequence.num_pending else sequence.outputs[-1]",
                                  "sequence.outputs[-1] if sequence.outputs else None"),
    "sample in flight not counted": (Draft, "add_decode", "sequence.num_pending += 1", "pass"),
    "sample before the last chunk": (Draft, "add_prefill", "end == sequence.num_to_prefill", "True"),
    "chunk skips a token": (Draft, "add_prefill", "start = sequence.num_computed",
                            "start = sequence.num_computed + (sequence.num_computed > 0)"),
    "chunk ends off the page grid": (planner, "share_chunks", "min(need, n * block_tokens)",
                                     "min(need, max(1, n * block_tokens - 1))"),
    "random counter reset by preemption": (Draft, "add_prefill", "output_index=len(sequence.outputs)",
                                           "output_index=0"),
    "outputs lost by preemption": (Draft, "add_load", "tuple(sequence.outputs)", "()"),
    "budget without padding": (Draft, "add_prefill", "padded_tokens(length, self._config.block_tokens)", "length"),
    "tokens sent again after preemption": (Tenancies, "preempt", "sequence.preempted_at_s = now_s",
                                           "sequence.outputs.clear()"),
    "preempted and forgotten": (Tenancies, "preempt", "self.waiting.add(sequence)", "pass"),
    "double free by preemption": (Tenancies, "preempt", "self.release(sequence, keeps=swapped)",
                                  "lane.memory.release(sequence, False); self.release(sequence, keeps=swapped)"),
    "the oldest is the victim": (planner, "pick_page_victim", "max(running", "min(running"),
    "preempted without end": (planner, "must_guard", "return True", "return False"),
    "guarded beyond the pool": (planner, "guard_fits", "<= num_usable", "<= 2 * num_usable"),
    "late result is applied": (Scheduler, "apply_result", " and sequence.slot == slot", ""),
    "two rows swapped": (Scheduler, "apply_result", "result.decode + result.prefill",
                         "result.decode[::-1] + result.prefill"),
    "one token too many": (Sequence, "wants_decode", "self.num_planned_outputs <", "self.num_planned_outputs <="),
    "end missed": (Scheduler, "_accept", "num_outputs >= request.stop.max_tokens",
                   "num_outputs > request.stop.max_tokens"),
    "stop id missed": (Scheduler, "_accept", "token_id in request.stop.stop_token_ids", "False"),
    "token from logits that are not finite": (Scheduler, "_accept", "not sampled.is_finite", "False"),
    "finished, but still live": (Scheduler, "_finish", "del self._live[sequence.request.request_id]", "pass"),
    "slot not given back": (Tenancies, "release", "lane.slots.release(sequence.slot)", "pass"),
    "tenancy cleared in part": (Tenancies, "release", "sequence.clear_tenancy()", "sequence.slot = None"),
    "a failed step ends too much": (Scheduler, "fail_plan", "if sequence.slot == slot:", "if True:"),
    "budget of another lane": (Draft, "add_prefill", "self._num_prefill_tokens[lane] +=",
                               "self._num_prefill_tokens[0] +="),
    "program of all lanes together": (Draft, "seal", "max(self._num_rows)", "sum(self._num_rows)"),
    "page of another lane": (tenancy, "make_lanes", "PageMemory(config, hash_page, index)",
                             "PageMemory(config, hash_page)"),
    "slot of another lane": (tenancy, "make_lanes", "first=index * config.num_slots", "first=0"),
    "queue limit off by one": (WaitingQueue, "refuse", "len(self) >= self", "len(self) > self"),
    "drain takes new work": (Scheduler, "_refuse", "if self._is_draining:", "if False:"),
    "no admission while anything runs": (Planner, "_admit", "while tenancies.waiting", "while not tenancies.running "
                                         "and tenancies.next_step < 9 and tenancies.waiting"),
    "hit at the wrong count": (page_memory, "num_pages_for", "-(-num_tokens // page_size)",
                               "num_tokens // page_size"),
}  # fmt: skip


@contextmanager
def planted(bug: str) -> Iterator[None]:
    """While open, the function is the same source with one place changed."""
    owner, name, old, new = PLANTED[bug]
    found = inspect.getattr_static(owner, name)
    function = found.fget if isinstance(found, property) else found
    assert isinstance(function, FunctionType)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{bug}: {old!r} is {source.count(old)} times in {name}; write the bug anew"
    scope = dict(vars(sys.modules[function.__module__]))
    exec(compile(source.replace(old, new), f"<{name} with a bug>", "exec"), scope)
    setattr(owner, name, scope[function.__name__])
    try:
        yield
    finally:
        setattr(owner, name, found)
