"""Which weights of a GGUF file stay quantized on which back end, and the report of it."""

import json
from dataclasses import replace
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.model.group_quant import dequantized
from headrace.model.init import init_weights
from headrace.model.load import load_model, open_weights
from headrace.model.on_mesh import config_on_mesh
from headrace.model.quant_form import GGUF_FORMS, QuantForm
from headrace.model.specs import WeightScheme, param_specs
from headrace.pallas_kernels.quant_matmul.cpu.tiles import untiled
from headrace.pallas_kernels.types import Activations, GroupQuant, Implementation, Kernels, TiledQuant, UnsupportedCase
from headrace.serving.core.errors import ConfigError
from headrace.serving.runner.backend import Backend, find_mesh
from headrace.serving.runner.forms import choose, choose_forms, with_forms
from headrace.serving.runner.load import load_placed
from headrace.serving.runner.scheme import scheme_of
from headrace.serving.runner.weights import weight_shapes
from headrace.sharding.errors import MeshError
from headrace.sharding.mesh_shape import parse_mesh
from tests.model.tiny import GPT_OSS_TINY, MIXTRAL_TINY, TINY, write_gguf, write_hf

Kind = gguf.GGMLQuantizationType
CPU = jax.devices("cpu")[0]
CFG = replace(TINY, tied_embeddings=False, ffn_width=128)
REFERENCE = Backend(device=CPU)
TILED = replace(REFERENCE, kernels=Kernels(implementation=Implementation.CPU, activations=Activations.INT16))
TPU = Backend(
    device=CPU,
    kernels=Kernels(implementation=Implementation.TPU, chip="v6e", interpret=True),
    dtype=np.dtype(jnp.bfloat16),
    scan_layers=True,
)
GPU = replace(TPU, kernels=Kernels(implementation=Implementation.GPU, chip="h100", interpret=True), scan_layers=False)
WIDE_Q4_1 = QuantForm(values="int8", group=32, is_affine=True)
MIXED = {"blk.1.attn_v.weight": Kind.Q8_0, "blk.0.ffn_down.weight": Kind.F16, "output.weight": Kind.F16}


def written(tmp_path: Path, kind: Kind = Kind.Q4_1, **changes: object) -> Path:
    return write_gguf(tmp_path / "m.gguf", CFG, init_weights(CFG, 3), kind, **changes)


def stored_forms(cfg: object, kind: str) -> dict[str, QuantForm]:
    specs = jax.tree.leaves(param_specs(cfg))
    return {spec.name: GGUF_FORMS[kind] for spec in specs if len(spec.shape) > 1 and "router" not in spec.name}


def test_without_kernels_a_cpu_multiplies_floats(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert with_forms(REFERENCE, path) == REFERENCE
    choice = choose(open_weights(path), REFERENCE)
    assert choice.why.keys() == open_weights(path).forms.keys()
    assert set(choice.why.values()) == {"without CPU kernels, XLA multiplies float weights faster on a CPU"}
    model = load_placed(path, REFERENCE)
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(model.weights))


def test_with_cpu_kernels_tiles_are_the_files_weights(tmp_path: Path) -> None:
    path = written(tmp_path, kinds=MIXED)
    backend = with_forms(TILED, path)
    assert backend.forms == open_weights(path).forms
    model, host = load_placed(path, backend), load_model(path, keeps_forms=True)
    shapes = weight_shapes(CFG, backend)
    assert jax.tree.structure(shapes) == jax.tree.structure(model.weights)
    for x, shape in zip(jax.tree.leaves(model.weights), jax.tree.leaves(shapes), strict=True):
        assert (x.shape, x.dtype) == (shape.shape, shape.dtype)
    is_leaf = lambda x: isinstance(x, GroupQuant | TiledQuant)  # noqa: E731
    pairs = zip(jax.tree.leaves(model.weights, is_leaf), jax.tree.leaves(host.weights, is_leaf), strict=True)
    for tiles, weight in pairs:
        assert isinstance(tiles, TiledQuant) == isinstance(weight, GroupQuant)
        if isinstance(tiles, TiledQuant):
            assert tiles.shape == weight.shape
            assert np.array_equal(dequantized(untiled(tiles)), dequantized(weight))
    assert model.weights.embed_VD.shape == (64, 96) and isinstance(model.weights.head_DV, jax.Array)
    assert model.model_hash == host.model_hash


def test_accelerators_get_types_that_their_kernels_know(tmp_path: Path) -> None:
    path = written(tmp_path)
    for backend in (TPU, GPU):
        forms = with_forms(backend, path).forms
        assert set(forms.values()) == {WIDE_Q4_1} and forms.keys() == open_weights(path).forms.keys() - {"embed_VD"}
        assert choose(open_weights(path), backend).why == {"embed_VD": "an embedding is read by rows"}


def test_a_reference_on_another_device_serves_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.serving.runner.forms.platform_of", lambda _: "tpu")
    forms = choose_forms(stored_forms(CFG, "Q4_0"), CFG, REFERENCE).forms
    assert forms["layers.0.q_DX"] == QuantForm(values="int8", group=32) and "embed_VD" not in forms


