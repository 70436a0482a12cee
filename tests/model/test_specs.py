"""The spec tree: names, shapes, axes, bytes, and random weights drawn from it."""

import math
import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from headrace.model.config import ModelConfig
from headrace.model.families import FAMILIES, family_named
from headrace.model.family import FileFormat
from headrace.model.init import init_weights
from headrace.model.shapes import AXIS_LETTERS
from headrace.model.specs import param_specs, weight_bytes
from tests.model.tiny import FAMILIES_TINY, GPT_OSS_TINY, MIXTRAL_TINY, TINY

UNTIED = replace(TINY, tied_embeddings=False)
SIZES = {"V": 96, "D": 64, "F": 96, "X": 4 * 16, "Y": 2 * 16}


def test_shapes_and_axes_follow_the_letters_of_the_names() -> None:
    axes: dict[str, set[str]] = {}
    for spec in jax.tree.leaves(param_specs(UNTIED)):
        letters = spec.name.rsplit("_", 1)[1]
        assert spec.shape == tuple(SIZES[letter] for letter in letters), spec.name
        assert len(spec.logical_axes) == len(letters)
        for letter, axis in zip(letters, spec.logical_axes, strict=True):
            axes.setdefault(letter, set()).add(axis)
    assert axes == {"V": {"vocab"}, "D": {"width"}, "F": {"ffn"}, "X": {"heads"}, "Y": {"kv_heads"}}
    assert axes.keys() <= AXIS_LETTERS.keys()


def test_names_are_paths_in_the_tree() -> None:
    tree = param_specs(UNTIED)
    for path, spec in jax.tree.leaves_with_path(tree):
        assert re.sub(r"\[(\d+)\]", r".\1", jax.tree_util.keystr(path)).lstrip(".") == spec.name


@pytest.mark.parametrize("cfg", [UNTIED, *FAMILIES_TINY], ids=lambda cfg: cfg.family)
def test_every_weight_has_a_source_name_of_its_own(cfg: ModelConfig) -> None:
    """Or a half of one that holds two."""
    specs = jax.tree.leaves(param_specs(cfg))
    names = [
        (spec.source.of(FileFormat.HF, expert), spec.source.half)
        for spec in specs
        for expert in range((spec.num_experts or 1) if spec.source.is_by_expert else 1)
    ]
    assert len(set(names)) == len(names) >= 3 + 9 * TINY.num_layers
    assert not any("{" in name for name, _ in names)


def test_gguf_names() -> None:
    names = [spec.source.of(FileFormat.GGUF) for spec in jax.tree.leaves(param_specs(UNTIED))]
    assert len(set(names)) == len(names) == 3 + 9 * TINY.num_layers
    assert not any("{" in name for name in names)
    with pytest.raises(KeyError, match="no name in gguf files"):
        param_specs(MIXTRAL_TINY).embed_VD.source.of(FileFormat.GGUF)


def test_every_family_is_tried_and_every_source_used() -> None:
    assert {cfg.family for cfg in (TINY, *FAMILIES_TINY)} == {family.name for family in FAMILIES}
    for cfg in (UNTIED, *FAMILIES_TINY):
        fields = {spec.name.rsplit(".", 1)[-1] for spec in jax.tree.leaves(param_specs(cfg))}
        family = family_named(cfg.family)
        assert fields == family.top.keys() | family.layer.keys()


