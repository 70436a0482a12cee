"""What one model family states about itself: names in files, and the flags in which it differs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from headrace.model.config_keys import ConfigKeys


class FileFormat(StrEnum):
    GGUF = "gguf"
    HF = "hf"


@dataclass(frozen=True, slots=True)
class SourceName:
    """Tensor name in each file format, None where the family has no such files; ``{layer}`` stands for the layer index.

    ``{expert}`` in a Hugging Face name stands for the expert's index, one tensor each; without it, one tensor holds a
    weight of all experts. is_inputs_first: a matrix lies there as [inputs, outputs]. half: the tensor holds two
    weights whose outputs alternate; 0 is the one that comes first, 1 the other.
    """

    gguf: str | None
    hf: str
    is_inputs_first: bool = False
    half: int | None = None

    def of(self, file_format: FileFormat, expert: int = 0) -> str:
        """Raises: KeyError where the family has no files of this format."""
        if file_format is FileFormat.HF:
            return self.hf.format(expert=expert)
        if self.gguf is None:
            raise KeyError(f"{self.hf} has no name in {file_format} files")
        return self.gguf

    def of_layer(self, layer: int) -> "SourceName":
        gguf = None if self.gguf is None else self.gguf.format(layer=layer)
        return replace(self, gguf=gguf, hf=self.hf.format(layer=layer, expert="{expert}"))

    @property
    def is_by_expert(self) -> bool:
        return "{expert}" in self.hf


def no_options(_: ConfigKeys, __: int) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture of decoder.

    gguf_architecture: None where GGUF files of the family are not supported.
    top, layer: source names by field of ``Weights`` and ``LayerWeights``.
    hf_options: (keys, num_layers); reads the keys of config.json that are the family's own, and gives fields of
      ``ModelConfig``.
    hf_required: keys that config.json must have, since transformers' default is the family's own.
    gguf_interleaved_rotary: the rows of q and k are stored in llama.cpp's order (pairs side by side) in GGUF files;
      loading restores the order of halves that the decoder rotates.
    gguf_inert_keys, hf_inert_keys: configuration keys that do not change what the model computes. GGUF keys are given
      without the architecture's prefix.
    gguf_unit_tensors: tensors that are accepted when every element is 1, and refused otherwise.
    hf_ignored_tensors: regular expressions of tensors that hold nothing that cannot be computed from the configuration.
    """

    name: str
    hf_model_type: str
    hf_architecture: str
    top: Mapping[str, SourceName]
    layer: Mapping[str, SourceName]
    gguf_architecture: str | None = None
    gguf_interleaved_rotary: bool = False
    hf_options: Callable[[ConfigKeys, int], Mapping[str, Any]] = no_options
    hf_required: frozenset[str] = frozenset()
    gguf_inert_keys: frozenset[str] = frozenset()
    hf_inert_keys: frozenset[str] = frozenset()
    gguf_unit_tensors: frozenset[str] = frozenset()
    hf_ignored_tensors: tuple[str, ...] = ()
