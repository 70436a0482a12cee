"""Load a model: configuration, weights and content hash, from a GGUF file or a directory of safetensors.

Tensor by tensor, and expert by expert where a weight is that of many: host memory holds the weights and, for each of
the few reading threads, one such piece in its stored and decoded form.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import jax
import numpy as np

from headrace.model.config import ModelConfig
from headrace.model.config_files import config_from_directory, config_from_gguf, is_gguf
from headrace.model.directory import ModelDirectory
from headrace.model.errors import ModelFileError
from headrace.model.families import family_named
from headrace.model.family import FileFormat
from headrace.model.gguf_metadata import read_gguf
from headrace.model.gguf_tensors import GGUFSource
from headrace.model.int8_weights import quantize_channels
from headrace.model.safetensors_files import SafetensorsSource
from headrace.model.specs import ParamSpec, WeightScheme, param_specs
from headrace.model.tensor_source import StoredTensor, TensorSource, check_finite, read_bytes
from headrace.model.weights import Weights
from headrace.pallas_kernels.types import GroupQuant

Progress = Callable[[int, int], None]
"""(done_bytes, total_bytes) of the stored tensors; called by the thread that loads."""

# Hashing and NumPy's inner loops release the interpreter lock, so a second thread nearly halves the time; more would
# only hold more tensors in memory.
_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """weights: host arrays, which the runner places on its devices. model_hash: SHA-256 in hex over the config and
    the name, type, shape and stored bytes of every weight; two formats of one model have different hashes."""

    config: ModelConfig
    weights: Weights[np.ndarray]
    model_hash: str


def load_model(
    path: str | os.PathLike[str],
    *,
    dtype: np.dtype | type = np.float32,
    scheme: WeightScheme = WeightScheme.NATIVE,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load and check a whole model.

    Args:
      path: a GGUF file, or a directory with config.json and safetensors.
      dtype: of the matrices in memory, float32 or bfloat16 (vectors are float32). scheme: see WeightScheme; quantized
        weights are made from the stored values, not from values rounded to dtype.
      progress: called after each tensor.
    Raises: ModelFileError, which names the file, and the tensor where one is at fault: missing, extra, of the wrong
      shape or an unsupported type, not finite.
    """
    if is_gguf(path):
        header = read_gguf(path)
        config, source = config_from_gguf(header), GGUFSource(header)
        return _load(config, source, param_specs(config, dtype, scheme), progress)
    directory = ModelDirectory(path)
    config = config_from_directory(directory)
    return _load(config, SafetensorsSource(directory), param_specs(config, dtype, scheme), progress)


def _load(
    config: ModelConfig, source: TensorSource, wanted: Weights[ParamSpec], progress: Progress | None
) -> LoadedModel:
    specs, treedef = jax.tree.flatten(wanted)
    stored = [_pieces(spec, source) for spec in specs]
    _refuse_extra(config, source, {name for spec in specs for name in _names(spec, source.format)})
    interleaved = source.format is FileFormat.GGUF and family_named(config.family).gguf_interleaved_rotary
    sizes = [sum(tensor.num_bytes for tensor in pieces) for pieces in stored]
    total, done = sum(sizes), 0
    arrays: list[np.ndarray | GroupQuant] = []
    leaves: set[tuple[str, str, tuple[int, ...], str]] = set()

    def load_one(spec: ParamSpec, pieces: list[StoredTensor]) -> tuple[np.ndarray | GroupQuant, list[str]]:
        out, digests = np.empty(spec.shape, np.float32 if spec.is_quantized else spec.dtype), []
        for tensor, piece in zip(pieces, out if spec.num_experts is not None else [out], strict=True):
            raw = read_bytes(tensor)
            digests.append(hashlib.sha256(raw.data).hexdigest())
            values = source.decode(tensor, raw)
            check_finite(tensor, values)
            arrange(spec, values, piece, interleaved_rotary=interleaved)
        return quantize_channels(spec, out) if spec.is_quantized else out, digests

    with ThreadPoolExecutor(_THREADS) as pool:
        jobs = [pool.submit(load_one, spec, pieces) for spec, pieces in zip(specs, stored, strict=True)]
        try:
            for pieces, size, job in zip(stored, sizes, jobs, strict=True):
                array, digests = job.result()
                arrays.append(array)
                leaves |= {(t.name, t.dtype, t.shape, d) for t, d in zip(pieces, digests, strict=True)}
                done += size
                if progress is not None:
                    progress(done, total)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    root = json.dumps({"config": asdict(config), "tensors": sorted(leaves)}, sort_keys=True)
    return LoadedModel(
        config=config,
        weights=jax.tree.unflatten(treedef, arrays),
        model_hash=hashlib.sha256(root.encode()).hexdigest(),
    )


