"""Static bundle counts as golden values: a change of a kernel's machine code by more than the band is shown, and stays
a failure until somebody looks and runs with ``--update``. One file for each version of libtpu, whose compiler it is."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.aot.matrix import ATTENTION, Entry
from tests.aot.outcome import Outcome

FOLDER = Path(__file__).resolve().parent.parent / "golden"
BAND = 0.15
CHIP = "v6e"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    problems: tuple[str, ...]
    note: str


def is_kept(entry: Entry) -> bool:
    """One shape of each operation and type."""
    plain = entry.window is None and (entry.page_tokens == 128 or entry.operation not in ATTENTION)
    return entry.chip == CHIP and entry.head_dim == 128 and entry.kv_heads == 8 and plain


def path_for(libtpu: str) -> Path:
    return FOLDER / f"bundles-{libtpu}.json"


def counts_of(entries: Mapping[str, Entry], outcomes: Sequence[Outcome]) -> dict[str, dict[str, dict[str, int]]]:
    """Own bundles of each loop, by entry and kernel."""
    return {
        outcome.name: {name.split(".")[0]: loop.own() for name, loop in sorted(outcome.kernels.items())}
        for outcome in sorted(outcomes, key=lambda outcome: outcome.name)
        if is_kept(entries[outcome.name]) and outcome.kernels
    }


def compare(counts: Mapping[str, Mapping[str, Mapping[str, int]]], libtpu: str, *, update: bool) -> Compared:
    """Against the file of this version. Entries that were not compiled this time are left alone.

    Loops are compared where both sides have the same; a kernel whose loops differ, by the sum of its bundles.
    """
    path = path_for(libtpu)
    known = json.loads(path.read_text())["bundles"] if path.is_file() else {}
    if update:
        merged = {**known, **{name: dict(kernels) for name, kernels in counts.items()}}
        text = json.dumps({"libtpu": libtpu, "chip": CHIP, "band": BAND, "bundles": merged}, indent=1, sort_keys=True)
        path.write_text(text + "\n")
        return Compared(problems=(), note=f"{len(counts)} golden bundle counts written to {path.name}")
    if not counts:
        return Compared(problems=(), note="no entry with golden bundle counts was compiled")
    if not known:
        others = ", ".join(sorted(file.name for file in FOLDER.glob("bundles-*.json"))) or "none"
        what = f"no golden bundle counts for libtpu {libtpu} (there are: {others}); look at the table, then --update"
        return Compared(problems=(what,), note="bundle counts were not compared")
    problems = [problem for name, kernels in counts.items() for problem in _differences(name, kernels, known.get(name))]
    return Compared(problems=tuple(problems), note=f"{len(counts)} entries compared with {path.name}")


def _differences(
    name: str, kernels: Mapping[str, Mapping[str, int]], known: Mapping[str, Mapping[str, int]] | None
) -> list[str]:
    if known is None or set(known) != set(kernels):
        return [f"{name}: kernels {sorted(kernels)}, golden: {sorted(known) if known else 'none'}"]
    found = []
    for kernel, own in kernels.items():
        old = known[kernel]
        if set(own) != set(old):
            own, old = {"in all": sum(own.values())}, {"in all": sum(old.values())}
        found += [
            f"{name}: {kernel} loop {path or 'outside'} has {count} bundles, golden {old[path]}"
            for path, count in own.items()
            if abs(count - old[path]) > max(BAND * old[path], 8)
        ]
    return found
