"""Step plans by hand, on a tiny model."""

import functools

import jax
import numpy as np

from headrace.model import oracle
from headrace.model.config import ModelConfig
from headrace.model.init import init_weights
from headrace.model.load import LoadedModel
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.events import Event, Finished, TokenEvent
from headrace.serving.core.plan import Bucket, DecodeRow, PrefillSegment, ProgramKind, SlotLoad, SlotRef, StepPlan
from headrace.serving.core.request import Request, RequestId, SamplingParams, StopRule
from headrace.serving.core.scheduler import Scheduler
from headrace.serving.engine.ports import Runner
from tests.model.tiny import TINY

CONFIG = SchedulerConfig(
    num_slots=4,
    page_size=4,
    num_pages=4000,
    max_context=64,
    chunk_tokens=16,
    block_tokens=8,
    decode_rows=(1, 4),
    prefill_tokens=(8, 16),
    max_segments=2,
)
GREEDY = SamplingParams(temperature=0.0)
MIXED = Bucket(ProgramKind.MIXED, 4, 16)
DECODE = Bucket(ProgramKind.DECODE, 4)


@functools.cache
def tiny_model() -> LoadedModel:
    return LoadedModel(config=TINY, weights=jax.tree.map(np.asarray, init_weights(TINY, 3)), model_hash="")


def prompt(seed: int, length: int, cfg: ModelConfig = TINY) -> tuple[int, ...]:
    return tuple(int(i) for i in np.random.default_rng(seed).integers(0, cfg.vocab_size, length))


def request(
    number: int, ids: tuple[int, ...], params: SamplingParams = GREEDY, max_tokens: int = 8, **stop: object
) -> Request:
    rule = StopRule(max_tokens=max_tokens, **stop)
    return Request(request_id=RequestId(number), prompt_ids=ids, sampling=params, stop=rule)


def load(slot: SlotRef, of: Request, output_ids: tuple[int, ...] = ()) -> SlotLoad:
    return SlotLoad(slot=slot, request=of, output_ids=output_ids)


def segment(slot: SlotRef, ids: tuple[int, ...], pages: tuple[int, ...], **changes: object) -> PrefillSegment:
    fields = {"start": 0, "samples": True, "output_index": 0} | changes
    return PrefillSegment(slot=slot, token_ids=ids, page_ids=pages, **fields)


def row(slot: SlotRef, position: int, pages: tuple[int, ...], **changes: object) -> DecodeRow:
    fields = {"input_token": None, "output_index": 1} | changes
    return DecodeRow(slot=slot, position=position, page_ids=pages, **fields)


def plan(step_id: int, bucket: Bucket, **parts: tuple[object, ...]) -> StepPlan:
    return StepPlan(step_id=step_id, bucket=bucket, **({"loads": (), "decode": (), "prefill": ()} | parts))


def greedy_ids(ids: tuple[int, ...], count: int) -> list[int]:
    """What the oracle says comes next."""
    model = tiny_model()
    out = list(ids)
    for _ in range(count):
        # Padded to one length: the oracle compiles once per length, and later tokens change nothing before them.
        padded = [*out, *[0] * (64 - len(out))]
        out.append(int(np.asarray(oracle.logits_SV(model.weights, model.config, padded))[len(out) - 1].argmax()))
    return out[len(ids) :]


def serve(runner: Runner, config: SchedulerConfig, requests: list[Request]) -> dict[int, list[Event]]:
    """Run requests to their ends with the scheduler, as many steps in flight as it allows; events by request."""
    scheduler = Scheduler(config)
    compiles = runner.compiles_after_ready()
    events: dict[int, list[Event]] = {int(r.request_id): [] for r in requests}
    for one in requests:
        assert scheduler.submit(one, 0.0) is None
    in_flight = []
    while not scheduler.is_idle:
        step = scheduler.plan_step(0.0)
        if step is not None:
            in_flight.append((step, runner.dispatch(step)))
            if len(in_flight) < config.max_steps_in_flight:
                continue
        oldest, ticket = in_flight.pop(0)
        for event in scheduler.apply_result(oldest, runner.collect(ticket), 0.0):
            events[int(event.request_id)].append(event)
        scheduler.check()
    for _, ticket in in_flight:
        runner.collect(ticket)
    assert runner.compiles_after_ready() == compiles
    return events


def ids_of(events: list[Event]) -> list[int]:
    return [event.token_id for event in events if isinstance(event, TokenEvent)]


def end_of(events: list[Event]) -> Finished:
    (end,) = [event for event in events if isinstance(event, Finished)]
    return end
