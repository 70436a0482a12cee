"""Who counts which compilation."""

import gc

import jax
import numpy as np

from headrace.model.init import init_weights
from headrace.model.load import LoadedModel
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.runner.runner import JaxRunner
from tests.model.tiny import SMALLEST

CONFIG = SchedulerConfig(
    num_slots=1,
    page_size=4,
    num_pages=4,
    max_context=12,
    chunk_tokens=4,
    block_tokens=4,
    decode_rows=(1,),
    prefill_tokens=(4,),
)


def warm_runner() -> JaxRunner:
    weights = jax.tree.map(np.asarray, init_weights(SMALLEST, 1))
    runner = JaxRunner.of_host(LoadedModel(config=SMALLEST, weights=weights, model_hash=""), CONFIG)
    runner.warm_up(lambda what, done, total: None)
    return runner


def compile_something(factor: int) -> None:
    jax.jit(lambda x: x * factor)(np.ones(3))


def test_compiles_after_ready_are_counted_until_the_runner_is_closed() -> None:
    runner = warm_runner()
    assert runner.compiles_after_ready() == 0
    compile_something(2)
    assert runner.compiles_after_ready() > 0
    counted = runner.compiles_after_ready()
    runner.close()
    runner.close()
    compile_something(3)
    assert runner.compiles_after_ready() == counted


def test_a_runner_that_is_gone_counts_no_more() -> None:
    runner = warm_runner()
    log = runner._compile_log
    del runner
    gc.collect()
    compile_something(4)
    assert log.after_ready == ()
