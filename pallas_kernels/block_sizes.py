"""Which block sizes a kernel runs with: given ones, else the tuned ones of the chip, else a heuristic's.

Each operation has one frozen dataclass of block sizes and states its heuristic, with reasons, beside the kernel. Tuned
files are ``tuned/<chip>.json``: {operation: {shape key: {field: value}}}, written by ``scripts/tune_kernels.py``.
"""

import functools
import json
from collections.abc import Callable
from importlib import resources
from typing import TypeVar

from headrace.pallas_kernels.types import Kernels

Blocks = TypeVar("Blocks")


@functools.cache
def tuned(chip: str) -> dict[str, dict[str, dict[str, int]]]:
    """The tuned file of a chip; empty where there is none."""
    file = resources.files("headrace.pallas_kernels").joinpath("tuned", f"{chip}.json")
    return json.loads(file.read_text()) if file.is_file() else {}


def pick(kernels: Kernels, kind: type[Blocks], operation: str, key: str, heuristic: Callable[[], Blocks]) -> Blocks:
    """Block sizes of one call. key: names everything that the best sizes depend on."""
    explicit = kernels.explicit(kind)
    if explicit is not None:
        return explicit
    entry = tuned(kernels.chip).get(operation, {}).get(key) if kernels.chip else None
    return heuristic() if entry is None else kind(**entry)
