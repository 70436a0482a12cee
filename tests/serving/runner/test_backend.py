"""What every combination of flags comes to on every kind of device, and the words of those that cannot be had."""

import re
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.pallas_kernels.kv_quantization import LARGEST, is_quantized
from headrace.pallas_kernels.native.build import BuildError
from headrace.pallas_kernels.types import Activations, Implementation, Kernels
from headrace.serving.app.build import ATTENTIONS, DTYPES, KV_DTYPES
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.kv_memory import ITEM_BYTES, KVFormat
from headrace.serving.runner.backend import Backend, Wishes, choose_backend, find_device
from headrace.serving.runner.warmup import Program
from tests.model.tiny import TINY


@dataclass(frozen=True)
class FakeDevice:
    platform: str
    device_kind: str


CPU = FakeDevice("cpu", "cpu")
V5E, V6E, V7X = (FakeDevice("tpu", kind) for kind in ("TPU v5 lite", "TPU v6 lite", "TPU7x"))
H100, A100 = FakeDevice("cuda", "NVIDIA H100 80GB HBM3"), FakeDevice("gpu", "NVIDIA A100-SXM4-40GB")
TPU, GPU, REFERENCE = Implementation.TPU, Implementation.GPU, Implementation.REFERENCE
BF16 = np.dtype(jnp.bfloat16)


def chosen(device: FakeDevice, **wishes: object) -> Backend:
    """Where the CPU's kernels cannot be built."""
    return choose_backend(device, Wishes(**wishes), load=no_compiler)  # type: ignore[arg-type]


def no_compiler() -> str:
    raise BuildError("no C++ compiler")


def with_cpu_kernels(device: FakeDevice, mesh: object = None, model: object = None, **wishes: object) -> Backend:
    return choose_backend(device, Wishes(**wishes), mesh, model=model, load=lambda: "avx2")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "kernels", "dtype", "scans"),
    [
        (CPU, Kernels(), np.dtype(np.float32), False),
        (V5E, Kernels(implementation=TPU, chip="v5e"), BF16, True),
        (V7X, Kernels(implementation=TPU, chip="tpu7x"), BF16, True),
        (H100, Kernels(implementation=GPU, chip="h100"), BF16, False),
    ],
)
def test_auto(device: FakeDevice, kernels: Kernels, dtype: np.dtype, scans: bool) -> None:
    backend = chosen(device)
    assert (backend.kernels, backend.dtype, backend.kv_dtype) == (kernels, dtype, dtype)
    assert backend.scan_layers == scans
    assert backend.device is device


def test_a_cpu_without_its_kernels_gets_the_reference_and_the_reason() -> None:
    backend = chosen(CPU)
    why = "plain XLA instead of the CPU's kernels, since they could not be built or loaded: no C++ compiler"
    assert backend == Backend(device=CPU, why=why)  # type: ignore[arg-type]
    assert chosen(CPU, attention="reference").why == ""


def test_a_cpu_with_its_kernels() -> None:
    backend = with_cpu_kernels(CPU)
    kernels = Kernels(
        implementation=Implementation.CPU, activations=Activations.INT16, by_reference=("grouped_matmul",)
    )
    assert (backend.kernels, backend.isa, backend.dtype) == (kernels, "avx2", np.dtype(np.float32))
    assert backend.why == "compiled for avx2; by reference: grouped_matmul"
    assert backend.kv_format == KVFormat(
        dtype="float32", page_multiple=8, why_multiple="the CPU's kernels read 8 tokens at once"
    )
    assert with_cpu_kernels(CPU, activations="int8").kernels.activations is Activations.INT8
    assert with_cpu_kernels(CPU, kv_dtype="bfloat16").kv_as_bits
    assert with_cpu_kernels(V6E).kernels.implementation is TPU


