"""What a worker process of ``scripts/aot_cuda.py`` runs."""

from pathlib import Path

from tests.aot import cuda_faults, matrix, steps, swaps
from tests.aot.cuda import check, compile_for
from tests.aot.matrix import Entry, Operation
from tests.aot.outcome import Failing, Outcome, of_fault
from tests.aot.steps import WholeStep
from tests.aot.swaps import Swap


def entry(of: Entry, dump: Path) -> Outcome:
    """One entry of the matrix. Page writes and products with one scale per column are XLA's own on GPU."""
    is_xla = of.operation is Operation.WRITE or (of.operation is Operation.QUANT and of.dtype == "int8")
    return check(of.name, of.chip, matrix.build(of), dump, needs_kernel=not is_xla)


def step(of: WholeStep, dump: Path) -> Outcome:
    return check(of.name, of.chip, steps.build_step(of), dump, needs_kernel=True)


def swap(of: Swap, dump: Path) -> Outcome:
    return swaps.check(of.name, swaps.build_swap(of), lambda built: compile_for(of.chip, built, dump))


def fault(name: str, dump: Path) -> Outcome:
    """A planted fault, see ``outcome.of_fault``."""
    make, failing, word = cuda_faults.FAULTS[name]
    outcome = check(name, cuda_faults.CHIP, make(), dump, needs_kernel=failing is Failing.KERNEL)
    return of_fault(outcome, failing, word)