def _names(spec: ParamSpec, file_format: FileFormat) -> list[str]:
    """Of the stored tensors that make one weight."""
    count = (spec.num_experts or 1) if spec.source.is_by_expert else 1
    return [spec.source.of(file_format, expert) for expert in range(count)]


def _pieces(spec: ParamSpec, source: TensorSource) -> list[StoredTensor]:
    """What is read for one weight: a stored tensor, or one for each expert, cut out of a common one where need be."""
    tensors = [_find(name, spec, source) for name in _names(spec, source.format)]
    if spec.num_experts is None or spec.source.is_by_expert:
        return tensors
    return [tensors[0].row(expert) for expert in range(spec.num_experts)]


def _find(name: str, spec: ParamSpec, source: TensorSource) -> StoredTensor:
    tensor = source.tensors.get(name)
    if tensor is None:
        raise ModelFileError(source.path, f"tensor {name!r} is missing")
    if tensor.shape != spec.stored_shape:
        raise ModelFileError(
            tensor.path,
            f"tensor {name!r} has shape {list(tensor.shape)}; the configuration asks for {list(spec.stored_shape)}",
        )
    return tensor


def _refuse_extra(config: ModelConfig, source: TensorSource, used: set[str]) -> None:
    """Every tensor is used, known to hold nothing, or an error."""
    family = family_named(config.family)
    for name in sorted(source.tensors.keys() - used):
        tensor = source.tensors[name]
        if source.format is FileFormat.GGUF and name in family.gguf_unit_tensors:
            if not np.all(source.decode(tensor, read_bytes(tensor)) == 1):
                raise ModelFileError(tensor.path, f"tensor {name!r} scales the rotary positions: not supported")
        elif source.format is FileFormat.GGUF or not any(re.fullmatch(p, name) for p in family.hf_ignored_tensors):
            tied = name == family.top["head_DV"].hf and config.tied_embeddings
            why = "which config.json denies with tie_word_embeddings" if tied else "which this model does not have"
            raise ModelFileError(tensor.path, f"holds tensor {name!r:.200}, {why}")


def arrange(spec: ParamSpec, values: np.ndarray, out: np.ndarray, *, interleaved_rotary: bool) -> None:
    """Write a stored tensor in the layout and type of its spec.

    Args:
      values: as stored, of one expert where the spec has many. out: [spec.piece_shape], of spec.dtype.
      interleaved_rotary: rows of rotated heads lie in llama.cpp's order, in which the two halves of a head alternate;
        they are put back into halves.
    Source: the permutation of convert_hf_to_gguf.py in ggml-org/llama.cpp (LlamaModel.permute).
    """
    if spec.is_product and not spec.source.is_inputs_first:
        values = values.T
    if spec.source.half is not None:
        values = values[..., spec.source.half :: 2]
    if spec.is_rotated and spec.head_dim is not None and interleaved_rotary:
        half = spec.head_dim // 2
        heads = (*out.shape[:-1], -1)
        out.reshape(*heads, 2, half)[...] = values.reshape(*heads, half, 2).swapaxes(-1, -2)
    else:
        out[...] = values
