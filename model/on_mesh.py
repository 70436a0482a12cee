"""A model on a mesh: its configuration, where its weights are cut, and how one weight comes to be there."""

from dataclasses import replace

import jax
import numpy as np
from jax.sharding import PartitionSpec

from headrace.model.config import ModelConfig
from headrace.model.specs import ParamSpec, param_specs
from headrace.model.weights import Weights
from headrace.sharding.errors import MeshError
from headrace.sharding.mesh_shape import MeshShape
from headrace.sharding.rules import partition, replicated_kv_heads


def config_on_mesh(cfg: ModelConfig, mesh: MeshShape) -> ModelConfig:
    """The configuration that pages and programs are made for: with more parts than key heads, each key head counts once
    for every device that holds it.

    Raises: MeshError naming the tensor that does not divide, or the axis that would cut nothing.
    """
    if mesh.expert > 1 and not cfg.num_experts:
        raise MeshError(f"mesh axis expert is {mesh.expert}, and this model has no experts to cut")
    if cfg.num_layers % (mesh.stage * len(cfg.layer_windows)):
        period = f" in periods of {len(cfg.layer_windows)}" if len(cfg.layer_windows) > 1 else ""
        raise MeshError(f"layers: {cfg.num_layers}{period} do not divide into {mesh.stage} stages (mesh axis stage)")
    heads = replicated_kv_heads(cfg.num_kv_heads, mesh.tensor)
    if cfg.num_heads % heads:
        raise MeshError(f"q_DX: {cfg.num_heads} query heads do not divide into {mesh.tensor} parts (mesh axis tensor)")
    found = replace(cfg, num_kv_heads=heads)
    partitions(found, mesh)
    return found


def partitions(cfg: ModelConfig, mesh: MeshShape) -> Weights[PartitionSpec]:
    """Of each weight, for a configuration that is on the mesh already. Raises: MeshError naming the tensor."""
    found: Weights[PartitionSpec] = jax.tree.map(lambda spec: partition(spec, mesh), param_specs(cfg))
    return found


def repeated_heads(x: np.ndarray, spec: ParamSpec) -> np.ndarray:
    """A weight, or the values or factors of one, as the spec of a configuration on a mesh has it: key heads are
    repeated side by side."""
    if x.shape[-1] == spec.shape[-1] or spec.head_dim is None:
        return x
    heads = x.reshape(*x.shape[:-1], -1, spec.head_dim)
    return heads.repeat(spec.shape[-1] // x.shape[-1], axis=-2).reshape(*x.shape[:-1], spec.shape[-1])
