"""What libtpu says about the machine code of a kernel: VLIW bundles of each loop, use of each unit, spills.

libtpu writes it where ``LIBTPU_INIT_ARGS`` asks for it, and reads that variable once, when it is loaded: a process
that wants the dump sets it before the first compilation. A bundle takes a cycle at least, so bundles times trips is a
lower bound of a loop's time; waits for memory come on top.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PASSES = ("final_hlo-static-per-bundle-utilization", "final_bundles")
UNITS = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "FILL", "VSTORE", "SPILL", "SALU")
_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:([A-Z]{2}):|:)\s*(>*)\s*\{(\})?")
_LOOP_START = re.compile(r"Start region (\d+)")
_BRANCH = re.compile(r"sbr\.rel [^}]*?target = \$region(\d+)")
_DELAY = 4
"""Bundles behind a branch that run before it is taken."""
_FILE = re.compile(r"^\d+-(?P<name>.+)-\d+-(?P<label>[a-z_]+[a-z-]*)\.txt$")


def init_args(directory: Path) -> str:
    """Value of LIBTPU_INIT_ARGS that makes libtpu write the two files of each kernel that are read here."""
    only = "|".join(PASSES)
    return f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=^({only})$"


@dataclass(slots=True)
class Loop:
    """A loop of a kernel, or the kernel itself (depth 0). bundles: its own, without those of the loops inside it, each
    predicated region counted as if it always ran. uses: how many slots of each unit they fill, by UNITS."""

    depth: int
    bundles: int = 0
    uses: list[int] = field(default_factory=lambda: [0] * len(UNITS))
    loops: list["Loop"] = field(default_factory=list)

    def walk(self, path: str = "") -> Iterator[tuple[str, "Loop"]]:
        """(path, loop) of this loop and those in it: "" the kernel, "2" its second loop, "2.1" the first in that."""
        yield path, self
        for index, loop in enumerate(self.loops, start=1):
            yield from loop.walk(f"{path}.{index}" if path else str(index))

    def own(self) -> dict[str, int]:
        """Own bundles by path."""
        return {path: loop.bundles for path, loop in self.walk()}

    def total(self, unit: str) -> int:
        """Slots of a unit filled anywhere in the kernel."""
        index = UNITS.index(unit)
        return sum(loop.uses[index] for _, loop in self.walk())

    def spills(self) -> int:
        """Vector registers stored for want of room, and loaded again."""
        return self.total("SPILL") + self.total("FILL")

    def figures(self) -> dict[str, Any]:
        """What evidence keeps."""
        return {"bundles": self.own(), "spills": self.spills()}


def parse(bundles: str, utilization: str) -> Loop:
    """The loops of a kernel from the text of its two files. Raises: ValueError where the files do not agree."""
    rows = _rows(bundles)
    uses, capacity = _uses(utilization)
    if len(rows) != len(uses):
        raise ValueError(f"{len(rows)} bundles with the use of {len(uses)}")
    if len(capacity) != len(UNITS):
        raise ValueError(f"{len(capacity)} units; {len(UNITS)} are known")
    kernel = Loop(0)
    stack = [kernel]
    for (mark, depth), use in zip(rows, uses, strict=True):
        while len(stack) - 1 > depth or (mark == "LB" and len(stack) - 1 == depth):
            stack.pop()
        while len(stack) - 1 < depth:
            stack[-1].loops.append(Loop(len(stack)))
            stack.append(stack[-1].loops[-1])
        loop = stack[-1]
        loop.bundles += 1
        loop.uses = [a + b for a, b in zip(loop.uses, use, strict=True)]
    return kernel


def _rows(text: str) -> list[tuple[str | None, int]]:
    """(mark, loop depth) of each bundle.

    Empty bundles carry no depth: they fill the delay of the branch before them. The branch back to a loop's start, what
    it needs and its delay are printed one level too high, but run in every round.
    """
    marks, depths, texts = list[str | None](), list[int](), list[str]()
    for line in text.splitlines():
        found = _BUNDLE.match(line)
        if found:
            mark, arrows, is_empty = found.groups()
            marks.append(mark)
            depths.append(len(arrows) if arrows or not is_empty or not depths else depths[-1])
            texts.append(line)
        elif texts:
            texts[-1] += line
    starts = {
        region: index
        for index, (mark, line) in enumerate(zip(marks, texts, strict=True))
        if mark == "LB"
        for region in _LOOP_START.findall(line)
    }
    for index, line in enumerate(texts):
        for region in _BRANCH.findall(line):
            start = starts.get(region)
            if start is not None and start <= index:
                first = next(i for i in range(index, start - 1, -1) if i == start or depths[i - 1] >= depths[start])
                for i in range(first, min(index + _DELAY + 1, len(depths))):
                    depths[i] = max(depths[i], depths[start])
    return list(zip(marks, depths, strict=True))


def _uses(text: str) -> tuple[list[list[int]], list[int]]:
    """(slots filled by each bundle, slots of a bundle), by unit."""
    numbers = [[int(word) for word in line.split()] for line in text.splitlines() if re.match(r"^[\d ]+$", line)]
    return numbers[1:], numbers[0]


def read_dump(directory: Path, kernels: set[str]) -> dict[str, Loop]:
    """Kernels that were compiled since the directory was empty, by the name of their instruction in the HLO.

    Raises: KeyError naming a kernel of which libtpu wrote nothing: no dump must not read as no spill.
    """
    texts: dict[str, dict[str, str]] = {name: {} for name in kernels}
    for path in sorted(directory.iterdir()):
        found = _FILE.match(path.name)
        if found and found["name"] in kernels and found["label"] in PASSES:
            texts[found["name"]][found["label"]] = path.read_text()
    for name, of_kernel in texts.items():
        if set(of_kernel) != set(PASSES):
            raise KeyError(f"libtpu wrote {sorted(of_kernel) or 'nothing'} about the kernel {name}")
    return {name: parse(of_kernel[PASSES[1]], of_kernel[PASSES[0]]) for name, of_kernel in texts.items()}
