"""What a decoder's computation is fixed by. JAX-free; ``config_files.py`` reads it from model files."""

import math
from dataclasses import dataclass

from headrace.model.rope_scaling import RopeScaling
from headrace.model.router import Gate, Router, RouterBias
from headrace.serving.core.errors import ConfigError

# Far beyond any published decoder; they keep a hostile file from asking for a tree of a billion layers.
_LIMITS = {
    "vocab_size": 1 << 22,
    "num_layers": 1 << 10,
    "width": 1 << 17,
    "num_heads": 1 << 10,
    "num_kv_heads": 1 << 10,
    "head_dim": 1 << 10,
    "max_context": 1 << 24,
}
_MAX_FFN_WIDTH = 1 << 20
_MAX_EXPERTS = 1 << 12


def check_limit(field: str, value: int) -> None:
    """Of one field of ModelConfig, for who reads a file and makes something as large as the value before there is one.

    Raises: ConfigError.
    """
    if not 1 <= value <= _LIMITS[field]:
        raise ConfigError(f"{field} is {value}; it must be from 1 to {_LIMITS[field]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Architecture of one model; hashable, so that it can be a static argument of jit.

    family: name of a ``families`` entry. width: D. ffn_width: F of dense layers, 0 where layers have experts.
    num_heads: N. num_kv_heads: K, divides N. head_dim: H, even. max_context: positions the model was made for.
    rope_theta: base of the rotary frequencies, above 1. rms_norm_eps: added to the mean square. tied_embeddings: logits
    are read through the embedding. bos_id, eos_ids: ids in [0, vocab_size) as the files state them; eos_ids end a
    generation. rope_scaling: None leaves the frequencies as they are.
    num_experts: E, 0 = dense layers, else every layer has experts. experts_per_token: A. expert_ffn_width: F of one
    expert. router: given where there are experts. expert_bias: each of an expert's products has a bias.
    shared_expert_width: F of a dense network beside the experts, which every token takes; 0 = none. has_shared_gate:
    what it gives is multiplied by the sigmoid of a product of its own.
    gate: the activation, of dense layers and experts alike.
    qk_norm: queries and keys are normalized per head, before they are rotated. attention_bias: q, k, v and o have one.
    qkv_bias: q, k and v have one, o has none.
    has_sinks: each query head has a logit that joins its softmax and carries no value.
    sliding_window: a query sees this many keys, its own included, in layers whose entry of window_pattern is True. The
    pattern repeats over the layers, and its length divides their number; it is empty without a window.

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
    rope_scaling: RopeScaling | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn_width: int = 0
    router: Router | None = None
    expert_bias: bool = False
    shared_expert_width: int = 0
    has_shared_gate: bool = False
    gate: Gate = Gate()
    qk_norm: bool = False
    attention_bias: bool = False
    qkv_bias: bool = False
    has_sinks: bool = False
    sliding_window: int | None = None
    window_pattern: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        for field in _LIMITS:
            check_limit(field, getattr(self, field))
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_kv_heads {self.num_kv_heads} must divide num_heads {self.num_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; rotary positions need an even one")
        if not (math.isfinite(self.rope_theta) and self.rope_theta > 1):
            raise ConfigError(f"rope_theta is {self.rope_theta}; it must be finite and above 1")
        if not 0 < self.rms_norm_eps < 1:
            raise ConfigError(f"rms_norm_eps is {self.rms_norm_eps}; it must be between 0 and 1")
        for field, ids in (("bos_id", () if self.bos_id is None else (self.bos_id,)), ("eos_ids", self.eos_ids)):
            for token in ids:
                if not 0 <= token < self.vocab_size:
                    raise ConfigError(f"{field} {token} is not in the vocabulary of {self.vocab_size} ids")
        self._check_experts()
        self._check_window()

    def _check_experts(self) -> None:
        if self.num_experts == 0:
            for field in ("experts_per_token", "expert_ffn_width", "router", "expert_bias", "shared_expert_width"):
                if getattr(self, field):
                    raise ConfigError(f"{field} is {getattr(self, field)}, but num_experts is 0")
            if not 1 <= self.ffn_width <= _MAX_FFN_WIDTH:
                raise ConfigError(f"ffn_width is {self.ffn_width}; it must be from 1 to {_MAX_FFN_WIDTH}")
            return
        for field, limit in (
            ("num_experts", _MAX_EXPERTS),
            ("experts_per_token", self.num_experts),
            ("expert_ffn_width", _MAX_FFN_WIDTH),
        ):
            if not 1 <= getattr(self, field) <= limit:
                raise ConfigError(f"{field} is {getattr(self, field)}; it must be from 1 to {limit}")
        if not 0 <= self.shared_expert_width <= _MAX_FFN_WIDTH:
            raise ConfigError(
                f"shared_expert_width is {self.shared_expert_width}; it must be from 0 to {_MAX_FFN_WIDTH}"
            )
        if self.has_shared_gate and not self.shared_expert_width:
            raise ConfigError("has_shared_gate is True, but shared_expert_width is 0")
        if self.router is None:
            raise ConfigError(f"router is missing; {self.num_experts} experts need one")
        if self.ffn_width:
            raise ConfigError(f"ffn_width is {self.ffn_width}; it must be 0 where every layer has experts")

    def _check_window(self) -> None:
        period = len(self.window_pattern)
        if self.sliding_window is None:
            if period:
                raise ConfigError(f"window_pattern has {period} entries, but there is no sliding_window")
            return
        if not 1 <= self.sliding_window <= _LIMITS["max_context"]:
            raise ConfigError(f"sliding_window is {self.sliding_window}; it must be from 1 to {_LIMITS['max_context']}")
        if not any(self.window_pattern) or self.num_layers % period:
            raise ConfigError(
                f"window_pattern {self.window_pattern} must have a layer with a window, and a length that divides "
                f"num_layers {self.num_layers}"
            )

    @property
    def has_router_bias(self) -> bool:
        return self.router is not None and self.router.bias is not RouterBias.NONE

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of each layer of one period; layer i has entry i modulo the period's length."""
        return tuple(self.sliding_window if has_window else None for has_window in self.window_pattern or (False,))
