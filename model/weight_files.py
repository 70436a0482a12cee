"""The weights in a GGUF file or a directory of safetensors, one at a time: read, hashed, checked, and laid out.

A tensor is read in blocks of its rows, so that beside the finished weights only a few megabytes are held in their
stored and decoded form. How far reading runs ahead of whoever takes the weights is bounded in bytes.
"""

import functools
import hashlib
import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from headrace.model.arrange import QuantWindow, arrange
from headrace.model.config import ModelConfig
from headrace.model.errors import ModelFileError
from headrace.model.families import family_named
from headrace.model.family import FileFormat
from headrace.model.quant_form import QuantForm
from headrace.model.specs import NO_FORMS, ParamSpec, WeightScheme, may_be_quantized, param_specs
from headrace.model.tensor_source import (
    StoredTensor,
    TensorSource,
    count_not_finite,
    read_bytes,
    refuse_not_finite,
)
from headrace.pallas_kernels.types import GroupQuant

Progress = Callable[[int, int], None]
"""(done_bytes, total_bytes) of the stored tensors; called by the thread that loads."""

# Hashing and NumPy's inner loops release the interpreter lock, so a second thread nearly halves the time; more would
# only hold more tensors in memory.
THREADS = 2
AHEAD_BYTES = 256 << 20
"""Finished weights that may wait to be taken, the one that was taken last among them; a larger one is read alone."""
BLOCK_BYTES = 4 << 20
"""Read at once. A block of 4-bit values is eight times as large in float32."""

ResultT = TypeVar("ResultT", covariant=True)
Leaf = tuple[str, str, tuple[int, ...], str]
"""(name, type, shape, SHA-256 in hex) of one stored tensor, or of one expert's part of it."""


