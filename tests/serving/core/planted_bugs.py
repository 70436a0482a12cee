"""Faults that the simulator must find: real functions of the scheduler with one place of their source changed."""

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType

from headrace.serving.core import page_memory, planner, tenancy, waiting_queue
from headrace.serving.core.draft import Draft
from headrace.serving.core.fair_share import FairShare, Tenant
from headrace.serving.core.page_memory import PageMemory
from headrace.serving.core.page_pool import PagePool
from headrace.serving.core.planner import Planner
from headrace.serving.core.prefix_cache import Entry, PrefixCache
from headrace.serving.core.scheduler import Scheduler
from headrace.serving.core.sequence import Sequence
from headrace.serving.core.simulated_edge import SendBuffer
from headrace.serving.core.swap_space import SwapSpace
from headrace.serving.core.tenancy import Tenancies
from headrace.serving.core.waiting_queue import WaitingQueue

Owner = type | ModuleType
"""A module as owner means the name that the module looks up."""

RELEASES = "lane.memory.release(sequence, self._is_in_flight(sequence.last_step))"

# (owner, function, original text, text with the bug)
PLANTED: dict[str, tuple[Owner, str, str, str]] = {
    # Ends and releases
    "not taken from the queue by a cancel": (Tenancies, "release", "self.waiting.remove(sequence)", "pass"),
    "forget to free on cancel in prefill": (Tenancies, "release", RELEASES, "sequence.is_prefilling or " + RELEASES),
    "forget to free in the finishing step": (
        Tenancies, "release", RELEASES,
        "sequence.num_planned_outputs >= sequence.request.stop.max_tokens or " + RELEASES,
    ),
    "host pages leak on cancel": (Tenancies, "release", "self.drop_swapped(sequence)", "sequence.swapped = None"),
    "forget to free": (PageMemory, "release", "self._give_back(pages)", "pass"),
    "free pages that a plan in flight names": (PageMemory, "release", "if is_in_flight:", "if False:"),
    "free one page too few": (PageMemory, "settle", "_give_back(hold.pages)", "_give_back(hold.pages[1:])"),
    "let go of held pages one step early": (
        PageMemory, "settle", "due = [h for h in self._holds if oldest_in_flight is None or h.last_step < "
        "oldest_in_flight]", "due = list(self._holds)",
    ),
    "slot not given back": (Tenancies, "release", "lane.slots.release(sequence.slot)", "pass"),
    "tenancy cleared in part": (Tenancies, "release", "sequence.clear_tenancy()", "sequence.slot = None"),
    "finished, but still live": (Scheduler, "_finish", "del self._live[sequence.request.request_id]", "pass"),
    "terminal event twice": (Scheduler, "_told", "return told + events",
                             "return told + events + [e for e in events if isinstance(e, Finished)]"),
    "end missed": (Scheduler, "_accept", "num_outputs >= request.stop.max_tokens",
                   "num_outputs > request.stop.max_tokens"),
    "stop id missed": (Scheduler, "_accept", "token_id in request.stop.stop_token_ids", "False"),
    "one token too many": (Sequence, "wants_decode", "self.num_planned_outputs <", "self.num_planned_outputs <="),
    # Results
    "late result is applied": (Scheduler, "apply_result", " and sequence.slot == slot", ""),
    "two rows swapped": (Scheduler, "apply_result", "result.decode + result.prefill",
                         "result.decode[::-1] + result.prefill"),
    "a failing row ends all rows": (
        Scheduler, "apply_result", "self._accept(sequence, sampled, now_s, events)",
        "self._accept(sequence, next((r for r in result.decode + result.prefill if r and not r.is_finite), sampled), "
        "now_s, events)",
    ),
    "token from logits that are not finite": (Scheduler, "_accept", "not sampled.is_finite", "False"),
    "a failed step ends too much": (Scheduler, "fail_plan", "if sequence.slot == slot:", "if True:"),
    "last event dropped by a slow reader's buffer": (SendBuffer, "take", "tuple(self.unsent)",
                                                    "tuple(self.unsent[:4])"),
    # Pages and the prefix cache
    "revived pages are counted as available": (PageMemory, "admit", " - num_revived", ""),
    "hit is not retained": (PageMemory, "admit", "self.pool.retain(entry.page)", "pass"),
    "full hit computes nothing": (PageMemory, "_hits", "(sequence.num_tokens - 1) //", "sequence.num_tokens //"),
    "page missing at a page edge": (PageMemory, "grow", "sequence.num_computed <", "sequence.num_computed <="),
    "publish before the last KV is there": (PageMemory, "publish", "num_tokens = sequence.num_tokens - 1",
                                            "num_tokens = sequence.num_tokens"),
    "hit at the wrong count": (page_memory, "num_pages_for", "-(-num_tokens // page_size)", "num_tokens // page_size"),
    "shared prefix leaks into the private part": (PageMemory, "_extend_keys", "if i < num_shared", "if num_shared"),
    "hash without the namespace": (PrefixCache, "next_key", "chained(keys[-1] if keys else None, namespace)",
                                   'chained(keys[-1] if keys else None, b"")'),
    "namespace not compared": (Entry, "holds", "self.key.namespace == key.namespace", "True"),
    "digest taken for identity": (Entry, "holds", "self.key.token_ids == key.token_ids", "True"),
    "parent not compared": (Entry, "holds", "self.parent is parent", "True"),
    "entry outlives its page": (PrefixCache, "_forget", "del self._by_digest[entry.key.digest]", "pass"),
    "children outlive their parent": (PrefixCache, "_forget", "stack.extend(entry.children.values())", "pass"),
    "evicted page stays out of the pool": (PagePool, "unpublish", "self._free.append(page)", "pass"),
    # Plans
    "page table one short": (Draft, "add_decode", "position + 1)", "position)"),
    "stale token from the host": (Draft, "add_decode", "None if sequence.num_pending else sequence.outputs[-1]",
                                  "sequence.outputs[-1] if sequence.outputs else None"),
    "sample in flight not counted": (Draft, "add_decode", "sequence.num_pending += 1", "pass"),
    "sample before the last chunk": (Draft, "add_prefill", "end == sequence.num_to_prefill", "True"),
    "chunk start off by one": (Draft, "add_prefill", "start = sequence.num_computed",
                               "start = sequence.num_computed + (sequence.num_computed > 0)"),
    "budget without padding": (Draft, "add_prefill", "padded_tokens(length, self._config.block_tokens)", "length"),
    "tokens of another lane": (Draft, "add_prefill", "self._num_prefill_tokens[lane] +=",
                               "self._num_prefill_tokens[0] +="),
    "program of all lanes together": (Draft, "seal", "max(self._num_rows)", "sum(self._num_rows)"),
    "page of another lane": (tenancy, "make_lanes", "PageMemory(config, hash_page, index)",
                             "PageMemory(config, hash_page)"),
    "slot of another lane": (tenancy, "make_lanes", "first=index * config.num_slots", "first=0"),
    "more prompts than a step has segments for": (planner, "share_chunks", "blocks[:max_segments]", "blocks"),
    "deterministic grid broken": (planner, "share_cells", "cell = min(need, budget_tokens)",
                                  "cell = min(need, max(block_tokens, budget_tokens // block_tokens // 2 * "
                                  "block_tokens))"),
    "deterministic step of both kinds": (Planner, "_kinds", "not self._config.deterministic", "True"),
    "no admission while anything runs": (Planner, "_admit", "while tenancies.waiting:",
                                         "while tenancies.waiting and not tenancies.running and tenancies.next_step < "
                                         "9:"),
    # Preemption and swap
    "double free by preemption": (Tenancies, "preempt", "self.release(sequence, keeps=swapped)",
                                  "lane.memory.release(sequence, False); self.release(sequence, keeps=swapped)"),
    "preempted and forgotten": (Tenancies, "preempt", "self.waiting.add(sequence)", "pass"),
    "tokens sent again after preemption": (Tenancies, "preempt", "sequence.preempted_at_s = now_s",
                                           "sequence.preempted_at_s = now_s; sequence.outputs.clear()"),
    "random counter reset by preemption": (Draft, "add_prefill", "output_index=len(sequence.outputs)",
                                           "output_index=0"),
    "outputs lost by preemption": (Draft, "add_load", "tuple(sequence.outputs)", "()"),
    "preempted without end": (planner, "must_guard", ">= MAX_PAGE_PREEMPTIONS", ">= 1_000"),
    "yields without end": (Planner, "_pick_yielding", "s.num_preempted_for(*YIELDS) < MAX_YIELDS and ", ""),
    "the first in turn is the victim": (planner, "pick_page_victim", "max(running", "min(running"),
    "preemption is not told": (Tenancies, "preempt", "self.events.append(", "(lambda event: None)("),
    "preemptions counted twice": (Tenancies, "preempt", "self.num_preempted[action] += 1",
                                  "self.num_preempted[action] += 2"),
    "swapped page reused before the copy": (Tenancies, "settle", "oldest = self.next_step", "pass"),
    "leaving page taken while a neighbour reads it": (PageMemory, "_takeable", "self.pool.num_holders(page) == 1",
                                                      "True"),
    "swapped in to the wrong pages": (Tenancies, "_bring_back", "tuple(map(PageCopy, pages,",
                                      "tuple(map(PageCopy, pages[::-1],"),
    "swapped in a page too few": (Tenancies, "_bring_back", "pages = sequence.pages[num_cached :",
                                  "pages = sequence.pages[num_cached + 1 :"),
    "copies in are forgotten": (Draft, "add_swap_in", "self._swap_in.extend(copies)", "pass"),
    "host page reused while it is read": (Tenancies, "_bring_back", "swapped.host_pages, self.next_step)",
                                          "swapped.host_pages)"),
    "host pages are not given back": (SwapSpace, "settle", "self.release(hold.pages)", "pass"),
    "copied out twice": (Tenancies, "carry_out", "self._leaving.clear()", "pass"),
    "swapped in on another lane": (Planner, "_suits", "sequence.swapped is None or ", "True or "),
    "runs before its copy is done": (Tenancies, "is_ready", "swapped is None or ", "True or "),
    # Queue, deadlines, shares
    "queue limit off by one": (WaitingQueue, "refuse", "len(self) >= self", "len(self) > self"),
    "queued prompt tokens are lost": (WaitingQueue, "remove", "self._num_prompt_tokens -=", "0 -"),
    "drain takes new work": (Scheduler, "_refuse", "if self._is_draining:", "if False:"),
    "deadline only in decode": (Scheduler, "expire", "self._deadlines.take_due(now_s)",
                                "[s for s in self._deadlines.take_due(now_s) if s.outputs]"),
    "deadline only until the first token": (Scheduler, "expire", "self._deadlines.take_due(now_s)",
                                            "[s for s in self._deadlines.take_due(now_s) if not s.outputs]"),
    "missed deadlines are not counted": (Scheduler, "expire", "self._counters.deadline_misses += len(late)", "pass"),
    "running requests of a tenant are miscounted": (Tenancies, "release", "sequence.tenant.num_running -= 1", "pass"),
    "virtual time is never lifted": (FairShare, "join", "tenant.served = max(tenant.served, self._floor())", "pass"),
    "weights are ignored": (Tenant, "charge", " / self.weight", ""),
    "aging is off": (waiting_queue, "class_level", "int(max(0.0, waited_s) / aging_s)", "0"),
    "nobody yields a slot to another tenant": (planner, "pick_fairness_victim", "return max(over,",
                                               "return None and max(over,"),
    "queue by class alone": (waiting_queue, "tenant_turn", "head.tenant.turn", "0.0"),
}  # fmt: skip

BY_FAIRNESS = (
    "virtual time is never lifted",
    "weights are ignored",
    "aging is off",
    "nobody yields a slot to another tenant",
    "queue by class alone",
)
"""Found by the worlds of simulated_fairness: they break no books, only shares."""


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
