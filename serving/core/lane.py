"""One copy of the model as the scheduler sees it: pages, slots and host pages that no other copy can use."""

from dataclasses import dataclass

from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.page_memory import PageMemory
from headrace.serving.core.prefix_cache import PageHash
from headrace.serving.core.slots import Slots
from headrace.serving.core.swap_space import SwapSpace


@dataclass(frozen=True, slots=True)
class Lane:
    index: int
    memory: PageMemory
    slots: Slots
    host: SwapSpace


def make_lanes(config: SchedulerConfig, hash_page: PageHash) -> tuple[Lane, ...]:
    """Slots, pages and host pages are numbered through all lanes."""
    return tuple(
        Lane(
            index,
            PageMemory(config, hash_page, index),
            Slots(config.num_slots, first=index * config.num_slots),
            SwapSpace(config.num_swap_pages, first=index * config.num_swap_pages),
        )
        for index in range(config.num_lanes)
    )
