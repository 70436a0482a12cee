"""The policy headrace-sampling/1 once more, row by row in float64, with sorts: what the device must agree with."""

import jax
import numpy as np

from headrace.serving.core.request import SamplingParams


def edited(
    logits: np.ndarray, params: SamplingParams, prompt: tuple[int, ...], output: tuple[int, ...], held: tuple[int, ...]
) -> np.ndarray:
    x = logits.astype(np.float64)
    x[list(held)] = -np.inf
    if params.allowed_token_ids is not None:
        x[[i for i in range(len(x)) if i not in params.allowed_token_ids]] = -np.inf
    for token, bias in params.logit_bias:
        x[token] += bias
    for token in set(prompt) | set(output):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return x


def probabilities(x: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Of each id after temperature and the three cuts; 0 for ids that are cut off."""
    z = (x - x.max()) / params.temperature
    weight = np.exp(z)
    if params.top_k:
        weight[z < np.sort(z)[-params.top_k]] = 0
    if params.top_p < 1:
        falling = np.sort(weight)[::-1]
        last = np.searchsorted(np.cumsum(falling), params.top_p * weight.sum())
        weight[weight < falling[last]] = 0
    weight[np.exp(z) < params.min_p] = 0
    return weight / weight.sum()


def uniform(seed: int, position: int) -> float:
    """The draw's number, from a key that JAX makes itself."""
    with jax.enable_x64(True):
        return float(jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position), dtype=np.float32))
