"""One description of every weight: the single source of random init, loading, shardings and memory estimates."""

import math
from dataclasses import dataclass
from enum import StrEnum

import jax
import numpy as np

from headrace.model.config import ModelConfig
from headrace.model.families import family_named
from headrace.model.family import SourceName
from headrace.model.weights import LayerWeights, Weights
from headrace.sharding.axes import Axis


class WeightScheme(StrEnum):
    """How matrices that products contract lie in memory: in the type of products, or as int8 with one float32 factor
    for each output channel (of each expert). Embeddings, routers and vectors are never quantized."""

    NATIVE = "native"
    INT8 = "int8"


class Init(StrEnum):
    """How a weight is drawn at random: ones, zeros, or normal with the standard deviation num_inputs ** -0.5."""

    ONES = "ones"
    ZEROS = "zeros"
    NORMAL = "normal"


SCALE_DTYPE = np.dtype(np.float32)
"""Of factors: one in 576 to 28,672 values, so that 4 bytes cost less than 1%."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One weight.

    name: path in ``Weights``, such as ``layers.3.q_DX``. shape: in the order of the name's letters. dtype: of the
      weight; what products read beside it is in that type too.
    is_quantized: a ``GroupQuant`` that stands for this dtype: int8 of this shape, and factors of scale_shape.
    is_product: a matrix whose first axis (behind that of experts) a product contracts. Files store it as [outputs,
      inputs] unless its source says otherwise. Vectors and the embedding are stored as they are.
    num_experts: the first axis is that of this many experts, whose weights are read one by one; None for other weights.
    head_dim: width of the heads that an axis of heads is made of (1: one value per head); None for weights without one.
    is_rotated: the heads are rotated by position.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    logical_axes: tuple[Axis, ...]
    init: Init
    source: SourceName
    is_product: bool = False
    is_quantized: bool = False
    num_experts: int | None = None
    head_dim: int | None = None
    is_rotated: bool = False

    @property
    def read_dtype(self) -> np.dtype:
        """On the way from a file. What is to be quantized is not rounded before."""
        return np.dtype(np.float32) if self.is_quantized else self.dtype

    @property
    def read_bytes(self) -> int:
        return math.prod(self.shape) * self.read_dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """In memory, with factors."""
        if self.is_quantized:
            return math.prod(self.shape) + math.prod(self.scale_shape) * SCALE_DTYPE.itemsize
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Of the factors of a quantized weight: one for each output channel."""
        return (*self.shape[:-2], 1, self.shape[-1])

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Of what is read at once: all of it, or one expert's."""
        return self.shape if self.num_experts is None else self.shape[1:]

    @property
    def num_inputs(self) -> int:
        """Terms of the sum that makes one output: 1 for a vector, D for the embedding used as a head."""
        piece = self.piece_shape
        return piece[0] if self.is_product else math.prod(piece[1:])

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of one tensor in a file, rows first (GGUF writes the same in reverse order)."""
        piece = self.piece_shape
        if self.source.half is not None:
            piece = (*piece[:-1], 2 * piece[-1])
        if self.is_product and not self.source.is_inputs_first:
            piece = piece[::-1]
        return piece if self.num_experts is None or self.source.is_by_expert else (self.num_experts, *piece)


class _Specs:
    """Makes specs of one model: axes by letter, sources by family."""

    def __init__(self, cfg: ModelConfig, dtype: np.dtype, scheme: WeightScheme) -> None:
        self.cfg, self.dtype, self.scheme, self.family = cfg, dtype, scheme, family_named(cfg.family)
        self.axes = {
            "V": (cfg.vocab_size, Axis.VOCAB),
            "D": (cfg.width, Axis.WIDTH),
            "X": (cfg.num_heads * cfg.head_dim, Axis.HEADS),
            "Y": (cfg.num_kv_heads * cfg.head_dim, Axis.KV_HEADS),
            "N": (cfg.num_heads, Axis.HEADS),
            "H": (cfg.head_dim, Axis.HEAD),
            "E": (cfg.num_experts, Axis.EXPERTS),
            "F": (cfg.expert_ffn_width, Axis.EXPERT_FFN) if cfg.num_experts else (cfg.ffn_width, Axis.FFN),
            "1": (1, Axis.CHOICES),
        }

    def make(self, path: str, source: SourceName, *, init: Init | None = None, is_product: bool = False) -> ParamSpec:
        letters = path.rsplit("_", 1)[1]
        axes = [self.axes[letter] for letter in letters]
        if "router" in path:  # whole everywhere: each device chooses for all tokens
            axes = [(size, Axis.CHOICES if axis is Axis.EXPERTS else axis) for size, axis in axes]
        if "shared" in path:
            width = (self.cfg.shared_expert_width, Axis.FFN)
            axes = [width if letter == "F" else axis for letter, axis in zip(letters, axes, strict=True)]
        # Vectors cost nothing in float32, nor does a router, whose rounding would swap experts.
        is_small = len(letters) == 1 or letters in ("DE", "D1")
        return ParamSpec(
            name=path,
            shape=tuple(size for size, _ in axes),
            dtype=np.dtype(np.float32) if is_small else self.dtype,
            logical_axes=tuple(axis for _, axis in axes),
            init=init or (Init.ONES if len(letters) == 1 else Init.NORMAL),
            source=source,
            is_product=is_product,
            is_quantized=is_product and not is_small and self.scheme is WeightScheme.INT8,
            num_experts=self.cfg.num_experts if letters[0] == "E" and len(letters) > 1 else None,
            head_dim=1 if "N" in letters else self.cfg.head_dim if {"X", "Y"} & set(letters) else None,
            is_rotated=path.endswith(("q_DX", "k_DY", "q_bias_X", "k_bias_Y")),
        )

    def top(self, field: str, *, is_product: bool = False) -> ParamSpec:
        return self.make(field, self.family.top[field], is_product=is_product)

    def layer(self, index: int) -> LayerWeights[ParamSpec]:
        cfg = self.cfg
        has_experts = cfg.num_experts > 0
        norms = ["attn_norm_D", "ffn_norm_D"] + ["q_norm_H", "k_norm_H"] * cfg.qk_norm
        matrices = ["q_DX", "k_DY", "v_DY", "o_XD"]
        matrices += ["router_DE", "gate_EDF", "up_EDF", "down_EFD"] if has_experts else ["gate_DF", "up_DF", "down_FD"]
        matrices += ["shared_gate_DF", "shared_up_DF", "shared_down_FD"] * (cfg.shared_expert_width > 0)
        matrices += ["shared_score_D1"] * cfg.has_shared_gate
        biases = ["q_bias_X", "k_bias_Y", "v_bias_Y"] * (cfg.attention_bias or cfg.qkv_bias)
        biases += ["o_bias_D"] * cfg.attention_bias
        biases += ["sinks_N"] * cfg.has_sinks + ["router_bias_E"] * cfg.has_router_bias
        biases += ["gate_bias_EF", "up_bias_EF", "down_bias_ED"] * cfg.expert_bias

        def of(field: str, init: Init, is_product: bool = False) -> ParamSpec:
            source = self.family.layer[field].of_layer(index)
            return self.make(f"layers.{index}.{field}", source, init=init, is_product=is_product)

        return LayerWeights(
            **{field: of(field, Init.ONES) for field in norms},
            **{field: of(field, Init.NORMAL, is_product=True) for field in matrices},
            **{field: of(field, Init.ZEROS) for field in biases},
        )


def param_specs(
    cfg: ModelConfig, dtype: np.dtype | type = np.float32, scheme: WeightScheme = WeightScheme.NATIVE
) -> Weights[ParamSpec]:
    """Specs of all weights of a model, in the tree of its ``Weights``.

    dtype: of matrices in memory, or what quantized ones stand for; vectors and routers are float32. scheme: of the
    matrices that products contract. Files may hold other types.
    """
    specs = _Specs(cfg, np.dtype(dtype), scheme)
    return Weights(
        embed_VD=specs.top("embed_VD"),
        layers=tuple(specs.layer(i) for i in range(cfg.num_layers)),
        final_norm_D=specs.top("final_norm_D"),
        head_DV=None if cfg.tied_embeddings else specs.top("head_DV", is_product=True),
    )


def weight_bytes(
    cfg: ModelConfig, dtype: np.dtype | type = np.float32, scheme: WeightScheme = WeightScheme.NATIVE
) -> int:
    """Bytes of all weights in memory; nothing is allocated."""
    return sum(spec.num_bytes for spec in jax.tree.leaves(param_specs(cfg, dtype, scheme)))
