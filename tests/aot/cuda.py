"""Compilation for NVIDIA GPUs that are not there, by the CUDA plugin and ptxas, and what must hold of the result.

The plugin compiles for a description of the device (``sharding/targets``); no driver is needed. Registers and spills
are those that ptxas reports for the very PTX that XLA compiles, from the wheel that XLA takes ptxas from too.
"""

import functools
import importlib.util
import re
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from headrace.pallas_kernels.chips import CHIPS
from headrace.pallas_kernels.types import UnsupportedCase
from headrace.sharding.slices import parse_slice
from headrace.sharding.topologies import topology_devices
from tests.aot import hlo
from tests.aot.matrix import Built
from tests.aot.outcome import Failing, Outcome, failed

IN_PLACE_ROOTS = ("scatter", "dynamic-update-slice")
"""What a fusion may end in that has the shape of a donated array: XLA:GPU writes these into their operand. Were one not
in place, the aliased bytes or the temporaries would show it."""
_LAUNCH = re.compile(r"kCustomKernel .*\] (?P<name>\S+) +grid: .*shared_memory: (?P<bytes>\d+) bytes")
_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)'")
_SPILLS = re.compile(r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes")
_REGISTERS = re.compile(r"Used (?P<registers>\d+) registers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One compiled GPU function. registers: of a thread. spill_bytes: stores and loads of a thread. shared_bytes: of a
    block, as launched. is_ours: a Pallas kernel, not one of XLA's fusions."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    is_ours: bool

    def figures(self) -> dict[str, Any]:
        return asdict(self)


@functools.cache
def mesh_of(chip: str) -> Mesh:
    """One device of a chip, from its description."""
    return Mesh(np.array(topology_devices(parse_slice(f"{chip}:1"))), ("one",))


@functools.cache
def ptxas() -> Path:
    """Raises: FileNotFoundError naming the package that brings it."""
    spec = importlib.util.find_spec("nvidia.cuda_nvcc")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        program = Path(folder) / "bin" / "ptxas"
        if program.exists():
            return program
    raise FileNotFoundError("no ptxas: pip install nvidia-cuda-nvcc-cu12 (make aot-cuda does it)")


def compile_for(chip: str, built: Built, dump: Path) -> jax.stages.Compiled:
    """Raises: what tracing, Triton or XLA raise."""
    mesh = mesh_of(chip)
    sharding = NamedSharding(mesh, PartitionSpec())
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), built.arguments)
    with jax.set_mesh(mesh):
        lowered = jax.jit(built.function, donate_argnums=built.donated).lower(*arguments)
    # XLA of JAX 0.10 dumps PTX always, that of 0.12 where its emitter is named.
    return lowered.compile(compiler_options={"xla_dump_to": str(dump), "xla_dump_emitter_re": "ptx"})


def check(name: str, chip: str, built: Built, dump: Path, *, needs_kernel: bool) -> Outcome:
    """Compile and look. needs_kernel: a program without a kernel of ours is a failure."""
    shutil.rmtree(dump, ignore_errors=True)
    dump.mkdir(parents=True)
    started_s = time.monotonic()
    try:
        compiled = compile_for(chip, built, dump)
    except UnsupportedCase as error:
        return failed(name, started_s, Failing.UNSUPPORTED, error.why)
    except Exception as error:  # whatever the compiler says is the finding
        return failed(name, started_s, Failing.COMPILER, f"{type(error).__name__}: {error}"[:2000])
    seconds = round(time.monotonic() - started_s, 2)
    kernels = read_kernels(dump, our_names(compiled.as_text()))
    largest = largest_temporary("".join(path.read_text() for path in dump.glob("*-buffer-assignment.txt")))
    text, memory = compiled.as_text(), compiled.memory_analysis()
    temporary, alias = int(memory.temp_size_in_bytes), int(memory.alias_size_in_bytes)
    failures: list[tuple[Failing, str]] = []
    if alias < built.donated_bytes:
        failures.append((Failing.ALIAS, f"{alias} bytes are aliased, {built.donated_bytes} were donated"))
    if largest >= built.bound_bytes:
        failures.append((Failing.TEMPORARY, f"a temporary of {largest} bytes; the bound is {built.bound_bytes}"))
    failures += [(Failing.COPY, found) for found in copies(text, built)]
    limit = CHIPS[chip].on_chip_bytes
    for function, kernel in kernels.items():
        if kernel.spill_bytes:
            failures.append((Failing.SPILL, f"{function}: {kernel.spill_bytes} bytes, {kernel.registers} registers"))
        if kernel.shared_bytes > limit:
            failures.append((Failing.SHARED, f"{function}: {kernel.shared_bytes} bytes; a block has {limit}"))
    if needs_kernel and not any(kernel.is_ours for kernel in kernels.values()):
        failures.append((Failing.KERNEL, "no kernel of ours was compiled"))
    return Outcome(
        name=name,
        seconds=seconds,
        failures=tuple(failures),
        temporary_bytes=temporary,
        largest_temporary_bytes=largest,
        alias_bytes=alias,
        kernels={name: kernel for name, kernel in kernels.items() if kernel.is_ours},
    )


