"""Where a model runs, with which kernels and in which types: decided once at start, never changed silently.

Each wish is the value of a command-line flag. What cannot be had is an error that names the flag, what was found, and
what to do; nothing else is taken in its place.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from headrace.model.config import ModelConfig
from headrace.model.quant_form import QuantForm
from headrace.model.specs import WeightScheme
from headrace.pallas_kernels.chips import CHIPS, Chip, chip_of
from headrace.pallas_kernels.types import Activations, Implementation, Kernels, UnsupportedCase
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.kv_memory import KVFormat
from headrace.serving.runner.cpu_kernels import BY_REFERENCE, LoadKernels, load_kernels, try_cpu_kernels
from headrace.sharding.collectives import ONE_DEVICE, MeshAxis, Shards
from headrace.sharding.errors import MeshError
from headrace.sharding.mesh import make_mesh
from headrace.sharding.mesh_shape import MeshShape

PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}
"""Names that JAX has for what --device calls otherwise."""
INTERPRETED_CHIPS = {Implementation.TPU: "v6e", Implementation.GPU: "h100"}
"""Whose limits an interpreted kernel keeps."""
SUBLANES = 8
"""Rows of a TPU tile of 32-bit values; narrower types are packed, so a tile of 8-bit values has 32 rows."""
ACCELERATOR_PAGE_TOKENS = 64
"""Default page. A DMA of one page of 8 heads of 128 in bfloat16 is then 256 KiB; a GPU block reads 64 keys of one page.
Smaller pages mean more table entries and smaller copies, larger ones coarser prefix sharing."""
EIGHT_BIT_PAGE_TOKENS = 128
"""On TPU, 8-bit pages: the same bytes per copy, and the factors of a page fill a row of 128 lanes."""


class DeviceFacts(Protocol):
    """What is asked of a ``jax.Device``."""

    @property
    def platform(self) -> str: ...
    @property
    def device_kind(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Values of --attention, --activations, --dtype, --weights and --kv-dtype.

    interpret: tests only: kernels run in Pallas's plain interpreter, on any device, with layers scanned as on theirs.
    """

    attention: str = "auto"
    activations: str = "auto"
    dtype: str = "auto"
    weights: str = "native"
    kv_dtype: str = "auto"
    interpret: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """device: None = JAX's default; of a mesh, its first. mesh: None = one device. dtype: of weights, and of what
    products read. weights: how the matrices of products lie in memory. forms: of the native scheme, weights that stay
    quantized as their files have them, by name (``forms.with_forms`` finds them; without, all are floats). kv_dtype: of
    pages.

    scan_layers: layers are stacked and scanned, which compiles one layer instead of all. XLA:CPU and XLA:GPU copy the
    slices of stacked weights (on an H100 three times the traffic of a decode step), so layers are unrolled there; 32 of
    Llama-3.1-8B compile in 9 to 28 s. kv_as_bits: see ``KVPool.bits_of``.
    isa: instruction set of the CPU's kernels; "" where they do not run. why: these kernels, for people.
    """

    device: jax.Device | None = None
    mesh: Mesh | None = None
    kernels: Kernels = field(default_factory=Kernels)
    dtype: np.dtype = np.dtype(np.float32)
    weights: WeightScheme = WeightScheme.NATIVE
    forms: Mapping[str, QuantForm] = field(default_factory=dict, hash=False)
    kv_dtype: np.dtype = np.dtype(np.float32)
    scan_layers: bool = False
    kv_as_bits: bool = False
    isa: str = ""
    why: str = ""

    @property
    def mesh_shape(self) -> MeshShape:
        return MeshShape() if self.mesh is None else MeshShape(**dict(self.mesh.shape))

    @property
    def shards(self) -> Shards:
        """What model code needs to know of the mesh."""
        if self.mesh is None:
            return ONE_DEVICE
        sizes = self.mesh_shape

        def along(*names: str) -> MeshAxis:
            used = tuple(name for name in names if sizes.sizes[name] > 1)
            return MeshAxis(names=used, size=math.prod(sizes.sizes[name] for name in used))

        return Shards(
            tensor=along("tensor"),
            expert=along("expert"),
            stage=along("stage"),
            vocabulary=along("stage", "tensor"),
            data=along("data"),
        )

    def sharding(self, spec: PartitionSpec | None = None) -> Sharding | None:
        """On the mesh (spec None = whole on every device), or on the device; None = on JAX's default."""
        if self.mesh is not None:
            return NamedSharding(self.mesh, spec or PartitionSpec())
        return None if self.device is None else SingleDeviceSharding(self.device)

    @property
    def chip(self) -> Chip | None:
        """What the device is, whosever kernels run; None on a CPU, and where it is not known."""
        if self.device is None or platform_of(self.device) == "cpu":
            return None
        try:
            return chip_of(self.device.device_kind)
        except UnsupportedCase:
            return None

    @property
    def deterministic_options(self) -> Mapping[str, bool | int]:
        """What XLA is told in deterministic mode, so that every start compiles the same programs. On GPU it measures
        which code is fastest, and the answer can change from one start to the next; and it may use atomic additions.
        No GPU has confirmed that these are all; on CPU and TPU there is nothing to tell."""
        if self.device is None or platform_of(self.device) != "gpu":
            return {}
        return {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}

    @property
    def kv_format(self) -> KVFormat:
        """What decides page sizes and KV bytes."""
        name, item = self.kv_dtype.name, self.kv_dtype.itemsize
        if self.kernels.implementation is Implementation.TPU:
            if item == 1:
                # With shorter pages XLA lays the factors out so that it copies all of them around every kernel
                # (compiled for v6e with 16, 32 and 64 tokens).
                return KVFormat(
                    dtype=name,
                    page_tokens=EIGHT_BIT_PAGE_TOKENS,
                    page_multiple=EIGHT_BIT_PAGE_TOKENS,
                    why_multiple=f"the factors of a page of {name} fill whole rows of {EIGHT_BIT_PAGE_TOKENS} lanes",
                )
            rows = SUBLANES * 4 // item
            return KVFormat(
                dtype=name,
                page_tokens=ACCELERATOR_PAGE_TOKENS,
                page_multiple=rows,
                why_multiple=f"a TPU tile of {name} has {rows} rows",
            )
        if self.kernels.implementation is Implementation.GPU:
            return KVFormat(dtype=name, page_tokens=ACCELERATOR_PAGE_TOKENS)
        if self.kernels.implementation is Implementation.CPU:
            return KVFormat(dtype=name, page_multiple=8, why_multiple="the CPU's kernels read 8 tokens at once")
        return KVFormat(dtype=name)


