"""Orbax checkpoints: weights that lie in parts, written from one mesh and restored onto any other.

Every weight is an array of its own, as products read it and with each key head once, whatever mesh wrote it and
whichever reads it. A device reads the parts that it needs. Each weight's SHA-256 is in the manifest; a process that
holds all of a weight compares it, and one that holds a part of it cannot.
"""

import functools
import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from headrace.model.checkpoint_files import AGAIN, MANIFEST, WEIGHTS, Manifest, StoredWeight
from headrace.model.config import ModelConfig
from headrace.model.errors import ModelFileError
from headrace.model.on_mesh import config_on_mesh, partitions
from headrace.model.specs import param_specs
from headrace.model.weight_files import BLOCK_BYTES, Progress, WeightFiles, ahead, hash_of
from headrace.serving.runner.backend import Backend
from headrace.serving.runner.placing import Wanted, format_of, put, served_form

log = logging.getLogger("headrace.checkpoint")

CHUNK_BYTES = 32 << 20
"""Most that is read at once. A device that needs a part of a chunk reads all of it, so that a weight which was written
by one device must not be one chunk; every chunk costs an entry in the index."""

AHEAD_BYTES = 64 << 20
"""As in ``weight_files``; less, since Orbax holds chunks of a weight beside it."""


def save_weights(
    files: WeightFiles, folder: Path, backend: Backend, progress: Progress | None = None
) -> dict[str, StoredWeight]:
    """Write all weights below a folder, in parts as the backend's mesh has them; returns what the manifest lists.

    The devices hold the model meanwhile. Raises: ModelFileError, MeshError; OSError where it cannot be written.
    """
    import orbax.checkpoint as ocp

    names, places = list(files.specs), _stored_places(files.config, backend)
    stored, arrays = {}, {}
    for spec, x in files.stream(names, progress):
        stored[spec.name] = StoredWeight(dtype=spec.dtype.name, shape=spec.shape, sha256=_digest(x))
        arrays[spec.name] = jax.block_until_ready(put(x, places[spec.name]))
        del x
    save_args = dict.fromkeys(names, ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
        writer.save((folder / WEIGHTS).resolve(), args=ocp.args.PyTreeSave(arrays, save_args=save_args))
    return stored


def _stored_places(cfg: ModelConfig, backend: Backend) -> dict[str, jax.ShapeDtypeStruct]:
    """Cut as the mesh cuts them; what it would repeat lies whole on every device."""
    on_mesh = config_on_mesh(cfg, backend.mesh_shape)
    trees = param_specs(cfg, backend.dtype), param_specs(on_mesh), partitions(on_mesh, backend.mesh_shape)
    found = {}
    for spec, repeated, cut in zip(*map(jax.tree.leaves, trees), strict=True):
        sharding = backend.sharding(cut if repeated.shape == spec.shape else PartitionSpec())
        found[spec.name] = jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)
    return found


