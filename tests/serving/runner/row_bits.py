"""All bits that the device says of one row, alone and in the company of others."""

import numpy as np

from headrace.serving.core.plan import SlotRef
from headrace.serving.core.request import SamplingParams
from headrace.serving.runner.runner import JaxRunner
from tests.serving.runner.plans import DECODE, MIXED, load, plan, prompt, request, row, segment

NEIGHBOURS = (
    SamplingParams(temperature=1.3, top_p=0.6, top_k=5, seed=4, num_logprobs=3),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.6, presence_penalty=0.2),
    SamplingParams(temperature=0.7, min_p=0.1, logit_bias=((3, 2.0), (7, -1.0)), seed=9),
)


def row_bits(runner: JaxRunner, params: SamplingParams, *, company: int | None) -> np.ndarray:
    """Of a prompt's sample and two decode steps, all that the device says of them. company: None = alone; else it
    decides neighbours, slots, pages and places in the step."""
    rng = np.random.default_rng(company)
    slots, pages = np.arange(4), np.arange(1, 200)
    if company is not None:
        slots, pages = rng.permutation(slots), rng.permutation(pages)
    ids, me = prompt(31, 5), SlotRef(int(slots[0]), 9)
    own = tuple(map(int, pages[:2]))

    def others(count: int) -> list[tuple[SlotRef, SamplingParams, tuple[int, ...]]]:
        if company is None:
            return []
        # A sequence of four pages each, whose KV nobody wrote: any finite bits will do.
        return [
            (SlotRef(int(slots[1 + i]), 9), NEIGHBOURS[i], tuple(map(int, pages[10 + 4 * i : 14 + 4 * i])))
            for i in range(count)
        ]

    def step(number: int, neighbours: list, mine: object) -> np.ndarray:
        kind = "prefill" if number == 1 else "decode"
        loads = [load(slot, request(2, (1, 2, 3), asks), (5,)) for slot, asks, _ in neighbours]
        if number == 1:
            loads.append(load(me, request(1, ids, params)))
            rows = [
                segment(slot, prompt(company, 4 + company % 5), of, start=4, samples=bool(company % 2))
                for slot, _, of in neighbours
            ]
            rows = [of for of in rows if of.samples or not len(of.token_ids) % 4]
        else:
            rows = [row(slot, int(rng.integers(16)), of, input_token=7) for slot, _, of in neighbours]
        rows.insert(int(rng.integers(len(rows) + 1)), mine)
        loads = [one for one in loads if one.slot in {of.slot for of in rows}]
        ticket = runner.dispatch(
            plan(number, MIXED if number == 1 else DECODE, loads=tuple(loads), **{kind: tuple(rows)})
        )
        runner.collect(ticket)
        return np.asarray(ticket.packed)[ticket.rows[rows.index(mine)]]

    found = [step(1, others(1), segment(me, ids, own))]
    for i in range(2):
        mine = row(me, 5 + i, own, output_index=i + 1)
        found.append(step(2 + i, others(0 if company is None else int(rng.integers(1, 4))), mine))
    return np.stack(found)