def test_stored_shapes_of_experts() -> None:
    """As transformers writes them: its records hold the shapes of all tensors (test_families_golden.py)."""
    mixtral, gpt_oss = param_specs(MIXTRAL_TINY).layers[1], param_specs(GPT_OSS_TINY).layers[1]
    assert mixtral.gate_EDF.stored_shape == (48, 64) and mixtral.down_EFD.stored_shape == (64, 48)
    assert mixtral.gate_EDF.source.of(FileFormat.HF, 7) == "model.layers.1.block_sparse_moe.experts.7.w1.weight"
    assert gpt_oss.gate_EDF.stored_shape == gpt_oss.up_EDF.stored_shape == (8, 64, 96)
    assert gpt_oss.down_EFD.stored_shape == (8, 48, 64) and gpt_oss.up_bias_EF.stored_shape == (8, 96)
    assert gpt_oss.router_DE.stored_shape == (8, 64) and gpt_oss.sinks_N.stored_shape == (4,)
    assert (gpt_oss.sinks_N.head_dim, gpt_oss.q_bias_X.head_dim, gpt_oss.q_DX.head_dim) == (1, 16, 16)


def test_axes_of_experts() -> None:
    layer = param_specs(GPT_OSS_TINY, np.float16).layers[0]
    assert layer.gate_EDF.logical_axes == ("experts", "width", "expert_ffn") and layer.gate_EDF.num_inputs == 64
    assert layer.down_EFD.logical_axes == ("experts", "expert_ffn", "width") and layer.down_EFD.num_inputs == 48
    assert layer.down_bias_ED.logical_axes == ("experts", "width") and layer.sinks_N.logical_axes == ("heads",)
    assert layer.router_DE.dtype == np.float32 and layer.gate_EDF.dtype == np.float16


def test_stored_shapes_are_outputs_by_inputs() -> None:
    layer = param_specs(TINY).layers[0]
    assert layer.q_DX.stored_shape == (64, 64) and layer.k_DY.stored_shape == (32, 64)
    assert layer.o_XD.stored_shape == (64, 64) and layer.down_FD.stored_shape == (64, 96)
    assert layer.up_DF.stored_shape == (96, 64) and layer.attn_norm_D.stored_shape == (64,)
    assert param_specs(TINY).embed_VD.stored_shape == (96, 64)


def test_bytes_are_counted_without_allocating() -> None:
    per_layer = 2 * 64 + 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96
    assert weight_bytes(TINY) == 4 * (96 * 64 + 64 + 2 * per_layer)
    assert weight_bytes(UNTIED) - weight_bytes(TINY) == 4 * 64 * 96
    of_vectors = 4 * 64 * (2 * TINY.num_layers + 1)  # float32 whatever the matrices are
    assert (weight_bytes(TINY, np.float16) - of_vectors) * 2 == weight_bytes(TINY) - of_vectors
    large = replace(TINY, width=8192, ffn_width=28672, num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128)
    assert 250e9 < weight_bytes(large) < 280e9


def test_tied_embeddings_have_no_head() -> None:
    assert param_specs(TINY).head_DV is None
    assert param_specs(UNTIED).head_DV is not None


def test_random_weights_are_seeded_and_independent_of_other_weights() -> None:
    a, b, c = init_weights(TINY, 1), init_weights(TINY, 1), init_weights(TINY, 2)
    for x, y, z in zip(*(jax.tree.leaves(w) for w in (a, b, c)), strict=True):
        assert x.tobytes() == y.tobytes()
        assert x.ndim == 1 or x.tobytes() != z.tobytes()
    deeper = init_weights(replace(TINY, num_layers=3), 1)
    assert np.array_equal(deeper.layers[1].q_DX, a.layers[1].q_DX)
    assert not np.array_equal(a.layers[0].q_DX, a.layers[1].q_DX)


def test_random_weights_keep_the_scale_of_their_input() -> None:
    weights = init_weights(UNTIED, 1)
    for spec, x in zip(jax.tree.leaves(param_specs(UNTIED)), jax.tree.leaves(weights), strict=True):
        assert x.shape == spec.shape and x.dtype == spec.dtype
        expected = 0.0 if x.ndim == 1 else 1 / math.sqrt(spec.num_inputs)
        assert x.std() == pytest.approx(expected, rel=0.1, abs=1e-9), spec.name


def test_an_unknown_family_is_an_error() -> None:
    with pytest.raises(KeyError, match="mamba"):
        family_named("mamba")
