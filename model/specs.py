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

    name: path in ``Weights``, such as ``layers.3.q_DX``. shape: in the order of the name's letters.
    is_product: a matrix whose first axis a product contracts. Files store it as [outputs, inputs]: ``stored_shape``.
      Vectors and the embedding are stored as they are.
    head_dim: width of the heads that an axis of heads is made of; None for weights without one.
    is_rotated: the heads are rotated by position.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    logical_axes: tuple[Axis, ...]
    init: Init
    source: SourceName
    is_product: bool = False
    head_dim: int | None = None
    is_rotated: bool = False

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def num_inputs(self) -> int:
        """Terms of the sum that makes one output: 1 for a vector, D for the embedding used as a head."""
        return self.shape[0] if self.is_product else math.prod(self.shape[1:])

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in a file, rows first (GGUF writes the same in reverse order)."""
        return self.shape[::-1] if self.is_product else self.shape


def param_specs(cfg: ModelConfig, dtype: np.dtype | type = np.float32) -> Weights[ParamSpec]:
    """Specs of all weights of a model, in the tree of its ``Weights``.

    dtype: of matrices in memory; vectors (of norms) are float32, which costs nothing. Files may hold other types.
    """
    family = family_named(cfg.family)
    of = np.dtype(dtype)
    D, F, V = (cfg.width, Axis.WIDTH), (cfg.ffn_width, Axis.FFN), (cfg.vocab_size, Axis.VOCAB)
    X, Y = (cfg.num_heads * cfg.head_dim, Axis.HEADS), (cfg.num_kv_heads * cfg.head_dim, Axis.KV_HEADS)

    def weight(
        path: str, source: SourceName, *axes: tuple[int, Axis], product: bool = False, rot: bool = False
    ) -> ParamSpec:
        shape, names = tuple(size for size, _ in axes), tuple(axis for _, axis in axes)
        init = Init.ONES if len(axes) == 1 else Init.NORMAL
        return ParamSpec(
            name=path,
            shape=shape,
            dtype=of if len(axes) > 1 else np.dtype(np.float32),
            logical_axes=names,
            init=init,
            source=source,
            is_product=product,
            head_dim=cfg.head_dim if X in axes or Y in axes else None,
            is_rotated=rot,
        )

    def layer(i: int) -> LayerWeights[ParamSpec]:
        def of_layer(field: str, *axes: tuple[int, Axis], rot: bool = False) -> ParamSpec:
            source = family.layer[field].of_layer(i)
            return weight(f"layers.{i}.{field}", source, *axes, product=len(axes) == 2, rot=rot)

        return LayerWeights(
            attn_norm_D=of_layer("attn_norm_D", D),
            q_DX=of_layer("q_DX", D, X, rot=True),
            k_DY=of_layer("k_DY", D, Y, rot=True),
            v_DY=of_layer("v_DY", D, Y),
            o_XD=of_layer("o_XD", X, D),
            ffn_norm_D=of_layer("ffn_norm_D", D),
            gate_DF=of_layer("gate_DF", D, F),
            up_DF=of_layer("up_DF", D, F),
            down_FD=of_layer("down_FD", F, D),
        )

    return Weights(
        embed_VD=weight("embed_VD", family.top["embed_VD"], V, D),
        layers=tuple(layer(i) for i in range(cfg.num_layers)),
        final_norm_D=weight("final_norm_D", family.top["final_norm_D"], D),
        head_DV=None if cfg.tied_embeddings else weight("head_DV", family.top["head_DV"], D, V, product=True),
    )


def weight_bytes(cfg: ModelConfig, dtype: np.dtype | type = np.float32) -> int:
    """Bytes of all weights in memory; nothing is allocated."""
    return sum(spec.num_bytes for spec in jax.tree.leaves(param_specs(cfg, dtype)))
