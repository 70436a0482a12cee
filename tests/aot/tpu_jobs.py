"""What a worker process runs: imported there, after libtpu's variables are set."""

import functools
from pathlib import Path

import jax

from headrace.sharding.slices import parse_slice
from headrace.sharding.topologies import topology_devices
from tests.aot import matrix, steps, swaps, tpu, tpu_faults
from tests.aot.matrix import ATTENTION, Entry
from tests.aot.outcome import Outcome, of_fault
from tests.aot.steps import WholeStep
from tests.aot.swaps import Swap


def entry(of: Entry, dump: Path) -> Outcome:
    """One entry of the matrix. Products may be XLA's own, attention and writes may not."""
    return tpu.check(of.name, of.chip, matrix.build(of), dump, needs_kernel=of.operation in ATTENTION)


def step(of: WholeStep, dump: Path) -> Outcome:
    return tpu.check(of.name, of.chip, steps.build_step(of, _devices(of)), dump, needs_kernel=True)


def swap(of: Swap, dump: Path) -> Outcome:
    return swaps.check(of.name, swaps.build_swap(of, _devices(of)), functools.partial(tpu.compile_for, of.chip))


def _devices(of: WholeStep | Swap) -> tuple[jax.Device, ...]:
    if of.topology is None:
        return tuple(tpu.mesh_of(of.chip).devices.flat)
    return tuple(topology_devices(parse_slice(of.topology)))


def fault(name: str, dump: Path) -> Outcome:
    """A planted fault: no failures where its check found it, else what is wrong with the check."""
    make, failing, word = tpu_faults.FAULTS[name]
    outcome = tpu.check(name, tpu_faults.CHIP, make(), dump, needs_kernel=True)
    return of_fault(outcome, failing, word)
