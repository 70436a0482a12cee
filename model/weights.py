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
    """None where the family has no such weight, or the layer is of the other kind: dense, or of experts."""

    attn_norm_D: LeafT
    q_DX: LeafT
    k_DY: LeafT
    v_DY: LeafT
    o_XD: LeafT
    ffn_norm_D: LeafT
    gate_DF: LeafT | None = None
    up_DF: LeafT | None = None
    down_FD: LeafT | None = None
    q_norm_H: LeafT | None = None
    k_norm_H: LeafT | None = None
    q_bias_X: LeafT | None = None
    k_bias_Y: LeafT | None = None
    v_bias_Y: LeafT | None = None
    o_bias_D: LeafT | None = None
    sinks_N: LeafT | None = None
    router_DE: LeafT | None = None
    router_bias_E: LeafT | None = None
    gate_EDF: LeafT | None = None
    up_EDF: LeafT | None = None
    down_EFD: LeafT | None = None
    gate_bias_EF: LeafT | None = None
    up_bias_EF: LeafT | None = None
    down_bias_ED: LeafT | None = None
    shared_gate_DF: LeafT | None = None
    shared_up_DF: LeafT | None = None
    shared_down_FD: LeafT | None = None
    shared_score_D1: LeafT | None = None


@struct.dataclass
class Weights(Generic[LeafT]):
    """head_DV is None for a model with tied embeddings, which reads its logits through embed_VD."""

    embed_VD: LeafT
    layers: tuple[LayerWeights[LeafT], ...]
    final_norm_D: LeafT
    head_DV: LeafT | None
