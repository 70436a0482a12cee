"""Options to a scheduler configuration."""

from dataclasses import replace
from typing import Any

import pytest

from headrace.serving.app.build import (
    DEFAULT_KV_BYTES,
    DEFAULT_SWAP_BYTES,
    SWAP_POOLS,
    EngineOptions,
    FakeOptions,
    build_engine,
    check,
    decode_options,
    engine_launch,
    ladder,
    query_block,
    resolve,
)
from headrace.serving.app.fake_engine import step_hook
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.kv_memory import DeviceMemory, KVFormat
from headrace.serving.engine.link import FrameDecoder
from tests.model.tiny import SMOLLM2

OPTIONS = EngineOptions(model="m.gguf")


def test_memory_arithmetic() -> None:
    resolved = resolve(replace(OPTIONS, pages=101, context=800), SMOLLM2)
    assert resolved.kv_bytes_per_token == 2 * 30 * 3 * 64 * 4
    assert resolved.kv_bytes == 101 * 16 * resolved.kv_bytes_per_token


def test_the_pool_holds_every_context_unless_that_is_too_much() -> None:
    small = resolve(replace(OPTIONS, num_slots=2, context=100), SMOLLM2)
    assert small.scheduler.num_pages == 1 + 2 * 7
    large = resolve(OPTIONS, SMOLLM2)
    assert DEFAULT_KV_BYTES * 0.99 < large.kv_bytes <= DEFAULT_KV_BYTES
    given = resolve(replace(OPTIONS, kv_bytes=100_000_000), SMOLLM2)
    assert 99_000_000 < given.kv_bytes <= 100_000_000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pages": 5, "kv_bytes": 1 << 30}, "pages and kv_bytes"),
        ({"kv_bytes": 100}, "kv_bytes 100"),
        ({"pages": 1}, "num_pages is 1"),
        ({"context": 8193}, "context 8193.*8192"),
        ({"context": 1}, "max_context is 1"),
        ({"chunk_tokens": 100}, "multiple of page_size 16; try 96"),
        ({"chunk_tokens": 8}, "multiple of page_size 16; try 16"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0"),
        ({"page_size": 0}, "page_size is 0"),
        ({"num_slots": -1}, "num_slots is -1"),
        ({"pages": 5, "memory_fraction": 0.5}, "pages and memory_fraction"),
        ({"kv_bytes": 1 << 30, "memory_fraction": 0.5}, "kv_bytes and memory_fraction"),
        ({"memory_fraction": 0.0}, "--memory-fraction 0 must be above 0"),
        ({"memory_fraction": 1.5}, "--memory-fraction 1.5 must be above 0 and at most 1"),
        ({"device": "npu"}, "--device 'npu' is not known; it can be auto, cpu, gpu, tpu"),
        ({"attention": "flash"}, "--attention 'flash' is not known"),
        ({"dtype": "float16"}, "--dtype 'float16' is not known; it can be auto, float32, bfloat16"),
        ({"kv_dtype": "int4"}, "--kv-dtype 'int4' is not known"),
        ({"weights": "int3"}, "--weights 'int3' is not known; it can be native, bf16, f32, int8, int4"),
        ({"activations": "int4"}, "--activations 'int4' is not known; it can be auto, exact, int16, int8"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    for refuse in (resolve, check):
        with pytest.raises(ConfigError, match=words):
            refuse(replace(OPTIONS, **changes), SMOLLM2)


TPU_INT8 = KVFormat(dtype="int8", page_tokens=128, page_multiple=128, why_multiple="factors fill rows of 128 lanes")


def test_the_page_size_is_the_devices_unless_one_is_asked_for() -> None:
    assert resolve(OPTIONS, SMOLLM2).scheduler.page_size == 16
    resolved = resolve(OPTIONS, SMOLLM2, TPU_INT8)
    assert (resolved.scheduler.page_size, resolved.scheduler.block_tokens) == (128, 128)
    assert resolved.kv_bytes_per_token == 2 * 30 * 3 * (64 + 4)
    asked = resolve(replace(OPTIONS, page_size=256), SMOLLM2, TPU_INT8)
    assert (asked.scheduler.page_size, asked.scheduler.block_tokens) == (256, 256)


def test_a_page_that_is_no_whole_tile_is_refused_by_flag() -> None:
    options = replace(OPTIONS, page_size=16)
    check(options, SMOLLM2)  # some device takes it
    words = "--page-size 16 must be a multiple of 128, since factors fill rows of 128 lanes; try 128"
    with pytest.raises(ConfigError, match=words):
        resolve(options, SMOLLM2, TPU_INT8)


def test_the_check_before_a_device_is_known_refuses_nothing_that_some_device_takes() -> None:
    """Bytes for two pages of int8 are too few for two of float32."""
    few = 2 * 16 * KVFormat(dtype="int8").token_bytes(num_layers=30, num_kv_heads=3, head_dim=64)
    check(replace(OPTIONS, kv_bytes=few), SMOLLM2)
    with pytest.raises(ConfigError, match="holds no page"):
        check(replace(OPTIONS, kv_bytes=few, kv_dtype="float32"), SMOLLM2)


def test_pages_are_what_the_device_has_room_for() -> None:
    resolved = resolve(OPTIONS, SMOLLM2)
    memory = DeviceMemory(
        limit_bytes=10_000_000_000,
        fraction=0.9,
        weights_bytes=5_000_000_000,
        state_bytes=1_000_000,
        temporary_bytes=500_000_000,
        steps_bytes=1_000,
        page_bytes=16 * resolved.kv_bytes_per_token,
    )
    sized = resolved.in_memory(memory)
    assert sized.memory is memory
    assert sized.scheduler.num_pages == (9_000_000_000 - 5_501_001_000) // (16 * 46_080)
    assert sized.kv_bytes == sized.scheduler.num_pages * 16 * 46_080
    assert replace(sized.scheduler, num_pages=2) == replace(resolved.scheduler, num_pages=2)


@pytest.mark.parametrize("page_size", [1, 8, 16, 24, 64, 128])
@pytest.mark.parametrize("pages_in_chunk", [1, 2, 3, 7, 16, 32])
def test_every_multiple_of_the_page_is_a_chunk(page_size: int, pages_in_chunk: int) -> None:
    chunk = page_size * pages_in_chunk
    block = query_block(page_size, chunk)
    assert chunk % block == block % page_size == 0
    assert block <= max(64, page_size)
    resolved = resolve(replace(OPTIONS, page_size=page_size, chunk_tokens=chunk, pages=10), SMOLLM2)
    assert resolved.scheduler.prefill_tokens[-1] == chunk


@pytest.mark.parametrize("slots", [1, 2, 5, 16, 100])
def test_ladders_are_short_and_end_where_they_must(slots: int) -> None:
    rungs = ladder(1, slots)
    assert rungs[0] == 1
    assert rungs[-1] == slots
    assert list(rungs) == sorted(set(rungs))
    assert len(rungs) <= 5


def test_options_survive_the_way_to_the_engine() -> None:
    options = replace(OPTIONS, context=77, compile_cache="/x", fake=FakeOptions(fault="hang:3"))
    (body,) = FrameDecoder().feed(engine_launch(options).first_frame)
    assert decode_options(body) == options


@pytest.mark.parametrize("fault", ["hang", "hang:x", "burn:3", "raise:-1"])
def test_a_fault_that_is_not_known_is_refused(fault: str) -> None:
    with pytest.raises(ConfigError, match="unknown fault"):
        step_hook(FakeOptions(fault=fault))


def test_the_fake_engine_needs_no_model() -> None:
    built = build_engine(replace(OPTIONS, fake=FakeOptions()), lambda what, done, total: None)
    assert built.topology.device == "fake:fake"


def test_host_pages_come_from_bytes_and_stay_below_what_all_streams_take() -> None:
    page_bytes = 16 * 2 * 30 * 3 * 64 * 4
    given = resolve(replace(OPTIONS, swap_bytes=10 * page_bytes + 5), SMOLLM2).scheduler
    assert given.num_swap_pages == 10
    assert resolve(OPTIONS, SMOLLM2).scheduler.num_swap_pages == DEFAULT_SWAP_BYTES // page_bytes
    small = resolve(replace(OPTIONS, num_slots=1, context=32), SMOLLM2).scheduler
    assert small.num_swap_pages == SWAP_POOLS * 2
    assert resolve(replace(OPTIONS, preemption="recompute"), SMOLLM2).scheduler.num_swap_pages == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"preemption": "drop"}, "--preemption 'drop' is not known; it can be auto, swap, recompute"),
        ({"preemption": "swap", "swap_bytes": 5}, "--preemption swap needs --swap-memory for at least a page"),
        ({"deterministic": True, "preemption": "recompute"}, "never computes a request again"),
        ({"inter_token_ms": 0.0}, "inter_token_s must be above 0"),
        ({"aging_s": 0.0}, "aging_s is 0"),
    ],
    ids=str,
)
def test_scheduling_options_that_cannot_work_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(replace(OPTIONS, **changes), SMOLLM2)


def test_an_objective_has_finer_programs_and_deterministic_mode_one_of_each() -> None:
    assert resolve(OPTIONS, SMOLLM2).scheduler.prefill_tokens == (64, 256)
    fine = resolve(replace(OPTIONS, inter_token_ms=250.0), SMOLLM2).scheduler
    assert (fine.prefill_tokens, fine.inter_token_s) == ((16, 32, 64, 128, 256), 0.25)
    exact = resolve(replace(OPTIONS, deterministic=True), SMOLLM2).scheduler
    assert (exact.decode_rows, exact.prefill_tokens, exact.chunk_grid) == ((16,), (256,), 256)
