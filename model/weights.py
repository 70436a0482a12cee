"""The weights of a decoder, as a pytree.

One tree shape serves four uses: leaves are arrays in the served path, NumPy arrays on the host after loading,
``ParamSpec`` in ``specs.param_specs``, and shardings where they are made. Matrices are laid out input axes first,
output axes last. Axis letters: ``shapes.py``.
"""

from typing import Generic, TypeVar

from flax import struct

LeafT = TypeVar("LeafT")


@struct.dataclass
class LayerWeights(Generic[LeafT]):
    attn_norm_D: LeafT
    q_DX: LeafT
    k_DY: LeafT
    v_DY: LeafT
    o_XD: LeafT
    ffn_norm_D: LeafT
    gate_DF: LeafT
    up_DF: LeafT
    down_FD: LeafT


@struct.dataclass
class Weights(Generic[LeafT]):
    """head_DV is None for a model with tied embeddings, which reads its logits through embed_VD."""

    embed_VD: LeafT
    layers: tuple[LayerWeights[LeafT], ...]
    final_norm_D: LeafT
    head_DV: LeafT | None