class WeightFiles:
    """Weights that are all there in the right shapes, none of them read yet.

    config: of the model. specs: by name, in the order of ``Weights``. dtype: of the matrices in memory, float32 or
    bfloat16 (vectors are float32). scheme: matrices that are to be quantized come in float32. forms: see param_specs;
    those weights come as a ``GroupQuant`` of the form that their file has, which forms may be wider than.
    Raises: ModelFileError, which names the file and the tensor that is missing, extra or of the wrong shape.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: TensorSource,
        dtype: np.dtype,
        scheme: WeightScheme = WeightScheme.NATIVE,
        forms: Mapping[str, QuantForm] = NO_FORMS,
    ) -> None:
        self.config = config
        specs = jax.tree.leaves(param_specs(config, dtype, scheme, forms))
        self.specs: Mapping[str, ParamSpec] = {spec.name: spec for spec in specs}
        self._source, self._dtype = source, dtype
        self._pieces = {name: _pieces(spec, source) for name, spec in self.specs.items()}
        used = {name for spec in self.specs.values() for name in _names(spec, source.format)}
        _refuse_extra(config, source, used)
        self._interleaved = source.format is FileFormat.GGUF and family_named(config.family).gguf_interleaved_rotary
        self._leaves: dict[str, list[Leaf]] = {}

    def stored_bytes(self, name: str) -> int:
        """Of one weight in the files. Two weights that lie in one tensor count it each."""
        return sum(tensor.num_bytes for tensor in self._pieces[name])

    def keeping(self, forms: Mapping[str, QuantForm]) -> "WeightFiles":
        """The same weights, none read yet, with those that forms name quantized as their files have them."""
        return WeightFiles(self.config, self._source, self._dtype, WeightScheme.NATIVE, forms)

    @property
    def types(self) -> Mapping[str, str]:
        """The stored type of each weight, by its name."""
        return {name: pieces[0].dtype for name, pieces in self._pieces.items()}

    @property
    def forms(self) -> Mapping[str, QuantForm]:
        """Of each matrix, and of the embedding, that the files hold in groups of small integers."""
        found = {name: self._form(spec) for name, spec in self.specs.items() if may_be_quantized(spec)}
        return {name: form for name, form in found.items() if form is not None}

    def _form(self, spec: ParamSpec) -> QuantForm | None:
        forms = {self._source.form(tensor) for tensor in self._pieces[spec.name]}
        # Groups run along the rows of a stored tensor, which must be the inputs.
        return None if len(forms) > 1 or spec.source.is_inputs_first else forms.pop()

    def stream(
        self, names: Sequence[str], progress: Progress | None = None
    ) -> Iterator[tuple[ParamSpec, np.ndarray | GroupQuant]]:
        """Each of these weights as its spec has it, in this order; whoever takes an array has the only reference to it.

        progress: called when a weight was taken and the next one is asked for.
        Raises: ModelFileError naming the file and tensor that cannot be read or is not finite.
        """
        total, done = sum(map(self.stored_bytes, names)), 0
        with ThreadPoolExecutor(THREADS, thread_name_prefix="load") as pool:
            try:
                sizes = [self.specs[name].read_bytes for name in names]
                arrays = ahead([functools.partial(self._start, name, pool) for name in names], sizes)
                for name in names:
                    yield self.specs[name], next(arrays)
                    done += self.stored_bytes(name)
                    if progress is not None:
                        progress(done, total)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    @property
    def digests(self) -> Mapping[str, str]:
        """SHA-256 in hex of the stored bytes of what was read so far, by name of the tensor; where the experts of a
        weight share one, each has its own entry, such as ``NAME[3]``."""
        return {name: digest for leaves in self._leaves.values() for name, _, _, digest in leaves}

    @property
    def stored_types(self) -> Mapping[str, int]:
        """How many tensors (or experts' parts) of each type were read so far, such as Q4_1 or BF16."""
        unique = {leaf for leaves in self._leaves.values() for leaf in leaves}
        return dict(sorted(Counter(dtype for _, dtype, _, _ in unique).items()))

    @property
    def model_hash(self) -> str:
        """See ``LoadedModel``. Every weight must have been streamed."""
        if missing := self.specs.keys() - self._leaves.keys():
            raise RuntimeError(f"{len(missing)} weights were not read, such as {min(missing)}")
        return hash_of(self.config, {leaf for leaves in self._leaves.values() for leaf in leaves})

    def _start(self, name: str, pool: ThreadPoolExecutor) -> "_Reading":
        spec, pieces = self.specs[name], self._pieces[name]
        if spec.is_read_quantized:
            return self._start_quantized(spec, pieces, pool)
        out = np.empty(spec.shape, spec.read_dtype)
        windows = out if spec.num_experts is not None else [out]
        jobs = [pool.submit(self._read, spec, tensor, window) for tensor, window in zip(pieces, windows, strict=True)]
        return _Reading(out, jobs, functools.partial(self._leaves.__setitem__, name))

    def _start_quantized(self, spec: ParamSpec, pieces: list[StoredTensor], pool: ThreadPoolExecutor) -> "_Reading":
        form = self._form(spec)
        if form is None:
            raise ValueError(f"weight {spec.name} is not quantized in its file")
        out = QuantWindow.empty(spec, form)
        windows = out.by_expert() if spec.num_experts is not None else [out]
        jobs = [
            pool.submit(self._read_quantized, spec, form, tensor, window)
            for tensor, window in zip(pieces, windows, strict=True)
        ]
        whole = out.weight(form, spec.dtype)
        return _Reading(whole, jobs, functools.partial(self._leaves.__setitem__, spec.name))

    def _read_quantized(self, spec: ParamSpec, form: QuantForm, tensor: StoredTensor, out: QuantWindow) -> Leaf:
        digest, bad = hashlib.sha256(), 0
        for part, first, last in _row_blocks(spec, tensor):
            raw = read_bytes(part)
            digest.update(raw.data)
            groups = self._source.groups(part, raw)
            bad += groups.num_not_finite()
            out.fill(spec, form, groups, (first, last), interleaved_rotary=self._interleaved)
        if bad:
            refuse_not_finite(tensor, bad)
        return tensor.name, tensor.dtype, tensor.shape, digest.hexdigest()

    def _read(self, spec: ParamSpec, tensor: StoredTensor, out: np.ndarray) -> Leaf:
        digest, bad = hashlib.sha256(), 0
        for part, window in _blocks(spec, tensor, out):
            raw = read_bytes(part)
            digest.update(raw.data)
            values = self._source.decode(part, raw)
            bad += count_not_finite(values)
            arrange(spec, values, window, interleaved_rotary=self._interleaved)
        if bad:
            refuse_not_finite(tensor, bad)
        return tensor.name, tensor.dtype, tensor.shape, digest.hexdigest()


class _Reading:
    """One weight that threads are filling. jobs: one for each piece that is read. on_leaves: called with what they
    found."""

    def __init__(self, out: Any, jobs: list[Future[Leaf]], on_leaves: Callable[[list[Leaf]], None]) -> None:
        self._out, self._jobs, self._on_leaves = out, jobs, on_leaves

    def result(self) -> Any:
        self._on_leaves([job.result() for job in self._jobs])
        return self._out


class Job(Protocol[ResultT]):
    """What is asked of a ``Future``."""

    def result(self) -> ResultT: ...


def ahead(
    starts: Sequence[Callable[[], Job[ResultT]]], sizes: Sequence[int], limit_bytes: int | None = None
) -> Iterator[ResultT]:
    """Results in order, of jobs that are started ahead: as many as their bytes together, and those of the result that
    was taken last, stay within the limit (None = AHEAD_BYTES) or the largest one's. Nothing is kept of what was taken.
    """
    limit = max(AHEAD_BYTES if limit_bytes is None else limit_bytes, *sizes, 0)
    running: deque[Job[ResultT]] = deque()
    held, first = 0, 0
    for index, size in enumerate(sizes):
        while first < len(starts) and (first == index or held + sizes[first] <= limit):
            running.append(starts[first]())
            held += sizes[first]
            first += 1
        yield running.popleft().result()
        held -= size


def hash_of(config: ModelConfig, leaves: set[Leaf]) -> str:
    """SHA-256 in hex over the configuration and every stored tensor."""
    root = json.dumps({"config": _stated(config), "tensors": sorted(leaves)}, sort_keys=True)
    return hashlib.sha256(root.encode()).hexdigest()


def config_hash(config: ModelConfig) -> str:
    """SHA-256 in hex over the configuration alone."""
    return hashlib.sha256(json.dumps(_stated(config), sort_keys=True).encode()).hexdigest()


def _stated(value: Any) -> Any:
    """Fields that are not at their defaults, so that a field which a later version adds changes no hash."""
    if not is_dataclass(value):
        return value
    given = {field.name: (getattr(value, field.name), field.default) for field in fields(value)}
    return {name: _stated(found) for name, (found, default) in given.items() if found != default}


def _blocks(spec: ParamSpec, tensor: StoredTensor, out: np.ndarray) -> Iterator[tuple[StoredTensor, np.ndarray]]:
    """Parts of a stored tensor in the order of its bytes, each with the part of ``out`` that it fills."""
    if tensor.scales is not None or len(tensor.shape) < 2:
        yield tensor, out
        return
    is_turned = spec.is_product and not spec.source.is_inputs_first
    for part, first, last in _row_blocks(spec, tensor):
        yield part, out[..., first:last] if is_turned else out[first:last]


def _row_blocks(spec: ParamSpec, tensor: StoredTensor) -> Iterator[tuple[StoredTensor, int, int]]:
    """(rows first..last of a matrix as a tensor, first, last)."""
    rows = tensor.shape[0]
    # llama.cpp's order of rotated rows is put right within a head.
    unit = spec.head_dim if spec.is_rotated and spec.head_dim is not None else 1
    step = max(1, BLOCK_BYTES * rows // tensor.num_bytes // unit) * unit
    for first in range(0, rows, step):
        last = min(first + step, rows)
        yield tensor.rows(first, last), first, last


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