class CheckpointWeights:
    """The weights of a checkpoint, none of them read yet. path: its directory.

    Raises: ModelFileError naming the weight that is missing, extra or of the wrong shape.
    """

    def __init__(self, path: Path, manifest: Manifest, config: ModelConfig) -> None:
        self.config = config
        self.digests = {name: weight.sha256 for name, weight in manifest.weights.items()}
        """As the manifest has them; ``stream`` compares."""
        self._path, self._stored = path, manifest.weights
        self._finishes: dict[tuple[Any, ...], Callable[[jax.Array], jax.Array]] = {}
        specs = {spec.name: spec for spec in jax.tree.leaves(param_specs(config, np.dtype(manifest.dtype)))}
        for name in sorted(specs.keys() ^ manifest.weights.keys()):
            what = "lacks" if name in specs else "lists"
            raise ModelFileError(path / MANIFEST, f"{what} weight {name!r:.100}, against config.json or the fields")
        for name, spec in specs.items():
            found = manifest.weights[name]
            if (found.shape, found.dtype) != (spec.shape, spec.dtype.name):
                raise ModelFileError(
                    path / MANIFEST,
                    f"weight {name!r} is {found.dtype} {list(found.shape)}; the configuration asks for "
                    f"{spec.dtype.name} {list(spec.shape)}",
                )

    @property
    def stored_types(self) -> Mapping[str, int]:
        """How many weights of each type it holds."""
        return dict(sorted(Counter(weight.dtype for weight in self._stored.values()).items()))

    @property
    def types(self) -> Mapping[str, str]:
        """The type of each weight, by its name."""
        return {name: weight.dtype for name, weight in self._stored.items()}

    @property
    def model_hash(self) -> str:
        """As ``LoadedModel``'s, over the weights as they lie here. It differs from that of the source's files."""
        leaves = {(name, weight.dtype, weight.shape, weight.sha256) for name, weight in self._stored.items()}
        return hash_of(self.config, leaves)

    def stream(self, wanted: Sequence[Wanted], progress: Progress | None = None) -> Iterator[Any]:
        """Pieces for ``Placement.fill``.

        Raises: ModelFileError for a weight that cannot be read, or is not what was written.
        """
        total, done, unseen = sum(self._bytes(one.spec.name) for one in wanted), 0, 0
        # Restoring meets the other processes of a mesh, so that all of them must do it in the same order.
        with ThreadPoolExecutor(1, thread_name_prefix="restore") as pool:
            try:
                starts = [functools.partial(pool.submit, self._restore, one) for one in wanted]
                restored = ahead(starts, [self._bytes(one.spec.name) for one in wanted], AHEAD_BYTES)
                for one in wanted:
                    piece, is_verified = next(restored)
                    yield piece
                    del piece
                    unseen += not is_verified
                    done += self._bytes(one.spec.name)
                    if progress is not None:
                        progress(done, total)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        if unseen:
            log.warning(
                "%d of %d weights are partly another process's and were not compared with their SHA-256",
                unseen,
                len(wanted),
            )

    def _bytes(self, name: str) -> int:
        weight = self._stored[name]
        return int(np.prod(weight.shape)) * np.dtype(weight.dtype).itemsize

    def _restore(self, one: Wanted) -> tuple[Any, bool]:
        """One weight in its place, and whether it is known to be what was written."""
        name, weight = one.spec.name, self._stored[one.spec.name]
        target, dtype = one.target, np.dtype(weight.dtype)
        is_as_stored = isinstance(target, jax.ShapeDtypeStruct) and target.size == int(np.prod(weight.shape))
        if not is_as_stored or target.sharding is None:
            host = self._read(name, None)
            self._compare(name, _digest(host))
            return put(served_form(host.astype(one.spec.read_dtype, copy=False), one), target), True
        place = _without_stack(target, weight.shape, dtype)
        array = self._read(name, place)
        parts = list(_parts(array))
        is_whole = sum(values.size for _, values in parts) == array.size
        if is_whole:
            self._compare(name, _digest_of(parts, array.shape, array.dtype))
        del parts
        return self._finished(array, target), is_whole

    def _finished(self, array: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
        """In the type, shape and layout that were asked for; nothing is done where it is so already."""
        if array.shape == target.shape and array.dtype == target.dtype and target.format.layout is None:
            return array
        key = target.shape, target.dtype, format_of(target)
        if key not in self._finishes:  # compiled once for all layers
            shape, dtype = target.shape, target.dtype
            self._finishes[key] = jax.jit(
                lambda x: x.astype(dtype).reshape(shape), donate_argnums=0, out_shardings=format_of(target)
            )
        return self._finishes[key](array)

    def _read(self, name: str, place: jax.ShapeDtypeStruct | None) -> Any:
        """place: None = on the host."""
        import orbax.checkpoint as ocp

        if place is None:
            how = ocp.RestoreArgs(restore_type=np.ndarray)
        else:
            how = ocp.ArrayRestoreArgs(sharding=place.sharding, global_shape=place.shape, dtype=place.dtype)
        args = ocp.args.PyTreeRestore(item={name: place or 0}, restore_args={name: how}, partial_restore=True)
        folder = self._path / WEIGHTS
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                found = reader.restore(folder.resolve(), args=args)[name]
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # Orbax and its storage raise many kinds, none of their own
            reason = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
            raise ModelFileError(
                folder, f"weight {name!r} cannot be restored ({type(error).__name__}: {reason:.200}); {AGAIN}"
            ) from error
        if found.shape != self._stored[name].shape or found.dtype.name != self._stored[name].dtype:
            raise ModelFileError(
                folder,
                f"weight {name!r} is {found.dtype} {list(found.shape)}, and {MANIFEST} lists it as "
                f"{self._stored[name].dtype} {list(self._stored[name].shape)}; {AGAIN}",
            )
        return found

    def _compare(self, name: str, digest: str) -> None:
        if digest != self._stored[name].sha256:
            raise ModelFileError(
                self._path / WEIGHTS, f"weight {name!r} has another SHA-256 than {MANIFEST} lists: damaged; {AGAIN}"
            )


Part = tuple[tuple[slice, ...], np.ndarray]
"""Where a part of an array lies in it, and its values."""


def _digest(x: np.ndarray) -> str:
    """SHA-256 in hex of the values row by row."""
    return _digest_of([((slice(None),) * x.ndim, x)], x.shape, x.dtype)


def _digest_of(parts: list[Part], shape: tuple[int, ...], dtype: np.dtype) -> str:
    """Of an array that these parts are, put together a few rows at a time."""
    row_bytes = max(math.prod(shape[1:]) * dtype.itemsize, 1)
    rows = max(1, BLOCK_BYTES // row_bytes)
    digest = hashlib.sha256()
    for first in range(0, shape[0], rows):
        last = min(first + rows, shape[0])
        block = np.empty((last - first, *shape[1:]), dtype)
        for (on_rows, *rest), values in parts:
            start, stop, _ = on_rows.indices(shape[0])
            low, high = max(start, first), min(stop, last)
            if low < high:
                block[(slice(low - first, high - first), *rest)] = values[low - start : high - start]
        digest.update(block.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _parts(array: jax.Array) -> Iterator[Part]:
    """What this process has of an array, each part once."""
    # An array keeps what NumPy once got of it: the model would stay on the host. These are other arrays in its memory.
    shards = array.addressable_shards
    other = jax.make_array_from_single_device_arrays(array.shape, array.sharding, [shard.data for shard in shards])
    seen: set[tuple[tuple[int, int, int], ...]] = set()
    for shard in other.addressable_shards:
        place = tuple(on.indices(size) for on, size in zip(shard.index, array.shape, strict=True))
        if place not in seen:
            seen.add(place)
            yield shard.index, np.asarray(shard.data)


def _without_stack(target: jax.ShapeDtypeStruct, shape: tuple[int, ...], dtype: np.dtype) -> jax.ShapeDtypeStruct:
    """The same place for the weight alone, in the stored type, in the default layout."""
    sharding: Any = target.sharding
    if len(target.shape) > len(shape) and isinstance(sharding, jax.sharding.NamedSharding):
        sharding = jax.sharding.NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
