"""What a person is shown at the start: the arithmetic must add up."""

import io
from pathlib import Path

from rich.console import Console

from headrace.serving.app.build import EngineOptions, resolve
from headrace.serving.app.console import ProgressDisplay, print_configuration, print_ledger
from headrace.serving.app.options import ServeOptions
from headrace.serving.engine.messages import ProgramInfo, Ready
from tests.model.tiny import SMOLLM2


def printed(show: object, *arguments: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    show(console, *arguments)  # type: ignore[operator]
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def test_memory_arithmetic() -> None:
    engine = EngineOptions(model="m.gguf", pages=1025, page_size=16, num_slots=8)
    options = ServeOptions(model_name="small", model_path=Path("m.gguf"), engine=engine)
    text = printed(print_configuration, options, SMOLLM2, resolve(engine, SMOLLM2))
    assert "2 × 30 layers × 3 heads × 64 × 4 bytes = 46,080 bytes" in text
    assert "1,024 pages × 16 tokens = 16,384 tokens, 756 MB" in text  # 1,025 pages of 737,280 bytes
    assert "2.0 streams of the whole context (8,192 tokens), or 8 streams of 2,048 tokens each" in text
    assert "this machine alone; no keys; origins: the server's own; http" in text


def test_the_ledger_names_each_program() -> None:
    programs = (
        ProgramInfo("decode-4", seconds=1.25, temp_bytes=2_500_000, from_cache=False),
        ProgramInfo("mixed-64", seconds=0.5, temp_bytes=0, from_cache=True),
    )
    ready = Ready(
        model_hash="ab",
        num_pages=9,
        page_size=16,
        num_slots=4,
        max_context=64,
        kv_bytes_per_token=8,
        weights_bytes=538_000_000,
        programs=programs,
        device="cpu:cpu",
        warmup_seconds=3.5,
    )
    text = printed(print_ledger, ready)
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
