"""What a decoder's computation is fixed by. JAX-free; ``config_files.py`` reads it from model files."""

import math
from dataclasses import dataclass

from headrace.serving.core.errors import ConfigError

# Far beyond any published decoder; they keep a hostile file from asking for a tree of a billion layers.
_LIMITS = {
    "vocab_size": 1 << 22,
    "num_layers": 1 << 10,
    "width": 1 << 17,
    "ffn_width": 1 << 20,
    "num_heads": 1 << 10,
    "num_kv_heads": 1 << 10,
    "head_dim": 1 << 10,
    "max_context": 1 << 24,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Architecture of one model; hashable, so that it can be a static argument of jit.

    family: name of a ``families`` entry. width: D. ffn_width: F. num_heads: N. num_kv_heads: K, divides N.
    head_dim: H, even. max_context: positions the model was made for. rope_theta: base of the rotary frequencies.
    rms_norm_eps: added to the mean square. tied_embeddings: logits are read through the embedding.
    bos_id, eos_ids: ids in [0, vocab_size) as the files state them; eos_ids end a generation.

    Raises: ConfigError, which names the field and its limit.
    """

    family: str
    vocab_size: int
    num_layers: int
    width: int
    ffn_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rope_theta: float
    rms_norm_eps: float
    tied_embeddings: bool
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field, limit in _LIMITS.items():
            value = getattr(self, field)
            if not 1 <= value <= limit:
                raise ConfigError(f"{field} is {value}; it must be from 1 to {limit}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_kv_heads {self.num_kv_heads} must divide num_heads {self.num_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; rotary positions need an even one")
        if not (math.isfinite(self.rope_theta) and self.rope_theta > 0):
            raise ConfigError(f"rope_theta is {self.rope_theta}; it must be finite and above 0")
        if not 0 < self.rms_norm_eps < 1:
            raise ConfigError(f"rms_norm_eps is {self.rms_norm_eps}; it must be between 0 and 1")
        for field, ids in (("bos_id", () if self.bos_id is None else (self.bos_id,)), ("eos_ids", self.eos_ids)):
            for token in ids:
                if not 0 <= token < self.vocab_size:
                    raise ConfigError(f"{field} {token} is not in the vocabulary of {self.vocab_size} ids")
