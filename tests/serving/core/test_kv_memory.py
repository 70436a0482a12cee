"""KV bytes and page counts, by hand."""

from dataclasses import replace

import pytest

from headrace.serving.core.errors import ConfigError
from headrace.serving.core.kv_memory import DeviceMemory, KVFormat

MEMORY = DeviceMemory(
    limit_bytes=1000,
    fraction=0.9,
    weights_bytes=300,
    state_bytes=40,
    temporary_bytes=100,
    steps_bytes=10,
    page_bytes=7,
)


@pytest.mark.parametrize(
    ("dtype", "head_bytes"),
    [("float32", 64 * 4), ("bfloat16", 64 * 2), ("int8", 64 + 4), ("float8_e4m3fn", 64 + 4), ("float8_e5m2", 64 + 4)],
)
def test_bytes_of_a_token(dtype: str, head_bytes: int) -> None:
    assert KVFormat(dtype=dtype).token_bytes(num_layers=30, num_kv_heads=3, head_dim=64) == 2 * 30 * 3 * head_bytes


def test_pages_fill_what_is_left_and_no_more() -> None:
    assert MEMORY.fixed_bytes == 450
    assert MEMORY.num_pages == (900 - 450) // 7 == 64
    assert MEMORY.total_bytes(64) <= 900 < MEMORY.total_bytes(65)


def test_no_room_is_an_error_with_the_sum() -> None:
    assert replace(MEMORY, temporary_bytes=536).num_pages == 2
    words = "--memory-fraction 0.9 of 1,000 bytes .* weights take 300, temporaries 537, .* 50, and two pages 14 bytes"
    with pytest.raises(ConfigError, match=words):
        _ = replace(MEMORY, temporary_bytes=537).num_pages


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01, float("nan")])
def test_a_fraction_is_a_share(fraction: float) -> None:
    with pytest.raises(ConfigError, match="--memory-fraction"):
        replace(MEMORY, fraction=fraction)
