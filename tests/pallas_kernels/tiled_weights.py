"""Forms of weights that tiles hold, random ones of each, and the instruction sets to run them on."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from headrace.pallas_kernels.native import instruction_sets, library
from headrace.pallas_kernels.types import GroupQuant, TiledQuant

ISAS = instruction_sets.of_this_machine()


@contextlib.contextmanager
def running(isa: str) -> Iterator[None]:
    """The kernels of an instruction set, and afterwards those that ran before."""
    before = library.load().isa
    library.load(isa=isa)
    try:
        yield
    finally:
        library.load(isa=before)


@dataclass(frozen=True, slots=True)
class Form:
    """Integers of ``bits`` in groups of ``group`` rows (0: whole columns), with float16 or float32 factors.

    low: smallest value of 4-bit weights, -8 or 0.
    """

    bits: int
    group: int = 32
    is_affine: bool = False
    scale: str = "float16"
    low: int = -8

    def __str__(self) -> str:
        return f"int{self.bits}{' affine' * self.is_affine} in {self.group}, {self.scale}, from {self.low}"


FORMS = (
    Form(bits=4, is_affine=True, low=0),
    Form(bits=8),
    Form(bits=4),
    Form(bits=8, is_affine=True),
    Form(bits=4, group=16, is_affine=True, low=0),
    Form(bits=8, group=16),
    Form(bits=4, scale="float32", is_affine=True),
    Form(bits=8, group=0, scale="float32"),
    Form(bits=4, group=16, scale="float32"),
    Form(bits=8, group=16, scale="float32", is_affine=True),
)


def random_weight(rng: np.random.Generator, form: Form, k: int, n: int) -> GroupQuant:
    """[k, n] of NumPy arrays; every value of the form occurs, the extremes too."""
    group = form.group or k
    group = group if k % group == 0 else k
    low = form.low if form.bits == 4 else -128
    values = rng.integers(low, low + (1 << form.bits), (k, n)).astype(np.int8)
    values.flat[0], values.flat[-1] = low, low + (1 << form.bits) - 1
    scale = rng.uniform(0.002, 0.02, (k // group, n)).astype(form.scale).astype(np.float32)
    offset = rng.uniform(-0.1, 0.1, (k // group, n)).astype(form.scale).astype(np.float32)
    return GroupQuant(values, scale, offset if form.is_affine else None)


def on_device(weight: TiledQuant) -> TiledQuant:
    return jax.tree.map(jnp.asarray, weight)
