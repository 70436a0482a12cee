"""In which form a back end serves what a GGUF file holds in groups of small integers: exactly that, or dequantized.

Chosen from the file's table of tensors before anything of it is read, by asking the kernels themselves; whatever is
not as the file has it carries its reason, which the scheme report states.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from headrace.model.config import ModelConfig
from headrace.model.config_files import is_gguf, read_config
from headrace.model.load import open_weights
from headrace.model.on_mesh import config_on_mesh, partitions
from headrace.model.quant_form import QuantForm, common_form
from headrace.model.specs import ParamSpec, WeightScheme, param_specs
from headrace.model.weight_files import WeightFiles
from headrace.pallas_kernels import api
from headrace.pallas_kernels.types import GroupQuant, Implementation, UnsupportedCase
from headrace.serving.core.errors import ConfigError
from headrace.serving.runner.backend import Backend, platform_of
from headrace.serving.runner.tiling import is_tiled, tiled_shape
from headrace.serving.runner.weights import is_stacked, stacks, weight_shapes
from headrace.sharding.errors import MeshError

FLOATS_ON_CPU = "without CPU kernels, XLA multiplies float weights faster on a CPU"
ASKED_ROWS = 16
"""Of the product that a kernel is asked about; its limits are of the weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """forms: of the weights that stay quantized, by name. why: of each other weight that the files hold quantized, the
    reason for which it is dequantized."""

    forms: Mapping[str, QuantForm]
    why: Mapping[str, str]


def with_forms(backend: Backend, path: str | os.PathLike[str]) -> Backend:
    """The back end that serves this model: of the native scheme with the forms that a GGUF file's weights keep.

    Only headers are read. Raises: ModelFileError; ConfigError naming --mesh and the weight that it cannot cut.
    """
    files = open_weights(path, dtype=backend.dtype) if is_gguf(path) else None
    config = read_config(path) if files is None else files.config
    try:
        if files is not None and backend.weights is WeightScheme.NATIVE:
            backend = replace(backend, forms=choose(files, backend).forms)
        weight_shapes(config_on_mesh(config, backend.mesh_shape), backend)
    except MeshError as error:
        raise ConfigError(f"--mesh: {error}") from error
    return backend


def choose(files: WeightFiles, backend: Backend) -> Choice:
    """For the native scheme. Raises: MeshError."""
    return choose_forms(files.forms, config_on_mesh(files.config, backend.mesh_shape), backend)


def choose_forms(stored: Mapping[str, QuantForm], cfg: ModelConfig, backend: Backend) -> Choice:
    """stored: what the files hold, by weight. cfg: on the backend's mesh."""
    is_cpu = backend.device is None or platform_of(backend.device) == "cpu"
    if is_cpu and backend.kernels.implementation is Implementation.REFERENCE:
        return Choice(forms={}, why=dict.fromkeys(stored, FLOATS_ON_CPU))
    forms: dict[str, QuantForm] = {}
    why: dict[str, str] = {}
    specs = {spec.name: spec for spec in jax.tree.leaves(param_specs(cfg, backend.dtype))}
    ask = _Asking(cfg, backend)
    for names in _leaves(cfg, backend):
        found = [stored[name] for name in names if name in stored]
        if not found:
            continue
        refusal = None
        if len(found) < len(names):
            refusal = "other layers of its stack are not quantized"
        else:
            form = common_form([_widest(form, backend) for form in found])
            refusal = ask.refusal(replace(specs[names[0]], form=form))
        if refusal is None:
            forms |= dict.fromkeys(names, form)
        else:
            why |= {name: refusal for name in names if name in stored}
    return Choice(forms=forms, why=why)


def _leaves(cfg: ModelConfig, backend: Backend) -> Iterator[tuple[str, ...]]:
    """Names of the weights that lie in one placed array, and have one form therefore."""
    specs = param_specs(cfg)
    yield from ((spec.name,) for spec in jax.tree.leaves(specs.replace(layers=())))
    for stack in stacks(cfg, backend) if is_stacked(backend) else [(layer,) for layer in range(cfg.num_layers)]:
        for together in zip(*(jax.tree.leaves(specs.layers[layer]) for layer in stack), strict=True):
            yield tuple(spec.name for spec in together)


def _widest(form: QuantForm, backend: Backend) -> QuantForm:
    """What a back end has instead, exactly.

    Kernels of GPU and TPU know no unsigned values of 4 bits and no float16; and no device of theirs has confirmed that
    compiled programs take int4, which on CPU they do not (see ``weights.backend_specs``).
    """
    if backend.kernels.implementation is Implementation.CPU:
        return form
    return replace(form, values="int8", scale="float32")


class _Asking:
    """Asks once for all layers."""

    def __init__(self, cfg: ModelConfig, backend: Backend) -> None:
        self.backend = backend
        self._sizes = backend.mesh_shape.sizes
        cuts = partitions(cfg, backend.mesh_shape)
        names = [spec.name for spec in jax.tree.leaves(param_specs(cfg))]
        self._cuts = dict(zip(names, jax.tree.leaves(cuts), strict=True))
        self._answers: dict[tuple[object, ...], str | None] = {}

    def refusal(self, spec: ParamSpec) -> str | None:
        """Why a weight of this form cannot be served; None where it can. On a mesh, of one device's part."""
        key = spec.form, self._local_shape(spec), spec.is_product
        if key not in self._answers:
            self._answers[key] = self._refusal(spec)
        return self._answers[key]

    def _refusal(self, spec: ParamSpec) -> str | None:
        kernels = self.backend.kernels
        form = spec.form
        assert form is not None and form.group is not None
        if kernels.implementation is Implementation.CPU:
            if not is_tiled(spec, kernels):
                return "experts have no CPU kernel for small integers"
            try:
                tiled_shape(spec)
            except UnsupportedCase as error:
                return error.why
            return None
        if not spec.is_product:
            return "an embedding is read by rows"
        *lead, contraction, columns = self._local_shape(spec)
        if contraction % form.group:
            return None  # the mesh cannot cut it, which weight_shapes says by name

        def shape(rows: int, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*lead, rows, columns), dtype)

        scale = shape(contraction // form.group, form.scale_dtype)
        weight = GroupQuant(shape(contraction, form.values_dtype), scale, scale if form.is_affine else None)
        x_MK = jax.ShapeDtypeStruct((ASKED_ROWS, contraction), self.backend.dtype)
        try:
            if spec.num_experts is None:
                jax.eval_shape(lambda x, w: api.quant_matmul(x, w, kernels=kernels), x_MK, weight)
            else:
                sizes = jax.ShapeDtypeStruct((spec.num_experts,), jnp.int32)
                jax.eval_shape(lambda x, w, of: api.grouped_matmul(x, w, of, kernels=kernels), x_MK, weight, sizes)
        except UnsupportedCase as error:
            return error.why
        return None

    def _local_shape(self, spec: ParamSpec) -> tuple[int, ...]:
        shape = list(spec.shape)
        for axis, entry in enumerate(self._cuts[spec.name]):
            for name in () if entry is None else (entry,) if isinstance(entry, str) else entry:
                shape[axis] //= self._sizes[name]
        return tuple(shape)
