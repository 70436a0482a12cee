"""How many bytes the keys and values of a token take, and how many pages a device holds. Arithmetic only."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from headrace.serving.core.errors import ConfigError

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {"float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}
)
"""By the type that pages have."""
SCALE_BYTES = 4
"""A float32 factor for each key and each value of a head, where items are one byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFormat:
    """How keys and values are stored.

    dtype: one of ITEM_BYTES. page_tokens: tokens of a page unless another size is asked for. page_multiple: every page
    size must be a multiple of it, for the reason in why_multiple.
    """

    dtype: str = "float32"
    page_tokens: int = 16
    page_multiple: int = 1
    why_multiple: str = ""

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def scale_bytes(self) -> int:
        """For one key or value of one head."""
        return SCALE_BYTES if self.item_bytes == 1 else 0

    def token_bytes(self, *, num_layers: int, num_kv_heads: int, head_dim: int) -> int:
        """Key and value of one token in all layers, with their factors."""
        return 2 * num_layers * num_kv_heads * (head_dim * self.item_bytes + self.scale_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """What a device's memory is used for; bytes as the device lays arrays out, padding included.

    limit_bytes: what may be allocated at all. fraction: the share of it to use, in (0, 1]. weights_bytes, state_bytes
    (of the sampling slots): live from start to end. temporary_bytes: of the program that needs most; programs run one
    after the other. steps_bytes: packed inputs and results of all steps in flight. page_bytes: one page, all layers.
    page_temporary_bytes: what temporaries grow by with each page, where a program copies the pool; kernels never do.
    """

    limit_bytes: int
    fraction: float
    weights_bytes: int
    state_bytes: int
    temporary_bytes: int
    steps_bytes: int
    page_bytes: int
    page_temporary_bytes: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"--memory-fraction {self.fraction:g} must be above 0 and at most 1")

    @property
    def fixed_bytes(self) -> int:
        """Everything but the pages."""
        return self.weights_bytes + self.state_bytes + self.temporary_bytes + self.steps_bytes

    def total_bytes(self, num_pages: int) -> int:
        return self.fixed_bytes + num_pages * (self.page_bytes + self.page_temporary_bytes)

    @property
    def num_pages(self) -> int:
        """As many as fit, the null page included. Raises: ConfigError with the sum, where not even two do."""
        each = self.page_bytes + self.page_temporary_bytes
        pages = (int(self.limit_bytes * self.fraction) - self.fixed_bytes) // each
        if pages < 2:
            raise ConfigError(
                f"--memory-fraction {self.fraction:g} of {self.limit_bytes:,} bytes leaves no room for KV pages: "
                f"weights take {self.weights_bytes:,}, temporaries {self.temporary_bytes:,}, sampling state and steps "
                f"{self.state_bytes + self.steps_bytes:,}, and two pages {2 * each:,} bytes"
            )
        return pages
