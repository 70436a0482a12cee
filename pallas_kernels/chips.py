"""What a kernel and its cost model need to know of a chip. Figures are per JAX device (half a TPU7x).

Sources: TPU bandwidth, VMEM and cores from JAX's ``pltpu.TpuInfo``; HBM sizes and peak rates from Google's and NVIDIA's
data sheets; clocks are inferred from the peak rate (v6e: 918 TFLOP/s = 4 MXUs of 256 x 256 products
at 1.75 GHz), which nothing has confirmed.
"""

from dataclasses import dataclass

from headrace.pallas_kernels.types import Implementation, UnsupportedCase

GIB, MIB = 1 << 30, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One JAX device. on_chip_bytes: VMEM of a TPU core, or shared memory that one GPU block may use.

    topology: what ``topologies.get_topology_desc`` calls the smallest slice of TPUs. clock_hz: None where no source
    gives it. fp8: the type that 8-bit float pages have; None = refused. has_bfloat16_vectors: False for TPUs whose
    vector unit knows float32 only: bfloat16 is unpacked for it and packed again, 8 bits are widened twice.
    bfloat16_tile_rows: rows of the tiles that XLA's products read bfloat16 matrices in on a TPU.
    """

    name: str
    implementation: Implementation
    device_kinds: tuple[str, ...]
    hbm_bytes: int
    hbm_bytes_per_s: float
    matmul_bf16_per_s: float
    on_chip_bytes: int
    fp8: str | None
    topology: str | None = None
    clock_hz: float | None = None
    has_bfloat16_vectors: bool = True
    bfloat16_tile_rows: int = 8


_TPU, _GPU = Implementation.TPU, Implementation.GPU
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v5e",
            implementation=_TPU,
            device_kinds=("TPU v5 lite", "TPU v5e"),
            hbm_bytes=16 * GIB,
            hbm_bytes_per_s=0.82e12,
            matmul_bf16_per_s=197e12,
            on_chip_bytes=128 * MIB,
            fp8=None,
            topology="v5e:2x2",
            clock_hz=1.5e9,
            has_bfloat16_vectors=False,
        ),
        Chip(
            name="v5p",
            implementation=_TPU,
            device_kinds=("TPU v5", "TPU v5p"),
            hbm_bytes=95 * GIB,
            hbm_bytes_per_s=2.46e12,
            matmul_bf16_per_s=459e12,
            on_chip_bytes=64 * MIB,
            fp8=None,
            topology="v5p:2x2x1",
            clock_hz=1.75e9,
            has_bfloat16_vectors=False,
        ),
        Chip(
            name="v6e",
            implementation=_TPU,
            device_kinds=("TPU v6 lite", "TPU v6e"),
            hbm_bytes=32 * GIB,
            hbm_bytes_per_s=1.64e12,
            matmul_bf16_per_s=918e12,
            on_chip_bytes=128 * MIB,
            fp8="float8_e5m2",
            topology="v6e:2x2",
            clock_hz=1.75e9,
        ),
        Chip(
            name="tpu7x",
            implementation=_TPU,
            device_kinds=("TPU7x", "TPU v7x"),
            hbm_bytes=96 * GIB,
            hbm_bytes_per_s=3.69e12,
            matmul_bf16_per_s=1153e12,
            on_chip_bytes=64 * MIB,
            fp8="float8_e4m3fn",
            topology="tpu7x:2x2x1",
            bfloat16_tile_rows=16,
        ),
        Chip(
            name="h100",
            implementation=_GPU,
            device_kinds=("NVIDIA H100 80GB HBM3",),
            hbm_bytes=80 * GIB,
            hbm_bytes_per_s=3.35e12,
            matmul_bf16_per_s=989e12,
            on_chip_bytes=232_448,
            fp8="float8_e4m3fn",
        ),
        Chip(
            name="h200",
            implementation=_GPU,
            device_kinds=("NVIDIA H200",),
            hbm_bytes=141 * GIB,
            hbm_bytes_per_s=4.8e12,
            matmul_bf16_per_s=989e12,
            on_chip_bytes=232_448,
            fp8="float8_e4m3fn",
        ),
    )
}


def chip_of(device_kind: str) -> Chip:
    """The chip that JAX calls device_kind. Raises: UnsupportedCase listing what is known."""
    for chip in CHIPS.values():
        if device_kind in chip.device_kinds:
            return chip
    known = ", ".join(kind for chip in CHIPS.values() for kind in chip.device_kinds)
    raise UnsupportedCase(f"no kernels were compiled for {device_kind!r}; known: {known}")


def has_bfloat16_vectors(chip: str | None) -> bool:
    """Of a chip by its name; None is an interpreter without one, which rounds as the chips that have them."""
    return chip is None or CHIPS[chip].has_bfloat16_vectors
