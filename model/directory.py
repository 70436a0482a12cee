"""A model directory in the Hugging Face layout: opening its files without ever leaving it.

JAX-free. Names come from files that are not trusted (a shard index), and links may point anywhere.
"""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from headrace.model.errors import ModelFileError

MAX_JSON_BYTES = 1 << 26
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
PICKLE_REFUSAL = "a pickle, which can run code when it is loaded; convert it to safetensors or GGUF"
# One plain file name: no separator, no leading dot, nothing that a file system or a terminal treats specially.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,254}")


class ModelDirectory:
    """A directory with config.json and weights.

    A link is followed only if it ends inside the directory, or, for a snapshot of the Hugging Face cache
    (models--…/snapshots/<revision>), among the blobs of the same repository.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ModelFileError(path, "not a directory")
        root = self.path.resolve()
        self._roots = [root]
        if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
            self._roots.append(root.parent.parent / "blobs")

    def file(self, name: str, *, named_by: Path | None = None) -> Path:
        """The path of a regular file in the directory.

        Args:
          name: a plain file name. named_by: the file in which the name stands, for the error.
        Raises: ModelFileError if the name is not plain, or the file is missing, not regular or outside.
        """
        if not _PLAIN_NAME.fullmatch(name):
            raise ModelFileError(named_by or self.path, f"{name!r:.200} is not a plain file name of this directory")
        path = self.path / name
        try:
            target = path.resolve(strict=True)
            mode = os.stat(target).st_mode
        except (OSError, RuntimeError):
            origin = f" (named by {named_by.name})" if named_by else ""
            raise ModelFileError(path, f"missing{origin}") from None
        if not any(target.is_relative_to(root) for root in self._roots):
            raise ModelFileError(path, f"a link that leads out of the model directory, to {target}")
        if not stat.S_ISREG(mode):
            raise ModelFileError(path, "not a regular file")
        return path

    def has(self, name: str) -> bool:
        return os.path.lexists(self.path / name)

    def names(self, suffixes: tuple[str, ...]) -> list[str]:
        """Names in the directory that end in one of the suffixes, sorted."""
        return sorted(name for name in os.listdir(self.path) if name.endswith(suffixes))

    def read_json(self, name: str) -> dict[str, Any]:
        """The JSON object in a file of at most MAX_JSON_BYTES. Raises: ModelFileError."""
        path = self.file(name)
        with open(path, "rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
        if len(data) > MAX_JSON_BYTES:
            raise ModelFileError(path, f"longer than {MAX_JSON_BYTES} bytes")
        return parse_json_object(data, path)


def parse_json_object(data: bytes, path: Path) -> dict[str, Any]:
    """A JSON object with no key twice and no NaN or infinity. Raises: ModelFileError, with ``path``."""

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise ModelFileError(path, f"key {key!r:.100} appears twice")
                seen.add(key)
        return result

    def no_constant(name: str) -> None:
        raise ModelFileError(path, f"{name} is not JSON")

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=no_duplicates, parse_constant=no_constant)
    except RecursionError:
        raise ModelFileError(path, "not readable as JSON: nested too deeply") from None
    except ModelFileError:
        raise
    except ValueError as error:
        raise ModelFileError(path, f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFileError(path, f"holds a JSON {type(value).__name__}, not an object")
    return value
