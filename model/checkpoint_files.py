"""A checkpoint directory of our own: what lies beside its Orbax weights. JAX-free.

``headrace_checkpoint.json`` lists every weight with its type, shape and SHA-256; it is written last. Configuration,
tokenizer and chat template are the source's own files, or the fields of a source in GGUF.
"""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.model.directory import ModelDirectory
from headrace.model.errors import ModelFileError
from headrace.model.gguf_metadata import GGUFFile, read_gguf, write_fields

MANIFEST = "headrace_checkpoint.json"
WEIGHTS = "weights"
GGUF_FIELDS = "fields.gguf"
FORMAT = 1
DTYPES = ("float32", "bfloat16")
COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""All files beside the weights that are ever read."""
_ORBAX = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt")
AGAIN = "write it again with 'headrace checkpoint'"
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """One weight as it lies in the checkpoint: laid out as products read it, key heads once each. sha256: of its bytes,
    row by row, in hex."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """dtype: of matrices. mesh: that it was written on; it restores onto every other. source_hash: model hash of the
    files that it was made from. weights: by name, such as ``layers.3.q_DX``."""

    dtype: str
    mesh: str
    source_hash: str
    weights: Mapping[str, StoredWeight]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    text = json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def copy_companions(source: Path, folder: Path) -> None:
    """Configuration, tokenizer and chat template of a GGUF file or a directory. Raises: ModelFileError."""
    if not source.is_dir():
        write_fields(read_gguf(source), folder / GGUF_FIELDS)
        return
    directory = ModelDirectory(source)
    for name in COPIED:
        if directory.has(name):
            shutil.copyfile(directory.file(name), folder / name)


def read_manifest(directory: ModelDirectory) -> Manifest | None:
    """None for a directory that is no checkpoint.

    Raises: ModelFileError for a damaged one, and for Orbax weights that are not ours.
    """
    if not directory.has(MANIFEST):
        if any(directory.has(name) or (directory.path / WEIGHTS / name).exists() for name in _ORBAX):
            raise ModelFileError(
                directory.path,
                f"holds an Orbax checkpoint, but no {MANIFEST}: it is incomplete, or another program's. Give the "
                f"model's safetensors or GGUF, or make a checkpoint of them with 'headrace checkpoint'",
            )
        return None
    path, values = directory.path / MANIFEST, directory.read_json(MANIFEST)
    if values.get("format") != FORMAT:
        raise ModelFileError(path, f"has format {values.get('format')!r:.60}; this version reads {FORMAT}; {AGAIN}")
    weights, texts = values.get("weights"), [values.get(key) for key in ("dtype", "mesh", "source_hash")]
    if not isinstance(weights, dict) or not all(isinstance(text, str) for text in texts):
        raise ModelFileError(path, f"must have dtype, mesh and source_hash as texts and weights as an object; {AGAIN}")
    if values["dtype"] not in DTYPES:
        raise ModelFileError(path, f"has dtype {values['dtype']!r:.60}; it must be {' or '.join(DTYPES)}; {AGAIN}")
    if not (directory.path / WEIGHTS).is_dir() or (directory.path / WEIGHTS).is_symlink():
        raise ModelFileError(directory.path / WEIGHTS, f"is not a directory, and {MANIFEST} says it holds the weights")
    return Manifest(
        dtype=values["dtype"],
        mesh=values["mesh"],
        source_hash=values["source_hash"],
        weights={name: _weight(path, name, entry) for name, entry in weights.items()},
    )


def fields_of(directory: ModelDirectory) -> GGUFFile | None:
    """Of the GGUF file that a checkpoint was made from; None for other directories. Raises: ModelFileError."""
    if read_manifest(directory) is None or not directory.has(GGUF_FIELDS):
        return None
    return read_gguf(directory.file(GGUF_FIELDS))


def _weight(path: Path, name: str, entry: Any) -> StoredWeight:
    if isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "sha256"}:
        dtype, shape, digest = entry["dtype"], entry["shape"], entry["sha256"]
        is_shape = isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)
        if dtype in DTYPES and is_shape and isinstance(digest, str) and _DIGEST.fullmatch(digest):
            return StoredWeight(dtype=dtype, shape=tuple(shape), sha256=digest)
    raise ModelFileError(path, f"weight {name!r:.100} must have dtype, shape and sha256, and nothing else; {AGAIN}")
