"""What a person is shown at the start: the arithmetic must add up."""

import io
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console

from headrace.serving.app.build import EngineOptions
from headrace.serving.app.console import ProgressDisplay, print_configuration, print_ledger
from headrace.serving.app.options import ServeOptions
from headrace.serving.core.kv_memory import DeviceMemory
from headrace.serving.engine.messages import ProgramInfo, Ready, Topology
from tests.model.tiny import SMOLLM2


def printed(show: object, *arguments: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    show(console, *arguments)  # type: ignore[operator]
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


READY = Ready(
    model_hash="ab",
    num_pages=1025,
    page_size=16,
    num_slots=8,
    max_context=8192,
    kv_bytes_per_token=46_080,
    weights_bytes=538_000_000,
    programs=(),
    topology=Topology(platform="cpu", device_kind="cpu"),
    mesh="tensor=1",
    attention="reference",
    dtype="float32",
    weights="native",
    kv_dtype="float32",
    kv_bytes=1025 * 737_280,
    memory=None,
    warmup_seconds=3.5,
)


def test_what_is_known_before_the_engine_has_a_device() -> None:
    engine = EngineOptions(model="m.gguf", num_slots=8, dtype="bfloat16")
    options = ServeOptions(model_name="small", model_path=Path("m.gguf"), engine=engine)
    text = printed(print_configuration, options, SMOLLM2)
    assert "this machine alone; no keys; origins: the server's own; http" in text
    asked = (
        "--device auto --mesh tensor=1 --attention auto --activations auto --dtype bfloat16 --weights native "
        "--kv-dtype auto; what"
    )
    assert asked in text
    assert "up to 8 streams and 256 prompt tokens a step; prefix cache on" in text
    assert "where it is for this model; every 300 s; without a record unchecked" in text
    strict = replace(options, probes=(Path("a.json"), Path("records")), require_probe=True)
    text = printed(print_configuration, strict, SMOLLM2)
    assert "by probe record: a.json, records; every 300 s; without a record not ready" in text
    assert "KV per token" not in text and "pages" not in text  # they follow from the device


def test_kernels_of_the_cpu_are_named_with_their_choices_and_the_scheme() -> None:
    lines = ("Q8_0 -> int8 in groups of 32, exact: embed_VD (1)", "F32 -> float32, exact: final_norm_D (1)")
    changes = {"attention": "cpu", "activations": "int16", "why": "compiled for avx2", "scheme_lines": lines}
    text = printed(print_ledger, SMOLLM2, msgspec.structs.replace(READY, **changes))
    assert "kernels cpu, inputs of products with quantized weights int16; compiled for avx2 types" in text
    assert " ".join(("weights", *lines)) in text


def test_quantized_weights_are_named() -> None:
    text = printed(print_ledger, SMOLLM2, msgspec.structs.replace(READY, weights="int8", dtype="bfloat16"))
    assert "types weights of products int8; products bfloat16, KV float32" in text


def test_memory_arithmetic() -> None:
    text = printed(print_ledger, SMOLLM2, READY)
    assert "device cpu:cpu, mesh tensor=1 kernels reference types weights and products float32, KV float32" in text
    assert "2 × 30 layers × 3 heads × 64 × 4 bytes = 46,080 bytes" in text
    assert "1,024 pages × 16 tokens = 16,384 tokens, 756 MB" in text  # 1,025 pages of 737,280 bytes
    assert "2.0 streams of the whole context (8,192 tokens), or 8 streams of 2,048 tokens each" in text
    assert "memory" not in text


def test_swap_space_is_printed_in_bytes_and_time() -> None:
    text = printed(print_ledger, SMOLLM2, msgspec.structs.replace(READY, num_swap_pages=1000, swap_page_s=0.0022))
    assert "1,000 pages of host memory, up to 737 MB; a page takes 2.2 ms there and back" in text


def test_memory_arithmetic_of_a_device_with_factors() -> None:
    memory = DeviceMemory(
        limit_bytes=16_000_000_000,
        fraction=0.9,
        weights_bytes=269_000_000,
        state_bytes=3_000_000,
        temporary_bytes=40_000_000,
        steps_bytes=1_000_000,
        page_bytes=1_600_000,
    )
    ready = msgspec.structs.replace(READY, kv_dtype="int8", kv_bytes_per_token=12_240, memory=memory)
    text = printed(print_ledger, SMOLLM2, ready)
    assert "2 × 30 layers × 3 heads × (64 × 1 + 4 for its factor) bytes = 12,240 bytes" in text
    assert 2 * 30 * 3 * (64 * 1 + 4) == 12_240
    assert "0.9 of 16,000 MB, less 269 MB of weights, 40 MB of temporaries, 4 MB of sampling state and steps" in text
    assert "a page takes 1,600,000 bytes" in text


def test_the_ledger_names_each_program() -> None:
    programs = (
        ProgramInfo("decode-4", seconds=1.25, temp_bytes=2_500_000, from_cache=False),
        ProgramInfo("mixed-64", seconds=0.5, temp_bytes=0, from_cache=True),
    )
    text = printed(print_ledger, SMOLLM2, msgspec.structs.replace(READY, programs=programs))
    assert "decode-4 1.25 2.5 no" in text
    assert "mixed-64 0.50 0.0 yes" in text
    assert "cpu:cpu: 538 MB of weights, 2 programs, ready after 3.5 s" in text


def test_progress_without_a_terminal_is_one_line_per_text() -> None:
    console = Console(file=io.StringIO(), width=120)
    with ProgressDisplay(console) as display:
        for done in range(4):
            display.update("loading weights", done, 3)
        display.update("compiling decode-4", 0, 2)
    assert console.file.getvalue() == "loading weights\ncompiling decode-4\n"  # type: ignore[attr-defined]


def test_a_mesh_is_printed_with_its_devices_and_what_joins_them() -> None:
    topology = Topology(platform="tpu", device_kind="TPU v6 lite", num_devices=8, num_processes=2, link="ICI")
    text = printed(
        print_ledger, SMOLLM2, msgspec.structs.replace(READY, mesh="data=2,tensor=4", topology=topology, hosts=2)
    )
    assert "device 8 × tpu:TPU v6 lite of 2 hosts, of which this is rank 0, mesh data=2,tensor=4, joined by ICI" in text
