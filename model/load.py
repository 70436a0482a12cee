"""Open a model, a GGUF file or a directory of safetensors: configuration and weights; or load all of it at once."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import numpy as np

from headrace.model.checkpoint_files import read_manifest
from headrace.model.config import ModelConfig
from headrace.model.config_files import config_from_directory, config_from_gguf, is_gguf
from headrace.model.directory import ModelDirectory
from headrace.model.errors import ModelFileError
from headrace.model.gguf_metadata import read_gguf
from headrace.model.gguf_tensors import GGUFSource
from headrace.model.group_quant import quantized
from headrace.model.quant_form import QuantForm
from headrace.model.safetensors_files import SafetensorsSource
from headrace.model.specs import NO_FORMS, WeightScheme, param_specs
from headrace.model.weight_files import Progress, WeightFiles
from headrace.model.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """weights: host arrays. model_hash: SHA-256 in hex over the config and the name, type, shape and stored bytes of
    every weight; two formats of one model have different hashes. digests: see ``WeightFiles``."""

    config: ModelConfig
    weights: Weights[np.ndarray]
    model_hash: str
    digests: Mapping[str, str] = field(default_factory=dict)


def open_weights(
    path: str | os.PathLike[str],
    *,
    dtype: np.dtype | type = np.float32,
    scheme: WeightScheme = WeightScheme.NATIVE,
    forms: Mapping[str, QuantForm] = NO_FORMS,
) -> WeightFiles:
    """The weights of a GGUF file, or of a directory with config.json and safetensors; only headers are read.

    forms: see ``WeightFiles``.

    Raises: ModelFileError, which names the file, and the tensor where one is at fault.
    """
    if is_gguf(path):
        header = read_gguf(path)
        return WeightFiles(config_from_gguf(header), GGUFSource(header), np.dtype(dtype), scheme, forms)
    directory = ModelDirectory(path)
    if read_manifest(directory) is not None:
        raise ModelFileError(path, "a checkpoint, which goes to devices only; give the files it was made from")
    return WeightFiles(config_from_directory(directory), SafetensorsSource(directory), np.dtype(dtype), scheme, forms)


def load_model(
    path: str | os.PathLike[str],
    *,
    dtype: np.dtype | type = np.float32,
    scheme: WeightScheme = WeightScheme.NATIVE,
    keeps_forms: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """All of a model on the host; what is served is placed weight by weight instead (serving/runner/load.py).

    Args:
      path: a GGUF file, or a directory with config.json and safetensors.
      dtype: of the matrices in memory, float32 or bfloat16 (vectors are float32). scheme: see WeightScheme.
      keeps_forms: of the native scheme: matrices and an embedding that a GGUF file holds in groups of small integers
        stay so, as ``GroupQuant``, the embedding as the head [D, V]; else they are dequantized.
      progress: called after each tensor.
    Raises: ModelFileError, which names the file, and the tensor where one is at fault: missing, extra, of the wrong
      shape or an unsupported type, not finite.
    """
    files = open_weights(path, dtype=dtype, scheme=scheme)
    if keeps_forms:
        files = files.keeping(files.forms)
    arrays = [
        quantized(array, spec.rounded_to, spec.dtype) if spec.rounded_to is not None else array
        for spec, array in files.stream(list(files.specs), progress)
    ]
    treedef = jax.tree.structure(param_specs(files.config, dtype))
    return LoadedModel(
        config=files.config,
        weights=jax.tree.unflatten(treedef, arrays),
        model_hash=files.model_hash,
        digests=files.digests,
    )
