"""The memory that is predicted before anything is allocated, against what the compiled programs say they take."""

import functools
import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.model.config import ModelConfig
from headrace.model.init import init_weights
from headrace.model.load import LoadedModel
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.kv_memory import DeviceMemory
from headrace.serving.runner.arrays import pool_shapes, state_shapes
from headrace.serving.runner.backend import Backend
from headrace.serving.runner.inputs import InputLayout
from headrace.serving.runner.memory import argument_bytes, check_pages, free_bytes, limit_of, measure
from headrace.serving.runner.programs import step_program
from headrace.serving.runner.runner import JaxRunner
from headrace.serving.runner.weights import weight_shapes
from tests.model.tiny import TINY
from tests.serving.runner.plans import CONFIG as LONG_LADDER

LIMIT = 8 << 20
CONFIG = replace(LONG_LADDER, decode_rows=(4,), prefill_tokens=(16,))
BUCKETS = range(len(CONFIG.buckets))
UNTIED = replace(TINY, tied_embeddings=False)
BACKENDS = {
    "float32": Backend(),
    "bfloat16": Backend(dtype=np.dtype(jnp.bfloat16), kv_dtype=np.dtype(jnp.bfloat16), kv_as_bits=True),
    "int8": Backend(kv_dtype=np.dtype(np.int8)),
    "int8, bfloat16 weights, scanned": Backend(
        dtype=np.dtype(jnp.bfloat16), kv_dtype=np.dtype(np.int8), scan_layers=True
    ),
}


@functools.cache
def memory_of(name: str) -> DeviceMemory:
    backend = BACKENDS[name]
    return measure(UNTIED, CONFIG, backend, limit_bytes=LIMIT, fraction=0.75)


