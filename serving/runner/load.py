"""A model from its files into the places of a backend, without ever being on the host as a whole."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jax

from headrace.model.checkpoint_files import read_manifest
from headrace.model.config import ModelConfig
from headrace.model.config_files import is_gguf, read_config
from headrace.model.directory import ModelDirectory
from headrace.model.load import LoadedModel, open_weights
from headrace.model.on_mesh import config_on_mesh
from headrace.model.weight_files import Progress, WeightFiles
from headrace.model.weights import Weights
from headrace.serving.runner.backend import Backend
from headrace.serving.runner.checkpoint import CheckpointWeights
from headrace.serving.runner.forms import choose
from headrace.serving.runner.placing import Placement, from_host, place
from headrace.serving.runner.scheme import Scheme, scheme_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedModel:
    """config: the model's own, on no mesh. weights: in a backend's places. model_hash, digests: see ``LoadedModel``.
    stored_types: see ``WeightFiles``. scheme: what the weights are in memory; None for what was on the host."""

    config: ModelConfig
    weights: Weights[jax.Array]
    model_hash: str
    digests: Mapping[str, str] = field(default_factory=dict)
    stored_types: Mapping[str, int] = field(default_factory=dict)
    scheme: Scheme | None = None


def load_placed(path: str | os.PathLike[str], backend: Backend, progress: Progress | None = None) -> PlacedModel:
    """From a GGUF file, a directory of safetensors, or a checkpoint.

    The host holds AHEAD_BYTES of weights or the largest one at most, whichever is more, beside what devices hold.
    backend: as ``forms.with_forms`` has it of this path, where quantized weights are to stay so. progress: called after
    each weight. Raises: ModelFileError, MeshError.
    """
    manifest = None if is_gguf(path) else read_manifest(ModelDirectory(path))
    if manifest is not None:
        stored = CheckpointWeights(Path(path), manifest, read_config(path))
        placement = Placement(config_on_mesh(stored.config, backend.mesh_shape), backend)
        weights = placement.fill(stored.stream(placement.wanted, progress))
        return _placed(stored, weights, scheme_of(stored.types, stored.config, backend, {}))
    files = open_weights(path, dtype=backend.dtype, scheme=backend.weights, forms=backend.forms)
    placement = Placement(config_on_mesh(files.config, backend.mesh_shape), backend)
    wanted = placement.wanted
    stream = files.stream([one.spec.name for one in wanted], progress)
    weights = placement.fill(from_host(wanted, stream))
    return _placed(files, weights, scheme_of(files.types, files.config, backend, choose(files, backend).why))


def _placed(source: CheckpointWeights | WeightFiles, weights: Weights[jax.Array], scheme: Scheme) -> PlacedModel:
    return PlacedModel(
        config=source.config,
        weights=weights,
        model_hash=source.model_hash,
        digests=source.digests,
        stored_types=source.stored_types,
        scheme=scheme,
    )


def placed(model: LoadedModel, backend: Backend) -> PlacedModel:
    """A model that is on the host, as tests have it."""
    return PlacedModel(
        config=model.config,
        weights=place(model.weights, config_on_mesh(model.config, backend.mesh_shape), backend),
        model_hash=model.model_hash,
        digests=model.digests,
    )
