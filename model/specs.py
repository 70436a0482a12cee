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


class Init(StrEnum):
    """How a weight is drawn at random: all ones, or normal with the standard deviation num_inputs ** -0.5."""

    ONES = "ones"
    NORMAL = "normal"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One weight.

    name: path in ``Weights``, such as ``layers.3.q_DNH``. shape: in the order of the name's letters.
    num_input_axes: leading axes that a product contracts; 0 for vectors and for the embedding, which are stored as
      they are. Files store a matrix as [outputs, inputs], each flattened: ``stored_shape``.
    is_rotated: the output axes are heads whose vectors are rotated by position.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    logical_axes: tuple[Axis, ...]
    init: Init
    source: SourceName
    num_input_axes: int = 0
    is_rotated: bool = False

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def num_inputs(self) -> int:
        """Terms of the sum that makes one output: 1 for a vector, D for the embedding used as a head."""
        if self.num_input_axes:
            return math.prod(self.shape[: self.num_input_axes])
        return math.prod(self.shape[1:])

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in a file, rows first (GGUF writes the same in reverse order)."""
        if not self.num_input_axes:
            return self.shape
        return math.prod(self.shape[self.num_input_axes :]), math.prod(self.shape[: self.num_input_axes])


def param_specs(cfg: ModelConfig, dtype: np.dtype | type = np.float32) -> Weights[ParamSpec]:
    """Specs of all weights of a model, in the tree of its ``Weights``.

    dtype: of matrices in memory; vectors (of norms) are float32, which costs nothing. Files may hold other types.
    """
    family = family_named(cfg.family)
    of = np.dtype(dtype)
    D, F, V = (cfg.width, Axis.WIDTH), (cfg.ffn_width, Axis.FFN), (cfg.vocab_size, Axis.VOCAB)
    N, K, H = (cfg.num_heads, Axis.HEADS), (cfg.num_kv_heads, Axis.KV_HEADS), (cfg.head_dim, Axis.HEAD_DIM)

    def weight(path: str, source: SourceName, *axes: tuple[int, Axis], inputs: int = 0, rot: bool = False) -> ParamSpec:
        shape, names = tuple(size for size, _ in axes), tuple(axis for _, axis in axes)
        init = Init.ONES if len(axes) == 1 else Init.NORMAL
        return ParamSpec(
            name=path,
            shape=shape,
            dtype=of if len(axes) > 1 else np.dtype(np.float32),
            logical_axes=names,
            init=init,
            source=source,
            num_input_axes=inputs,
            is_rotated=rot,
        )

    def layer(i: int) -> LayerWeights[ParamSpec]:
        def of_layer(field: str, *axes: tuple[int, Axis], inputs: int = 0, rot: bool = False) -> ParamSpec:
            return weight(f"layers.{i}.{field}", family.layer[field].of_layer(i), *axes, inputs=inputs, rot=rot)

        return LayerWeights(
            attn_norm_D=of_layer("attn_norm_D", D),
            q_DNH=of_layer("q_DNH", D, N, H, inputs=1, rot=True),
            k_DKH=of_layer("k_DKH", D, K, H, inputs=1, rot=True),
            v_DKH=of_layer("v_DKH", D, K, H, inputs=1),
            o_NHD=of_layer("o_NHD", N, H, D, inputs=2),
            ffn_norm_D=of_layer("ffn_norm_D", D),
            gate_DF=of_layer("gate_DF", D, F, inputs=1),
            up_DF=of_layer("up_DF", D, F, inputs=1),
            down_FD=of_layer("down_FD", F, D, inputs=1),
        )

    return Weights(
        embed_VD=weight("embed_VD", family.top["embed_VD"], V, D),
        layers=tuple(layer(i) for i in range(cfg.num_layers)),
        final_norm_D=weight("final_norm_D", family.top["final_norm_D"], D),
        head_DV=None if cfg.tied_embeddings else weight("head_DV", family.top["head_DV"], D, V, inputs=1),
    )


def weight_bytes(cfg: ModelConfig, dtype: np.dtype | type = np.float32) -> int:
    """Bytes of all weights in memory; nothing is allocated."""
    return sum(spec.num_bytes for spec in jax.tree.leaves(param_specs(cfg, dtype)))
