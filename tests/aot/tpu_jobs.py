"""What a worker process runs: imported there, after libtpu's variables are set."""

from pathlib import Path

from headrace.sharding.topologies import topology_devices
from tests.aot import matrix, steps, tpu, tpu_faults
from tests.aot.matrix import ATTENTION, Entry
from tests.aot.outcome import Outcome, of_fault
from tests.aot.steps import WholeStep


def entry(of: Entry, dump: Path) -> Outcome:
    """One entry of the matrix. Products may be XLA's own, attention and writes may not."""
    return tpu.check(of.name, of.chip, matrix.build(of), dump, needs_kernel=of.operation in ATTENTION)


def step(of: WholeStep, dump: Path) -> Outcome:
    devices = tpu.mesh_of(of.chip).devices.flat if of.topology is None else topology_devices(of.topology)
    built = steps.build_step(of, tuple(devices))
    return tpu.check(of.name, of.chip, built, dump, needs_kernel=True)


def fault(name: str, dump: Path) -> Outcome:
    """A planted fault: no failures where its check found it, else what is wrong with the check."""
    make, failing, word = tpu_faults.FAULTS[name]
    outcome = tpu.check(name, tpu_faults.CHIP, make(), dump, needs_kernel=True)
    return of_fault(outcome, failing, word)
