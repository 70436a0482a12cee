"""Reading optimized HLO text: which kernels a program calls, and which large arrays it makes."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16, "s32": 32,
        "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "f8e5m2": 8, "f8e4m3fn": 8, "f8e4m3": 8,
        "f8e8m0fnu": 8, "token": 0, "s2": 2, "u2": 2}  # fmt: skip
PASSED_ON = frozenset(
    ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "custom-call", "copy-done",
     "fusion-done", "async-start", "async-update", "async-done", "optimization-barrier", "opt-barrier")
)  # fmt: skip
"""Opcodes that make no array of their own. A custom call is a kernel: its results alias arguments or are counted among
temporaries. A copy is counted where it starts."""
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.<>-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.<>-]+) = (?P<rest>.*)$")
_OPCODE = re.compile(r"(?:^|\s)(?P<opcode>[a-z][a-z0-9-]*)\(")
_SHAPE = re.compile(r"\b(?P<type>[a-z]+[0-9a-z]*)\[(?P<dims>[\d,]*)\](?:\{(?P<layout>[^}]*)\})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """is_on_chip: in a TPU's VMEM."""

    type: str
    size: int
    is_on_chip: bool

    @property
    def bits(self) -> int:
        return BITS[self.type]

    @property
    def bytes(self) -> int:
        return self.size * self.bits // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """shapes: of the result, one for each member of a tuple; of what is started, what it makes."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    text: str


def instructions(text: str) -> Iterator[Instruction]:
    """Instructions whose results exist in memory: those of every computation that is not inside a fusion."""
    fused = {name.lstrip("%") for name in re.findall(r" fusion\(.*?calls=(%?[\w.<>-]+)", text)}
    inside = ""
    for line in text.splitlines():
        started = _COMPUTATION.match(line)
        if started:
            inside = started["name"]
        found = _INSTRUCTION.match(line)
        if found and inside not in fused and not inside.startswith("fused_computation"):
            opcode = _OPCODE.search(found["rest"])
            if opcode:
                result = found["rest"][: opcode.start("opcode")]
                if opcode["opcode"] == "fusion-start":
                    result = result.partition("), ")[2]  # what is before it are operands
                shapes = _shapes(result)
                if opcode["opcode"] == "copy-start":
                    shapes = shapes[:1]  # the others are what is copied, and a flag
                yield Instruction(name=found["name"], opcode=opcode["opcode"], shapes=shapes, text=line.strip())


def _shapes(result: str) -> tuple[Shape, ...]:
    return tuple(
        Shape(
            type=shape["type"],
            size=math.prod(int(n) for n in shape["dims"].split(",") if n),
            is_on_chip="S(1)" in (shape["layout"] or ""),
        )
        for shape in _SHAPE.finditer(result)
        if shape["type"] in BITS
    )


def made(text: str) -> Iterator[Instruction]:
    """Instructions that make an array, or start a copy of one."""
    return (instruction for instruction in instructions(text) if instruction.opcode not in PASSED_ON)


def kernel_names(text: str, target: str) -> set[str]:
    """Names of the custom calls to a target."""
    return {
        instruction.name
        for instruction in instructions(text)
        if instruction.opcode == "custom-call" and f'custom_call_target="{target}"' in instruction.text
    }


def layered_sums(text: str, size_bytes: int, *, layers: int, period: int) -> int:
    """How many all-reduces of one size a step makes, those in the loop over layers counted as often as it runs.

    period: layers in one iteration.
    """
    count = 0
    for instruction in instructions(text):
        if instruction.opcode not in ("all-reduce", "all-reduce-start"):
            continue
        of_size = sum(shape.bytes == size_bytes for shape in instruction.shapes)
        count += of_size * (layers // period if "/while/body/" in instruction.text else 1)
    return count