def platform_of(device: DeviceFacts) -> str:
    """cpu, gpu or tpu; the name that JAX has where it is none of them."""
    return PLATFORMS.get(device.platform, device.platform)


def describe_device(device: DeviceFacts) -> str:
    """Such as "tpu (TPU v6 lite)"."""
    return f"{platform_of(device)} ({device.device_kind})"


def find_device(wanted: str, *, min_cpus: int = 1) -> jax.Device:
    """The first device of this host, of a platform or of JAX's default one.

    min_cpus: devices that a CPU is to be shown as; it counts where JAX's back ends have not been started yet.
    Raises: ConfigError naming what JAX found.
    """
    if min_cpus > 1 and min_cpus > jax.config.jax_num_cpu_devices:
        with contextlib.suppress(RuntimeError):  # too late; the mesh will say how many there are
            jax.config.update("jax_num_cpu_devices", min_cpus)
    if wanted == "auto":
        return jax.local_devices()[0]
    try:
        return jax.local_devices(backend=wanted)[0]
    except RuntimeError as error:
        found = ", ".join(sorted({platform_of(device) for device in jax.devices()}))
        raise ConfigError(
            f"--device {wanted}: JAX found only {found}; --device auto takes it. A GPU needs the cuda extra of this "
            f"package and its driver, a TPU the tpu extra, and JAX_PLATFORMS must not leave it out"
        ) from error


def find_mesh(first: jax.Device, shape: MeshShape, devices: Sequence[jax.Device] | None = None) -> Mesh | None:
    """A mesh of some devices, None = all of the first one's platform; None for one device.

    Raises: ConfigError naming --mesh.
    """
    if shape.num_devices == 1:
        return None
    try:
        return make_mesh(shape, jax.devices(first.platform) if devices is None else devices)
    except MeshError as error:
        raise ConfigError(f"--mesh: {error}") from error


