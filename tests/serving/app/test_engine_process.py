"""What the engine process does with files and options that cannot work: it ends soon, and says why."""

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.serving.app.build import EngineOptions, engine_launch
from headrace.serving.edge.engine_client import EngineClient, EngineStartError
from headrace.serving.edge.engine_connection import EngineLaunch
from headrace.serving.engine.link import encode_frame
from headrace.serving.engine.messages import Drain

LIMIT_S = 30.0


async def start_error(launch: EngineLaunch) -> str:
    client = EngineClient(launch)
    await client.start()
    try:
        with pytest.raises(EngineStartError) as caught:
            await asyncio.wait_for(client.wait_ready(), LIMIT_S)
    finally:
        await client.stop()
    return str(caught.value)


async def test_a_damaged_model_ends_with_file_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(10))
    error = await start_error(engine_launch(EngineOptions(model=str(path))))
    assert "broken.gguf: " in error
    assert "exit code 1" in error


async def test_a_missing_model_ends_with_its_path(tmp_path: Path) -> None:
    error = await start_error(engine_launch(EngineOptions(model=str(tmp_path / "nowhere.gguf"))))
    assert "nowhere.gguf" in error
    assert "exit code 1" in error


async def test_options_that_cannot_work_are_named(smollm2_path: Path) -> None:
    error = await start_error(engine_launch(EngineOptions(model=str(smollm2_path), context=1 << 20)))
    assert "context 1048576 is more than the 8192 positions of the model" in error


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"attention": "tpu"}, "--attention tpu needs a TPU, and the device is cpu (cpu); take --attention auto"),
        ({"attention": "gpu"}, "--attention gpu needs a GPU, and the device is cpu (cpu); take --attention auto"),
        ({"device": "tpu"}, "--device tpu: JAX found only cpu; --device auto takes it"),
        ({"attention": "tpu", "interpret": True, "page_size": 4}, "--page-size 4 must be a multiple of 8, since a TPU"),
    ],
    ids=str,
)
async def test_a_device_or_kernels_that_cannot_be_had_end_the_start(
    smollm2_path: Path, options: dict[str, object], says: str
) -> None:
    """Nothing else runs in their place."""
    error = await start_error(engine_launch(EngineOptions(model=str(smollm2_path), **options)))
    assert says in error
    assert "exit code 1" in error


async def test_unreadable_options_are_an_error() -> None:
    launch = replace(engine_launch(EngineOptions(model="x")), first_frame=encode_frame(Drain()))
    assert "unreadable options" in await start_error(launch)


@pytest.mark.parametrize("arguments", [[], ["--fd", "x"], ["--fd", "0"]], ids=str)
def test_nobody_starts_it_by_hand(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "headrace.serving.app.engine_process", *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S)
    assert done.returncode != 0
