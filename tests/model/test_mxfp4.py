"""Experts in MXFP4: values bit for bit, a whole model in both forms, and what is refused."""

import json
from collections.abc import Mapping
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.model.directory import ModelDirectory
from headrace.model.errors import ModelFileError
from headrace.model.load import load_model
from headrace.model.safetensors_files import SafetensorsSource
from headrace.model.tensor_source import read_bytes
from tests.golden import random_weights
from tests.model.tiny import write_json

GOLDEN = Path(__file__).parent.parent / "golden"
PACKED = ("gate_up_proj", "down_proj")
QUANTIZED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def save(directory: Path, tensors: Mapping[str, np.ndarray], **change: object) -> Path:
    """A gpt-oss of 64 by 64, that both products of an expert may be cut into groups of 32."""
    config = json.loads((GOLDEN / "families" / "gpt_oss.json").read_text())["config"]
    write_json(directory / "config.json", config | {"intermediate_size": 64} | change)
    save_file(dict(tensors), directory / "model.safetensors")
    return directory


def shapes() -> dict[str, list[int]]:
    sizes = {"gate_up_proj": [8, 64, 128], "gate_up_proj_bias": [8, 128], "down_proj": [8, 64, 64]}
    recorded = json.loads((GOLDEN / "families" / "gpt_oss.json").read_text())["shapes"]
    return {name: sizes.get(name.rsplit(".", 1)[1], shape) for name, shape in recorded.items()}


def pack(tensors: Mapping[str, np.ndarray], seed: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(with random bytes in place of the experts' matrices, with the values of those bytes in their place)."""
    rng = np.random.default_rng(seed)
    packed, plain = dict(tensors), dict(tensors)
    for name, x in tensors.items():
        if not name.endswith(PACKED):
            continue
        experts, inputs, outputs = x.shape
        del packed[name]
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)
        scales = rng.integers(120, 126, blocks.shape[:3]).astype(np.uint8)
        packed |= {name + "_blocks": blocks, name + "_scales": scales}
        codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
        # E2M1: sign, two bits of exponent, one of mantissa; exponent 0 is subnormal.
        sign, exponent, mantissa = 1 - 2.0 * (codes >> 3), (codes >> 1) & 3, codes & 1
        magnitude = np.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1.0))
        values = sign * magnitude * 2.0 ** (scales.astype(np.float64) - 127)[..., None]
        plain[name] = values.reshape(experts, outputs, inputs).swapaxes(1, 2).astype(np.float32).copy()
    return packed, plain


def test_values_are_those_of_transformers(tmp_path: Path) -> None:
    golden = json.loads((GOLDEN / "mxfp4.json").read_text())
    pair = {f"x_{kind}": np.array(golden[kind], np.uint8) for kind in ("blocks", "scales")}
    save_file(pair, tmp_path / "model.safetensors")
    source = SafetensorsSource(ModelDirectory(tmp_path))
    tensor = source.tensors["x"]
    assert tensor.shape == (2, 64, 6) and tensor.dtype == "MXFP4"
    for expert in range(2):
        row = tensor.row(expert)
        assert source.decode(row, read_bytes(row)).tolist() == golden["values"][expert]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_a_packed_model_has_the_weights_of_the_plain_one(tmp_path: Path, dtype: type) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    packed, plain = pack(random_weights.draw(1, shapes()), seed=2)
    calls: list[tuple[int, int]] = []
    a = load_model(
        save(tmp_path / "a", packed, quantization_config=QUANTIZED), dtype=dtype, progress=lambda *c: calls.append(c)
    )
    b = load_model(save(tmp_path / "b", plain), dtype=dtype)
    assert a.config == b.config and a.model_hash != b.model_hash and calls[-1][0] == calls[-1][1]
    for x, y in zip(jax.tree.leaves(a.weights), jax.tree.leaves(b.weights), strict=True):
        assert x.dtype == y.dtype and np.array_equal(x, y)
    assert a.weights.layers[0].gate_EDF.dtype == dtype
    # Exact: the values of the file are in float32 what they are in bfloat16.
    exact = plain["model.layers.0.mlp.experts.down_proj"]
    assert np.array_equal(a.weights.layers[0].down_EFD.astype(np.float32), exact)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quantization_config.quant_method is 'bitsandbytes', which is not supported",
        ),
        ({"bits": 4}, "quantization_config.bits (value 4) is not known"),
    ],
)
def test_other_quantization_is_refused(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    save(tmp_path, {"x": np.zeros(1, np.float32)}, quantization_config=QUANTIZED | change)
    with pytest.raises(ModelFileError) as caught:
        load_model(tmp_path)
    assert reason in caught.value.reason


DAMAGE = {
    "no scales": (lambda t: t.pop("down_proj_scales"), "has type 'U8'; bytes are supported as _blocks and _scales"),
    "no blocks": (lambda t: t.pop("down_proj_blocks"), "has type 'U8'; bytes are supported as _blocks and _scales"),
    "float scales": (
        lambda t: t.update(down_proj_scales=t["down_proj_scales"].astype(np.float32)),
        "has type 'U8'; bytes are supported as _blocks and _scales",
    ),
    "groups of 16": (
        lambda t: t.update(down_proj_blocks=t["down_proj_blocks"].reshape(8, 64, 4, 8)),
        "with scales of [8, 64, 2] it must be [experts, outputs, groups, 16]",
    ),
    "a scale of 255": (
        lambda t: t["down_proj_scales"].__setitem__((3, 5, 1), 255),
        "'model.layers.2.mlp.experts.down_proj[3]' holds 32 NaN or infinite values",
    ),
    "fewer outputs": (
        lambda t: t.update({k: t[k][:, :32].copy() for k in ("down_proj_blocks", "down_proj_scales")}),
        "down_proj' has shape [8, 64, 32]; the configuration asks for [8, 64, 64]",
    ),
    "both forms": (lambda t: t.update(down_proj=np.zeros((8, 64, 64), np.float32)), "and its only form in the files"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_pairs_are_refused(tmp_path: Path, damage: str) -> None:
    change, reason = DAMAGE[damage]
    packed, _ = pack(random_weights.draw(1, shapes()), seed=2)
    stem = "model.layers.2.mlp.experts."
    own = {name.removeprefix(stem): packed.pop(name) for name in list(packed) if name.startswith(stem)}
    change(own)
    tensors = packed | {stem + name: x for name, x in own.items()}
    with pytest.raises(ModelFileError) as caught:
        load_model(save(tmp_path, tensors, quantization_config=QUANTIZED))
    assert reason in caught.value.reason
