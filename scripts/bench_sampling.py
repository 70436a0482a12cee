"""Share of sampling in a decode step when every row is greedy: the sampler alone against the whole step.

Both run in one process, in turns, on the loaded default model; the share is the median of the paired ratios.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from headrace.model.load import load_model
from headrace.model.pull import DEFAULT_MODEL, resolve_model
from headrace.model.sampling import sample
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.plan import DecodeRow, SlotLoad, SlotRef, StepPlan
from headrace.serving.core.request import Request, RequestId, SamplingParams, StopRule
from headrace.serving.runner.runner import JaxRunner
from headrace.serving.runner.sampling_state import initial_state

ROWS, CONTEXT, PAGE = 16, 200, 16
PAGES_EACH = -(-(CONTEXT + 1) // PAGE)


def plan(config: SchedulerConfig, step_id: int, loads: tuple[SlotLoad, ...]) -> StepPlan:
    rows = tuple(
        DecodeRow(
            slot=SlotRef(i, 0),
            position=CONTEXT,
            input_token=100 + i,
            page_ids=tuple(range(1 + i * PAGES_EACH, 1 + (i + 1) * PAGES_EACH)),
            output_index=1,
        )
        for i in range(ROWS)
    )
    return StepPlan(step_id=step_id, bucket=config.buckets[0], loads=loads, decode=rows, prefill=())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    repeats = parser.parse_args().repeats
    config = SchedulerConfig(
        num_slots=ROWS, page_size=PAGE, num_pages=1 + ROWS * PAGES_EACH, max_context=1024, chunk_tokens=64,
        block_tokens=64, decode_rows=(ROWS,), prefill_tokens=(64,),
    )  # fmt: skip
    model = load_model(resolve_model(DEFAULT_MODEL).path)
    runner = JaxRunner.of_host(model, config)
    greedy = SamplingParams(temperature=0.0)
    loads = tuple(
        SlotLoad(
            slot=SlotRef(i, 0),
            request=Request(request_id=RequestId(i), prompt_ids=(1,), sampling=greedy, stop=StopRule(max_tokens=9)),
            output_ids=(),
        )
        for i in range(ROWS)
    )
    alone = jax.jit(sample, donate_argnums=1)
    state = initial_state(ROWS, model.config.vocab_size)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, model.config.vocab_size)), jnp.float32)
    slots, ones = jnp.arange(ROWS), jnp.ones(ROWS, jnp.int32)
    positions, holds = ones, ones < 0
    _, state = alone(logits, state, slots, positions, holds)  # compiled before the runner counts compiles
    runner.warm_up(lambda what, done, total: None)
    steps, samples = [], []
    for repeat in range(repeats + 3):
        started_s = time.perf_counter()
        runner.collect(runner.dispatch(plan(config, repeat, loads if repeat == 0 else ())))
        steps.append(time.perf_counter() - started_s)
        started_s = time.perf_counter()
        sampled, state = alone(logits, state, slots, positions, holds)
        jax.block_until_ready(sampled)
        samples.append(time.perf_counter() - started_s)
    shares = [one / step for one, step in zip(samples[3:], steps[3:], strict=True)]
    print(f"{ROWS} greedy rows, {CONTEXT} tokens of context, {repeats} pairs")
    print(f"step {1e3 * statistics.median(steps[3:]):.1f} ms, sampler {1e3 * statistics.median(samples[3:]):.2f} ms")
    print(f"share {statistics.median(shares):.2%} (quartiles {statistics.quantiles(shares)})")


if __name__ == "__main__":
    main()