@pytest.mark.parametrize(
    ("wishes", "mesh", "why"),
    [
        ({}, "a mesh", "they run on one device, and --mesh has several"),
        ({"dtype": "bfloat16"}, None, r"they read float32 and --dtype is bfloat16 \(take --dtype float32"),
        ({"kv_dtype": "fp8"}, None, "they have no --kv-dtype float8_e4m3fn .*float32, bfloat16, int8"),
    ],
)
def test_what_the_cpu_kernels_cannot_run(wishes: dict, mesh: object, why: str) -> None:
    """By itself the choice is the reference, with the reason; asked for by name it is refused."""
    backend = with_cpu_kernels(CPU, mesh, **wishes)
    assert backend.kernels == Kernels() and re.search(why, backend.why)
    with pytest.raises(ConfigError, match=f"--attention cpu: {why}.*; --attention reference runs everywhere"):
        with_cpu_kernels(CPU, mesh, attention="cpu", **wishes)


def test_models_that_the_cpu_kernels_cannot_run_are_named() -> None:
    odd = replace(TINY, head_dim=12)
    assert "they cannot run this model: heads of 12" in with_cpu_kernels(CPU, model=odd).why
    assert with_cpu_kernels(CPU, model=TINY).isa == "avx2"


@pytest.mark.parametrize("device", [CPU, V6E])
def test_activations_need_the_cpu_kernels(device: FakeDevice) -> None:
    with pytest.raises(ConfigError, match="--activations int8 needs the CPU's kernels.*take --activations auto or ex"):
        chosen(device, activations="int8")
    assert chosen(device, activations="exact").kernels == chosen(device).kernels


@pytest.mark.parametrize("device", [V6E, H100, A100])
def test_the_reference_runs_on_every_device(device: FakeDevice) -> None:
    assert chosen(device, attention="reference").kernels == Kernels()