def test_layers_in_one_stack_have_one_form(tmp_path: Path) -> None:
    """Of the kinds that differ, a wider one that holds both, or floats."""
    path = written(tmp_path, kinds=MIXED)
    stacked, alone = with_forms(TPU, path), with_forms(GPU, path)
    assert stacked.forms["layers.0.v_DY"] == stacked.forms["layers.1.v_DY"] == WIDE_Q4_1
    assert alone.forms["layers.1.v_DY"] == QuantForm(values="int8", group=32)
    assert "layers.1.down_FD" not in stacked.forms and alone.forms["layers.1.down_FD"] == WIDE_Q4_1
    why = choose(open_weights(path), stacked).why
    assert why["layers.1.down_FD"] == "other layers of its stack are not quantized"
    model, host = load_placed(path, stacked), load_model(path, keeps_forms=True)
    for layer in range(2):
        found = jax.tree.map(lambda x, at=layer: np.asarray(x[at]), model.weights.layers.v_DY)
        assert np.array_equal(dequantized(found), dequantized(host.weights.layers[layer].v_DY))
    assert model.weights.layers.down_FD.dtype == jnp.bfloat16


def test_experts_stay_quantized_where_a_kernel_takes_them() -> None:
    stored = stored_forms(MIXTRAL_TINY, "Q8_0")
    stored = {name: form for name, form in stored.items() if "down_EFD" not in name}
    for backend, why in (
        (TILED, "experts have no CPU kernel for small integers"),
        (TPU, "experts of int8 in groups of 32; int8 with one scale per column is there"),
        (GPU, None),
    ):
        choice = choose_forms(stored, MIXTRAL_TINY, backend)
        assert choice.why.get("layers.0.gate_EDF") == why and "layers.0.q_DX" in choice.forms
        assert ("layers.0.gate_EDF" in choice.forms) == (why is None)


@pytest.mark.parametrize("backend", [GPU, replace(GPU, kernels=Kernels())], ids=["gpu", "reference"])
def test_a_mesh_that_cuts_groups_is_refused_by_name(backend: Backend) -> None:
    """64 inputs of o in 4 parts are half a group each; in 2 parts they are one."""
    forms = {"layers.1.o_XD": WIDE_Q4_1}
    for parts, fits in ((2, True), (4, False)):
        mesh = find_mesh(CPU, parse_mesh(f"tensor={parts}"))
        of = replace(backend, mesh=mesh, forms=forms)
        cfg = config_on_mesh(CFG, of.mesh_shape)
        if fits:
            leaf = weight_shapes(cfg, of).layers[1].o_XD
            assert leaf.scale_GN.sharding.spec == leaf.values_KN.sharding.spec == leaf.offset_GN.sharding.spec
            assert leaf.scale_GN.sharding.shard_shape(leaf.scale_GN.shape) == (1, 64)
        else:
            with pytest.raises(MeshError, match=r"layers\.1\.o_XD .* 2 groups of 32 inputs do not divide into 4 parts"):
                weight_shapes(cfg, of)


def test_a_mesh_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    backend = replace(GPU, mesh=find_mesh(CPU, parse_mesh("tensor=4")))
    with pytest.raises(ConfigError, match=r"--mesh: layers\.0\.o_XD .*groups of 32 inputs do not divide into 4 parts"):
        with_forms(backend, written(tmp_path))


def test_factors_beyond_float16_are_refused_by_name(tmp_path: Path) -> None:
    weights = init_weights(CFG, 3)
    weights.layers[1].up_DF[5, 5] = 1e6
    path = write_hf(tmp_path, CFG, weights)
    with pytest.raises(
        ConfigError, match=r"weight layers\.1\.up_DF: values up to 1000000\.0 need factors beyond float16"
    ):
        load_placed(path, replace(TILED, weights=WeightScheme.INT4))


def test_tiles_are_cut_over_no_mesh_axis() -> None:
    forms = stored_forms(CFG, "Q4_1")
    for axis, fits in (("tensor", False), ("stage", False), ("data", True)):
        backend = replace(TILED, mesh=find_mesh(CPU, parse_mesh(f"{axis}=2")), forms=forms)
        cfg = config_on_mesh(CFG, backend.mesh_shape)
        if fits:
            assert isinstance(weight_shapes(cfg, backend).embed_VD, TiledQuant)
        else:
            with pytest.raises(MeshError, match="in tiles for CPU kernels it is cut over no mesh axis"):
                weight_shapes(cfg, backend)


def test_groups_that_tiles_lack_are_refused_by_name() -> None:
    backend = replace(TILED, forms={"layers.0.q_DX": QuantForm(values="int8", group=64)})
    with pytest.raises(UnsupportedCase, match=r"layers\.0\.q_DX: groups of 64; tiles have groups of 16 or 32"):
        weight_shapes(CFG, backend)


