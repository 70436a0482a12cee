"""One description of every weight: the single source of random init, loading, shardings and memory estimates."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

import jax
import ml_dtypes
import numpy as np

from headrace.model.config import ModelConfig
from headrace.model.families import family_named
from headrace.model.family import SourceName
from headrace.model.quant_form import INT4_GROUPS, INT8_CHANNELS, QuantForm
from headrace.model.weights import LayerWeights, Weights
from headrace.sharding.axes import Axis


class WeightScheme(StrEnum):
    """How matrices that products contract lie in memory. Routers and vectors are never quantized.

    native: what a GGUF file holds in groups of small integers stays so, exactly, where the back end has products with
    such weights (``param_specs``' forms); all else is in the type of products. bf16, f32: dequantized to that type.
    int8: one float32 factor for each output channel (of each expert). int4: symmetric, one float16 factor for 32
    inputs of an output channel. int8 and int4 are rounded from the values of the files, and leave embeddings as they
    are.
    """

    NATIVE = "native"
    BF16 = "bf16"
    F32 = "f32"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def dtype(self) -> np.dtype | None:
        """Of matrices, where the scheme names it."""
        names = {WeightScheme.BF16: ml_dtypes.bfloat16, WeightScheme.F32: np.float32}
        return np.dtype(names[self]) if self in names else None


class Init(StrEnum):
    """How a weight is drawn at random: ones, zeros, or normal with the standard deviation num_inputs ** -0.5."""

    ONES = "ones"
    ZEROS = "zeros"
    NORMAL = "normal"


SMALL_MATRICES = ("DE", "D1")
"""Letters of routers and of the score of a shared expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One weight.

    name: path in ``Weights``, such as ``layers.3.q_DX``. shape: in the order of the name's letters. dtype: of the
      weight; what products read beside it is in that type too.
    form: of small integers that stand for this dtype, as a ``GroupQuant`` of matrix_shape; None = not quantized.
    rounded_to: what the weight is rounded to, where its file does not hold it so; the form holds that exactly.
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
    form: QuantForm | None = None
    rounded_to: QuantForm | None = None
    num_experts: int | None = None
    head_dim: int | None = None
    is_rotated: bool = False

    @property
    def is_quantized(self) -> bool:
        return self.form is not None

    @property
    def is_read_quantized(self) -> bool:
        """It comes from its file as a ``GroupQuant``."""
        return self.form is not None and self.rounded_to is None

    @property
    def read_dtype(self) -> np.dtype:
        """On the way from a file. What is to be quantized is not rounded before."""
        return np.dtype(np.float32) if self.is_quantized else self.dtype

    @property
    def read_bytes(self) -> int:
        if self.form is not None and self.rounded_to is None:
            return replace(self.form, values="int8").num_bytes(self.matrix_shape)
        return math.prod(self.shape) * self.read_dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """In memory, with factors."""
        if self.form is not None:
            return self.form.num_bytes(self.matrix_shape)
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """Of a matrix as a product takes it, inputs first: an embedding is the head [D, V]."""
        return self.shape if self.is_product else self.shape[::-1]

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Of the factors of a quantized weight."""
        assert self.form is not None
        *lead, contraction, columns = self.matrix_shape
        return (*lead, self.form.num_groups(contraction), columns)

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

    def __init__(self, cfg: ModelConfig, dtype: np.dtype, scheme: WeightScheme, forms: Mapping[str, QuantForm]) -> None:
        self.cfg, self.dtype, self.scheme, self.forms = cfg, scheme.dtype or dtype, scheme, forms
        self.family = family_named(cfg.family)
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
        is_small = len(letters) == 1 or letters in SMALL_MATRICES
        shape = tuple(size for size, _ in axes)
        form = self._form(path, shape) if is_product and not is_small else self.forms.get(path)
        return ParamSpec(
            name=path,
            shape=shape,
            dtype=np.dtype(np.float32) if is_small else self.dtype,
            logical_axes=tuple(axis for _, axis in axes),
            init=init or (Init.ONES if len(letters) == 1 else Init.NORMAL),
            source=source,
            is_product=is_product,
            form=form,
            rounded_to=None if self.scheme is WeightScheme.NATIVE else form,
            num_experts=self.cfg.num_experts if letters[0] == "E" and len(letters) > 1 else None,
            head_dim=1 if "N" in letters else self.cfg.head_dim if {"X", "Y"} & set(letters) else None,
            is_rotated=path.endswith(("q_DX", "k_DY", "q_bias_X", "k_bias_Y")),
        )

    def _form(self, path: str, shape: tuple[int, ...]) -> QuantForm | None:
        """Of a matrix that a product contracts."""
        if self.scheme is WeightScheme.INT8:
            return INT8_CHANNELS
        if self.scheme is WeightScheme.INT4:
            return INT4_GROUPS if INT4_GROUPS.divides(shape[-2]) else None
        return self.forms.get(path)

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


def may_be_quantized(spec: ParamSpec) -> bool:
    """Matrices but routers, which choose, and single columns; and the embedding, as the head that it can be."""
    letters = spec.name.rsplit("_", 1)[1]
    return spec.name == "embed_VD" or (spec.is_product and letters not in SMALL_MATRICES)


NO_FORMS: Mapping[str, QuantForm] = MappingProxyType({})


def param_specs(
    cfg: ModelConfig,
    dtype: np.dtype | type = np.float32,
    scheme: WeightScheme = WeightScheme.NATIVE,
    forms: Mapping[str, QuantForm] = NO_FORMS,
) -> Weights[ParamSpec]:
    """Specs of all weights of a model, in the tree of its ``Weights``.

    dtype: of matrices in memory, or what quantized ones stand for, unless the scheme names a type; vectors and routers
    are float32. scheme: of the matrices that products contract. Files may hold other types. forms: of the native scheme
    alone: in what form matrices and the embedding stay quantized, by the weight's name; what is not there is not.
    """
    if forms and scheme is not WeightScheme.NATIVE:
        raise ValueError(f"forms of weights in files are of the native scheme, not of {scheme}")
    specs = _Specs(cfg, np.dtype(dtype), scheme, forms)
    return Weights(
        embed_VD=specs.top("embed_VD"),
        layers=tuple(specs.layer(i) for i in range(cfg.num_layers)),
        final_norm_D=specs.top("final_norm_D"),
        head_DV=None if cfg.tied_embeddings else specs.top("head_DV", is_product=True),
    )


def weight_bytes(
    cfg: ModelConfig,
    dtype: np.dtype | type = np.float32,
    scheme: WeightScheme = WeightScheme.NATIVE,
    forms: Mapping[str, QuantForm] = NO_FORMS,
) -> int:
    """Bytes of all weights in memory; nothing is allocated. See param_specs."""
    return sum(spec.num_bytes for spec in jax.tree.leaves(param_specs(cfg, dtype, scheme, forms)))
