"""JAX's TPU interpreter as the kernel tests use it: memory full of NaN, copies that land only when waited for, bounds
checked, and a race detector whose verdict covers every kernel of a call."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu


def parameters(*, dma_execution_mode: str = "on_wait", num_cores: int = 1) -> pltpu.InterpretParams:
    """Value of ``Kernels.interpret``. Races are noted instead of raised (JAX 0.12 raises, 0.10 cannot), so that one
    test reads them in the same way in every version.

    dma_execution_mode: "on_wait": a copy happens when its semaphore is waited for; "eager": when it is started.
    num_cores: cores of a chip, which share the parallel axes of a grid.
    """
    fields = {field.name for field in dataclasses.fields(pltpu.InterpretParams)}
    return pltpu.InterpretParams(
        detect_races=True,
        uninitialized_memory="nan",
        dma_execution_mode=dma_execution_mode,
        out_of_bounds_reads="raise",
        num_cores_or_threads=num_cores,
        **({"on_race": "warn"} if "on_race" in fields else {}),
    )


@contextmanager
def _race_states() -> Iterator[list[Any]]:
    """Race states of all kernels that run inside. The interpreter replaces its state at each kernel, so that the one
    it shows afterwards knows of the last kernel only."""
    states: list[Any] = []
    make_state = interpret_pallas_call.RaceDetectionState

    def recorded(*args: Any, **kwargs: Any) -> Any:
        states.append(make_state(*args, **kwargs))
        return states[-1]

    interpret_pallas_call.RaceDetectionState = recorded
    try:
        yield states
    finally:
        interpret_pallas_call.RaceDetectionState = make_state


def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, bool]:
    """(result as NumPy arrays, whether a kernel raced). Fails where no kernel ran in the interpreter, and where this
    version of JAX keeps its verdict elsewhere: silence must not read as "no race"."""
    pltpu.reset_tpu_interpret_mode_state()
    try:
        with _race_states() as states:
            result = jax.tree.map(np.asarray, jax.block_until_ready(function(*args, **kwargs)))
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    assert states, "no kernel ran in the TPU interpreter"
    verdicts = [state.races_found for state in states]
    assert all(isinstance(verdict, bool) for verdict in verdicts), f"races_found of {jax.__version__} is {verdicts}"
    return result, any(verdicts)


def run_without_race(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Result as NumPy arrays; fails where a kernel raced."""
    result, has_raced = run(function, *args, **kwargs)
    assert not has_raced, "the race detector printed what it found"
    return result