@functools.cache
def analysis(cfg: ModelConfig, config: SchedulerConfig, backend: Backend, bucket: int = -1) -> SimpleNamespace:
    """Sizes of one compiled program."""
    weights, pool = weight_shapes(cfg, backend), pool_shapes(cfg, config, backend)
    state = state_shapes(cfg, config, backend)
    layout = InputLayout(config.buckets[bucket], config, cfg.vocab_size)
    found = step_program(cfg, layout, backend, weights, pool, state).compile(None).memory_analysis()
    return SimpleNamespace(
        arguments=found.argument_size_in_bytes,
        temporary=found.temp_size_in_bytes,
        results=found.output_size_in_bytes - found.alias_size_in_bytes,
        packed=4 * math.prod(layout.shape),
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_the_prediction_is_what_the_programs_take(name: str) -> None:
    """Arguments and results exactly. Temporaries exactly where no program copies the pool; else too high by at most the
    part of them that does not grow with the pool."""
    memory, backend = memory_of(name), BACKENDS[name]
    pages = memory.num_pages
    programs = [analysis(UNTIED, replace(CONFIG, num_pages=pages), backend, bucket) for bucket in BUCKETS]
    pool_bytes = pages * memory.page_bytes
    for program in programs:
        assert program.arguments == memory.weights_bytes + memory.state_bytes + pool_bytes + program.packed
    largest = programs[-1]
    assert memory.steps_bytes == CONFIG.max_steps_in_flight * (largest.packed + largest.results)
    assert largest.results > 0
    temporary, predicted = max(program.temporary for program in programs), memory.temporary_bytes
    if name in ("float32", "bfloat16"):
        assert (predicted, memory.page_temporary_bytes) == (temporary, 0)
    assert 0 <= predicted + pages * memory.page_temporary_bytes - temporary <= predicted
    other_step = largest.packed + largest.results  # two are in flight
    actual = largest.arguments + temporary + largest.results + other_step
    assert actual <= memory.total_bytes(pages) <= LIMIT * 0.75 < memory.total_bytes(pages + 1)
    assert memory.total_bytes(pages) - actual <= predicted


@pytest.mark.parametrize("bucket", [0, -1])
def test_temporaries_do_not_depend_on_the_number_of_pages(bucket: int) -> None:
    sizes = [analysis(TINY, replace(CONFIG, num_pages=pages), Backend(), bucket) for pages in (2, 200_000)]
    assert len({size.temporary for size in sizes}) == 1


def test_temporaries_that_do_are_a_line() -> None:
    """XLA:CPU of JAX 0.10 converts a pool of bfloat16 to float32 and back, where the pages are not held as integers; in
    JAX 0.12 nothing grows here, a line as well."""
    backend = replace(BACKENDS["bfloat16"], kv_as_bits=False)
    small, large, found = (
        analysis(TINY, replace(CONFIG, num_pages=pages), backend).temporary for pages in (1000, 2000, 9000)
    )
    growth = (large - small) // 1000
    assert growth in (0, TINY.num_layers * CONFIG.page_size * TINY.num_kv_heads * 2 * TINY.head_dim * 4)
    assert found == pytest.approx(small + growth * 8000, rel=0.02)


def test_the_pool_and_weights_that_a_runner_holds_are_the_predicted_ones() -> None:
    for name in BACKENDS:
        memory, backend = memory_of(name), BACKENDS[name]
        model = LoadedModel(config=UNTIED, weights=init_weights(UNTIED, 1, backend.dtype), model_hash="")
        runner = JaxRunner.of_host(model, replace(CONFIG, num_pages=memory.num_pages), backend=backend)
        assert sum(x.nbytes for x in jax.tree.leaves(runner._pool)) == memory.num_pages * memory.page_bytes
        assert sum(x.nbytes for x in jax.tree.leaves(runner._weights)) == memory.weights_bytes
        assert sum(x.nbytes for x in jax.tree.leaves(runner._state)) == memory.state_bytes
        runner.close()


def test_pages_of_every_type_take_the_bytes_of_the_arithmetic() -> None:
    heads = {"num_layers": UNTIED.num_layers, "num_kv_heads": UNTIED.num_kv_heads, "head_dim": UNTIED.head_dim}
    for name, backend in BACKENDS.items():
        assert memory_of(name).page_bytes == CONFIG.page_size * backend.kv_format.token_bytes(**heads)


def test_weights_that_leave_no_room_are_an_error_with_the_sum() -> None:
    words = "--memory-fraction 0.5 of 700,000 bytes leaves no room for KV pages: weights take 296,192, temporaries "
    with pytest.raises(ConfigError, match=words):
        _ = replace(memory_of("float32"), limit_bytes=700_000, fraction=0.5).num_pages


def test_given_pages_that_cannot_fit_are_refused_before_anything_is_compiled() -> None:
    memory, backend = memory_of("float32"), BACKENDS["float32"]
    limit = memory.weights_bytes + memory.state_bytes + 10 * memory.page_bytes
    check_pages(UNTIED, replace(CONFIG, num_pages=10), backend, limit_bytes=limit)
    with pytest.raises(ConfigError, match=r"11 KV pages take .* room for 10 pages\. .* --pages or --kv-memory"):
        check_pages(UNTIED, replace(CONFIG, num_pages=11), backend, limit_bytes=limit)
    with pytest.raises(ConfigError, match="room for 0 pages"):
        check_pages(UNTIED, replace(CONFIG, num_pages=2), backend, limit_bytes=1000)


def test_nothing_is_allocated_to_measure() -> None:
    before = sum(array.nbytes for array in jax.live_arrays())
    assert argument_bytes(jax.ShapeDtypeStruct((1 << 40,), jnp.int8), Backend()) == 1 << 40
    assert sum(array.nbytes for array in jax.live_arrays()) == before


def test_limits() -> None:
    assert 1 << 20 < limit_of(jax.devices()[:1]) < 1 << 50
    stats = {"bytes_limit": 1000, "bytes_in_use": 10}
    device = SimpleNamespace(platform="gpu", device_kind="x", memory_stats=lambda: stats)
    less = SimpleNamespace(platform="gpu", device_kind="x", memory_stats=lambda: {"bytes_limit": 800})
    assert limit_of([device, less]) == 800  # type: ignore[list-item]
    assert limit_of(jax.devices()[:4]) < limit_of(jax.devices()[:1]) / 3
    assert limit_of([device]) == 990  # type: ignore[list-item]
    silent = SimpleNamespace(platform="tpu", device_kind="TPU v9", memory_stats=lambda: None)
    assert free_bytes([silent]) is None  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"--memory-fraction: tpu \(TPU v9\) does not say .* --kv-memory"):
        limit_of([silent])  # type: ignore[list-item]