def choose_backend(
    device: jax.Device,
    wishes: Wishes,
    mesh: Mesh | None = None,
    *,
    model: ModelConfig | None = None,
    load: LoadKernels = load_kernels,
) -> Backend:
    """Resolve every ``auto`` for a device, or a mesh that begins with it.

    model: None = any. load: see LoadKernels; called where the CPU's kernels may run. Raises: ConfigError naming the
    flag.
    """
    is_cpu = platform_of(device) == "cpu"
    dtype = np.dtype(np.float32 if is_cpu else jnp.bfloat16) if wishes.dtype == "auto" else _float(wishes.dtype)
    isa, why_not = "", "the device is no CPU"
    if is_cpu and wishes.attention in ("auto", "cpu") and not wishes.interpret:
        kv_dtype = _choose_kv_dtype(device, wishes, Kernels(), dtype)
        isa, why_not = try_cpu_kernels(mesh, dtype, kv_dtype, model, load)
    kernels = _choose_kernels(device, wishes, isa, why_not)
    kv_dtype = _choose_kv_dtype(device, wishes, kernels, dtype)
    is_narrow_float = kv_dtype not in (np.dtype(np.float32), np.dtype(np.int8))
    return Backend(
        device=device,
        mesh=mesh,
        isa=isa,
        why=_why(kernels, wishes, isa, why_not if is_cpu else ""),
        kernels=kernels,
        dtype=dtype,
        weights=WeightScheme(wishes.weights),
        kv_dtype=kv_dtype,
        scan_layers=platform_of(device) == "tpu" or (wishes.interpret and kernels.implementation is Implementation.TPU),
        kv_as_bits=is_cpu
        and is_narrow_float
        and kernels.implementation in (Implementation.REFERENCE, Implementation.CPU),
    )


def _float(name: str) -> np.dtype:
    return np.dtype(jnp.bfloat16 if name == "bfloat16" else np.float32)


def _choose_kernels(device: DeviceFacts, wishes: Wishes, isa: str, why_not: str) -> Kernels:
    """isa: of the CPU's kernels, "" where they cannot run: why_not."""
    platform = platform_of(device)
    wanted = wishes.attention
    if wanted == "auto":
        wanted = platform if platform in ("tpu", "gpu") else "cpu" if isa else "reference"
    implementation = Implementation(wanted)
    if wishes.activations not in ("auto", Activations.EXACT) and implementation is not Implementation.CPU:
        raise ConfigError(
            f"--activations {wishes.activations} needs the CPU's kernels, and those that run are {wanted}"
            f"{f', since {why_not}' if platform == 'cpu' else ''}; take --activations auto or exact"
        )
    if implementation is Implementation.CPU and platform == "cpu":
        if not isa:
            raise ConfigError(f"--attention cpu: {why_not}; --attention reference runs everywhere, more slowly")
        activations = Activations.INT16 if wishes.activations == "auto" else Activations(wishes.activations)
        return Kernels(implementation=implementation, activations=activations, by_reference=BY_REFERENCE)
    if implementation is Implementation.REFERENCE:
        return Kernels()
    if wishes.interpret:
        return Kernels(implementation=implementation, chip=INTERPRETED_CHIPS[implementation], interpret=True)
    if wanted != platform:
        raise ConfigError(
            f"--attention {wanted} needs a {wanted.upper()}, and the device is {describe_device(device)}; take "
            f"--attention auto or reference, or --device {wanted} where there is one"
        )
    return Kernels(implementation=implementation, chip=_chip(device, f"--attention {wishes.attention}").name)


def _why(kernels: Kernels, wishes: Wishes, isa: str, why_not: str) -> str:
    if kernels.implementation is Implementation.CPU:
        return f"compiled for {isa}; by reference: {', '.join(kernels.by_reference)}"
    if kernels.implementation is Implementation.REFERENCE and wishes.attention == "auto":
        return f"plain XLA instead of the CPU's kernels, since {why_not}"
    return ""


def _choose_kv_dtype(device: DeviceFacts, wishes: Wishes, kernels: Kernels, dtype: np.dtype) -> np.dtype:
    if wishes.kv_dtype == "auto":
        return dtype
    if wishes.kv_dtype == "int8":
        return np.dtype(np.int8)
    if wishes.kv_dtype != "fp8":
        return _float(wishes.kv_dtype)
    if kernels.chip is None and platform_of(device) == "cpu":
        return np.dtype(jnp.float8_e4m3fn)
    chip = CHIPS[kernels.chip] if kernels.chip is not None else _chip(device, "--kv-dtype fp8")
    if chip.fp8 is None:
        raise ConfigError(f"--kv-dtype fp8: {chip.name} has no 8-bit floats; int8 takes the same memory")
    return np.dtype(getattr(jnp, chip.fp8))


def _chip(device: DeviceFacts, flag: str) -> Chip:
    try:
        return chip_of(device.device_kind)
    except UnsupportedCase as error:
        raise ConfigError(f"{flag}: {error.why}; --attention reference runs on every device") from error