@pytest.mark.parametrize(
    ("device", "wishes", "words"),
    [
        (
            CPU,
            {"attention": "tpu"},
            r"--attention tpu needs a TPU, and the device is cpu \(cpu\); .* or reference",
        ),
        (
            CPU,
            {"attention": "cpu"},
            "--attention cpu: they could not be built .*: no C.. compiler; --attention reference",
        ),
        (V6E, {"attention": "cpu"}, r"--attention cpu needs a CPU, and the device is tpu \(TPU v6 lite\)"),
        (CPU, {"attention": "gpu"}, r"--attention gpu needs a GPU, and the device is cpu \(cpu\); .* --device gpu"),
        (H100, {"attention": "tpu"}, r"--attention tpu needs a TPU, .* gpu \(NVIDIA H100 80GB HBM3\)"),
        (V6E, {"attention": "gpu"}, r"--attention gpu needs a GPU, .* tpu \(TPU v6 lite\)"),
        (A100, {}, "--attention auto: no kernels .*'NVIDIA A100-SXM4-40GB'; known: .*H100.*--attention reference"),
        (A100, {"attention": "gpu"}, "--attention gpu: no kernels were compiled"),
        (V5E, {"kv_dtype": "fp8"}, "--kv-dtype fp8: v5e has no 8-bit floats; int8"),
        (A100, {"attention": "reference", "kv_dtype": "fp8"}, "--kv-dtype fp8: no kernels were compiled"),
    ],
)
def test_what_cannot_be_had_names_flag_device_and_remedy(device: FakeDevice, wishes: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        chosen(device, **wishes)


@pytest.mark.parametrize(
    ("device", "kv_dtype", "name"),
    [
        (CPU, "fp8", "float8_e4m3fn"),
        (V6E, "fp8", "float8_e5m2"),
        (V7X, "fp8", "float8_e4m3fn"),
        (H100, "fp8", "float8_e4m3fn"),
        (V5E, "int8", "int8"),
        (V6E, "float32", "float32"),
        (CPU, "bfloat16", "bfloat16"),
    ],
)
def test_kv_types(device: FakeDevice, kv_dtype: str, name: str) -> None:
    backend = chosen(device, kv_dtype=kv_dtype)
    assert backend.kv_dtype.name == backend.kv_format.dtype == name


def test_only_the_reference_on_a_cpu_holds_narrow_floats_as_integers() -> None:
    for kv_dtype in ("float32", "bfloat16", "int8", "fp8"):
        assert chosen(CPU, kv_dtype=kv_dtype).kv_as_bits == (kv_dtype in ("bfloat16", "fp8"))
        assert not chosen(V6E, kv_dtype=kv_dtype, attention="reference").kv_as_bits
        assert not chosen(CPU, kv_dtype=kv_dtype, attention="tpu", interpret=True).kv_as_bits


def test_kv_follows_the_type_of_products() -> None:
    assert chosen(CPU, dtype="bfloat16").kv_dtype == BF16
    assert chosen(V6E, dtype="float32").kv_dtype == np.float32
    assert chosen(V6E, dtype="float32").dtype == np.float32


@pytest.mark.parametrize(
    ("device", "kv_dtype", "page_tokens", "multiple"),
    [
        (CPU, "float32", 16, 1),
        (CPU, "int8", 16, 1),
        (V6E, "float32", 64, 8),
        (V6E, "bfloat16", 64, 16),
        (V6E, "int8", 128, 128),
        (V6E, "fp8", 128, 128),
        (H100, "int8", 64, 1),
    ],
)
def test_pages(device: FakeDevice, kv_dtype: str, page_tokens: int, multiple: int) -> None:
    kv = chosen(device, kv_dtype=kv_dtype).kv_format
    assert (kv.page_tokens, kv.page_multiple) == (page_tokens, multiple)
    assert page_tokens % multiple == 0
    assert bool(kv.why_multiple) == (multiple > 1)


def test_interpreted_kernels_run_anywhere_with_a_chips_limits() -> None:
    assert chosen(CPU, attention="tpu", interpret=True).kernels == Kernels(
        implementation=TPU, chip="v6e", interpret=True
    )
    backend = chosen(CPU, attention="gpu", interpret=True, kv_dtype="fp8")
    assert backend.kernels == Kernels(implementation=GPU, chip="h100", interpret=True)
    assert (backend.dtype, backend.kv_dtype.name, backend.scan_layers) == (np.float32, "float8_e4m3fn", False)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_every_wish_of_the_command_line_comes_to_something(attention: str, dtype: str, kv_dtype: str) -> None:
    device = {"tpu": V6E, "cpu": CPU}.get(attention, H100)
    if attention == "cpu" and (dtype == "bfloat16" or kv_dtype == "fp8"):
        with pytest.raises(ConfigError, match="--attention cpu: they (read|have)"):
            with_cpu_kernels(device, attention=attention, dtype=dtype, kv_dtype=kv_dtype)
        return
    backend = with_cpu_kernels(device, attention=attention, dtype=dtype, kv_dtype=kv_dtype)
    assert attention in ("auto", str(backend.kernels.implementation))
    assert dtype in ("auto", backend.dtype.name)


def test_the_table_of_bytes_has_every_type_that_a_pool_can_have() -> None:
    assert set(ITEM_BYTES) == {"float32", "bfloat16", *(dtype.name for dtype in LARGEST)}
    for name, size in ITEM_BYTES.items():
        dtype = np.dtype(getattr(jnp, name))
        assert dtype.itemsize == size
        assert bool(KVFormat(dtype=name).scale_bytes) == is_quantized(dtype)


def test_a_device_that_is_not_there_names_what_is() -> None:
    assert find_device("auto") == find_device("cpu") == jax.devices()[0]
    with pytest.raises(ConfigError, match="--device tpu: JAX found only cpu; --device auto takes it"):
        find_device("tpu")


def test_what_deterministic_mode_tells_the_compiler() -> None:
    assert chosen(H100).deterministic_options == {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}
    assert chosen(CPU).deterministic_options == chosen(V6E).deterministic_options == {}


def test_compiler_options_reach_the_compiler() -> None:
    program = Program(function=lambda x: x + 1, donated=(), arguments=(jax.ShapeDtypeStruct((2,), jnp.float32),))
    assert program.compile(None, {}).memory_analysis() is not None
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_nothing'"):
        program.compile(None, {"xla_nothing": True})
