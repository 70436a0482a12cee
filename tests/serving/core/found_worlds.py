"""Worlds that once broke a promise of the scheduler, made small by the shrinker; they run in each gate."""

from headrace.serving.core.config import PreemptionPolicy, SchedulerConfig
from headrace.serving.core.request import Priority, Request, RequestId, SamplingParams, StopRule
from headrace.serving.core.simulated_world import Arrival, Faults, Reader, World

__all__ = ["FOUND", "Faults", "PreemptionPolicy", "Priority", "Reader"]

FOUND: tuple[World, ...] = (
    # A request whose worst case was set aside wanted a page, and the only one that could have yielded it was before it
    # in turn: both waited for ever.
    World(
        seed=54,
        config=SchedulerConfig(
            num_slots=5,
            page_size=2,
            num_pages=19,
            max_context=38,
            chunk_tokens=4,
            block_tokens=4,
            decode_rows=(1, 5),
            prefill_tokens=(4,),
            max_segments=1,
            prefix_cache=False,
            max_steps_in_flight=1,
        ),
        vocab_size=64,
        arrivals=(
            Arrival(
                tick=0,
                request=Request(
                    request_id=RequestId(9),
                    prompt_ids=(35,),
                    sampling=SamplingParams(),
                    stop=StopRule(max_tokens=15),
                    cache_namespace=b"\x02" * 32,
                    tenant="tenant-1",
                ),
            ),
            Arrival(
                tick=0,
                request=Request(
                    request_id=RequestId(10),
                    prompt_ids=(44,),
                    sampling=SamplingParams(),
                    stop=StopRule(max_tokens=23),
                    cache_namespace=b"\x03" * 32,
                    tenant="tenant-2",
                ),
            ),
            Arrival(
                tick=0,
                request=Request(
                    request_id=RequestId(11),
                    prompt_ids=(44,),
                    sampling=SamplingParams(),
                    stop=StopRule(max_tokens=23),
                    cache_namespace=b"\x03" * 32,
                    tenant="tenant-2",
                    weight=4.0,
                ),
            ),
        ),
        stall_ticks=20,
    ),
)