@pytest.mark.parametrize("scheme", [WeightScheme.INT8, WeightScheme.INT4])
def test_rounded_weights_lie_in_tiles_too(tmp_path: Path, scheme: WeightScheme) -> None:
    cfg = replace(CFG, ffn_width=80)
    path = write_hf(tmp_path, cfg, init_weights(cfg, 3))
    model = load_placed(path, replace(TILED, weights=scheme))
    host = init_weights(cfg, 3, scheme=scheme)
    for name in ("q_DX", "down_FD"):
        found, wanted = getattr(model.weights.layers[1], name), getattr(host.layers[1], name)
        assert isinstance(found, TiledQuant) == isinstance(wanted, GroupQuant)
        if isinstance(found, TiledQuant):
            assert np.array_equal(dequantized(untiled(found)), dequantized(wanted))
    assert isinstance(model.weights.layers[1].down_FD, TiledQuant) == (scheme is WeightScheme.INT8)


def test_rounded_weights_have_no_float16_on_accelerators(tmp_path: Path) -> None:
    path = write_hf(tmp_path, CFG, init_weights(CFG, 3))
    on_cpu, on_tpu = (
        load_placed(path, replace(backend, weights=WeightScheme.INT4, scan_layers=False)).weights.layers[0].down_FD
        for backend in (REFERENCE, TPU)
    )
    assert isinstance(on_cpu, GroupQuant) and isinstance(on_tpu, GroupQuant)
    assert (on_cpu.scale_GN.dtype, on_tpu.scale_GN.dtype) == (np.float16, np.float32)
    assert np.array_equal(np.asarray(on_tpu.scale_GN), np.asarray(on_cpu.scale_GN, np.float32))
    assert np.array_equal(on_tpu.values_KN, on_cpu.values_KN)


def test_host_weights_that_kept_their_forms_go_to_any_back_end(tmp_path: Path) -> None:
    from headrace.serving.runner.load import placed

    path = written(tmp_path)
    floats = placed(load_model(path), REFERENCE).weights
    kept = placed(load_model(path, keeps_forms=True), REFERENCE).weights
    for x, y in zip(jax.tree.leaves(floats), jax.tree.leaves(kept), strict=True):
        assert x.dtype == y.dtype and np.array_equal(x, y)


def test_the_report_names_every_kind_of_tensor(tmp_path: Path) -> None:
    path = written(tmp_path, kinds=MIXED)
    scheme = load_placed(path, with_forms(TPU, path)).scheme
    assert scheme is not None
    assert scheme.lines() == (
        "Q4_1 -> bfloat16, rounded; an embedding is read by rows: embed_VD (1)",
        "F32 -> float32, exact: attn_norm_D, ffn_norm_D, final_norm_D (5)",
        "Q4_1 -> int8 in groups of 32, affine, float32 scales, exact: q_DX, k_DY, v_DY, o_XD, gate_DF, up_DF (11)",
        "F16 -> bfloat16, rounded: down_FD, head_DV (2)",
        "Q8_0 -> int8 in groups of 32, affine, float32 scales, exact: v_DY (1)",
        "Q4_1 -> bfloat16, rounded; other layers of its stack are not quantized: down_FD (1)",
    )
    assert sum(kind.count for kind in scheme.kinds) == len(open_weights(path).specs)
    said = json.loads(json.dumps(scheme.as_json(), sort_keys=True))
    assert said["rounding"] is None
    assert said["kinds"][2] == {
        "stored": "Q4_1",
        "served": {"values": "int8", "bits": 8, "group": 32, "affine": True, "scale": "float32"},
        "exact": True,
        "fallback": None,
        "names": ["q_DX", "k_DY", "v_DY", "o_XD", "gate_DF", "up_DF"],
        "count": 11,
    }


def test_the_report_of_rounded_weights() -> None:
    types = {spec.name: "BF16" for spec in jax.tree.leaves(param_specs(GPT_OSS_TINY))}
    scheme = scheme_of(types, GPT_OSS_TINY, replace(TILED, weights=WeightScheme.INT8), {})
    assert scheme.as_json()["rounding"] == (
        "to nearest from the stored values, without calibration; one scale for each output channel"
    )
    lines = scheme.lines()
    assert any(line.startswith("BF16 -> float32, exact: embed_VD,") for line in lines)
    assert any("-> int8 one group per output channel, symmetric, float32 scales, rounded: gate_EDF" in x for x in lines)
    tiles = next(line for line in lines if "q_DX" in line)
    assert tiles.startswith("BF16 -> int8 in groups of 32, symmetric, float32 scales, rounded: q_DX")
    rounded = scheme_of(types, GPT_OSS_TINY, replace(REFERENCE, weights=WeightScheme.INT4), {})
    assert "BF16 -> float32, exact; its inputs are not whole groups of 32: down_EFD (2)" in rounded.lines()
    assert any(
        line.startswith("BF16 -> int8 in groups of 32, symmetric, float16 scales, rounded: q_DX")
        for line in rounded.lines()
    )
