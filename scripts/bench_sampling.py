"""Milliseconds of the sampler alone, XLA's own code and the CPU's native draw in turns, and its share of a decode step.

Of each sampler and case the least of the repeats counts: other processes only make it slower. Logits are random with
the given standard deviation: the wider, the fewer candidates a cut keeps. --step also loads the default model and
compares the sampler with whole steps of greedy rows, by the median of paired ratios.
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from headrace.model.load import load_model
from headrace.model.pull import DEFAULT_MODEL, resolve_model
from headrace.model.sampling import THRESHOLDS, SamplingState, sample
from headrace.pallas_kernels.native import library
from headrace.pallas_kernels.types import Implementation, Kernels
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.plan import DecodeRow, SlotLoad, SlotRef, StepPlan
from headrace.serving.core.request import Request, RequestId, SamplingParams, StopRule
from headrace.serving.runner.runner import JaxRunner
from headrace.serving.runner.sampling_state import initial_state

ROWS, CONTEXT, PAGE = 16, 200, 16
PAGES_EACH = -(-(CONTEXT + 1) // PAGE)
SAMPLERS = {"xla": THRESHOLDS, "native": Kernels(implementation=Implementation.CPU)}
CASES = {
    "greedy": {},
    "temperature": {"temperature_B": 1.0},
    "top_p .95, top_k 50": {"temperature_B": 1.0, "top_p_B": 0.95, "top_k_B": 50},
    "top_p .95": {"temperature_B": 1.0, "top_p_B": 0.95},
    "min_p .05": {"temperature_B": 1.0, "min_p_B": 0.05},
    "frequency penalty": {"temperature_B": 1.0, "frequency_B": 0.5},
    "logprobs": {"wants_logprobs_B": True},
}


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


def state_of(rows: int, vocab: int, case: dict[str, float]) -> SamplingState:
    state = initial_state(rows, vocab)
    seeds = jnp.arange(2 * (rows + 1), dtype=jnp.uint32).reshape(-1, 2)
    fields = {name: jnp.full(rows + 1, value, getattr(state, name).dtype) for name, value in case.items()}
    return state.replace(seed_B2=seeds, **fields)


def milliseconds(rows: int, logits_RV: jax.Array, case: dict[str, float], repeats: int) -> tuple[list[float], int]:
    """(of each sampler, rows whose ids differ)."""
    runs = [jax.jit(functools.partial(sample, kernels=kernels), donate_argnums=1) for kernels in SAMPLERS.values()]
    states = [state_of(rows, logits_RV.shape[1], case) for _ in runs]
    rest = jnp.arange(rows), jnp.full(rows, 7, jnp.int32), jnp.zeros(rows, bool)
    times: list[list[float]] = [[] for _ in runs]
    different = 0
    for repeat in range(repeats + 1):
        tokens = []
        for i, run in enumerate(runs):
            jax.block_until_ready(states[i])
            started_s = time.perf_counter()
            sampled, states[i] = run(logits_RV, states[i], *rest)
            jax.block_until_ready((sampled, states[i]))
            if repeat:
                times[i].append(time.perf_counter() - started_s)
            tokens.append(np.asarray(sampled.token_R))
        if not repeat:
            different = int((tokens[0] != tokens[1]).sum())
    return [1e3 * min(values) for values in times], different


def compare(vocab: int, deviation: float, repeats: int) -> None:
    rng = np.random.default_rng(0)
    print(f"{'rows':>4} {'case':20}" + "".join(f"{name + ' ms':>12}" for name in SAMPLERS) + "  other ids")
    for rows in (1, 4, 16, 32):
        logits_RV = jnp.asarray(rng.standard_normal((rows, vocab), np.float32) * deviation)
        for name, case in CASES.items():
            found, different = milliseconds(rows, logits_RV, case, repeats)
            print(f"{rows:4} {name:20}" + "".join(f"{value:12.3f}" for value in found) + f"{different:11}", flush=True)


def share_of_step(repeats: int) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--deviation", type=float, default=3.0)
    parser.add_argument("--step", action="store_true", help="share of a step instead; loads the default model")
    parser.add_argument("--isa", help="instruction set of the native one; by default the best")
    arguments = parser.parse_args()
    if not arguments.step:
        print(f"native: {library.load(isa=arguments.isa).isa}")
    if arguments.step:
        share_of_step(arguments.repeats)
    else:
        compare(arguments.vocab, arguments.deviation, arguments.repeats)


if __name__ == "__main__":
    main()