def our_names(text: str) -> set[str]:
    """Names of the Pallas kernels that optimized HLO calls, as their PTX has them."""
    calls = (i.text for i in hlo.instructions(text) if i.opcode == "custom-call" and "__gpu$xla.gpu.triton" in i.text)
    return {name for call in calls for name in re.findall(r'\bname = "([^"]+)"', call)}


def read_kernels(dump: Path, ours: set[str]) -> dict[str, Kernel]:
    """Every GPU function of a dump: PTX through ptxas, and shared memory from the launches.

    Raises: AssertionError where a launched kernel has no PTX: what is not read cannot pass.
    """
    launches = {
        found["name"]: int(found["bytes"])
        for path in dump.glob("*thunk_sequence.txt")
        for found in _LAUNCH.finditer(path.read_text())
    }
    kernels = {}
    for path in dump.glob("*.ptx"):
        text = path.read_text()
        if ".entry" not in text:  # constants have a file of their own, often empty
            continue
        target = re.search(r"^\.target (\S+?)[,\s]", text, re.MULTILINE)
        assert target, f"{path.name} names no target"
        command = [str(ptxas()), "--verbose", f"--gpu-name={target[1]}", "--output-file=/dev/null", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        for function, registers, spills in read_report(done.stderr):
            kernels[function] = Kernel(
                registers=registers,
                spill_bytes=spills,
                shared_bytes=launches.get(function, 0),
                is_ours=function in ours,
            )
    missing = (set(launches) | ours) - set(kernels)
    assert not missing, f"no PTX of {sorted(missing)} among {sorted(kernels)}"
    return kernels


def read_report(report: str) -> list[tuple[str, int, int]]:
    """(function, registers, bytes spilled) of each entry in the report of ptxas --verbose."""
    found = []
    for part in report.split("Compiling entry function")[1:]:
        entry = _ENTRY.match("Compiling entry function" + part)
        spills, registers = _SPILLS.search(part), _REGISTERS.search(part)
        assert entry and spills and registers, f"ptxas reports in another form: {part[:300]}"
        found.append((entry["name"], int(registers["registers"]), int(spills["stores"]) + int(spills["loads"])))
    return found


def largest_temporary(assignment: str) -> int:
    """Bytes of the largest array in XLA's report of buffers that is neither an argument, a result nor a constant.

    Raises: AssertionError for a report that names no allocation: what is not read cannot pass.
    """
    assert "allocation 0: size" in assignment, f"buffers are reported in another form: {assignment[:300]}"
    temporary = re.findall(r"^allocation \d+: .*preallocated-temp:\n((?: value: .*\n?)+)", assignment, re.MULTILINE)
    sizes = (int(size) for values in temporary for size in re.findall(r"\(size=(\d+),offset=", values))
    return max(sizes, default=0)


def copies(text: str, built: Built) -> list[str]:
    """Instructions that make another array of the size and width of a donated one or of a weight, or one that reaches
    the bound."""
    return [
        f"{instruction.opcode} makes {instruction.text[:160]}"
        for instruction in hlo.made(text)
        if not _is_in_place(instruction, text) and any(built.is_copy(shape) for shape in instruction.shapes)
    ]


def _is_in_place(instruction: hlo.Instruction, text: str) -> bool:
    if instruction.opcode in IN_PLACE_ROOTS:
        return True
    called = re.search(r"\bcalls=%?([\w.<>-]+)", instruction.text)
    if instruction.opcode != "fusion" or called is None:
        return False
    body = re.search(rf"^%?{re.escape(called[1])} \(.*?^\}}", text, re.MULTILINE | re.DOTALL)
    root = re.search(r"^\s+ROOT .*?\s([a-z][a-z0-9-]*)\(", body[0], re.MULTILINE) if body else None
    return root is not None and root[1] in IN_PLACE_ROOTS
