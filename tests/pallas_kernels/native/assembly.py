"""Reads the machine code of a function: does a loop of it spill vector registers to the stack?

An accumulator that goes to the stack and back in an inner loop halves a kernel's speed and changes no result. GCC 12
did that to products whose sums it computed all before it added them. A timing shows it on a quiet machine only; the
code shows it always.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
_INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(\S+)\s*(.*)$")
_JUMP = re.compile(r"^(j\w+|b|b\.\w+|cbn?z|tbn?z|loop\w*)$")
_TARGET = re.compile(r"\b([0-9a-f]+)\s+<")
_X86_STACK = re.compile(r"\(%r[sb]p")
_X86_VECTOR = re.compile(r"%[xyz]mm\d+")
_ARM_STACK = re.compile(r"\[(sp|x29)\b")
_ARM_VECTOR = re.compile(r"\bq\d+\b")


@dataclass(frozen=True, slots=True)
class Instruction:
    address: int
    name: str
    operands: str

    @property
    def stores_vector_on_stack(self) -> bool:
        """A move of a vector register to the frame. Scalar float moves (movss, movsd) and reads do not count: a
        constant that is read from the frame costs what one from anywhere costs."""
        if self.name.startswith(("vmov", "mova", "movu")):
            *sources, target = self.operands.split(",")
            is_store = bool(_X86_STACK.search(self.operands)) and not _X86_VECTOR.search(target)
            return is_store and self.name not in ("vmovss", "vmovsd") and bool(_X86_VECTOR.search(",".join(sources)))
        is_store = self.name in ("str", "stp", "stur")
        return is_store and bool(_ARM_STACK.search(self.operands)) and bool(_ARM_VECTOR.search(self.operands))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """From the target of a backward jump to the jump."""

    instructions: tuple[Instruction, ...]

    @property
    def num_spills(self) -> int:
        return sum(instruction.stores_vector_on_stack for instruction in self.instructions)

    @property
    def length(self) -> int:
        return len(self.instructions)


def functions(path: Path, pattern: str) -> dict[str, list[Instruction]]:
    """Instructions of all functions in an object or a library whose demangled name the pattern finds; a function that
    is nowhere else than inlined is not there. Skips the test where objdump is missing."""
    program = shutil.which("objdump")
    if program is None:
        pytest.skip("objdump is not installed (binutils)")
    text = subprocess.run(
        [program, "-d", "-C", "--no-show-raw-insn", str(path)], capture_output=True, text=True, check=True
    ).stdout
    return {name: found for name, found in _parsed(text) if re.search(pattern, name)}


def loops(instructions: list[Instruction]) -> list[Loop]:
    """Innermost loops, those that have no other in them."""
    place = {instruction.address: number for number, instruction in enumerate(instructions)}
    spans = set()
    for number, instruction in enumerate(instructions):
        target = _TARGET.search(instruction.operands)
        if _JUMP.match(instruction.name) and target is not None:
            first = place.get(int(target.group(1), 16))
            if first is not None and first <= number:
                spans.add((first, number))
    inner = [
        (first, last)
        for first, last in spans
        if not any((a, b) != (first, last) and first <= a and b <= last for a, b in spans)
    ]
    return [Loop(instructions=tuple(instructions[first : last + 1])) for first, last in sorted(inner)]


def spills(path: Path, pattern: str) -> dict[str, int]:
    """Vector registers stored on the stack in innermost loops, by function; each matching function is in it.

    Raises AssertionError: no function matches, so that a renamed kernel does not pass unseen.
    """
    found = functions(path, pattern)
    assert found, f"{path} has no function that {pattern!r} finds"
    return {name: sum(loop.num_spills for loop in loops(code)) for name, code in found.items()}


def _parsed(text: str) -> Iterator[tuple[str, list[Instruction]]]:
    name: str | None = None
    code: list[Instruction] = []
    for line in text.splitlines():
        if head := _FUNCTION.match(line):
            if name is not None:
                yield name, code
            name, code = head.group(1), []
        elif found := _INSTRUCTION.match(line):
            address, mnemonic, operands = found.groups()
            code.append(Instruction(int(address, 16), mnemonic, operands.partition("#")[0]))
    if name is not None:
        yield name, code
