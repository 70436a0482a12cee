"""Model configuration from files: GGUF fields, or a Hugging Face config.json. JAX-free.

Each key is either used, known to leave the computation alone, or refused by name: a key that is silently ignored is a
model that quietly computes something else.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.model.checkpoint_files import fields_of, read_manifest
from headrace.model.config import ModelConfig, check_limit
from headrace.model.config_keys import ConfigKeys
from headrace.model.directory import PICKLE_REFUSAL, PICKLE_SUFFIXES, ModelDirectory
from headrace.model.errors import ModelFileError
from headrace.model.families import FAMILIES
from headrace.model.family import Family
from headrace.model.gguf_metadata import MAGIC, GGUFFile, read_gguf
from headrace.model.rope_scaling import Llama3Scaling, RopeScaling, YarnScaling
from headrace.serving.core.errors import ConfigError

_GGUF_INERT = frozenset({"rope.scaling.original_context_length", "rope.scaling.finetuned"})

# Keys of transformers' PretrainedConfig that concern training, caching, generation or bookkeeping.
_HF_INERT = frozenset(
    [
        "architectures",
        "attention_dropout",
        "auto_map",
        "chunk_size_feed_forward",
        "dtype",
        "finetuning_task",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "label2id",
        "max_length",
        "model_type",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "return_dict_in_generate",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
        "use_return_dict",
    ]
)


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """True for a GGUF file, False for a model directory.

    Raises: ModelFileError for anything else, and for pickles, which are never loaded.
    """
    source = Path(path)
    if source.is_dir():
        return False
    if not source.exists():
        raise ModelFileError(path, "no such file or directory")
    if not source.is_file():
        raise ModelFileError(path, "not a regular file")
    try:
        with open(source, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror or error}") from error
    if magic == MAGIC:
        return True
    if source.suffix in PICKLE_SUFFIXES:
        raise ModelFileError(path, PICKLE_REFUSAL)
    if source.suffix == ".safetensors":
        raise ModelFileError(path, "give the directory that holds this file and its config.json")
    raise ModelFileError(path, "not a GGUF file (it does not start with 'GGUF') and not a model directory")


def read_config(path: str | os.PathLike[str]) -> ModelConfig:
    """Configuration of the model in a GGUF file, a Hugging Face directory or a checkpoint of either.

    Raises: ModelFileError, naming the file, the key and the reason.
    """
    if is_gguf(path):
        return config_from_gguf(read_gguf(path))
    directory = ModelDirectory(path)
    manifest, fields = read_manifest(directory), fields_of(directory)
    if manifest is None or fields is None:
        return config_from_directory(directory)
    # The fields of a GGUF file do not say whether it has a head: its table of tensors does.
    return replace(config_from_gguf(fields), tied_embeddings="head_DV" not in manifest.weights)


def config_from_gguf(gguf: GGUFFile) -> ModelConfig:
    """Configuration from the fields of a GGUF file. Raises: ModelFileError."""
    path, fields = gguf.path, gguf.fields
    top = ConfigKeys(path, fields)
    top.demand("general.type", "model")
    top.demand("split.count", 0, 1)
    architecture = fields.get("general.architecture")
    family = _family(path, "general.architecture", architecture, _gguf_families())
    keys = ConfigKeys(path, fields, f"{architecture}.")
    num_heads = keys.integer("attention.head_count")
    width = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", width // max(num_heads, 1))
    keys.demand("attention.value_length", head_dim)
    keys.demand("rope.dimension_count", head_dim)
    keys.demand("rope.scaling.type", "none")
    keys.demand("rope.scaling.factor", 1.0)
    keys.demand("rope.scaling.attn_factor", 1.0)
    keys.demand("rope.scale_linear", 1.0)
    keys.demand("attention.causal", True)
    for key in ("expert_count", "expert_used_count", "attention.sliding_window"):
        keys.demand(key, 0)
    tokens = fields.get("tokenizer.ggml.tokens")
    stated = len(tokens) if isinstance(tokens, list) else None
    vocab_size = keys.integer("vocab_size", stated)
    if stated is not None and stated != vocab_size:
        raise keys.fail("vocab_size", f"is {vocab_size}, but tokenizer.ggml.tokens has {stated} tokens")
    bos_id = top.integer("tokenizer.ggml.bos_token_id") if "tokenizer.ggml.bos_token_id" in fields else None
    eos_keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot")]
    config = _checked(
        path,
        family=family.name,
        vocab_size=vocab_size,
        num_layers=keys.integer("block_count"),
        width=width,
        ffn_width=keys.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=keys.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_context=keys.integer("context_length"),
        rope_theta=keys.number("rope.freq_base", 10000.0),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        tied_embeddings=family.top["head_DV"].gguf not in gguf.tensors,
        bos_id=bos_id,
        eos_ids=tuple(sorted({top.integer(key) for key in eos_keys if key in fields})),
    )
    keys.refuse_rest(_GGUF_INERT | family.gguf_inert_keys)
    return config


def config_from_directory(directory: ModelDirectory, name: str = "config.json") -> ModelConfig:
    """Configuration from config.json, or a file like it, with the end ids of generation_config.json where it has some.

    Raises: ModelFileError.
    """
    values = directory.read_json(name)
    path = directory.path / name
    family = _family(path, "model_type", values.get("model_type"), {f.hf_model_type: f for f in FAMILIES})
    # A key without a value takes its default, as in transformers.
    keys = ConfigKeys(path, {key: value for key, value in values.items() if value is not None})
    architectures = values.get("architectures")
    if architectures is not None and architectures != [family.hf_architecture]:
        raise keys.fail("architectures", f"is {architectures!r:.100}; [{family.hf_architecture!r}] is supported")
    for key in sorted(family.hf_required - keys.rest.keys()):
        raise keys.fail(key, "is missing")
    num_layers = keys.integer("num_hidden_layers")
    try:
        check_limit("num_layers", num_layers)
        options = family.hf_options(keys, num_layers)
    except ConfigError as error:
        raise ModelFileError(path, str(error)) from None
    num_heads, width = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    keys.demand("hidden_act", "silu", "swish")
    keys.demand("attention_bias", False)
    keys.demand("mlp_bias", False)
    keys.demand("rope_interleaved", False)
    keys.demand("partial_rotary_factor", 1.0)
    if "quantization_config" in keys.rest:
        raise keys.fail("quantization_config", "is set: quantized safetensors are not supported")
    ffn_width = 0 if "num_experts" in options else keys.integer("intermediate_size")
    rope_theta, rope_scaling = _rope(path, keys)
    eos_ids = _token_ids(keys, "eos_token_id")
    if directory.has("generation_config.json"):
        generation = ConfigKeys(
            directory.path / "generation_config.json", directory.read_json("generation_config.json")
        )
        eos_ids |= _token_ids(generation, "eos_token_id")
    config = _checked(
        path,
        family=family.name,
        vocab_size=keys.integer("vocab_size"),
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_kv_heads=keys.integer("num_key_value_heads", num_heads),
        head_dim=keys.integer("head_dim", width // max(num_heads, 1)),
        max_context=keys.integer("max_position_embeddings"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        tied_embeddings=keys.boolean("tie_word_embeddings", False),
        bos_id=keys.integer("bos_token_id") if "bos_token_id" in keys.rest else None,
        eos_ids=tuple(sorted(eos_ids)),
        ffn_width=ffn_width,
        **options,
    )
    hidden = {key for key in keys.rest if key.startswith("_")}
    keys.refuse_rest(_HF_INERT | family.hf_inert_keys | hidden)
    return config


def _rope(path: Path, keys: ConfigKeys) -> tuple[float, RopeScaling | None]:
    """Base and scaling of rotary positions: rope_theta and rope_scaling, or rope_parameters of newer files."""
    theta = keys.number("rope_theta", 10000.0)
    scaling: RopeScaling | None = None
    for name in ("rope_scaling", "rope_parameters"):
        value = keys.rest.pop(name, None)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise keys.fail(name, f"is {value!r:.60}; it must be an object")
        rope = ConfigKeys(
            path, {f"{name}.{key}": inner for key, inner in value.items() if inner is not None}, f"{name}."
        )
        rope.demand("partial_rotary_factor", 1.0)
        theta = rope.number("rope_theta", theta)
        scaling = _scaling(path, rope) or scaling
        rope.refuse_rest(())
    return theta, scaling


def _scaling(path: Path, rope: ConfigKeys) -> RopeScaling | None:
    kind = rope.rest.get("rope_type", rope.rest.get("type"))
    kinds = ("default", "llama3", "yarn")
    rope.demand("rope_type", *kinds)
    rope.demand("type", *kinds)
    try:
        if kind == "yarn":
            given = {"attention_factor": rope.number("attention_factor")} if "attention_factor" in rope.rest else {}
            return YarnScaling(
                factor=rope.number("factor"),
                original_context=rope.integer("original_max_position_embeddings"),
                beta_fast=rope.number("beta_fast", 32.0),
                beta_slow=rope.number("beta_slow", 1.0),
                truncate=rope.boolean("truncate", True),
                **given,
            )
        if kind == "llama3":
            return Llama3Scaling(
                factor=rope.number("factor"),
                original_context=rope.integer("original_max_position_embeddings"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
            )
    except ConfigError as error:
        raise ModelFileError(path, str(error)) from None
    return None


def _token_ids(keys: ConfigKeys, key: str) -> set[int]:
    value = keys.rest.pop(key, None)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise keys.fail(key, f"is {value!r:.60}; it must be a token id or a list of them")
    return set(ids)


def _gguf_families() -> dict[str, Family]:
    return {f.gguf_architecture: f for f in FAMILIES if f.gguf_architecture is not None}


def _family(path: Path, key: str, name: object, known: Mapping[str, Family]) -> Family:
    if not isinstance(name, str) or name not in known:
        found = "is missing" if name is None else f"is {name!r:.60}, which is not supported"
        raise ModelFileError(path, f"{key} {found}; supported: {', '.join(sorted(known))}")
    return known[name]


def _checked(path: Path, **values: Any) -> ModelConfig:
    try:
        return ModelConfig(**values)
    except ConfigError as error:
        raise ModelFileError(path, str(error)) from None
