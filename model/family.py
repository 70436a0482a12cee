"""What one model family states about itself: names in files, and the flags in which it differs."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class FileFormat(StrEnum):
    GGUF = "gguf"
    HF = "hf"


@dataclass(frozen=True, slots=True)
class SourceName:
    """Tensor name in each file format; ``{layer}`` stands for the layer index."""

    gguf: str
    hf: str

    def of(self, file_format: FileFormat) -> str:
        return self.gguf if file_format is FileFormat.GGUF else self.hf

    def of_layer(self, layer: int) -> "SourceName":
        return SourceName(self.gguf.format(layer=layer), self.hf.format(layer=layer))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture of decoder.

    top, layer: source names by field of ``Weights`` and ``LayerWeights``.
    gguf_interleaved_rotary: the rows of q and k are stored in llama.cpp's order (pairs side by side) in GGUF files;
      loading restores the order of halves that the decoder rotates.
    gguf_inert_keys, hf_inert_keys: configuration keys that do not change what the model computes. GGUF keys are given
      without the architecture's prefix.
    gguf_unit_tensors: tensors that are accepted when every element is 1, and refused otherwise.
    hf_ignored_tensors: regular expressions of tensors that hold nothing that cannot be computed from the configuration.
    """

    name: str
    gguf_architecture: str
    hf_model_type: str
    hf_architecture: str
    top: Mapping[str, SourceName]
    layer: Mapping[str, SourceName]
    gguf_interleaved_rotary: bool
    gguf_inert_keys: frozenset[str] = frozenset()
    hf_inert_keys: frozenset[str] = frozenset()
    gguf_unit_tensors: frozenset[str] = frozenset()
    hf_ignored_tensors: tuple[str, ...] = ()
