"""The exact scheme of the weights: what each kind of tensor is in the files, and what becomes of it in memory."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import jax

from headrace.model.config import ModelConfig
from headrace.model.quant_form import QuantForm
from headrace.model.specs import ParamSpec, WeightScheme, may_be_quantized
from headrace.serving.runner.backend import Backend
from headrace.serving.runner.tiling import is_tiled, tile_form
from headrace.serving.runner.weights import backend_specs

JsonValue = str | int | bool | None | list["JsonValue"] | dict[str, "JsonValue"]
_ROUNDED: Mapping[str, str] = MappingProxyType(
    {
        "int8": "to nearest from the stored values, without calibration; one scale for each output channel",
        "int4": "to nearest from the stored values, without calibration; one scale for 32 inputs of an output channel",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Weights that are stored and served alike. names: of fields, such as q_DX. count: of weights. served: the form in
    memory, or a float type. is_exact: every value is the stored one. why: for which a quantized one is dequantized."""

    stored: str
    served: QuantForm | str
    is_tiled: bool
    is_exact: bool
    why: str | None
    names: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """rounding: how --weights made its integers of what the files hold; None where it did not."""

    rounding: str | None
    kinds: tuple[Kind, ...]

    def as_json(self) -> dict[str, JsonValue]:
        """Of the contract."""
        return {
            "rounding": self.rounding,
            "kinds": [_kind_json(kind) for kind in self.kinds],
        }

    def lines(self) -> tuple[str, ...]:
        """For people, a line for each kind."""
        return tuple(map(_kind_line, self.kinds))


def scheme_of(types: Mapping[str, str], cfg: ModelConfig, backend: Backend, why: Mapping[str, str]) -> Scheme:
    """types: stored, by weight (``WeightFiles.types``). cfg: the model's. why: see ``forms.Choice``."""
    specs = {spec.name: spec for spec in jax.tree.leaves(backend_specs(cfg, backend))}
    found: Counter[tuple[object, ...]] = Counter()
    names: dict[tuple[object, ...], dict[str, None]] = {}
    kinds: dict[tuple[object, ...], Kind] = {}
    for name, stored in types.items():
        spec, field = specs[name], name.rsplit(".", 1)[-1]
        served = _served(spec, backend)
        kind = Kind(
            stored=stored,
            served=served,
            is_tiled=is_tiled(spec, backend.kernels),
            is_exact=_is_exact(stored, served, spec),
            why=_why_float(spec, why.get(name), backend),
            names=(),
            count=0,
        )
        key = stored, served, kind.why
        kinds.setdefault(key, kind)
        found[key] += 1
        names.setdefault(key, {})[field] = None
    return Scheme(
        rounding=_ROUNDED.get(backend.weights.value),
        kinds=tuple(
            Kind(
                stored=kind.stored,
                served=kind.served,
                is_tiled=kind.is_tiled,
                is_exact=kind.is_exact,
                why=kind.why,
                names=tuple(names[key]),
                count=found[key],
            )
            for key, kind in kinds.items()
        ),
    )


def _why_float(spec: ParamSpec, why: str | None, backend: Backend) -> str | None:
    """Of what could be quantized, and is not; the embedding only where its file has it so."""
    if spec.form is not None or not may_be_quantized(spec):
        return None
    if backend.weights is WeightScheme.INT4 and spec.is_product:
        return "its inputs are not whole groups of 32"
    return why


def _served(spec: ParamSpec, backend: Backend) -> QuantForm | str:
    if spec.form is None:
        return spec.dtype.name
    return tile_form(spec.form) if is_tiled(spec, backend.kernels) else spec.form


_FLOATS = {"F32": 24, "F16": 11, "BF16": 8, "float32": 24, "float16": 11, "bfloat16": 8}
"""Bits of precision, by the name that a file or NumPy has."""


def _is_exact(stored: str, served: QuantForm | str, spec: ParamSpec) -> bool:
    if isinstance(served, QuantForm):
        return spec.rounded_to is None
    # Products of integers and scales need up to 24 bits; bfloat16 has the range of float32, float16 fits into it.
    return served == "float32" or _FLOATS.get(stored) == 8 or (stored == "MXFP4" and served == "bfloat16")


def _kind_json(kind: Kind) -> dict[str, JsonValue]:
    served: JsonValue = kind.served if isinstance(kind.served, str) else None
    if isinstance(kind.served, QuantForm):
        form = kind.served
        served = {
            "values": form.values,
            "bits": form.bits,
            "group": "channel" if form.group is None else form.group,
            "affine": form.is_affine,
            "scale": form.scale,
        }
    return {
        "stored": kind.stored,
        "served": served,
        "exact": kind.is_exact,
        "fallback": kind.why,
        "names": list(kind.names),
        "count": kind.count,
    }


def _kind_line(kind: Kind) -> str:
    exact = "exact" if kind.is_exact else "rounded"
    why = "" if kind.why is None else f"; {kind.why}"
    return f"{kind.stored} -> {kind.served}, {exact}{why}: {', '.join(kind.names)} ({kind.count})"
